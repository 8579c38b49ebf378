"""What every request passes: its id, its place among those served at once, its key, its headers, its body."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from starlette.requests import Request

from headrace.services.gateway.errors import TooLarge, TooSlow
from headrace.services.gateway.settings import GatewaySection
from headrace.services.runtime.errors import InvalidArgument, ResourceExhausted, Unavailable
from headrace.services.runtime.ids import new_request_id, valid_request_id
from headrace.services.runtime.live import Ending, LiveSet
from headrace.v1 import common_pb2, inference_pb2

RETRY_AFTER_S: Final = 1.0
CLASS_HEADER: Final = "x-headrace-class"
PRIORITY_HEADER: Final = "x-headrace-priority"
TIMEOUT_HEADER: Final = "x-headrace-timeout-ms"
_CLASSES: Final = {
    "agent": common_pb2.TRAFFIC_CLASS_AGENT,
    "chat": common_pb2.TRAFFIC_CLASS_CHAT,
    "batch": common_pb2.TRAFFIC_CLASS_BATCH,
}

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Wanted:
    """What headers say of how a request is served."""

    traffic_class: common_pb2.TrafficClass.ValueType
    priority: int
    timeout_s: float

    def apply(self, request: inference_pb2.GenerateRequest) -> None:
        """Into the request; the deadline goes with the call, too."""
        request.traffic_class = self.traffic_class
        request.priority = self.priority
        request.timeout_ms = max(1, round(self.timeout_s * 1000))


class Door:
    """Lets requests in. Belongs to the event loop's thread."""

    def __init__(self, settings: GatewaySection) -> None:
        self._settings = settings
        self.live: LiveSet[object] = LiveSet("http")
        self._left = asyncio.Event()
        self.closing = False
        """This process is ending: what runs is finished, nothing new is taken (L19)."""

    @contextmanager
    def within(self) -> Iterator[Ending]:
        """A request that is being served. Raises ResourceExhausted, Unavailable (L12)."""
        with self.live.at_door():
            if self.closing:
                raise Unavailable("this gateway is ending; send the request again", retry_after_s=RETRY_AFTER_S)
            if len(self.live) >= self._settings.max_requests:
                raise ResourceExhausted(
                    f"{self._settings.max_requests} requests are being served; try again", retry_after_s=RETRY_AFTER_S
                )
        try:
            with self.live.within(object()) as ending:
                yield ending
        finally:
            self._left.set()

    async def idle(self) -> None:
        """Until nothing is being served."""
        while len(self.live):
            self._left.clear()
            await self._left.wait()

    async def body(self, request: Request) -> dict[str, Any]:
        """The request's JSON object. Raises InvalidArgument, TooLarge, TooSlow."""
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidArgument("is not read; send the body as it is", field="content-encoding")
        most, patience = int(self._settings.max_body_bytes), self._settings.read_seconds
        pieces: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(patience):
                async for piece in request.stream():
                    size += len(piece)
                    if size > most:
                        raise TooLarge(f"the body is longer than {most} bytes; send less")
                    pieces.append(piece)
        except TimeoutError:
            raise TooSlow(f"the body did not come within {patience:g} seconds; send it faster") from None
        try:
            body = _read(b"".join(pieces))
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"the body is no JSON: {error}") from error
        if not isinstance(body, dict):
            raise InvalidArgument("the body must be a JSON object")
        return body

    def wanted(self, request: Request) -> Wanted:
        """Raises InvalidArgument naming the header."""
        name = request.headers.get(CLASS_HEADER, "")
        if name and name not in _CLASSES:
            raise InvalidArgument(f"choose from {', '.join(_CLASSES)}", field=CLASS_HEADER)
        timeout_ms = _whole(request, TIMEOUT_HEADER, round(self._settings.timeout_seconds * 1000))
        if timeout_ms < 1:
            raise InvalidArgument("must be at least 1", field=TIMEOUT_HEADER)
        timeout_s = min(timeout_ms / 1000, self._settings.timeout_seconds)
        priority = _whole(request, PRIORITY_HEADER, 0)
        if abs(priority) >= 2**31:
            raise InvalidArgument("is out of range", field=PRIORITY_HEADER)
        return Wanted(_CLASSES.get(name, common_pb2.TRAFFIC_CLASS_UNSPECIFIED), priority, timeout_s)


def _read(data: bytes) -> Any:
    """JSON whose texts are texts: half a surrogate pair cannot be written as UTF-8, by us or by anybody behind us.
    Raises ValueError, RecursionError."""
    body = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    if _HALF_PAIR.search(data):  # a half, or of a pair
        json.dumps(body, ensure_ascii=False).encode()
    return body


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _whole(request: Request, header: str, default: int) -> int:
    text = request.headers.get(header)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument("must be a whole number", field=header) from None


def credential(request: Request) -> str | None:
    """The key that a client sends, in either of the two ways. Raises InvalidArgument for what can be none."""
    key = request.headers.get("x-api-key")
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        key = token.strip()
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InvalidArgument("the key has characters that no key has", field="authorization")
    return key or None


def request_id(request: Request) -> str:
    """The client's, if it may be logged, else a new one."""
    given = request.headers.get("x-request-id") or request.headers.get("x-client-request-id") or ""
    return given if valid_request_id(given) else new_request_id()


def caller_of(request: Request) -> inference_pb2.Caller | None:
    """Who calls, in the router's words; None: it has not said so (yet)."""
    caller: inference_pb2.Caller | None = getattr(request.state, "caller", None)
    return caller


def hear_caller(request: Request, caller: inference_pb2.Caller) -> None:
    """Remember what the router said. The only place where a request gets a tenant (L25)."""
    request.state.caller = caller
