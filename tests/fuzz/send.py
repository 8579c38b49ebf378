"""One call, and what came of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.services.runtime.errors import METADATA_KEY
from headrace.v1 import common_pb2
from tests.fuzz.methods import ENDLESS, STANDARD, Method

PATIENCE_S: Final = 60.0
"""A call that answers at once by its nature and has not in this time hangs (L6)."""
WAIT_S: Final = 3.0
"""Longest stay with a call that may rightly take long; then the fuzzer leaves, as clients do."""
LINGER_S: Final = 0.2
"""Stay with a stream that never ends, after its first word."""
MAY_WAIT: Final = frozenset(
    {
        "InferenceService/Generate", "PrefillService/Run", "ControlService/Drain", "ControlService/VerifyCache",
        "ControlService/CollectCache", "EncoderService/Push", "EncoderService/Encode", "CachePeerService/Send",
    }
)  # fmt: skip
"""Methods that wait for something that the message may put off: their own deadline field, or the fuzzer's."""
DEADLINE_S: Final = 300.0
"""Of every call at the servers, which some ask for; the fuzzer leaves before."""
CLIENT_RACE: Final = ("Internal error from Core", "")
"""What gRPC's asyncio client itself says when its next message crosses the server's answer: no server of ours sends
these words without a typed error, and the call is made again."""
CLIENT_RACE_TRIES: Final = 10
LEFT: Final = "LEFT"
"""In place of a status: the fuzzer ended the call."""


@dataclass
class Outcome:
    """What the caller saw."""

    method: str
    """Service/Method."""
    port: str
    parses: bool
    """The bytes are the method's message by the servers' own parser."""
    status: str = ""
    """Name of the gRPC status, or LEFT."""
    code: str = ""
    """Name of the typed error's code; empty without one."""
    details: str = ""
    seconds: float = 0.0
    responses: list[bytes] = field(default_factory=list)
    """The first few."""
    what: str = ""
    """How the message was made."""
    sent: Sequence[bytes] = ()

    @property
    def reached(self) -> bool:
        """A handler had the message: it parses, and the answer is one that neither the door, nor the parser, nor gRPC
        gives. In doubt no; the servers' own counters are compared besides (watch.py)."""
        if not self.parses:
            return False
        if self.status == "OK" or self.responses:
            return True
        if self.status == LEFT:
            return self.method in ENDLESS or self.method in MAY_WAIT
        if "replica is draining" in self.details or "a certificate of role" in self.details:
            return False
        return bool(self.code) or (self.method.partition("/")[0] in STANDARD and self.status == "NOT_FOUND")

    def row(self) -> dict[str, object]:
        """For a report."""
        return {
            "method": self.method,
            "port": self.port,
            "status": self.status,
            "code": self.code,
            "details": self.details[:300],
            "seconds": round(self.seconds, 2),
            "what": self.what[:300],
            "sent": [data[:2000].hex() for data in self.sent[:3]],
        }


async def exchange(
    channel: grpc.aio.Channel,
    method: Method,
    port: str,
    datas: Sequence[bytes],
    metadata: Sequence[tuple[str, str]] = (),
    *,
    what: str = "",
    patience_s: float | None = None,
) -> Outcome:
    """Send messages (one, unless the method streams), read what comes."""
    for _ in range(CLIENT_RACE_TRIES):
        outcome = await _exchange(channel, method, port, datas, metadata, patience_s)
        outcome.what = what
        if outcome.status != "INTERNAL" or outcome.code or outcome.details not in CLIENT_RACE:
            break
    return outcome


async def _exchange(
    channel: grpc.aio.Channel,
    method: Method,
    port: str,
    datas: Sequence[bytes],
    metadata: Sequence[tuple[str, str]],
    patience_s: float | None,
) -> Outcome:
    outcome = Outcome(method.short, port, method.parses(datas), sent=datas)
    waits = method.short in MAY_WAIT
    limit = patience_s or (WAIT_S if waits else PATIENCE_S)
    began = time.monotonic()
    call = _open(channel, method, datas, metadata)
    try:
        async with asyncio.timeout(limit):
            await _read(call, method, outcome)
            outcome.status = (await call.code()).name
    except TimeoutError as ended:
        outcome.status = LEFT if waits or patience_s or isinstance(ended, _LeftStream) else "HANGS"
    except grpc.aio.AioRpcError as error:
        outcome.status = error.code().name
        outcome.details = error.details() or ""
        outcome.code = _code(error)
    finally:
        call.cancel()
        outcome.seconds = time.monotonic() - began
    return outcome


def _open(channel: Any, method: Method, datas: Sequence[bytes], metadata: Sequence[tuple[str, str]]) -> Any:
    kind = f"{'stream' if method.client_streams else 'unary'}_{'stream' if method.server_streams else 'unary'}"
    make = getattr(channel, kind)(method.path)
    sent = _each(datas) if method.client_streams else datas[0]
    return make(sent, metadata=tuple(metadata), timeout=DEADLINE_S)


async def _each(datas: Sequence[bytes]) -> AsyncIterator[bytes]:
    for data in datas:
        yield data


async def _read(call: Any, method: Method, outcome: Outcome) -> None:
    if not method.server_streams:
        outcome.responses.append(await call)
        return
    endless = method.short in ENDLESS
    try:
        async with asyncio.timeout(None) as linger:
            async for response in call:
                if len(outcome.responses) < 64:
                    outcome.responses.append(response)
                if endless and linger.when() is None:
                    linger.reschedule(asyncio.get_running_loop().time() + LINGER_S)
    except TimeoutError:
        if not linger.expired():
            raise
        call.cancel()
        raise _LeftStream from None


class _LeftStream(TimeoutError):
    """The first words of an endless stream have come, and that was all that was wanted."""


def _code(error: grpc.aio.AioRpcError) -> str:
    """Name of the typed error's code. Raises nothing: what cannot be read is no typed error."""
    for key, value in error.trailing_metadata() or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            try:
                code = common_pb2.Error.FromString(value).code
                return common_pb2.ErrorCode.Name(code)
            except (DecodeError, ValueError):
                return ""
    return ""
