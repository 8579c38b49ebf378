"""What a registry in trouble answers ends no member that serves (L8); one that refuses at the start is told at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.services.runtime.ids import new_incarnation
from headrace.services.runtime.registry import member
from headrace.services.runtime.registry.base import (
    IncompatibleReplicaError,
    LostReason,
    RegistryError,
    Replica,
    Role,
)

TROUBLE = RegistryError("etcd at host:1: etcdserver: too many requests")


class Lease:
    """One that is lost at once, unless it is the last."""

    def __init__(self, *, last: bool) -> None:
        self.lost: asyncio.Future[LostReason] = asyncio.get_running_loop().create_future()
        if not last:
            self.lost.set_result(LostReason.EXPIRED)


class Registry:
    """Answers registrations in this order: an error, or None for a lease."""

    def __init__(self, *answers: RegistryError | None) -> None:
        self.answers = list(answers)
        self.done = asyncio.Event()

    async def register(self, replica: Replica, ttl_seconds: float) -> Any:
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer
        if not self.answers:
            self.done.set()
        return Lease(last=not self.answers)


def membership(registry: Any) -> member.Membership:
    replica = Replica("decode-0", new_incarnation(), Role.ROUTER, "dc", "host", "127.0.0.1:2")
    return member.Membership(registry, replica, 5.0, lambda: pytest.fail("not replaced"))


async def test_a_member_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """L8: the lease was lost, and etcd, which is coming back, is overloaded by all who register again."""
    monkeypatch.setattr(member, "RETRY_SECONDS", 0.0)
    registry = Registry(None, TROUBLE, TROUBLE, None)
    running = asyncio.create_task(membership(registry).run())
    waiting = asyncio.create_task(registry.done.wait())
    async with asyncio.timeout(60):
        await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
    assert not running.done()
    assert waiting.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("answers", [(TROUBLE,), (None, IncompatibleReplicaError("another layout"))])
async def test_what_waiting_does_not_cure_is_told(answers: tuple[RegistryError | None, ...]) -> None:
    """L14: a registry that refuses from the start, and a layout that differs whenever it is."""
    with pytest.raises(RegistryError):
        await membership(Registry(*answers, None)).run()
