"""A blocking client of a running cluster, for the CLI, the launcher, benches and tests. Knows the wire, no service."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.cli.client_tls import ClientTls
from headrace.services.runtime.errors import HeadraceError, Unimplemented, from_rpc_error, told_by_peer
from headrace.v1 import (
    common_pb2,
    control_pb2,
    control_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)

T = TypeVar("T")
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""The default of rpc.max_message_bytes, which limits both ends."""
MANAGE_SECONDS: Final = 30.0
"""Deadline of questions about the cache, which a router asks of all workers."""
CHANGE_SECONDS: Final = 330.0
"""Deadline of changes to the cache, which may walk an index."""
CALL_SECONDS: Final = 10.0
"""Deadline of calls that answer at once (L6)."""


class RouterClient:
    """One channel to a router. All calls raise HeadraceError. May be shared by threads."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: ClientTls | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """`api_key` says who calls, where the router asks for it (router.tenants); `tls` is the cluster's, None where
        it has none."""
        self.address = address
        self._credential = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel = open_channel(address, max_message_bytes, tls)
        self._inference = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._control = control_pb2_grpc.ControlServiceStub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> RouterClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> Iterator[inference_pb2.GenerateResponse]:
        """Events of one request. Closing the iterator (or leaving its loop) cancels the request."""
        call = self._inference.Generate(request, timeout=timeout_s, metadata=self._metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise typed(error) from error
        finally:
            cast(Any, call).cancel()

    def models(self) -> inference_pb2.ListModelsResponse:
        """What is served, with limits."""
        return _answered(
            lambda: self._inference.ListModels(
                inference_pb2.ListModelsRequest(), timeout=CALL_SECONDS, metadata=self._metadata()
            )
        )

    def count_tokens(self, request: inference_pb2.CountTokensRequest) -> inference_pb2.CountTokensResponse:
        """The prompt as Generate would tokenise it."""
        return _answered(lambda: self._inference.CountTokens(request, timeout=CALL_SECONDS, metadata=self._metadata()))

    def status(self, *, check_integrity: bool = False) -> control_pb2.StatusResponse:
        """The router's state and members; `check_integrity` runs its own checks only."""
        request = control_pb2.StatusRequest(check_integrity=check_integrity)
        return _answered(lambda: self._control.Status(request, timeout=CALL_SECONDS, metadata=self._metadata()))

    def cache_stats(self) -> control_pb2.CacheStatsResponse:
        """Numbers of every tier of every replica."""
        return self._managed(self._control.CacheStats, control_pb2.CacheStatsRequest(), MANAGE_SECONDS)

    def clear_cache(self, request: control_pb2.ClearCacheRequest) -> control_pb2.ClearCacheResponse:
        """Drop what the request names, on every replica."""
        return self._managed(self._control.ClearCache, request, CHANGE_SECONDS)

    def find_cache(self, request: control_pb2.FindCacheRequest) -> control_pb2.FindCacheResponse:
        """Who holds a prompt."""
        return self._managed(self._control.FindCache, request, MANAGE_SECONDS)

    def pin_cache(self, request: control_pb2.PinCacheRequest) -> control_pb2.PinCacheResponse:
        """Keep a prompt's stored entries."""
        return self._managed(self._control.PinCache, request, CHANGE_SECONDS)

    def collect_cache(self) -> control_pb2.CollectCacheResponse:
        """One pass of the store's sweeper."""
        return self._managed(self._control.CollectCache, control_pb2.CollectCacheRequest(), CHANGE_SECONDS)

    def verify_cache(self) -> Iterator[control_pb2.VerifyCacheResponse]:
        """Progress of a scrub, the result last. Takes as long as reading the store does."""
        call = self._control.VerifyCache(control_pb2.VerifyCacheRequest(), metadata=self._metadata())
        try:
            yield from call
        except grpc.RpcError as error:
            raise typed(error) from error
        finally:
            cast(Any, call).cancel()

    def _managed(self, call: Callable[..., T], request: object, timeout_s: float) -> T:
        return _answered(lambda: call(request, timeout=timeout_s, metadata=self._metadata()))

    def drain(self, wait_s: float) -> Any:
        """Begin a drain; the future of its answer, with done() and cancel()."""
        request = control_pb2.DrainRequest(wait_ms=round(wait_s * 1000))
        return cast(Any, self._control.Drain).future(request, timeout=wait_s + CALL_SECONDS, metadata=self._metadata())

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        """The request id that all services log (docs/operate.md, Logs), and who calls."""
        return (("x-request-id", f"cli-{os.getpid()}-{uuid.uuid4().hex[:12]}"), *self._credential)


def replica_status(
    address: str,
    *,
    check_integrity: bool = False,
    timeout_s: float = CALL_SECONDS,
    tls: ClientTls | None = None,
) -> control_pb2.StatusResponse:
    """State of any process of the system. Raises HeadraceError."""
    request = control_pb2.StatusRequest(check_integrity=check_integrity)
    with open_channel(address, tls=tls) as channel:
        return _answered(lambda: control_pb2_grpc.ControlServiceStub(channel).Status(request, timeout=timeout_s))


def change_role(
    address: str, role: common_pb2.Role.ValueType, wait_s: float, *, tls: ClientTls | None = None
) -> control_pb2.RoleChange:
    """Begin a worker's change of role; replica_status tells how it goes on. Raises HeadraceError."""
    request = control_pb2.ChangeRoleRequest(role=role, wait_ms=round(wait_s * 1000))
    with open_channel(address, tls=tls) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return _answered(lambda: stub.ChangeRole(request, timeout=CALL_SECONDS)).change


def drain_replica(
    address: str, *, wait_s: float = 0.0, hand_over: bool = False, resume: bool = False, tls: ClientTls | None = None
) -> control_pb2.DrainResponse:
    """Drain a worker, or let it take work again. Raises HeadraceError."""
    request = control_pb2.DrainRequest(resume=resume, wait_ms=round(wait_s * 1000), hand_over=hand_over)
    with open_channel(address, tls=tls) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        return _answered(lambda: stub.Drain(request, timeout=wait_s + CHANGE_SECONDS))


def replica_is_ready(address: str, timeout_s: float = 1.0, tls: ClientTls | None = None) -> bool:
    """Whether the health service of a process says `ready`; False when it does not answer."""
    with open_channel(address, tls=tls) as channel:
        try:
            # The published stubs of the health package lack the stub's methods.
            answer = cast(Any, health_pb2_grpc.HealthStub(channel)).Check(
                health_pb2.HealthCheckRequest(service="ready"), timeout=timeout_s
            )
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def open_channel(
    address: str, max_message_bytes: int = MAX_MESSAGE_BYTES, tls: ClientTls | None = None
) -> grpc.Channel:
    """A channel, plain text without `tls`; environment proxies are never used."""
    options = [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.insecure_channel(address, options=options) if tls is None else tls.open(address, options)


def typed(error: grpc.RpcError) -> HeadraceError:
    """The typed error of a failed call; the synchronous and the asyncio API share its methods."""
    failure = cast(grpc.aio.AioRpcError, error)
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED and not told_by_peer(failure):
        # The user named the address: somebody answers there, and to wait for another one is of no use.
        return Unimplemented("", f"{failure.details()} Another process is meant, or another version of it.")
    return from_rpc_error(failure)


def _answered(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        raise typed(error) from error
