"""The gRPC server that every service has: errors, ids, counters, limits, health, draining; over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.services.runtime import errors, logs
from headrace.services.runtime.health import READY, Health
from headrace.services.runtime.intercept import REQUEST_ID_KEY, CallGuard, _reader, request_metadata
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.server import ServiceServer, open_channel
from headrace.services.runtime.settings import ListenSettings, RpcSettings

RPC = RpcSettings(max_message_bytes=1 << 20)  # type: ignore[arg-type]
_METHODS = ("Unary", "Stream", "Collect", "Chat")


def _descriptor() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="headrace_test_echo.proto", package="headrace.test")
    file.message_type.add(name="Bytes")
    service = file.service.add(name="EchoService")
    for name in _METHODS:
        service.method.add(name=name, input_type=".headrace.test.Bytes", output_type=".headrace.test.Bytes")
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindServiceByName("headrace.test.EchoService")


DESCRIPTOR = _descriptor()


@dataclass
class Echo:
    """Does what the request's text says; counts what it released."""

    entered: asyncio.Event = field(default_factory=asyncio.Event)
    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def act(self, text: bytes) -> bytes:
        match text:
            case b"wait":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.released.set()
            case b"typed":
                raise errors.ResourceExhausted("the queue is full; try again", retry_after_s=1.5)
            case b"engine":
                raise KeyError("engine")
            case b"cancelled inside":
                raise asyncio.CancelledError  # what a call raises whose channel is closed
            case b"defect":
                raise RuntimeError("a secret detail")
            case b"id":
                return (logs.request_id() or "").encode()
        return text

    async def unary(self, request: bytes, context: Any) -> bytes:
        return await self.act(request)

    async def stream(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"first"
        yield await self.act(request)

    async def collect(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([await self.act(one) async for one in requests])

    async def chat(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for one in requests:
            yield await self.act(one)


def _add(echo: Echo, server: Any) -> None:
    handlers = {
        "Unary": grpc.unary_unary_rpc_method_handler(echo.unary),
        "Stream": grpc.unary_stream_rpc_method_handler(echo.stream),
        "Collect": grpc.stream_unary_rpc_method_handler(echo.collect),
        "Chat": grpc.stream_stream_rpc_method_handler(echo.chat),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(DESCRIPTOR.full_name, handlers),))


class Rig:
    """A server with the echo service, and a channel to it."""

    def __init__(self) -> None:
        self.metrics, self.health, self.echo = Metrics(), Health(), Echo()
        self.server = ServiceServer(ListenSettings(), RPC, self.metrics, self.health, self._translate)
        self.server.add(_add, self.echo, DESCRIPTOR, admits=("Unary",))

    @staticmethod
    def _translate(error: Exception) -> errors.HeadraceError | None:
        return errors.InvalidArgument("translated; fix the request") if isinstance(error, KeyError) else None

    async def unary(self, text: bytes, **options: Any) -> bytes:
        return bytes(await self.channel.unary_unary(f"/{DESCRIPTOR.full_name}/Unary")(text, **options))

    def ended(self, method: str, outcome: str) -> float | None:
        full = f"/{DESCRIPTOR.full_name}/{method}"
        return self.metrics.value("headrace_rpc_ended_total", method=full, outcome=outcome)

    async def idle(self) -> None:
        async with asyncio.timeout(60):
            while True:
                if not self.server.live_calls:
                    return
                await asyncio.sleep(0)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    it = Rig()
    await it.server.start()
    it.channel = open_channel(it.server.address, RPC)
    yield it
    await it.channel.close()
    await it.server.stop(0)


async def _error(call: Any) -> errors.HeadraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return errors.from_rpc_error(caught.value)


async def test_typed_errors_reach_the_client_as_they_are(rig: Rig) -> None:
    """L12: overload says when to come back."""
    error = await _error(rig.unary(b"typed"))
    assert isinstance(error, errors.ResourceExhausted)
    assert error.retry_after_s == 1.5
    await rig.idle()  # a client hears of the end before the server has counted it
    assert rig.ended("Unary", "refused") == 1


async def test_bytes_that_are_no_message_get_a_typed_answer(rig: Rig) -> None:
    """L13: for calls with one request and with many."""
    check = rig.channel.unary_unary("/grpc.health.v1.Health/Check")
    assert isinstance(await _error(check(b"\xff\xff\xff")), errors.InvalidArgument)
    reflect = rig.channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    assert isinstance(await _error(reflect(iter([b"\xff\xff\xff"])).read()), errors.InvalidArgument)
    # What no handler saw is not counted as seen by one.
    assert rig.metrics.value("headrace_rpc_messages_total", method="/grpc.health.v1.Health/Check") is None


async def test_health_lists_what_it_knows(rig: Rig) -> None:
    answer = await rig.channel.unary_unary("/grpc.health.v1.Health/List")(b"")
    listed = health_pb2.HealthListResponse.FromString(answer).statuses
    assert {name: one.status for name, one in listed.items()} == {
        "": health_pb2.HealthCheckResponse.SERVING,
        READY: health_pb2.HealthCheckResponse.NOT_SERVING,
    }


async def test_messages_that_reach_a_handler_are_counted(rig: Rig) -> None:
    full = f"/{DESCRIPTOR.full_name}"
    await rig.unary(b"x")
    await rig.channel.stream_unary(f"{full}/Collect")(iter([b"a", b"b", b"c"]))
    assert rig.metrics.value("headrace_rpc_messages_total", method=f"{full}/Unary") == 1
    assert rig.metrics.value("headrace_rpc_messages_total", method=f"{full}/Collect") == 3
    await rig.server.refuse_admission()
    await _error(rig.unary(b"x"))
    assert rig.metrics.value("headrace_rpc_messages_total", method=f"{full}/Unary") == 1


async def test_a_lower_layers_error_is_translated(rig: Rig) -> None:
    assert isinstance(await _error(rig.unary(b"engine")), errors.InvalidArgument)


async def test_a_defect_ends_its_call_alone_and_tells_no_secrets(rig: Rig) -> None:
    """L13."""
    error = await _error(rig.unary(b"defect", metadata=((REQUEST_ID_KEY, "r-1"),)))
    assert isinstance(error, errors.Internal)
    assert "secret" not in error.message
    assert "r-1" in error.message
    assert await rig.unary(b"still here") == b"still here"


async def test_request_ids_are_taken_made_and_handed_on(rig: Rig) -> None:
    assert await rig.unary(b"id", metadata=((REQUEST_ID_KEY, "mine-1"),)) == b"mine-1"
    assert len(await rig.unary(b"id")) == 32
    assert len(await rig.unary(b"id", metadata=((REQUEST_ID_KEY, "two words"),))) == 32
    with logs.request_context("outer"):
        assert await rig.unary(b"id", metadata=request_metadata()) == b"outer"
    assert request_metadata() == ()


async def test_all_four_kinds_of_calls_pass_and_are_counted(rig: Rig) -> None:
    path = f"/{DESCRIPTOR.full_name}/"
    assert await rig.unary(b"a") == b"a"
    assert [one async for one in rig.channel.unary_stream(path + "Stream")(b"b")] == [b"first", b"b"]
    assert await rig.channel.stream_unary(path + "Collect")(iter([b"c", b"d"])) == b"cd"
    assert [one async for one in rig.channel.stream_stream(path + "Chat")(iter([b"e", b"f"]))] == [b"e", b"f"]
    await rig.idle()
    assert [rig.ended(name, "finished") for name in _METHODS] == [1, 1, 1, 1]


async def test_a_client_that_leaves_releases_what_its_call_held(rig: Rig) -> None:
    """L10, L11: the handler's finally runs at once, in streams too, and the call counts as cancelled."""
    call = rig.channel.unary_stream(f"/{DESCRIPTOR.full_name}/Stream")(b"wait")
    assert await call.read() == b"first"
    await rig.echo.entered.wait()
    call.cancel()
    async with asyncio.timeout(60):
        await rig.echo.released.wait()
    await rig.idle()
    assert rig.ended("Stream", "cancelled") == 1


@pytest.mark.parametrize(("remaining", "outcome"), [(None, "cancelled"), (3.0, "cancelled"), (0.0, "deadline")])
async def test_a_response_that_nobody_takes_is_no_defect(remaining: float | None, outcome: str) -> None:
    """The core knows that the client left before asyncio does: a write fails, and the context is not done yet."""
    released: list[str] = []

    async def responses(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"one"
        finally:
            released.append("now")

    class Given:
        """A context whose call the core has given up."""

        async def write(self, message: bytes) -> None:
            raise cygrpc.ExecuteBatchError('Failed "execute_batch": (SendMessageOperation,)')

        async def abort(self, *_: Any) -> None:
            raise AssertionError("nobody is there to be told")

        def invocation_metadata(self) -> None:
            return None

        def time_remaining(self) -> float | None:
            return remaining

        def cancelled(self) -> bool:
            return False

        done = cancelled

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(responses)

    metrics = Metrics()
    details = SimpleNamespace(method="/a/B")
    handler: Any = await CallGuard(metrics).intercept_service(continuation, details)  # type: ignore[arg-type]
    await handler.unary_stream(b"", Given())
    assert released == ["now"], "L10"
    assert metrics.value("headrace_rpc_ended_total", method="/a/B", outcome=outcome) == 1


async def test_a_deadline_ends_the_call_on_the_server_too(rig: Rig) -> None:
    """L6."""
    assert isinstance(await _error(rig.unary(b"wait", timeout=0.2)), errors.DeadlineExceeded)
    async with asyncio.timeout(60):
        await rig.echo.released.wait()
    await rig.idle()
    assert rig.ended("Unary", "deadline") == 1


async def test_a_handler_that_is_cancelled_from_inside_still_answers(rig: Rig) -> None:
    """L6, L11: gRPC sends no status for a CancelledError; without one the client waits for ever."""
    assert isinstance(await _error(rig.unary(b"cancelled inside", timeout=60)), errors.Unavailable)
    await rig.idle()
    assert rig.ended("Unary", "failed") == 1


async def test_a_closed_channel_is_unavailability_and_a_cancelled_caller_is_cancelled(rig: Rig) -> None:
    """L6: the peer left, its channel is closed under a call that waits; only a cancelled caller ends as cancelled."""

    async def call(channel: grpc.aio.Channel) -> None:
        with errors.closed_is_unavailable("the peer"):
            async for _ in channel.unary_stream(f"/{DESCRIPTOR.full_name}/Stream")(b"wait"):
                waiting.set()

    waiting = asyncio.Event()
    channel = open_channel(rig.server.address, RPC)
    calling = asyncio.create_task(call(channel))
    await waiting.wait()
    await channel.close()
    with pytest.raises(errors.Unavailable):
        await calling
    with pytest.raises(errors.Unavailable, match="left before"):  # who had its stub from before
        await call(channel)

    waiting.clear()
    calling = asyncio.create_task(call(rig.channel))
    await waiting.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await rig.idle()


async def test_a_process_of_another_role_at_the_address_is_unavailability(rig: Rig) -> None:
    """L14, L28: a prefill has become a decode, and its router, whose registry is gone, sends it one more prompt: the
    request goes elsewhere."""
    run = rig.channel.unary_stream("/headrace.v1.PrefillService/Run")

    async def call() -> None:
        async for _ in run(b"", timeout=60):
            pass

    assert isinstance(await _error(call()), errors.Unavailable)


async def test_message_limits_are_the_same_at_both_ends(rig: Rig) -> None:
    fits = b"x" * ((1 << 20) - 64)
    assert await rig.unary(fits) == fits
    assert isinstance(await _error(rig.unary(b"x" * ((1 << 20) + 64))), errors.InvalidArgument)


async def test_readiness_needs_a_canary_and_liveness_does_not(rig: Rig) -> None:
    """L18."""
    stub = health_pb2_grpc.HealthStub(rig.channel)

    async def status(service: str) -> Any:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await status(""), await status(READY)) == (serving, not_serving)

    async def broken() -> None:
        raise RuntimeError("the canary died")

    async def sings() -> None:
        return None

    with pytest.raises(RuntimeError):
        await rig.health.become_ready(broken)
    assert await status(READY) == not_serving
    await rig.health.become_ready(sings)
    assert await status(READY) == serving
    await rig.health.unready("quarantine is full")
    assert (await status(""), await status(READY), rig.health.reason) == (serving, not_serving, "quarantine is full")
    await rig.server.refuse_admission()
    await rig.health.become_ready(sings)
    assert (await status(""), await status(READY)) == (serving, not_serving)


async def test_draining_refuses_new_work_and_lets_the_rest_go_on(rig: Rig) -> None:
    """L19; L12: unavailable, not overloaded."""
    await rig.server.refuse_admission()
    assert isinstance(await _error(rig.unary(b"a")), errors.Unavailable)
    call = rig.channel.unary_stream(f"/{DESCRIPTOR.full_name}/Stream")(b"b")
    assert [one async for one in call] == [b"first", b"b"]


async def test_reflection_lists_the_services(rig: Rig) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async for response in stub.ServerReflectionInfo(iter([request])):
        names = {one.name for one in response.list_services_response.service}
    assert {"headrace.test.EchoService", "grpc.health.v1.Health"} <= names


async def test_a_taken_port_is_an_error_not_a_shared_one(rig: Rig) -> None:
    """gRPC's default would let a second server share the port and get half of the calls."""
    listen = ListenSettings(port=int(rig.server.address.rpartition(":")[2]))
    server = ServiceServer(listen, RPC, Metrics(), Health())
    try:
        with pytest.raises(OSError, match="cannot listen"):
            await server.start()
    finally:
        await server.stop(0)


async def test_a_stream_that_ends_between_two_responses_is_closed_at_once() -> None:
    """L10: not when the garbage collector comes by."""
    released: list[str] = []

    async def responses(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield b"one"
        finally:
            released.append("now")

    class Leaving:
        """A context whose client has gone when the first response is written."""

        async def write(self, message: bytes) -> None:
            call.cancel()
            await asyncio.sleep(0)

        def invocation_metadata(self) -> None:
            return None

        def time_remaining(self) -> None:
            return None

    async def continuation(details: Any) -> Any:
        return grpc.unary_stream_rpc_method_handler(responses)

    details = SimpleNamespace(method="/a/B")
    handler: Any = await CallGuard(Metrics()).intercept_service(continuation, details)  # type: ignore[arg-type]
    call = asyncio.ensure_future(handler.unary_stream(b"", Leaving()))
    with pytest.raises(asyncio.CancelledError):
        await call
    assert released == ["now"]


async def test_an_unknown_admitting_method_is_a_mistake_of_the_caller() -> None:
    server = ServiceServer(ListenSettings(), RPC, Metrics(), Health())
    with pytest.raises(ValueError, match="Nonesuch"):
        server.add(_add, Echo(), DESCRIPTOR, admits=("Nonesuch",))
    await server.stop(0)


async def test_a_stream_that_outlives_its_server_ends_as_unavailable() -> None:
    """L14: a change of role stops the server under streams that are being read, which is no defect."""

    async def requests() -> AsyncIterator[bytes]:
        yield b"x"
        raise grpc.aio.BaseError("Server already stopped.")

    read = _reader(None, lambda: None, streaming=True)(requests())
    assert await anext(read) == b"x"
    with pytest.raises(errors.Unavailable):
        await anext(read)
