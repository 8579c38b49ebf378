"""Masks of a step, computed by a thread of their own while the device runs the forward pass.

xgrammar gives up the interpreter's lock while it works, and so does torch.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from headrace.engine.errors import EngineError, ErrorCode, invalid
from headrace.engine.masks.matcher import Bits, ChoiceMask
from headrace.engine.scheduler import StepPlan
from headrace.engine.sequence import Sequence


@dataclass(frozen=True)
class StepMasks:
    """Masks by chunk of the plan."""

    bits: Bits
    rows: dict[int, int]
    """Chunk → row of `bits`, for chunks whose tokens are constrained."""
    errors: dict[int, EngineError] = field(default_factory=dict)
    """Chunk → why it has no mask; its request ends."""

    def of(self, chunk: int) -> Bits | None:
        """The mask of a chunk's tokens; None where they are free."""
        row = self.rows.get(chunk)
        return None if row is None else self.bits[row]


@dataclass
class MaskWork:
    """Since start."""

    masks: int = 0
    seconds: float = 0.0
    """Of the thread's own time, for taking tokens and filling masks."""
    longest_s: float = 0.0
    """The most that one of them took."""
    waited_s: float = 0.0
    """What a step waited for masks after its forward pass: the rest was hidden behind the device."""


class MaskMaker:
    """Used by the engine thread: `begin` before the forward pass, `finish` behind it."""

    def __init__(self, vocab_size: int, limit_s: float) -> None:
        """`limit_s`: thread time of one mask beyond which its request ends: everybody in the batch waits for it."""
        self._width = -(-vocab_size // 32)
        self._limit_s = limit_s
        self._thread: ThreadPoolExecutor | None = None
        self.work = MaskWork()

    def begin(self, plan: StepPlan) -> Future[StepMasks] | None:
        """Start on the masks of a plan; None when nothing in it is constrained."""
        asked = [
            (index, chunk.sequence)
            for index, chunk in enumerate(plan.chunks)
            if chunk.choices and chunk.sequence.live.request.grammar is not None
        ]
        if not asked:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        return self._thread.submit(self._make, asked)

    def finish(self, begun: Future[StepMasks]) -> StepMasks:
        """The masks."""
        before = time.perf_counter()
        masks = begun.result()
        self.work.waited_s += time.perf_counter() - before
        return masks

    # --- the thread --------------------------------------------------------------------------------------------

    def _make(self, asked: list[tuple[int, Sequence]]) -> StepMasks:
        bits: Bits = np.full((len(asked), self._width), -1, dtype=np.int32)
        masks = StepMasks(bits, {index: row for row, (index, _) in enumerate(asked)})
        for row, (index, sequence) in enumerate(asked):
            began = time.thread_time()
            tokens = 1
            try:
                tokens = self._fill(sequence, bits, row)
            except EngineError as error:
                masks.errors[index] = error
            except Exception as error:  # noqa: BLE001 - L13: whatever one request's language does, ends that request
                masks.errors[index] = EngineError(ErrorCode.INTERNAL, f"its mask failed: {error}")
            took = time.thread_time() - began
            if took > self._limit_s * max(1, tokens):
                told = f"constraint: a mask took {took:.1f} s, more than {self._limit_s:g}; write it less ambiguously"
                masks.errors.setdefault(index, invalid(told))
            if index in masks.errors:
                bits[row] = -1
            self.work.masks += 1
            self.work.seconds += took
            self.work.longest_s = max(self.work.longest_s, took)
        return masks

    @staticmethod
    def _fill(sequence: Sequence, bits: Bits, row: int) -> int:
        """The tokens that the matcher had to take: all of them after a hand-over or a preemption elsewhere."""
        request = sequence.live.request
        if sequence.mask is None:
            assert request.grammar is not None
            sequence.mask = ChoiceMask(request.grammar)
        taken = sequence.mask.follow(sequence.output, len(request.delivered_to(sequence.choice)))
        sequence.mask.fill(bits, row)
        return taken
