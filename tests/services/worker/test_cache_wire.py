"""Cache events survive the wire; what no worker sends is refused (L13, L25)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.cache_events import CacheChange
from headrace.kvcache.event_log import Numbered
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.worker.cache_wire import change_from_wire, event_to_wire, stored_from_wire, tier_from_wire
from headrace.v1 import control_pb2, events_pb2
from tests.kvcache.test_event_log import changes


@given(st.integers(1, 2**63), changes())
def test_events_come_back_as_they_went(sequence: int, change: CacheChange) -> None:
    wire = events_pb2.CacheEvent.FromString(event_to_wire(Numbered(sequence, change)).SerializeToString())
    assert wire.sequence == sequence
    assert change_from_wire(wire) == change


def test_an_event_of_a_later_version_is_skipped() -> None:
    assert change_from_wire(events_pb2.CacheEvent(sequence=4)) is None


@pytest.mark.parametrize(
    "wire",
    [
        events_pb2.Stored(kind=events_pb2.ENTRY_KIND_BLOCK, tier=control_pb2.CACHE_TIER_HOST, keys=[b"short"]),
        events_pb2.Stored(kind=events_pb2.ENTRY_KIND_BLOCK, keys=[bytes(32)]),
        events_pb2.Stored(tier=control_pb2.CACHE_TIER_HOST, keys=[bytes(32)]),
    ],
    ids=["short key", "no tier", "no kind"],
)
def test_what_no_worker_sends_is_refused(wire: events_pb2.Stored) -> None:
    with pytest.raises(InvalidArgument):
        stored_from_wire(wire)


def test_tiers_are_the_wires_numbers() -> None:
    for tier in (control_pb2.CACHE_TIER_DEVICE, control_pb2.CACHE_TIER_HOST, control_pb2.CACHE_TIER_STORE):
        assert int(tier_from_wire(tier)) == tier
