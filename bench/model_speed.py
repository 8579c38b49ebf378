"""Speed of a DeepSeek-V3 folder's forward pass on the CPU, beside what memory allows and beside transformers.

    python -m bench.model_speed --json

Decode steps of 1 … 8 sequences behind a prompt of --context tokens, and prefill of that prompt in one chunk, with 1
and 2 threads. In the same run: how fast this process reads memory (a step reads every weight once, so bytes ÷ bandwidth
bounds decode of one sequence), and transformers' bf16 Llama of SmolLM2's shape. Figures are of the best of several
steps: this machine may be shared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from headrace.engine.batch import StepBatch
from headrace.engine.folders import models_directory
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.model import Model
from headrace.kvcache.pool import KVPool

VOCABULARY = 40_000
"""Token ids are drawn below it; which ones does not matter to the time."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, default=models_directory() / "smollm2-bfloat16", help="V3 model folder")
    parser.add_argument("--context", type=positive, default=540, help="tokens of the prompt")
    parser.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4, 8], help="sequences of a decode step")
    parser.add_argument("--threads", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=positive, default=8, help="steps per figure; the best counts")
    parser.add_argument("--no-transformers", action="store_true", help="leave the peer out; it takes a minute")
    flags = parser.parse_args(argv)
    model = load_model(flags.model, ModelSettings())
    table: list[dict[str, Scalar]] = []
    results: dict[str, JsonValue] = {"model": flags.model.name, "backend": str(getattr(model, "backend", "unknown"))}
    weights = sum(path.stat().st_size for path in flags.model.glob("*.safetensors"))
    results["weight_bytes"] = weights
    for threads in flags.threads:
        torch.set_num_threads(threads)
        bandwidth = read_bandwidth(flags.repeat)
        results[f"memory_read_gb_s_t{threads}"] = round(bandwidth / 1e9, 2)
        results[f"bound_tokens_per_s_c1_t{threads}"] = round(bandwidth / weights, 1)
        table += measure(model, flags.context, flags.batches, flags.repeat, threads, "headrace")
    if not flags.no_transformers:
        peer = llama(flags.model)
        if peer is None:
            results["transformers"] = None
        else:
            for threads in flags.threads:
                torch.set_num_threads(threads)
                table += measure_peer(peer, flags.context, (min(flags.batches), max(flags.batches)), threads)
    notes = [
        "prefill rows: tokens/s of one chunk of the whole prompt; decode rows: tokens/s summed over the sequences",
        "bound: reading every weight once per step at the measured bandwidth; a step of 8 is bound by arithmetic",
    ]
    emit(Report("model_speed", results, table, notes), as_json=flags.json)


@dataclass(frozen=True)
class Seconds:
    """Best of several runs of a step; cpu sums over threads and hardly sees what else the machine does."""

    wall: float
    cpu: float


def best(step: Callable[[], object], repeat: int, *, warm: bool = True) -> Seconds:
    if warm:
        step()
    wall = cpu = float("inf")
    for _ in range(repeat):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        wall = min(wall, time.perf_counter() - start)
        cpu = min(cpu, time.process_time() - start_cpu)
    return Seconds(wall, cpu)


def read_bandwidth(repeat: int) -> float:
    """Bytes per second that torch reads memory at (a sum over 256 MB), with the current threads."""
    data = torch.ones(64 << 20)
    return data.nbytes / best(data.sum, repeat).wall


def row(engine: str, phase: str, sequences: int, threads: int, tokens: int, seconds: Seconds) -> dict[str, Scalar]:
    return {
        "engine": engine,
        "phase": phase,
        "sequences": sequences,
        "threads": threads,
        "ms": round(seconds.wall * 1e3, 2),
        "cpu_ms": round(seconds.cpu * 1e3, 2),
        "tokens_per_s": round(tokens / seconds.wall, 1),
    }


def measure(
    model: Model, context: int, batches: Sequence[int], repeat: int, threads: int, name: str
) -> list[dict[str, Scalar]]:
    blocks = model.layout.blocks_for(context + 1)
    pool = KVPool(model.layout, num_rows=1 + max(batches) * blocks)
    rows = pool.allocate_rows(max(batches) * blocks, "bench")
    tables = torch.tensor(rows).view(max(batches), blocks)
    prompt = step_batch([0], [context], tables[:1])
    seconds = best(partial(model.forward, prompt, pool), max(1, repeat // 4))
    table = [row(name, "prefill", 1, threads, context, seconds)]
    for count in batches:
        batch = step_batch([context] * count, [1] * count, tables[:count])
        seconds = best(partial(model.forward, batch, pool), repeat)
        table.append(row(name, "decode", count, threads, count, seconds))
    return table


def step_batch(starts: Sequence[int], lengths: Sequence[int], tables: torch.Tensor) -> StepBatch:
    """Random tokens; the logits of each sequence's last one are wanted."""
    count = sum(lengths)
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
    return StepBatch(
        token_ids=torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(1)),
        positions=positions,
        sequence_of_row=torch.repeat_interleave(torch.arange(len(starts)), torch.tensor(lengths)),
        starts=tuple(starts),
        lengths=tuple(lengths),
        block_tables=tables,
        slots=torch.zeros(len(starts), dtype=torch.int64),
        keep_from=(0,) * len(starts),
        lookback=torch.zeros(len(starts), 0, dtype=torch.int64),
        image_mask=torch.zeros(count, dtype=torch.bool),
        image_embeddings=None,
        logit_rows=torch.tensor(lengths).cumsum(0) - 1,
    )


def llama(model: Path) -> torch.nn.Module | None:
    """transformers' bf16 Llama of SmolLM2's shape, random weights; None without transformers."""
    try:
        import transformers
    except ImportError:
        return None
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(1)
    shape = transformers.LlamaConfig(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=config["num_attention_heads"],
        num_key_value_heads=config["qk_rope_head_dim"] // config["v_head_dim"],
        max_position_embeddings=config["max_position_embeddings"],
        tie_word_embeddings=True,
    )
    peer: torch.nn.Module = transformers.LlamaForCausalLM(shape)
    return peer.to(torch.bfloat16).eval()


def measure_peer(peer: Any, context: int, batches: Sequence[int], threads: int) -> list[dict[str, Scalar]]:
    """One prefill, and decode steps behind a cache of random keys and values: a bf16 prefill of many takes minutes."""
    from transformers import DynamicCache

    config = peer.config
    ids = torch.randint(0, VOCABULARY, (1, context), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        seconds = best(partial(peer, input_ids=ids, logits_to_keep=1), 1, warm=False)
        table = [row("transformers", "prefill", 1, threads, context, seconds)]
        for count in batches:
            cache = DynamicCache(config=config)
            kept = torch.randn(count, config.num_key_value_heads, context, config.head_dim, dtype=torch.bfloat16)
            for layer in range(config.num_hidden_layers):
                cache.update(kept, kept, layer)
            step = partial(peer, input_ids=ids[:, :1].expand(count, -1), cache=cache, use_cache=True)
            table.append(row("transformers", "decode", count, threads, count, best(step, 2)))
    return table


if __name__ == "__main__":
    main()
