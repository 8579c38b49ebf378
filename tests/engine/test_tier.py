"""The engine and the cache tier: what it offers and adopts, and that neither leaks or starves (L5, L7, L11, L27)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace.engine.core import Engine
from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import Cancel, Submit
from headrace.engine.request import CacheScope, EngineRequest, TrafficClass
from headrace.engine.tier_messages import (
    Adopt,
    Adoption,
    BeginLoad,
    EndLoad,
    OfferPrefix,
    TierUnpin,
    TierWrite,
)
from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.keys import snapshot_key
from headrace.kvcache.tier.plan import Wanted

ROOT = bytes(32)
SCOPE = CacheScope(bytes(range(32)), bytes(16))


@dataclass
class FakeTier:
    """Copies at once what it is offered; its entries are what a store would hold."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)
    snapshots: dict[bytes, bytes] = field(default_factory=dict)
    writes: list[TierWrite] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)

    def __call__(self, write: TierWrite) -> None:
        self.writes.append(write)

    def copy(self, engine: Engine) -> None:
        """What a writer thread does."""
        while self.writes:
            write = self.writes.pop(0)
            for row in write.blocks:
                self.blocks[row.key] = engine.pool.rows[row.place].numpy().tobytes()
            for row in write.snapshots:
                self.snapshots[row.key] = engine.pool.snapshots[row.place].numpy().tobytes()
            engine.apply(TierUnpin((write.pin,)))

    def adoptions(self, engine: Engine, plan: Wanted, blocks: int | None = None) -> tuple[Adoption, ...]:
        """Blocks that the pool lacks, and every snapshot of the prefix."""
        ring = engine.pool.layout.ring_tokens
        found = []
        for key, present in list(zip(plan.keys, plan.present, strict=True))[:blocks]:
            if key not in self.blocks:
                break
            if not present:
                found.append(Adoption(key, EntryKind.BLOCK, self.blocks[key]))
            if ring and (mark := snapshot_key(key, ring)) in self.snapshots:
                found.append(Adoption(mark, EntryKind.SNAPSHOT, self.snapshots[mark]))
        return tuple(found)


def ask(kit: Any, name: str, prompt: Any, **changes: Any) -> EngineRequest:
    request: EngineRequest = kit.request(name, prompt, **{"cache": SCOPE, **changes})
    return request


def serve(kit: Any, engine: Engine, request: EngineRequest, tier: FakeTier | None = None) -> Any:
    engine.apply(Submit(request))
    outcome = kit.collect(kit.run(engine))[request.key.request_id]
    assert all(end.reason in kit.done for end in outcome.finished.values()), outcome
    if tier is not None:
        tier.copy(engine)
    assert engine.integrity(idle=tier is not None) == ()
    return outcome


def fresh(kit: Any, model: Any, tier: FakeTier | None = None, **changes: Any) -> Engine:
    engine: Engine = kit.engine(model, tier=tier, **changes)
    return engine


def test_a_prefix_that_went_through_the_tier_is_the_computed_one(kit: Any, model: Any) -> None:
    """L5, L27: prompt and output of one engine, loaded into another, give the tokens of computing them; every token is
    counted once, as loaded where it was."""
    tier = FakeTier()
    first = ask(kit, "first", 100, max_tokens=40)
    answer = serve(kit, fresh(kit, model, tier), first, tier).tokens[0]
    second = ask(kit, "second", [*first.prompt_ids, *answer, *kit.request("user", 20).prompt_ids], max_tokens=20)
    expected = serve(kit, fresh(kit, model, prefix_reuse=False), second)
    engine = fresh(kit, model)
    plan = engine.apply(BeginLoad(second))
    assert (plan.usable_tokens, any(plan.present)) == (0, False)
    entries = tier.adoptions(engine, plan)
    assert engine.apply(Adopt(second.key, entries)) == len(entries)
    assert engine.integrity() == ()
    outcome = serve(kit, engine, second)
    assert (outcome.tokens, outcome.text) == (expected.tokens, expected.text)
    common = 139  # the last token was sampled and never computed
    keep = kit.keep if model.layout.has_snapshots else 1
    assert outcome.usage.counts.loaded >= (common - keep) // kit.block * kit.block
    assert outcome.usage.counts.cached == 0
    assert outcome.usage.counts.loaded + outcome.usage.counts.computed == 160
    assert engine.integrity(idle=True) == ()


