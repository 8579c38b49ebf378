"""The error table: complete, reversible, and the same on both ends of a real call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.services.runtime import errors
from headrace.v1 import common_pb2

SAMPLES: list[errors.HeadraceError] = [
    errors.Unimplemented("sampling.logit_bias"),
    errors.ResourceExhausted("the queue is full; try again", retry_after_s=0.25, replica_id="decode-1"),
    *(
        row.error("what happened; what to do", field="stop.max_tokens", replica_id="router-0")
        for row in errors.TABLE.values()
        if row.error not in (errors.Unimplemented, errors.ResourceExhausted)
    ),
]


def contents(error: errors.HeadraceError) -> tuple[object, ...]:
    return type(error), error.message, error.field, error.retry_after_s, error.replica_id


def subclasses(base: type[errors.HeadraceError]) -> set[type[errors.HeadraceError]]:
    return {base, *(found for child in base.__subclasses__() for found in subclasses(child))}


def test_every_code_has_one_row() -> None:
    assert set(errors.TABLE) == set(common_pb2.ErrorCode.values()) - {common_pb2.ERROR_CODE_UNSPECIFIED}


def test_every_class_has_its_own_code() -> None:
    """Of the wire's errors. A process may tell kinds of one apart among its own, as the router does with Overtaken."""
    everywhere = subclasses(errors.HeadraceError) - {errors.HeadraceError}
    classes = {cls for cls in everywhere if cls.__module__ == errors.__name__}
    assert all("code" not in vars(cls) for cls in everywhere - classes), "a code of its own belongs into the table"
    assert {row.error for row in errors.TABLE.values()} == classes
    assert len({cls.code for cls in classes}) == len(classes)


def test_overload_and_unavailability_differ() -> None:
    """L12: overload is RESOURCE_EXHAUSTED / 429 with a delay, unavailability UNAVAILABLE / 503."""
    full = errors.ResourceExhausted("full; try again", retry_after_s=1.5)
    gone = errors.Unavailable("no ready replica; try again later")
    assert (errors.grpc_status(full), errors.http_status(full)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 429)
    assert (errors.grpc_status(gone), errors.http_status(gone)) == (grpc.StatusCode.UNAVAILABLE, 503)
    assert errors.to_proto(full).retry_after_ms == 1500
    with pytest.raises(TypeError):
        errors.ResourceExhausted("full")  # type: ignore[call-arg]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_wire_form_is_reversible(error: errors.HeadraceError) -> None:
    assert contents(errors.from_proto(errors.to_proto(error))) == contents(error)


@given(st.binary(max_size=64))
def test_any_wire_form_becomes_an_error(data: bytes) -> None:
    """L13: whatever a peer sends under the key, the caller gets a typed error."""
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE,
        grpc.aio.Metadata(),
        grpc.aio.Metadata((errors.METADATA_KEY, data)),
        details="gone",
    )
    assert isinstance(errors.from_rpc_error(failure), errors.HeadraceError)


def test_unknown_code_is_kept_readable() -> None:
    error = errors.from_proto(common_pb2.Error(code=9999, message="from the future"))  # type: ignore[arg-type]
    assert isinstance(error, errors.Internal)
    assert "9999" in error.message
    assert "from the future" in error.message


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.Unavailable),
        (grpc.StatusCode.FAILED_PRECONDITION, errors.FailedPrecondition),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InvalidArgument),
        (grpc.StatusCode.UNKNOWN, errors.Internal),
        (grpc.StatusCode.CANCELLED, errors.Unavailable),
        (grpc.StatusCode.UNIMPLEMENTED, errors.Unavailable),
    ],
)
def test_bare_statuses(status: grpc.StatusCode, expected: type[errors.HeadraceError]) -> None:
    failure = grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details="")
    error = errors.from_rpc_error(failure)
    assert type(error) is expected
    assert error.message == status.name


async def test_calls_that_meet_the_end_of_a_server_are_unavailable() -> None:
    """L6: whoever calls as a process ends or changes its role tries elsewhere; nobody has cancelled the call, although
    gRPC says so of those that no handler has begun."""

    async def serve(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await asyncio.sleep(0 if request else 600)
        return request

    handler = grpc.unary_unary_rpc_method_handler(serve)
    for _ in range(5):
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Serve": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary("/test.Service/Serve")
            calls = [asyncio.ensure_future(call(b"x", timeout=60))]
            await calls[0]
            calls.append(asyncio.ensure_future(call(b"", timeout=60)))
            await asyncio.sleep(0.01)
            stopping = asyncio.create_task(server.stop(0.01))
            while not stopping.done():
                calls.append(asyncio.ensure_future(call(b"x", timeout=60)))
                await asyncio.sleep(0)
            results = await asyncio.gather(*calls, return_exceptions=True)
        failures = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert len(failures) + results.count(b"x") == len(calls)
        assert {type(errors.from_rpc_error(failure)) for failure in failures} == {errors.Unavailable}


def test_negative_delay_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        errors.ResourceExhausted("full", retry_after_s=-1)


Caller = Callable[[errors.HeadraceError], "grpc.aio.UnaryUnaryCall[bytes, bytes]"]


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    """Calls a real server whose only method ends with the given error."""
    raised: list[errors.HeadraceError] = []

    async def fail(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await errors.abort(context, raised.pop())

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Fail": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        def call(error: errors.HeadraceError) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
            raised.append(error)
            return channel.unary_unary("/test.Service/Fail")(b"", timeout=60)

        yield call
    await server.stop(None)


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
async def test_a_call_carries_the_error(caller: Caller, error: errors.HeadraceError) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await caller(error)
    assert caught.value.code() is errors.grpc_status(error)
    assert caught.value.details() == str(error)
    assert contents(errors.from_rpc_error(caught.value)) == contents(error)


async def test_a_long_text_does_not_cost_the_error_its_type() -> None:
    """L13: gRPC drops metadata that is too long, and the caller would see its own RESOURCE_EXHAUSTED."""
    answers: list[tuple[object, str, tuple[tuple[str, bytes]]]] = []

    class Context:
        def trailing_metadata(self) -> None:
            return None

        async def abort(self, status: object, details: str, trailing: tuple[tuple[str, bytes]]) -> None:
            answers.append((status, details, trailing))

    error = errors.NotFound(f"no model {chr(0x1F600) * 70_000}", field="f" * 70_000)
    await errors.abort(Context(), error)  # type: ignore[arg-type]
    ((status, details, ((_, data),)),) = answers
    assert status is grpc.StatusCode.NOT_FOUND
    assert 3 * len(details.encode()) + len(data) * 4 / 3 < 8192
    assert common_pb2.Error.FromString(data).message.startswith("no model")
    assert errors.shortened("as it is") == "as it is"
