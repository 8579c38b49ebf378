"""The masks of outputs once more, by xgrammar over our grammars and by llguidance over the schemas, one after another.

Each output's tokens are taken one by one, and before each its mask is filled. llguidance may refuse a schema, or a
token that our grammar allowed; what it did up to there counts.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llguidance
import llguidance.numpy
import numpy as np

from bench._report import JsonValue
from bench.structured_harness.generate import Output, constraint_of
from headrace.engine.masks.grammars import Grammar
from headrace.engine.masks.matcher import ChoiceMask
from headrace.engine.offline import OfflineEngine


@dataclass
class Times:
    """Of one library, in seconds of the thread."""

    ready: list[float]
    """From the schema to the first mask's matcher, one per schema."""
    masks: list[float]
    refused: int = 0
    """Schemas that it does not take."""
    left: int = 0
    """Outputs that it did not follow to their end."""

    def json(self) -> dict[str, JsonValue]:
        """Figures in microseconds and milliseconds."""
        ordered = sorted(self.masks)
        return {
            "masks": len(ordered),
            "mask_us_mean": round(1e6 * statistics.fmean(ordered), 1) if ordered else None,
            "mask_us_p50": round(1e6 * ordered[len(ordered) // 2], 1) if ordered else None,
            "mask_us_p99": round(1e6 * ordered[len(ordered) * 99 // 100], 1) if ordered else None,
            "ready_ms_mean": round(1e3 * statistics.fmean(self.ready), 1) if self.ready else None,
            "schemas_refused": self.refused,
            "outputs_left": self.left,
        }


def ours(engine: OfflineEngine, outputs: Sequence[Output]) -> Times:
    """xgrammar, as the engine uses it; the grammars are compiled already, so `ready` stays empty."""
    times = Times([], [])
    for output in outputs:
        grammar: Grammar = engine.compile(constraint_of(output.case))
        mask = ChoiceMask(grammar)
        bits = np.full((1, -(-grammar.vocab_size // 32)), -1, dtype=np.int32)
        tokens: list[int] = []
        for token in output.token_ids:
            began = time.thread_time()
            mask.follow(tokens)
            mask.fill(bits, 0)
            times.masks.append(time.thread_time() - began)
            tokens.append(token)
    return times


def theirs(folder: Path, vocab_size: int, eos: Sequence[int], outputs: Sequence[Output]) -> Times:
    """llguidance, with its slices for JSON."""
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    slices = llguidance.LLTokenizer.json_slices()
    tokenizer = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos), slices=slices)
    times = Times([], [])
    for output in outputs:
        began = time.thread_time()
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(output.case.schema))
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0)
        times.ready.append(time.thread_time() - began)
        if matcher.is_error():
            times.refused += 1
            continue
        times.left += not _followed(matcher, output, vocab_size, times.masks.append)
    return times


def _followed(matcher: llguidance.LLMatcher, output: Output, vocab_size: int, took: Callable[[float], None]) -> bool:
    """Whether it took every token of the output."""
    bits = llguidance.numpy.allocate_token_bitmask(1, vocab_size)
    for token in output.token_ids:
        began = time.thread_time()
        llguidance.numpy.fill_next_token_bitmask(matcher, bits, 0)
        good = matcher.consume_token(token)
        took(time.thread_time() - began)
        if not good:
            return False
    return True