def test_each_block_is_offered_once_and_after_its_prefix(kit: Any, model: Any) -> None:
    """Blocks in order with their parents, snapshots behind the blocks they need, whatever the chunks."""
    tier = FakeTier()
    engine = fresh(kit, model, tier, max_batched_tokens=23)
    request = ask(kit, "order", 130, max_tokens=30)
    engine.apply(Submit(request))
    kit.run(engine)
    writes = list(tier.writes)
    blocks = [row for write in writes for row in write.blocks]
    assert [row.tokens for row in blocks] == list(range(16, 160, 16))
    assert [row.parent for row in blocks] == [request.key_root, *(row.key for row in blocks[:-1])]
    reached = 0
    for write in writes:
        assert (write.scope, write.retention, write.ready) == (SCOPE, RetentionClass.CHAT, None)
        reached = max([reached, *(row.tokens for row in write.blocks)])
        assert all(row.tokens <= reached for row in write.snapshots)
    snapshots = [row.tokens for write in writes for row in write.snapshots]
    assert snapshots == ([96, 112, 128, 144] if model.layout.has_snapshots else [])
    tier.copy(engine)
    again = ask(kit, "again", list(request.prompt_ids), max_tokens=1)
    serve(kit, engine, again, tier)
    counts = engine.status().tier_writes
    # With bounded replay the last block is computed anew, and offered anew: the tier knows what it has.
    assert counts.offered_blocks == (10 if model.layout.has_snapshots else 9)
    assert (counts.dropped_blocks, counts.pinned) == (0, 0)


def test_batch_traffic_and_unscoped_requests_write_nothing(kit: Any, model: Any) -> None:
    """BATCH reads and never writes; a canary is nobody's."""
    tier = FakeTier()
    engine = fresh(kit, model, tier)
    serve(kit, engine, ask(kit, "batch", 100, traffic=TrafficClass.BATCH))
    serve(kit, engine, ask(kit, "canary", 100, cache=None))
    assert tier.writes == []
    serve(kit, fresh(kit, model, tier, prefix_reuse=False), ask(kit, "alone", 100))
    assert tier.writes == []
    serve(kit, engine, ask(kit, "agent", 100, traffic=TrafficClass.AGENT))
    assert {write.retention for write in tier.writes} == {RetentionClass.AGENT}


def test_pins_are_bounded_and_the_rest_waits_in_order(kit: Any, model: Any) -> None:
    """L7, L12: a tier that does not copy pins a bounded share; when it does, the prefix goes on where it stopped; what
    still waits at the end is dropped, suffix first, and counted."""
    tier = FakeTier()
    engine = fresh(kit, model, tier, rows=40, write_fraction=0.1)
    serve(kit, engine, ask(kit, "slow", 160))
    assert engine.pool.row_region.pinned == 4
    assert engine.status().tier_writes.dropped_blocks == 6
    assert [row.tokens for write in tier.writes for row in write.blocks] == [16, 32, 48, 64]
    tier.copy(engine)
    assert engine.integrity(idle=True) == ()
    request = ask(kit, "quick", 160)
    engine.apply(Submit(request))
    while len(engine.ledger):
        engine.step()
        tier.copy(engine)
    assert engine.status().tier_writes.dropped_blocks == 6
    assert len(tier.blocks) == 14


def test_pinned_places_outlive_their_request(kit: Any, model: Any) -> None:
    """L7: rows under a copy are not given to others, though nobody holds them."""
    tier = FakeTier()
    engine = fresh(kit, model, tier, rows=16, write_fraction=0.5)
    first = ask(kit, "first", 120, max_tokens=1)
    serve(kit, engine, first)
    (*_, write) = tier.writes
    before = [engine.pool.rows[row.place].clone() for row in write.blocks]
    serve(kit, engine, ask(kit, "second", 110, cache=None, max_tokens=1))
    assert all(bool((engine.pool.rows[row.place] == old).all()) for row, old in zip(write.blocks, before, strict=True))
    tier.copy(engine)
    assert engine.integrity(idle=True) == ()


