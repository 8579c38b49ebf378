"""The fused MLA decoder step (mla.cpp) from Python: descriptors, lane analysis, the call.

A decoder is described once by tensors that stay alive here; a step passes pointers of the batch and of the pool. Plain
twin: the torch path of engine/models/deepseek_v3, which the tests compare with it on random models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headrace.compiler import NativeUnavailable
from headrace.kernels.native.build import load_native
from headrace.kernels.native.lanes import find_lanes, flatten, starts_of
from headrace.kernels.weights import Swiglu


@dataclass(frozen=True)
class DecoderShape:
    """Numbers of the model; names as in engine/models/deepseek_v3/config.py."""

    hidden: int
    heads: int
    q_rank: int
    """0 without query compression."""
    rank: int
    nope: int
    rope: int
    v: int
    vocab: int
    interleaved: bool
    invariant: bool
    """Every product in one order of summation, whatever the number of rows (L5); prefill is then about half as fast."""
    softmax_scale: float
    eps: float
    lora_eps: float
    top_k: int
    groups: int
    top_groups: int
    normalize: bool
    route_scale: float
    block_tokens: int
    row_bytes: int
    layer_bytes: int


@dataclass(frozen=True)
class LayerTensors:
    """One layer; matrices in the model's dtype, [out, in], contiguous; vectors in any float dtype."""

    attention_norm: torch.Tensor
    ffn_norm: torch.Tensor
    q_a: torch.Tensor | None
    q_a_bias: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q: torch.Tensor
    kv_a: torch.Tensor
    kv_a_bias: torch.Tensor | None
    kv_a_norm: torch.Tensor | None
    kv_b: torch.Tensor
    o: torch.Tensor
    o_bias: torch.Tensor | None
    ffns: Sequence[Swiglu]
    router: torch.Tensor | None
    router_bias: torch.Tensor | None
    shared: Swiglu | None


class _Ffn(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gate", "up", "down")] + [("inner", ctypes.c_int64)]


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "ffn_norm", "q_a", "q_a_bias", "q_a_norm", "q")),
        *((name, ctypes.c_void_p) for name in ("kv_a", "kv_a_bias", "kv_a_norm", "kv_b", "o", "o_bias", "q_runs")),
        ("num_q_runs", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("score_runs", "score_starts", "value_runs", "value_starts")),
        ("entry_runs", ctypes.c_void_p),
        ("num_entry_runs", ctypes.c_int64),
        ("nope_live", ctypes.c_void_p),
        ("ffns", ctypes.c_void_p),
        ("num_ffns", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("router", "router_bias", "shared")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("weight_bytes", "kv_bytes", "hidden", "heads", "q_rank", "rank", "nope")),
        *((name, ctypes.c_int64) for name in ("rope", "v", "vocab", "num_layers", "interleaved", "invariant")),
        *((name, ctypes.c_int64) for name in ("top_k", "groups", "top_groups", "normalize")),
        *((name, ctypes.c_int64) for name in ("block_tokens", "row_bytes", "layer_bytes")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "eps", "lora_eps", "route_scale")),
        *((name, ctypes.c_void_p) for name in ("layers", "embedding", "head", "norm")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("tokens", "sequences", "num_logits", "max_blocks")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "starts", "lengths", "block_tables")),
        *((name, ctypes.c_void_p) for name in ("logit_rows", "cos", "sin", "rows", "logits")),
        ("threads", ctypes.c_int64),
    ]


