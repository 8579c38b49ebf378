"""Rows whose sender says nothing come free when it is asked, and only then (L6, L7, L9)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.engine.messages import GetQuarantined, TransferEnded
from headrace.services.decode.last_words import LastWords
from tests.services.cluster import PATIENCE_S, Cluster
from tests.services.driver import Driver, make_request, prompt_of, spec_of


class Link:
    """An engine with these grants in quarantine."""

    def __init__(self, **senders: str | None) -> None:
        self.quarantined: dict[str, str | None] = dict(senders)
        self.ended: list[str] = []
        self.forgotten: list[str] = []

    async def call(self, command: object) -> Any:
        assert isinstance(command, GetQuarantined)
        return tuple((SimpleNamespace(transfer_id=name), sender) for name, sender in self.quarantined.items())

    def post(self, command: object) -> None:
        assert isinstance(command, TransferEnded)
        assert not command.complete
        assert self.forgotten[-1:] == [command.transfer_id], "no stream may write rows that are free"
        self.ended.append(command.transfer_id)
        del self.quarantined[command.transfer_id]


async def rounds(link: Link, answers: dict[str, bool | None], count: int) -> list[str]:
    """So many rounds; who was asked. `answers`: by transfer, None: the call fails."""
    asked = []

    async def ask(endpoint: str, incarnation: str, handle: Any) -> bool:
        assert endpoint == f"at {incarnation}"
        asked.append(handle.transfer_id)
        answer = answers[handle.transfer_id]
        if answer is None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, "nobody there")
        return answer

    def endpoint(sender: str) -> str | None:
        return None if sender == "dead" else f"at {sender}"

    words = LastWords(link, endpoint, ask, link.forgotten.append)  # type: ignore[arg-type]
    for _ in range(count):
        await words.round()
    return asked


async def test_who_may_still_write_keeps_its_rows() -> None:
    """One that runs the transfer yet, one that does not answer, one that nobody knows, one that is dead (its rows are
    freed by its death)."""
    link = Link(running="p", silent="q", nobody=None, gone="dead")
    assert await rounds(link, {"running": False, "silent": None}, 3) == ["running", "silent"] * 2
    assert link.ended == []


async def test_who_knows_nothing_of_it_gives_them_up() -> None:
    """Asked when it has been waiting for a round: the word may be on its way."""
    link = Link(lost="p", other="p")
    assert await rounds(link, {"lost": True, "other": True}, 1) == []
    assert await rounds(link, {"lost": True, "other": True}, 2) == ["lost", "other"]
    assert link.ended == ["lost", "other"]


async def test_one_that_does_not_answer_is_asked_once_a_round() -> None:
    """L17: decided once for a dead target."""
    link = Link(first="p", second="p")
    assert await rounds(link, {"first": None, "second": True}, 2) == ["first"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_grant_that_never_reached_its_sender(v3: Driver, v3_cluster: Cluster) -> None:
    """With real processes: the router reserved and died. Prefill, which lives, never heard of it."""
    spec = spec_of(make_request("unheard-of", prompt_of("unheard-of", 40)), v3.decode)
    await v3.reserve(spec)
    await v3.release(spec.id)
    async with asyncio.timeout(PATIENCE_S):
        await v3.decode.until_idle()
