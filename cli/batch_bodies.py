"""Bodies of Chat Completions and Completions as requests, and their events as response bodies: by the gateway's own
code (services/gateway), for a model whose tokenizer and chat template lie in a folder here."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from headrace.engine.text.assets import load_text_assets
from headrace.engine.text.chat import DeepseekV41Protocol
from headrace.services.gateway import chat, completions
from headrace.services.gateway.calls import make_call
from headrace.services.gateway.served import Served
from headrace.services.gateway.settings import GatewaySection
from headrace.services.gateway.streams import answers
from headrace.services.runtime.errors import InvalidArgument, Unimplemented
from headrace.v1 import common_pb2, inference_pb2

T = TypeVar("T")
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
APIS: Final = {CHAT: "chat", COMPLETIONS: "completions"}
Events = Sequence[inference_pb2.GenerateResponse]


@dataclass(frozen=True)
class Asked:
    """A body that can be asked."""

    request: inference_pb2.GenerateRequest
    response: Callable[[Events], dict[str, Any]]
    """The response's body, of all events of the request. Raises typed errors."""


class Conversion:
    """Of one served model."""

    def __init__(self, model: inference_pb2.Model, folder: Path) -> None:
        """`model` as whoever answers describes it. Raises TextError for a folder that cannot serve text."""
        assets = load_text_assets(folder)
        v41 = isinstance(assets.chat, DeepseekV41Protocol)
        self._model = model
        self._served = Served(model.identity.name, folder, assets, "v4.1" if v41 else "template")
        self._served.identity = model.identity
        self._low_detail_tokens = GatewaySection().low_detail_tokens

    def asked(self, url: str, body: Any) -> Asked:
        """Raises InvalidArgument, Unimplemented whose `field` is the body's."""
        if url not in APIS:
            raise Unimplemented("url", f"{url!r} is not served here; {CHAT} and {COMPLETIONS} are")
        if not isinstance(body, dict):
            raise InvalidArgument("must be a JSON object", field="body")
        given = {"model": self._served.name, **{name: value for name, value in body.items() if value is not None}}
        made = self._chat(given) if url == CHAT else self._completion(given)
        if given.get("stream"):
            raise Unimplemented("stream", "a file of requests has no streams; leave it out, or ask a gateway")
        chat.wants_usage(given)
        made.request.model = given["model"]
        made.request.traffic_class = common_pb2.TRAFFIC_CLASS_BATCH
        return made

    def _chat(self, body: dict[str, Any]) -> Asked:
        call = make_call(chat.ChatApi(), body, self._served, self._model, self._low_detail_tokens)
        return Asked(call.request, lambda events: _at_once(chat.whole(call, answers(call, _replayed(events)))))

    def _completion(self, body: dict[str, Any]) -> Asked:
        made = completions.make_completion(body, self._served)
        return Asked(made.request, lambda events: _at_once(completions.whole(made, _replayed(events))))


async def _replayed(events: Events) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
    for event in events:
        yield event


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that waits for nothing, without an event loop."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a response waits for something; it must not")
