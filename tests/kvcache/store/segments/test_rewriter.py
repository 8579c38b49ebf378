"""A refresh in flight is not begun again, however old the index's answer is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from headrace.kvcache.entries import GetResult, Miss, RetentionClass
from headrace.kvcache.index.base import IndexRow
from headrace.kvcache.index.memory import DictIndex
from headrace.kvcache.store.retention.classes import DEFAULT, HOUR
from headrace.kvcache.store.segments.intake import Again, Intake
from headrace.kvcache.store.segments.pending import Ticket
from headrace.kvcache.store.segments.rewriter import Rewriter
from tests.kvcache.store.entries import TENANT, block, soon

NOW = 1_800_000_000.0


class FakeIntake:
    """Takes everything; the test says when it is durable."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []

    def rewrite(self, loaded: Sequence[tuple[GetResult, Again]], epoch: int, deadline: float) -> Ticket:
        ticket = Ticket(1)
        ticket.seal()
        self.tickets.append(ticket)
        return ticket


def row(end: float) -> IndexRow:
    info = block("a", 0).info
    return IndexRow(info.key, "group", 0, info.length, info.kind, info.retention, info.tokens, int(end), TENANT)


def test_once_until_the_index_knows_the_new_copy() -> None:
    index, intake, seen = DictIndex(), FakeIntake(), []
    old, new = row(NOW + HOUR), row(DEFAULT.bucket(RetentionClass.CHAT, NOW))
    index.put_many([old], soon())

    def used(rows: Sequence[IndexRow], *, hit: bool) -> None:
        seen.append((rows[0].key, hit))

    rewriter = Rewriter(
        cast(Intake, intake),
        index,
        lambda rows, _: [Miss.ABSENT] * len(rows),
        used,
        DEFAULT,
        lambda: NOW,
        lambda: 0,
        lambda _: False,
        1,
        1 << 20,
    )
    rewriter.start()
    try:
        for _ in range(3):
            rewriter.touch([old.key], RetentionClass.CHAT)
            assert rewriter.wait_queued(20)
        assert len(intake.tickets) == 1
        assert seen == [(old.key, True)] * 3
        index.put_many([new], soon())
        intake.tickets[0].settle(0, True)
        rewriter.touch([old.key], RetentionClass.CHAT)
        assert rewriter.wait_queued(20)
        assert len(intake.tickets) == 1, "it is young now"
        index.put_many([old], soon())
        rewriter.touch([old.key], RetentionClass.CHAT)
        assert rewriter.wait_queued(20)
        assert len(intake.tickets) == 2, "and may be refreshed again once the last one ended"
    finally:
        rewriter.close()