def test_a_used_prefix_that_the_store_lacks_is_offered_again(kit: Any, model: Any) -> None:
    """What BATCH computed reaches the store when another class uses it; bounded like every offer."""
    tier = FakeTier()
    engine = fresh(kit, model, tier, rows=40, write_fraction=0.1)
    batch = ask(kit, "batch", 100, traffic=TrafficClass.BATCH)
    serve(kit, engine, batch, tier)
    assert not tier.blocks
    chat = ask(kit, "chat", list(batch.prompt_ids))
    plan = engine.apply(BeginLoad(chat))
    keys = plan.keys
    named = tuple((key, keys[index - 1] if index else ROOT, (index + 1) * 16) for index, key in enumerate(keys))
    ring = model.layout.ring_tokens
    marks = tuple((snapshot_key(key, ring), key, tokens) for key, _, tokens in named[-1:]) if ring else ()
    again = OfferPrefix(SCOPE, RetentionClass.CHAT, named, marks)
    assert engine.apply(again) == 4 + len(marks)
    assert engine.apply(again) == len(marks)
    tier.copy(engine)
    assert list(tier.blocks) == list(keys[:4])
    engine.apply(EndLoad(chat.key))
    assert engine.apply(OfferPrefix(SCOPE, RetentionClass.CHAT, ((bytes(32), ROOT, 16),))) == 0
    assert engine.integrity(idle=True) == ()


def test_a_load_ends_on_every_path(kit: Any, model: Any) -> None:
    """L10, L11: admission, EndLoad, Cancel, deadline, a higher attempt and a stop all let go of it; what it brought
    stays cached."""
    tier = FakeTier()
    first = ask(kit, "first", 100)
    serve(kit, fresh(kit, model, tier), first, tier)
    for end in ("submit", "end", "cancel", "deadline", "attempt", "stop"):
        clock = kit.clock()
        engine = fresh(kit, model, clock=clock)
        request = replace(ask(kit, "again", list(first.prompt_ids)), deadline=clock.now + 5)
        plan = engine.apply(BeginLoad(request))
        engine.apply(Adopt(request.key, tier.adoptions(engine, plan)))
        assert engine.next_expiry() == clock.now + 5
        assert engine.integrity() == ()
        assert engine.integrity(idle=True) != ()
        match end:
            case "submit":
                serve(kit, engine, request)
            case "end":
                engine.apply(EndLoad(request.key))
                engine.apply(EndLoad(request.key))
            case "cancel":
                assert engine.apply(Cancel(request.key)) is True
            case "deadline":
                clock.now += 6
                engine.step()
            case "attempt":
                higher = replace(request, key=replace(request.key, attempt=2))
                later = engine.apply(BeginLoad(higher))
                assert all(later.present[:5])
                engine.apply(EndLoad(higher.key))
            case "stop":
                engine.close()
        assert engine.integrity(idle=True) == (), end
        assert engine.pool.row_region.cached >= 5
        with pytest.raises(EngineError) as refused:
            engine.apply(Adopt(request.key, ()))
        assert refused.value.code is ErrorCode.NOT_FOUND


def test_loads_give_way_to_what_runs(kit: Any, model: Any) -> None:
    """L6, L12: a pool full of prefixes that wait for their requests lets a running sequence grow; the newest goes
    first, nobody is preempted."""
    tier = FakeTier()
    waiting = [ask(kit, f"w{index}", 96) for index in range(2)]
    for request in waiting:
        serve(kit, fresh(kit, model, tier), request, tier)
    engine = fresh(kit, model, rows=16)
    for request in waiting:
        plan = engine.apply(BeginLoad(request))
        engine.apply(Adopt(request.key, tier.adoptions(engine, plan)))
    assert engine.pool.row_region.available <= 6
    outcome = serve(kit, engine, ask(kit, "runs", 100, max_tokens=60))
    assert len(outcome.tokens[0]) == 60
    assert engine.scheduler.preemptions == 0
    assert len(engine.memory.loads) == 2
    for request in waiting:
        usage = serve(kit, engine, request).usage
        counts = usage.counts
        assert counts.cached + counts.loaded + counts.computed == 96
    assert engine.integrity(idle=True) == ()


