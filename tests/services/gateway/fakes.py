"""A router that says what a test wants, and a gateway in front of it, on real sockets in the test's own loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway.main import make_gateway
from headrace.services.gateway.response_store import open_store
from headrace.services.gateway.routes import make_app
from headrace.services.gateway.server import HttpServer
from headrace.services.gateway.settings import GatewaySection, GatewaySettings, ModelEntry, ResponsesSection
from headrace.services.runtime.callers import tell_caller
from headrace.services.runtime.errors import HeadraceError, Unauthenticated, abort
from headrace.services.runtime.settings import ListenSettings
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

FILE = make_byte_tokenizer()
TOKENIZER = Tokenizer(FILE.serialized)
TEMPLATE = """{% for m in messages %}[{{ m.role }}]{{ m.content }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
Events = AsyncGenerator[inference_pb2.GenerateResponse, None]
Script = Callable[[inference_pb2.GenerateRequest], Events]
PATIENCE_S = 60.0


def tokens_event(text: str, choice: int = 0, offset: int = 0, top: int | None = None) -> inference_pb2.GenerateResponse:
    """One event; the text's special tokens are ids without text, as decode sends them."""
    ids = TOKENIZER.encode_trusted(text)
    return ids_event(ids, TOKENIZER.decode(ids), choice, offset, top)


def ids_event(
    ids: Sequence[int], text: str, choice: int = 0, offset: int = 0, top: int | None = None
) -> inference_pb2.GenerateResponse:
    event = common_pb2.TokensEvent(choice=choice, offset=offset, token_ids=ids, text=text)
    if top is not None:
        for token in ids:
            one = common_pb2.TokenLogprob(token_id=token, logprob=-0.5, text=TOKENIZER.token_bytes(token))
            event.logprobs.add(chosen=one, top=[one] * top)
    return inference_pb2.GenerateResponse(tokens=event)


def finished_event(choice: int = 0, reason: Any = common_pb2.FINISH_REASON_STOP, **more: Any) -> Any:
    return inference_pb2.GenerateResponse(finished=common_pb2.FinishedEvent(choice=choice, reason=reason, **more))


def says(*pieces: str, cached: int = 0, reason: Any = common_pb2.FINISH_REASON_STOP, stop_string: str = "") -> Script:
    """Every choice says the same, piece by piece."""

    async def run(request: inference_pb2.GenerateRequest) -> Events:
        prompt = len(request.prompt.tokens.token_ids) or len(request.prompt.text.text)
        yield inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(prompt_tokens=prompt))
        top = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
        n = request.sampling.n or 1
        for piece in pieces:
            for choice in range(n):
                yield tokens_event(piece, choice, top=top)
        for choice in range(n):
            yield finished_event(choice, reason, **({"stop_string": stop_string} if stop_string else {}))
        made = sum(len(TOKENIZER.encode_trusted(piece)) for piece in pieces) * n
        yield inference_pb2.GenerateResponse(
            usage=common_pb2.Usage(
                prompt_tokens=prompt,
                cached_tokens=cached,
                computed_tokens=prompt - cached,
                completion_tokens=made,
            )
        )

    return run


def fails(error: HeadraceError, *before: inference_pb2.GenerateResponse) -> Script:
    async def run(_request: inference_pb2.GenerateRequest) -> Events:
        for event in before:
            yield event
        raise error

    return run


@dataclass
class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Answers by `script`; remembers what it was asked."""

    script: Script = field(default_factory=lambda: says("hello"))
    model: str = "m"
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """A call has ended, in whichever way."""
    known_keys: frozenset[str] | None = None
    """None: everybody."""
    tenants: dict[str, str] = field(default_factory=dict)
    """Tenants of keys; any other key is a tenant's of its own."""
    levels: inference_pb2.Caller = field(default_factory=inference_pb2.Caller)
    """What is left of everybody's rates."""
    max_tokens: int = 512

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        caller = await self._check(context)
        caller.MergeFrom(self.levels)
        await tell_caller(context, caller)
        try:
            async for event in self.script(request):
                yield event
        except HeadraceError as error:
            await abort(context, error)
        finally:
            self.ended.set()

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        caller = await self._check(context)
        identity = common_pb2.ModelIdentity(name=self.model, model_fingerprint=b"a" * 32, layout_fingerprint=b"b" * 32)
        limits = inference_pb2.ModelLimits(context_tokens=4096, max_tokens=self.max_tokens, max_n=8, max_images=4)
        model = inference_pb2.Model(
            identity=identity, family="fake", limits=limits, eos_token_ids=[FILE.eos_token_id], block_tokens=8
        )
        return inference_pb2.ListModelsResponse(models=[model], caller=caller)

    async def CountTokens(self, request: Any, context: Any) -> inference_pb2.CountTokensResponse:
        await self._check(context)
        return inference_pb2.CountTokensResponse(prompt_tokens=len(request.prompt.tokens.token_ids))

    async def _check(self, context: Any) -> inference_pb2.Caller:
        key = dict(context.invocation_metadata()).get("authorization", "").removeprefix("Bearer ")
        if self.known_keys is not None and key not in self.known_keys:
            await abort(context, Unauthenticated("no valid credential"))
        return inference_pb2.Caller(tenant=self.tenants.get(key, f"of {key}"))

    def prompt_text(self, index: int = -1) -> str:
        """The prompt's tokens as text, special ones spelt out."""
        return TOKENIZER.decode(self.requests[index].prompt.tokens.token_ids, skip_special=False)


def make_folder(folder: Path, *, template: bool) -> Path:
    """What a gateway reads of a model folder."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(FILE.serialized, encoding="utf-8")
    config: dict[str, Any] = {"eos_token_id": FILE.eos_token_id}
    if template:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    else:
        config["image_token_id"] = FILE.image_token_id
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class World:
    """A gateway with the models `v41` and `plain`, both of one fake router."""

    url: str
    router: FakeRouter
    server: grpc.aio.Server
    """Of the router."""
    gateway: Any


@asynccontextmanager
async def a_world(scratch: Path, **section: Any) -> AsyncIterator[World]:
    router = FakeRouter()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(router, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    entries = (
        ModelEntry(name="v41", router=address, folder=make_folder(scratch / "v41", template=False), protocol="v4.1",
                   router_model="m", thinking=True),
        ModelEntry(name="plain", router=address, folder=make_folder(scratch / "plain", template=True),
                   protocol="template", router_model="m", aliases=("other-name",)),
    )  # fmt: skip
    settings = GatewaySettings(
        gateway=GatewaySection(models=entries, **section), responses=ResponsesSection(per_tenant=3)
    )
    gateway = await make_gateway(settings, None)
    store = open_store(settings.responses)
    http = HttpServer(make_app(gateway, store), ListenSettings(), None, settings.gateway.read_seconds)
    serving = asyncio.ensure_future(http.serve())
    try:
        yield World(f"http://{http.address}", router, server, gateway)
    finally:
        await http.stop()
        await serving
        await store.close()
        await gateway.close()
        await server.stop(None)


async def until(holds: Callable[[], bool]) -> None:
    """Wait for what has to come."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 - of another process's or library's making
            await asyncio.sleep(0.01)


def texts(pieces: Sequence[str | None]) -> str:
    return "".join(piece or "" for piece in pieces)