class NativeDecoder:
    """All weights of a decoder, ready to step. Not reentrant: one engine thread owns it."""

    def __init__(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerTensors],
        embedding: torch.Tensor,
        head: torch.Tensor,
        norm: torch.Tensor,
        kv_dtype: torch.dtype,
    ) -> None:
        """Matrices are used in place; only vectors are widened to float32.

        Raises:
            NativeUnavailable: the library cannot be built or loaded here, or a tensor is not as it takes them.
        """
        self._library = load_native().handle
        self._check_sizes()
        self._kept: list[object] = []
        self._dtype = embedding.dtype
        if self._dtype not in (torch.float32, torch.bfloat16) or kv_dtype not in (torch.float32, self._dtype):
            raise NativeUnavailable(f"no kernel for {self._dtype} weights with {kv_dtype} entries")
        self._shape = shape
        described = [self._layer(layer) for layer in layers]
        array = (_Layer * len(described))(*described)
        self._kept.append(array)
        self._model = _Model(
            weight_bytes=self._dtype.itemsize,
            kv_bytes=kv_dtype.itemsize,
            hidden=shape.hidden,
            heads=shape.heads,
            q_rank=shape.q_rank,
            rank=shape.rank,
            nope=shape.nope,
            rope=shape.rope,
            v=shape.v,
            vocab=shape.vocab,
            num_layers=len(described),
            interleaved=shape.interleaved,
            invariant=shape.invariant,
            top_k=shape.top_k,
            groups=shape.groups,
            top_groups=shape.top_groups,
            normalize=shape.normalize,
            block_tokens=shape.block_tokens,
            row_bytes=shape.row_bytes,
            layer_bytes=shape.layer_bytes,
            softmax_scale=shape.softmax_scale,
            eps=shape.eps,
            lora_eps=shape.lora_eps,
            route_scale=shape.route_scale,
            layers=ctypes.addressof(array),
            embedding=self._matrix(embedding),
            head=self._matrix(head),
            norm=self._vector(norm),
        )
        self._workspace = ctypes.c_void_p(self._library.headrace_workspace_new())

    def __del__(self) -> None:
        workspace = getattr(self, "_workspace", None)
        if workspace is not None:
            self._library.headrace_workspace_free(workspace)

    def step(
        self,
        *,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        starts: Sequence[int],
        lengths: Sequence[int],
        block_tables: torch.Tensor,
        logit_rows: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        rows: torch.Tensor,
        threads: int,
    ) -> torch.Tensor:
        """One forward pass (shapes as in engine/batch.py; cos, sin [T, rope/2] float32; rows the pool's uint8 tensor)
        → logits [S, vocab] float32.

        Raises:
            IndexError: a token id outside the vocabulary, or a block table entry outside the pool.
        """
        shape = self._shape
        if token_ids.numel() and (int(token_ids.min()) < 0 or int(token_ids.max()) >= shape.vocab):
            raise IndexError(f"a token id is outside 0 … {shape.vocab - 1}")
        if block_tables.numel() and (int(block_tables.min()) < 0 or int(block_tables.max()) >= rows.shape[0]):
            raise IndexError(f"a block table names a row outside the pool's {rows.shape[0]}")
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        if ends and max(ends) > block_tables.shape[1] * shape.block_tokens:
            raise IndexError(
                f"positions up to {max(ends) - 1} do not fit block tables of {block_tables.shape[1]} blocks"
            )
        logits = torch.empty(logit_rows.shape[0], shape.vocab, dtype=torch.float32)
        inputs = [token_ids, positions, block_tables, logit_rows, cos, sin]
        token_ids, positions, block_tables, logit_rows, cos, sin = (tensor.contiguous() for tensor in inputs)
        step = _Step(
            tokens=token_ids.shape[0],
            sequences=len(starts),
            num_logits=logit_rows.shape[0],
            max_blocks=block_tables.shape[1],
            token_ids=token_ids.data_ptr(),
            positions=positions.data_ptr(),
            starts=ctypes.addressof(first := (ctypes.c_int64 * len(starts))(*starts)),
            lengths=ctypes.addressof(count := (ctypes.c_int64 * len(lengths))(*lengths)),
            block_tables=block_tables.data_ptr(),
            logit_rows=logit_rows.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            rows=rows.data_ptr(),
            logits=logits.data_ptr(),
            threads=threads,
        )
        self._library.headrace_mla_step(ctypes.byref(self._model), ctypes.byref(step), self._workspace)
        del first, count
        return logits

    # --- describing --------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        sizes = (ctypes.c_int64 * 4)()
        self._library.headrace_descriptor_sizes(sizes)
        mirror = [ctypes.sizeof(kind) for kind in (_Ffn, _Layer, _Model, _Step)]
        if list(sizes) != mirror:
            raise NativeUnavailable(f"descriptor sizes {list(sizes)} of the library are not {mirror} of mla.py")

    def _matrix(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype != self._dtype or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise NativeUnavailable(f"a matrix is {tensor.dtype} on {tensor.device}, wanted {self._dtype}, contiguous")
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _vector(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        wide = tensor.to(torch.float32).contiguous()
        self._kept.append(wide)
        return wide.data_ptr()

    def _integers(self, values: Sequence[int]) -> int:
        array = (ctypes.c_int64 * len(values))(*values)
        self._kept.append(array)
        return ctypes.addressof(array)

    def _swiglu(self, ffn: Swiglu) -> _Ffn:
        if not all(isinstance(part, torch.Tensor) for part in (ffn.gate, ffn.up, ffn.down)):
            raise NativeUnavailable("quantised experts have no C++ kernel")
        gate, up, down = ffn.gate, ffn.up, ffn.down
        assert isinstance(gate, torch.Tensor)
        assert isinstance(up, torch.Tensor)
        assert isinstance(down, torch.Tensor)
        return _Ffn(gate=self._matrix(gate), up=self._matrix(up), down=self._matrix(down), inner=gate.shape[0])

    def _layer(self, layer: LayerTensors) -> _Layer:
        shape = self._shape
        lanes = find_lanes(
            layer.q,
            layer.kv_b,
            heads=shape.heads,
            nope=shape.nope,
            rope=shape.rope,
            v=shape.v,
            interleaved=shape.interleaved,
        )
        ffns = (_Ffn * len(layer.ffns))(*[self._swiglu(ffn) for ffn in layer.ffns])
        shared = None if layer.shared is None else self._swiglu(layer.shared)
        self._kept += [ffns, shared]
        live = (ctypes.c_uint8 * self._shape.heads)(*lanes.nope_live)
        self._kept.append(live)
        return _Layer(
            attention_norm=self._vector(layer.attention_norm),
            ffn_norm=self._vector(layer.ffn_norm),
            q_a=self._matrix(layer.q_a),
            q_a_bias=self._vector(layer.q_a_bias),
            q_a_norm=self._vector(layer.q_a_norm),
            q=self._matrix(layer.q),
            kv_a=self._matrix(layer.kv_a),
            kv_a_bias=self._vector(layer.kv_a_bias),
            kv_a_norm=self._vector(layer.kv_a_norm),
            kv_b=self._matrix(layer.kv_b),
            o=self._matrix(layer.o),
            o_bias=self._vector(layer.o_bias),
            q_runs=self._integers(flatten(lanes.q_rows)),
            num_q_runs=len(lanes.q_rows),
            score_runs=self._integers(flatten([run for head in lanes.score for run in head])),
            score_starts=self._integers(starts_of(lanes.score)),
            value_runs=self._integers(flatten([run for head in lanes.value for run in head])),
            value_starts=self._integers(starts_of(lanes.value)),
            entry_runs=self._integers(flatten(lanes.entry)),
            num_entry_runs=len(lanes.entry),
            nope_live=ctypes.addressof(live),
            ffns=ctypes.addressof(ffns),
            num_ffns=len(layer.ffns),
            router=self._vector(layer.router),
            router_bias=self._vector(layer.router_bias),
            shared=None if shared is None else ctypes.addressof(shared),
        )