def test_a_load_takes_a_bounded_share(kit: Any, model: Any) -> None:
    """L12: room is told and kept; what finds none is refused as a suffix."""
    tier = FakeTier()
    request = ask(kit, "big", 200)
    serve(kit, fresh(kit, model, tier), request, tier)
    engine = fresh(kit, model, rows=20, load_fraction=0.25)
    plan = engine.apply(BeginLoad(request))
    assert plan.room_blocks == 5
    blocks = tuple(entry for entry in tier.adoptions(engine, plan) if entry.kind is EntryKind.BLOCK)
    assert engine.apply(Adopt(request.key, blocks)) == 5
    assert engine.apply(Adopt(request.key, blocks[5:])) == 0
    engine.apply(EndLoad(request.key))
    assert engine.integrity(idle=True) == ()


def test_what_the_pool_has_is_cached_and_only_the_rest_is_loaded(kit: Any, model: Any) -> None:
    """L27: leading blocks that were here count as cached although a load held them."""
    tier = FakeTier()
    long = ask(kit, "long", 150)
    serve(kit, fresh(kit, model, tier), long, tier)
    engine = fresh(kit, model)
    serve(kit, engine, ask(kit, "short", list(long.prompt_ids[:70])))
    again = ask(kit, "again", list(long.prompt_ids))
    plan = engine.apply(BeginLoad(again))
    assert plan.present == (True,) * 4 + (False,) * (len(plan.keys) - 4)
    engine.apply(Adopt(again.key, tier.adoptions(engine, plan)))
    counts = serve(kit, engine, again).usage.counts
    usable = (150 - (kit.keep if model.layout.has_snapshots else 1)) // 16 * 16
    assert (counts.cached, counts.loaded, counts.computed) == (64, usable - 64, 150 - usable)


def test_entries_of_another_prefix_or_size_are_refused(kit: Any, model: Any) -> None:
    """L1, L13: nothing but this request's own blocks and snapshots gets in, and only whole ones."""
    tier = FakeTier()
    other = ask(kit, "other", 100)
    serve(kit, fresh(kit, model, tier), other, tier)
    engine = fresh(kit, model)
    request = ask(kit, "mine", 100)
    plan = engine.apply(BeginLoad(request))
    for table, kind in ((tier.blocks, EntryKind.BLOCK), (tier.snapshots, EntryKind.SNAPSHOT)):
        for key, payload in list(table.items())[:1]:
            for bad in (Adoption(key, kind, payload), Adoption(key, kind, payload[:-1])):
                with pytest.raises(EngineError) as refused:
                    engine.apply(Adopt(request.key, (bad,)))
                assert refused.value.code is ErrorCode.INVALID_ARGUMENT
    with pytest.raises(EngineError):
        engine.apply(Adopt(request.key, (Adoption(plan.keys[0], EntryKind.BLOCK, b""),)))
    engine.apply(EndLoad(request.key))
    assert engine.integrity(idle=True) == ()


def test_a_preempted_sequence_offers_nothing_twice(kit: Any, model: Any) -> None:
    """Recomputation names the same blocks again; the tier has them already."""
    tier = FakeTier()
    engine = fresh(kit, model, tier, rows=14, spill_bytes=0, write_fraction=0.5)
    for length in (30, 45, 60):
        engine.apply(Submit(ask(kit, f"p{length}", length, max_tokens=80)))
    seen: list[bytes] = []
    while len(engine.ledger):
        engine.step()
        seen += [row.key for write in tier.writes for row in (*write.blocks, *write.snapshots)]
        tier.copy(engine)
    assert engine.scheduler.preemptions > 0
    assert len(seen) == len(set(seen))
    assert engine.integrity(idle=True) == ()


