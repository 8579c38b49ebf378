"""A row is the same bytes whatever the batch, the chunking, prefill or decode (L5; spec §20.1–3, 6–8)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from bench.golden_harness.serving import ServedSequence, admit, hand_over, prefill, run_step
from headrace.engine.models.deepseek_v41.model import DeepseekV41
from headrace.kvcache.pool import KVPool

LONGEST = 44
EXAMPLES = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
"""Without shrinking: an example is dozens of forward passes, and a failing one says which row differs."""


@dataclass
class Script:
    """One sequence of a random run."""

    ids: list[int]
    keep_from: int
    image: list[bool] = field(default_factory=list)
    seed: int = 0

    def embeddings(self, width: int) -> torch.Tensor | None:
        if not any(self.image):
            return None
        return torch.randn(sum(self.image), width, generator=torch.Generator().manual_seed(self.seed))

    def admit(self, model: DeepseekV41, pool: KVPool) -> ServedSequence:
        return admit(
            pool,
            self.ids,
            capacity=len(self.ids),
            keep_from=self.keep_from,
            image=self.image,
            embeddings=self.embeddings(model.hidden_size),
        )


@st.composite
def scripts(draw: st.DrawFn, *, replay: bool = True, images: bool = True) -> Script:
    length = draw(st.integers(1, LONGEST))
    ids = draw(st.lists(st.integers(0, 88), min_size=length, max_size=length))
    keep_from = draw(st.one_of(st.just(0), st.integers(1, length - 1))) if replay and length > 1 else 0
    image: list[bool] = []
    if images and draw(st.booleans()):
        first = draw(st.integers(0, length - 1))
        last = draw(st.integers(first, length - 1))
        image = [first <= p <= last for p in range(length)]
    return Script(ids, keep_from, image, draw(st.integers(0, 99)))


def new_pool(model: DeepseekV41, sequences: int) -> KVPool:
    rows = 1 + sequences * model.layout.blocks_for(LONGEST)
    return KVPool(model.layout, num_rows=rows, num_slots=1 + sequences, num_snapshots=1)


def state_of(pool: KVPool, sequence: ServedSequence) -> tuple[torch.Tensor, torch.Tensor]:
    return pool.rows[sequence.rows].clone(), pool.slots[sequence.slot].clone()


@dataclass
class Alone:
    """What a sequence gives alone in one piece."""

    logits: dict[int, torch.Tensor]
    rows: torch.Tensor
    slot: torch.Tensor


def alone(model: DeepseekV41, script: Script, *, mask_replay: bool = False) -> Alone:
    pool = new_pool(model, 1)
    sequence = script.admit(model, pool)
    logits = prefill(model, pool, sequence, LONGEST, every_row=True, mask_replay=mask_replay)
    kept = range(len(script.ids) - logits.shape[0], len(script.ids))
    rows, slot = state_of(pool, sequence)
    return Alone(dict(zip(kept, logits, strict=True)), rows, slot)


def together(model: DeepseekV41, played: list[Script], draw: st.DataObject) -> list[Alone]:
    """All sequences in one pool, in steps of random chunks of random sequences; once in a while one moves pools."""
    pools = [new_pool(model, len(played)), new_pool(model, len(played))]
    sequences = [script.admit(model, pools[0]) for script in played]
    place = [0] * len(played)
    logits: list[dict[int, torch.Tensor]] = [{} for _ in played]
    while unfinished := [i for i, s in enumerate(sequences) if s.computed < len(s.ids)]:
        here = draw.draw(st.sampled_from(sorted({place[i] for i in unfinished})), label="pool")
        able = [i for i in unfinished if place[i] == here]
        chosen = draw.draw(st.lists(st.sampled_from(able), min_size=1, unique=True), label="sequences")
        lengths = [
            draw.draw(st.one_of(st.just(1), st.integers(1, len(sequences[i].ids) - sequences[i].computed)))
            for i in chosen
        ]
        work = list(zip([sequences[i] for i in chosen], lengths, strict=True))
        wanted = [
            (i, p)
            for i, n in zip(chosen, lengths, strict=True)
            for p in range(sequences[i].computed, sequences[i].computed + n)
            if p >= sequences[i].keep_from
        ]
        for (i, p), row in zip(wanted, run_step(model, pools[here], work, every_row=True), strict=True):
            logits[i][p] = row
        if here == 0 and draw.draw(st.integers(0, 3), label="move") == 0:
            moving = chosen[0]
            sequences[moving] = hand_over(sequences[moving], pools[0], pools[1])
            place[moving] = 1
    states = [state_of(pools[place[i]], s) for i, s in enumerate(sequences)]
    return [Alone(one, *state) for one, state in zip(logits, states, strict=True)]


def check(got: Alone, expected: Alone) -> None:
    assert got.logits.keys() == expected.logits.keys()
    for position, row in expected.logits.items():
        assert torch.equal(got.logits[position], row), f"logits at position {position}"
    assert torch.equal(got.rows, expected.rows), "block bytes"
    assert torch.equal(got.slot, expected.slot), "slot bytes"


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        ("small", "noquant"),
        ("small", "kvquant"),
        ("ratio 4, no candidates, no drafts", "noquant"),
        ("no consumers, no Engram", "noquant"),
    ],
)
@EXAMPLES
@given(data=st.data(), played=st.lists(scripts(), min_size=1, max_size=4))
def test_any_batch_and_chunking_is_one_piece_alone(
    model_of: Callable[..., DeepseekV41], layout: str, mode: str, data: st.DataObject, played: list[Script]
) -> None:
    """L5: logits of every kept row, block bytes and slot bytes; kvquant covers spec §20.8 in the native formats."""
    model = model_of(layout, mode)
    expected = [alone(model, script) for script in played]
    for got, one in zip(together(model, played, data), expected, strict=True):
        check(got, one)


@EXAMPLES
@given(script=scripts())
def test_compact_is_mask_on_kept_rows(model_of: Callable[..., DeepseekV41], script: Script) -> None:
    """Spec §20.6: running all rows under the same visibility changes nothing that is kept."""
    model = model_of()
    check(alone(model, script, mask_replay=True), alone(model, script))


@EXAMPLES
@given(script=scripts(replay=False))
def test_a_kept_range_of_the_whole_prompt_is_off(model_of: Callable[..., DeepseekV41], script: Script) -> None:
    """Spec §20.6: compact == off when N ≤ K, that is keep_from ≤ 0."""
    negative = Script(script.ids, -3, script.image, script.seed)
    check(alone(model_of(), negative), alone(model_of(), script))


@EXAMPLES
@given(data=st.data(), ids=st.lists(st.integers(0, 88), min_size=24, max_size=LONGEST))
def test_prefix_hit_is_recompute(model_of: Callable[..., DeepseekV41], data: st.DataObject, ids: list[int]) -> None:
    """L5, spec §20.7: blocks of [0, P) and the snapshot at P, then the rest, give what the whole computation gives."""
    model = model_of()
    block = model.layout.block_tokens
    hit = data.draw(st.integers(1, (len(ids) - 8) // block), label="blocks") * block
    keep_from = data.draw(st.integers(hit, len(ids) - 1), label="keep_from")
    expected = alone(model, Script(ids, keep_from))

    pool = new_pool(model, 2)
    first = admit(pool, ids[:hit], capacity=hit, keep_from=0)
    prefill(model, pool, first, 7)
    snapshot = pool.take_snapshot(first.slot, "snapshot")
    second = admit(pool, ids, capacity=len(ids), keep_from=keep_from)
    second.rows[: hit // block] = first.rows
    second.computed = hit
    pool.restore_snapshot(snapshot, second.slot)
    logits = prefill(model, pool, second, 5, every_row=True)
    assert torch.equal(logits, torch.stack(list(expected.logits.values())))
    rows, slot = state_of(pool, second)
    assert torch.equal(rows, expected.rows)
    assert torch.equal(slot, expected.slot)
