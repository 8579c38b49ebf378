"""Channels to other workers, by address, shared by all requests of this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls

MAX_UNUSED = 32
"""Channels kept open though nobody uses them; restarted peers listen elsewhere, so old ones pile up otherwise."""


@dataclass(eq=False)
class _Shared:
    channel: grpc.aio.Channel
    users: int = 0


class Channels:
    """Belongs to the event loop's thread."""

    def __init__(self, rpc: RpcSettings, tls: Tls | None = None) -> None:
        self._rpc = rpc
        self._tls = tls
        self._open: OrderedDict[str, _Shared] = OrderedDict()

    @asynccontextmanager
    async def use(self, endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
        """The channel to host:port, open at least until the block ends."""
        shared = self._open.get(endpoint)
        if shared is None:
            shared = self._open[endpoint] = _Shared(open_channel(endpoint, self._rpc, tls=self._tls))
        shared.users += 1
        self._open.move_to_end(endpoint)
        try:
            yield shared.channel
        finally:
            shared.users -= 1
            await self._trim()

    async def _trim(self) -> None:
        unused = [endpoint for endpoint, shared in self._open.items() if not shared.users]
        for endpoint in unused[: max(0, len(unused) - MAX_UNUSED)]:
            await self._open.pop(endpoint).channel.close()

    async def close(self) -> None:
        """Close all; calls on them are cancelled."""
        while self._open:
            _, shared = self._open.popitem()
            await shared.channel.close()