@pytest.mark.parametrize("spill_bytes", [0, 1 << 20], ids=["recomputed", "spilled"])
def test_what_waits_with_a_preempted_sequence_is_its_own(kit: Any, model: Any, spill_bytes: int) -> None:
    """L1: blocks that waited for a pin while their sequence was preempted are offered by the right rows, or dropped:
    whatever is under a key anywhere is what computing the key gives."""
    tier, truth = FakeTier(), FakeTier()
    requests = [ask(kit, f"p{length}", length, max_tokens=80) for length in (30, 45, 60)]
    for request in requests:
        serve(kit, fresh(kit, model, truth, write_fraction=0.5), request, truth)
    engine = fresh(kit, model, tier, rows=14, spill_bytes=spill_bytes, write_fraction=0.1)
    for request in requests:
        engine.apply(Submit(request))
    turn = 0
    while len(engine.ledger):
        engine.step()
        turn += 1
        if turn % 5 == 0 and tier.writes:
            engine.apply(TierUnpin((copy_one(tier, engine),)))
        assert engine.integrity() == ()
    tier.copy(engine)
    assert engine.scheduler.preemptions > 0
    assert engine.integrity(idle=True) == ()
    assert len(tier.blocks) > 5
    assert all(truth.blocks[key] == payload for key, payload in tier.blocks.items())
    assert all(truth.snapshots[key] == payload for key, payload in tier.snapshots.items() if key in truth.snapshots)


def copy_one(tier: FakeTier, engine: Engine) -> str:
    """Copy the oldest offer and nothing else; its pin."""
    write = tier.writes.pop(0)
    for row in write.blocks:
        tier.blocks[row.key] = engine.pool.rows[row.place].numpy().tobytes()
    for row in write.snapshots:
        tier.snapshots[row.key] = engine.pool.snapshots[row.place].numpy().tobytes()
    return write.pin


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_loads_copies_and_ends(kit: Any, model: Any, seed: int) -> None:
    """L7, L10, L11: loads, adoptions, cancels, late copies and preemptions in any order leave a sound pool after every
    step and an empty one at the end; requests that ended by themselves have the tokens of computing them alone (L5)."""
    dice = random.Random(seed)
    tier, reference = FakeTier(), fresh(kit, model, prefix_reuse=False)
    stems = [kit.request(f"stem{index}", 96).prompt_ids for index in range(3)]
    engine = fresh(kit, model, tier, rows=22, spill_bytes=dice.choice([0, 1 << 20]), write_fraction=0.3)
    waiting: dict[str, tuple[EngineRequest, Wanted]] = {}
    asked: dict[str, EngineRequest] = {}
    events: list[Any] = []
    for turn in range(160):
        match dice.randrange(7):
            case 0 | 1 if len(asked) < 24:
                stem = dice.choice(stems)
                prompt = [
                    *stem[: dice.randrange(20, 97)],
                    *kit.request(f"t{turn % 4}", dice.randrange(1, 30)).prompt_ids,
                ]
                request = ask(kit, f"r{turn}", prompt, max_tokens=dice.randrange(1, 25))
                asked[request.key.request_id] = request
                if dice.random() < 0.7:
                    waiting[request.key.request_id] = (request, engine.apply(BeginLoad(request)))
                else:
                    engine.apply(Submit(request))
            case 2 if waiting:
                request, plan = dice.choice(list(waiting.values()))
                engine.apply(Adopt(request.key, tier.adoptions(engine, plan, dice.randrange(8))))
            case 3 if waiting:
                name = dice.choice(list(waiting))
                request, _ = waiting.pop(name)
                if dice.random() < 0.8:
                    engine.apply(Submit(request))
                else:
                    engine.apply(EndLoad(request.key))
                    del asked[name]
            case 4 if asked and dice.random() < 0.2:
                name = dice.choice(list(asked))
                waiting.pop(name, None)
                engine.apply(Cancel(asked.pop(name).key))
            case 5:
                dice.shuffle(tier.writes)
                tier.copy(engine)
            case _:
                engine.step()
        events += engine.drain_events()
        assert engine.integrity() == ()
    for request, _ in waiting.values():
        engine.apply(Submit(request))
    events += kit.run(engine)
    tier.copy(engine)
    assert engine.integrity(idle=True) == ()
    outcomes = kit.collect(events)
    for name, request in asked.items():
        outcome = outcomes[name]
        counts = outcome.usage.counts
        assert counts.cached + counts.loaded + counts.computed == request.prompt_length
        assert outcome.tokens == serve(kit, reference, request).tokens
