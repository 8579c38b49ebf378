from __future__ import annotations

import pytest

from headrace.kvcache.store.retention.heat import tick
from headrace.kvcache.store.retention.ledger import Ledger, SegmentUse

NOW = 1.7e9
TENANT, OTHER = b"t" * 16, b"o" * 16
SIZE = 118_784


def test_sums_by_segment_and_tenant_go_back_to_zero() -> None:
    """L11: everything removed reads zero."""
    ledger = Ledger()
    ledger.add(SegmentUse("a"))
    for tenant in (TENANT, TENANT, OTHER):
        ledger.append("a", tenant, SIZE, NOW)
    assert ledger.segments["a"].written == tick(NOW)
    assert +ledger.tenant_bytes == {TENANT: 2 * SIZE, OTHER: SIZE}
    ledger.remove("a", OTHER, SIZE)
    assert (ledger.disk_bytes, ledger.segments["a"].live_bytes) == (3 * SIZE, 2 * SIZE)
    ledger.add(SegmentUse("b"))
    ledger.move(TENANT, SIZE, "a", "b")
    assert (ledger.disk_bytes, ledger.tenant_bytes[TENANT]) == (4 * SIZE, 2 * SIZE)
    assert list(ledger.problems()) == []
    ledger.unlink("a")
    assert (ledger.disk_bytes, ledger.tenant_bytes[TENANT]) == (SIZE, SIZE)
    ledger.unlink("b")
    assert ledger.disk_bytes == 0
    assert not +ledger.tenant_bytes


def test_a_found_segment_counts() -> None:
    ledger = Ledger()
    found = SegmentUse("a", open=False, disk_bytes=3 * SIZE)
    found.live[TENANT] = SIZE
    ledger.add(found)
    assert (ledger.disk_bytes, ledger.tenant_bytes[TENANT]) == (3 * SIZE, SIZE)
    with pytest.raises(ValueError, match="never used twice"):
        ledger.add(SegmentUse("a"))


def test_what_does_not_add_up_is_told() -> None:
    ledger = Ledger()
    ledger.add(SegmentUse("a"))
    ledger.append("a", TENANT, SIZE, NOW)
    ledger.segments["a"].live[OTHER] = SIZE
    assert len(list(ledger.problems())) == 2
