"""A prefill and a decode engine over the toy model, and a wire between them that is the test's own copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from headrace.engine.decode import decode_role
from headrace.engine.messages import (
    Commit,
    Committed,
    Event,
    HandedOver,
    Prefill,
    PrefillDone,
    PrefillFailed,
    Reserve,
    Reserved,
    RowsReady,
    Unpin,
)
from headrace.engine.prefill import PrefillRole
from headrace.kvcache.checksum import checksums
from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity, PartChecksums


@dataclass
class Pair:
    """A prefill and a decode engine, and the wire between them."""

    kit: Any
    prefill: Any
    decode: Any
    landing: LandingRegion
    clock: Any

    def reserve(self, request: Any) -> Reserved:
        reply: Reserved = self.decode.apply(Reserve(request))
        return reply

    def run_prefill(self, request: Any, reserved: Reserved) -> list[Event]:
        self.prefill.apply(Prefill(request, reserved.held_blocks))
        events: list[Event] = []
        for _ in range(1000):
            self.prefill.step()
            events += self.prefill.drain_events()
            if any(isinstance(event, PrefillDone | PrefillFailed) for event in events):
                return events
        raise AssertionError("prefill does not end")

    def push(self, reserved: Reserved, events: list[Event], handle: Any = None) -> Commit:
        """Copy what prefill named to where decode granted, and build the commit."""
        done = next(event for event in events if isinstance(event, PrefillDone))
        rows = {entry.block: entry.row for event in events if isinstance(event, RowsReady) for entry in event.rows}
        if done.tail is not None:
            rows[done.tail.block] = done.tail.row
        handle = handle or reserved.handle
        sums = []
        for part in handle.parts:
            sources = [rows[block] for block in part.blocks]
            for source, target in zip(sources, part.rows, strict=True):
                self.landing.rows[target].copy_(self.prefill.pool.rows[source])
            if part.slot is not None:
                self.landing.slots[part.slot].copy_(self.prefill.pool.slots[done.slot])
            slot_sum = None
            if part.slot is not None:
                slot_sum = checksums(self.prefill.pool.slots, [done.slot], handle.checksum_kind)[0]
            row_sums = checksums(self.prefill.pool.rows, sources, handle.checksum_kind) if sources else []
            sums.append(PartChecksums(tuple(row_sums), slot_sum))
        return Commit(reserved.key, handle, tuple(sums), done.first, done.counts)

    def finish_prefill(self, events: list[Event]) -> None:
        done = next(event for event in events if isinstance(event, PrefillDone))
        rows = [entry.row for event in events if isinstance(event, RowsReady) for entry in event.rows]
        rows += [] if done.tail is None else [done.tail.row]
        self.prefill.apply(Unpin(done.key, tuple(rows), slot=done.slot != 0))
        self.prefill.apply(HandedOver(done.key))

    def serve(self, request: Any) -> Any:
        reserved = self.reserve(request)
        events = self.run_prefill(request, reserved)
        assert self.decode.apply(self.push(reserved, events)) == Committed()
        self.finish_prefill(events)
        outcome = self.kit.collect(self.kit.run(self.decode))[request.key.request_id]
        assert all(end.reason in self.kit.done for end in outcome.finished.values()), outcome
        return outcome

    def assert_idle(self) -> None:
        assert self.prefill.integrity(idle=True) == ()
        assert self.decode.integrity(idle=True) == ()


@pytest.fixture(scope="session")
def pair_of(kit: Any) -> Any:
    """``pair_of(model, prefill_rows=200, **decode settings)``."""

    def make(model: Any, prefill_rows: int = 200, **settings: Any) -> Pair:
        clock = kit.clock()
        identity = LandingIdentity("decode-1", model.layout.fingerprint, bytes(32), ChecksumKind.XXH3_64)
        landing = LandingRegion(
            identity,
            row_bytes=model.layout.block_bytes,
            slot_bytes=model.layout.slot_bytes,
            num_rows=24,
            num_slots=8,
        )
        prefill = kit.engine(model, clock=clock, role=PrefillRole, max_batched_tokens=23, rows=prefill_rows)
        decode = kit.engine(model, clock=clock, role=decode_role(landing), **settings)
        return Pair(kit, prefill, decode, landing, clock)

    return make


@pytest.fixture
def make_pair(pair_of: Any, model: Any) -> Any:
    return partial(pair_of, model)


@pytest.fixture
def pair(make_pair: Any) -> Pair:
    result: Pair = make_pair()
    return result
