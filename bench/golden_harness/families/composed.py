"""Sublayers and layers of the checkpoint, teacher forced: attn_chain and layers. One prefill, then single steps."""

from __future__ import annotations

import torch

from bench.golden_harness.case import Case, Tensors
from bench.golden_harness.loading import model_of
from bench.golden_harness.recorder import Recorder
from bench.golden_harness.registry import runner
from bench.golden_harness.serving import ServedSequence, admit, run_step
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.kvcache.pool import KVPool


@runner("attn_chain")
def run_attention(case: Case, device: str = "cpu") -> Tensors:
    """Every listed attention sublayer gets its own stored input; what the other parts compute does not matter."""
    layers = [int(name) for name in case.config["layers"]]
    inputs = {layer: case.input(f"x_layer{layer}") for layer in layers}
    recorder = Recorder({("attention_input", layer): x for layer, x in inputs.items()})
    total = next(iter(inputs.values())).shape[0]
    served = _serve(case, recorder, [0] * total, device)
    got = {f"y_layer{layer}": recorder.rows("attention_output", layer, list(range(total))) for layer in layers}
    return got | _selections(case, recorder, {"last": total - 1}) | served


@runner("layers")
def run_layers(case: Case, device: str = "cpu") -> Tensors:
    """Layer i is fed with the stored output of layer i − 1."""
    h, pre = case.expected("h"), case.expected("pre_mix")
    forced = {("layer_input", i + 1): h[i] for i in range(h.shape[0] - 1)}
    forced |= {("pre_input", i + 1): pre[i] for i in range(h.shape[0] - 1)}
    recorder = Recorder(forced)
    tokens = case.input("tokens").tolist()
    served = _serve(case, recorder, tokens, device)
    positions = list(range(len(tokens)))
    got = {
        "embed": recorder.rows("embedding", 0, positions),
        "h": torch.stack([recorder.rows("layer_output", i, positions) for i in range(h.shape[0])]),
        "pre_mix": torch.stack([recorder.rows("pre_output", i, positions) for i in range(h.shape[0])]),
    }
    steps = {f"step{i + 1}": case.integer("n0") + i for i in range(case.integer("n1"))}
    return got | _selections(case, recorder, steps) | served


def _serve(case: Case, recorder: Recorder, tokens: list[int], device: str) -> dict[str, torch.Tensor]:
    """Prefill n0 tokens and step through the rest; what the caches hold at the end."""
    model = model_of(case, device=device)
    rows = 1 + model.layout.blocks_for(len(tokens))
    pool = KVPool(model.layout, num_rows=rows, num_slots=2, device=device)
    sequence = admit(pool, tokens, capacity=len(tokens))
    model.probe = recorder
    try:
        run_step(model, pool, [(sequence, case.integer("n0"))])
        while sequence.computed < len(tokens):
            run_step(model, pool, [(sequence, 1)])
    finally:
        model.probe = None
    return {name: _cache(model, pool, sequence, name) for name in case.outputs if name.startswith(_CACHES)}


_CACHES = ("compress_kv_layer", "index_k_layer", "swa_ring_layer")


def _cache(model: DeepseekV41, pool: KVPool, sequence: ServedSequence, output: str) -> torch.Tensor:
    name, layer = output.rsplit("_layer", 1)
    views, dtype = model.views_of(pool), model.numerics.mode.activation_dtype
    if name == "swa_ring":
        window, end = model.layout.window, sequence.computed
        latest = torch.tensor([end - 1 - (end - 1 - place) % window for place in range(window)], device=pool.device)
        slot = torch.tensor([sequence.slot], device=pool.device)
        return views.rings[int(layer)].read(slot, latest[None], dtype)[0]
    source = views.sources[int(layer)]
    entries = torch.arange(sequence.computed // source.section.ratio, device=pool.device)
    rows = torch.tensor(sequence.rows, device=pool.device)
    if name == "compress_kv":
        return source.read_main(rows[entries // source.section.entries], entries % source.section.entries, dtype)
    return source.read_keys(rows[None], dtype)[0, : entries.shape[0]]


def _selections(case: Case, recorder: Recorder, steps: dict[str, int]) -> dict[str, torch.Tensor]:
    """``topk_layerL_prefill``, ``scores_layerL_prefill`` and the selections of single steps."""
    got: dict[str, torch.Tensor] = {}
    for name, entry in case.outputs.items():
        kind, _, rest = name.partition("_layer")
        if kind not in ("topk", "scores"):
            continue
        layer, when = rest.split("_", 1)
        recorded = "selection" if kind == "topk" else "scores"
        if when == "prefill":
            prefill = list(range(case.integer("n0")))
            width = entry.shape[-1] if kind == "scores" else None
            got[name] = recorder.rows(recorded, int(layer), prefill, width)
        else:
            got[name] = recorder.rows(recorded, int(layer), [steps[when]])[0]
    return got
