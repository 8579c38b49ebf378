"""Asks for the last word of transfers that nobody waits for any more.

A sender says it by itself, on the wire or by EndTransfer. But the word is lost with a connection, and a sender whom the
grant never reached has none to say; its router asks, unless it dies as well. So decode asks, too, on a clock of its own
(L9): whom it gets no answer from may still write, and its rows stay in quarantine (L7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc.aio

from headrace.engine.messages import GetQuarantined, TransferEnded
from headrace.kvcache.handle import Handle
from headrace.services.runtime import logs
from headrace.services.runtime.errors import from_rpc_error
from headrace.services.worker.channels import Channels
from headrace.services.worker.engine_link import EngineLink
from headrace.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

_log = logs.get(__name__)
ASK_S = 2.0
"""Between two rounds; a transfer is asked about from the second on that sees it."""
ANSWER_S = 5.0
Ask = Callable[[str, str, Handle], Awaitable[bool]]
"""(endpoint, incarnation, grant) → the sender does not write by it, and never will. Raises AioRpcError."""


class LastWords:
    """One decode rank's. A background task of its process."""

    def __init__(
        self, link: EngineLink, endpoint: Callable[[str], str | None], ask: Ask, forget: Callable[[str], None]
    ) -> None:
        """`endpoint`: of a sender that is not known to be dead; `forget` is told of transfers that have ended, before
        their rows are free: `TransferEngine.forget`."""
        self._forget = forget
        self._link = link
        self._endpoint = endpoint
        self._ask = ask
        self._seen: set[str] = set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(ASK_S)
            await self.round()

    async def round(self) -> None:
        """Ask about what was in quarantine a round ago already."""
        found = await self._link.call(GetQuarantined())
        old = [(handle, sender) for handle, sender in found if handle.transfer_id in self._seen]
        self._seen = {handle.transfer_id for handle, _ in found}
        senders: dict[str, list[Handle]] = {}
        for handle, sender in old:
            if sender is not None:
                senders.setdefault(sender, []).append(handle)
        await asyncio.gather(*(self._of(sender, handles) for sender, handles in senders.items()))

    async def _of(self, sender: str, handles: list[Handle]) -> None:
        endpoint = self._endpoint(sender)
        if endpoint is None:
            return
        for handle in handles:
            try:
                quiet = await self._ask(endpoint, sender, handle)
            except grpc.aio.AioRpcError as failure:
                _log.info("a sender was not asked", error=str(from_rpc_error(failure)))
                return
            if quiet:
                _log.info("a transfer has ended without a word", transfer=handle.transfer_id)
                self._forget(handle.transfer_id)
                self._link.post(TransferEnded(handle.transfer_id, complete=False))


def asking(channels: Channels) -> Ask:
    """Prefill is asked to take the run back: it knows none then, or will say the last word of it."""

    async def ask(endpoint: str, incarnation: str, handle: Handle) -> bool:
        request = prefill_pb2.PrefillServiceCancelRequest(
            id=common_pb2.AttemptId(request_id=handle.request_id, attempt=handle.attempt),
            peer=common_pb2.PeerId(incarnation=incarnation),
        )
        async with channels.use(endpoint) as channel:
            response = await prefill_pb2_grpc.PrefillServiceStub(channel).Cancel(request, timeout=ANSWER_S)
        return not response.found

    return ask
