"""Quantisers and byte records (spec §3, §17.1)."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, GoldenFormatError, Tensors
from bench.golden_harness.registry import runner
from headrace.kernels.reference import quant


@runner("quant")
def run(case: Case) -> Tensors:
    name = case.short_name
    if name.startswith("e4m3"):
        return _e4m3(case.input("x"))
    if name.startswith("fp4_index"):
        return _fp4_index(case.input("x"))
    if name.startswith("fp4_main"):
        return _fp4_main(case.input("x"))
    if name.startswith("e2m1"):
        codes = quant.e2m1_codes(case.input("x"))
        return {"y": quant.e2m1_values(codes), "code": codes}
    if name.startswith("pow2"):
        amax = case.input("amax")
        return {
            f"s{limit:g}": quant.e8m0_to_float(quant.pow2_scale_byte(amax, limit))
            for limit in (quant.E4M3_MAX, quant.E2M1_MAX)
        }
    if name.startswith("kv_records"):
        return {
            "main_record": quant.encode_main(case.input("kv")),
            "swa_record": quant.encode_swa(case.input("kv")),
            "index_section": quant.encode_index_section(case.input("index_k")),
        }
    if name.startswith("weight_fp8"):
        return {"dequant": quant.widen_fp8_weight(case.input("weight"), case.input("scale"))}
    if name.startswith("weight_fp4"):
        codes = quant.unpack_nibbles(case.input("weight"))
        return {
            "dequant": quant.widen_fp4_weight(case.input("weight"), case.input("scale")),
            "unpacked": quant.e2m1_values(codes),
        }
    raise GoldenFormatError(f"unknown quant case {case.name}")


def _e4m3(x: torch.Tensor) -> Tensors:
    codes, scale_bytes = quant.quantise_e4m3(x)
    return {
        "codes": codes,
        "scale_f32": quant.e8m0_to_float(scale_bytes),
        "scale_e8m0": scale_bytes.view(torch.float8_e8m0fnu),
        "dequant": quant.round_trip_e4m3(x),
    }


def _fp4_index(x: torch.Tensor) -> Tensors:
    packed, scale_bytes = quant.quantise_fp4_index(x)
    return {
        "packed": packed,
        "scale_e8m0": scale_bytes.view(torch.float8_e8m0fnu),
        "dequant": quant.round_trip_fp4_index(x),
    }


def _fp4_main(x: torch.Tensor) -> Tensors:
    packed, scales = quant.quantise_fp4_main(x)
    return {"packed": packed, "scale_e4m3": scales, "dequant": quant.round_trip_fp4_main(x)}
