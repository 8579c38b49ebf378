"""etcd's v3 gRPC API, as much of it as the registry needs: one channel at a time, the next endpoint on failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

import grpc.aio

from headrace.services.runtime.registry._etcd import rpc_pb2 as pb
from headrace.services.runtime.registry._etcd import rpc_pb2_grpc as stubs
from headrace.services.runtime.registry.base import RegistryError, RegistryUnavailableError
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls

T = TypeVar("T")
_NEED_LEADER: Final = (("hasleader", "true"),)
"""Ends a watch on a member that lost touch with its cluster, which would otherwise be silent for ever."""
_UNREACHABLE: Final = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
)


class _Line:
    """The connection to one member."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._left: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def leave(self) -> None:
        """Every call on it ends. grpc.aio is not to be relied on for that: of a channel that is closed it cancels some
        calls, as if their callers had, and lets others wait for ever."""
        if not self._left.done():
            self._left.set_result(None)
        await self.channel.close()

    async def take(self, step: Awaitable[T]) -> T:
        """Await a step of a call. Raises RegistryUnavailableError when the member is left meanwhile."""
        task = asyncio.ensure_future(step)
        try:
            waited: set[asyncio.Future[Any]] = {task, self._left}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled():
                return task.result()
        finally:
            task.cancel()
        raise RegistryUnavailableError("the member of etcd was left for another one")


class LeaseNotFoundError(RegistryError):
    """etcd does not know the lease: expired or revoked."""


class EtcdClient:
    """Calls to an etcd cluster. All raise RegistryUnavailableError when it cannot be reached in `timeout_seconds`."""

    def __init__(
        self, endpoints: Sequence[str], rpc: RpcSettings, timeout_seconds: float, tls: Tls | None = None
    ) -> None:
        if not endpoints:
            raise ValueError("etcd needs at least one endpoint")
        self._endpoints = tuple(endpoints)
        self._rpc = rpc
        self._tls = tls
        self._timeout = timeout_seconds
        self._at = 0
        self._line = self._connect()
        self._retired: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Close the connection."""
        await asyncio.gather(*self._retired, self._line.leave(), return_exceptions=True)

    async def read_prefix(self, prefix: bytes) -> tuple[Sequence[pb.KeyValue], int]:
        """All pairs under `prefix`, by key, and the revision at which they were read (linearizable)."""
        request = pb.RangeRequest(key=prefix, range_end=prefix_end(prefix))
        response = await self._call(lambda c: stubs.KVStub(c).Range(request, timeout=self._timeout))
        return response.kvs, response.header.revision

    async def read(self, key: bytes) -> pb.KeyValue | None:
        """One pair, or None."""
        response = await self._call(lambda c: stubs.KVStub(c).Range(pb.RangeRequest(key=key), timeout=self._timeout))
        return response.kvs[0] if response.kvs else None

    async def put_if(self, key: bytes, value: bytes, lease: int, *conditions: pb.Compare) -> bool:
        """Atomically put if all `conditions` hold; whether it did. Raises LeaseNotFoundError."""
        put = pb.RequestOp(request_put=pb.PutRequest(key=key, value=value, lease=lease))
        request = pb.TxnRequest(compare=conditions, success=[put])
        response = await self._call(lambda c: stubs.KVStub(c).Txn(request, timeout=self._timeout))
        return response.succeeded

    async def compact(self, revision: int) -> None:
        """Forget history below `revision`."""
        request = pb.CompactionRequest(revision=revision, physical=True)
        await self._call(lambda c: stubs.KVStub(c).Compact(request, timeout=self._timeout))

    async def grant(self, ttl_seconds: int) -> tuple[int, int]:
        """A new lease: (id, time to live in seconds that the server grants)."""
        request = pb.LeaseGrantRequest(TTL=ttl_seconds)
        response = await self._call(lambda c: stubs.LeaseStub(c).LeaseGrant(request, timeout=self._timeout))
        return response.ID, response.TTL

    async def keep_alive(self, lease: int, timeout_seconds: float) -> None:
        """Renew once. Raises LeaseNotFoundError."""

        async def once(channel: grpc.aio.Channel) -> int:
            call = stubs.LeaseStub(channel).LeaseKeepAlive(timeout=timeout_seconds)
            try:
                await call.write(pb.LeaseKeepAliveRequest(ID=lease))
                response = await call.read()
            finally:
                call.cancel()
            return response.TTL if isinstance(response, pb.LeaseKeepAliveResponse) else 0

        if await self._call(once) <= 0:
            raise LeaseNotFoundError(f"etcd does not know lease {lease:x}")

    async def revoke(self, lease: int) -> None:
        """End a lease and remove its keys; one that is gone already is fine."""
        request = pb.LeaseRevokeRequest(ID=lease)
        try:
            await self._call(lambda c: stubs.LeaseStub(c).LeaseRevoke(request, timeout=self._timeout))
        except LeaseNotFoundError:
            return

    async def watch_prefix(self, prefix: bytes, revision: int) -> AsyncGenerator[pb.Event, None]:
        """Changes under `prefix` from `revision` on. Ends when that part of history is compacted, or when etcd ends the
        watch: read again then. Raises RegistryUnavailableError when the stream breaks."""
        create = pb.WatchCreateRequest(key=prefix, range_end=prefix_end(prefix), start_revision=revision)
        line = self._line
        call = stubs.WatchStub(line.channel).Watch(metadata=_NEED_LEADER)
        try:
            await line.take(call.write(pb.WatchRequest(create_request=create)))
            while isinstance(response := await line.take(call.read()), pb.WatchResponse) and not response.canceled:
                for event in response.events:
                    yield event
        except grpc.aio.AioRpcError as failure:
            raise self._failed(failure, line) from failure
        except asyncio.InvalidStateError as failure:
            # grpc.aio raises it for a write on a call that has ended already.
            raise RegistryUnavailableError(f"etcd at {self._endpoint} broke the watch") from failure
        finally:
            call.cancel()

    @property
    def _endpoint(self) -> str:
        return self._endpoints[self._at]

    def _connect(self) -> _Line:
        return _Line(open_channel(self._endpoint, self._rpc, idle_pings=False, tls=self._tls))

    async def _call(self, call: Callable[[grpc.aio.Channel], Awaitable[T]]) -> T:
        line = self._line
        try:
            return await line.take(call(line.channel))
        except grpc.aio.AioRpcError as failure:
            raise self._failed(failure, line) from failure
        except asyncio.InvalidStateError as failure:
            raise RegistryUnavailableError(f"etcd at {self._endpoint} broke the call") from failure

    def _failed(self, failure: grpc.aio.AioRpcError, line: _Line) -> RegistryError:
        text = f"etcd at {self._endpoint}: {failure.details()}"
        if failure.code() in _UNREACHABLE:
            self._next_endpoint(line)
            return RegistryUnavailableError(text)
        if failure.code() is grpc.StatusCode.NOT_FOUND:
            return LeaseNotFoundError(text)
        return RegistryError(text)

    def _next_endpoint(self, failed: _Line) -> None:
        """Unless another call has led away from `failed` before. With one endpoint the channel reconnects by itself."""
        if len(self._endpoints) == 1 or failed is not self._line:
            return
        self._at = (self._at + 1) % len(self._endpoints)
        self._line = self._connect()
        leaving = asyncio.create_task(failed.leave())
        self._retired.add(leaving)
        leaving.add_done_callback(self._retired.discard)


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that start with `prefix` (whose last byte is below 255)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
