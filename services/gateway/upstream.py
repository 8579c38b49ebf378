"""One served model as the gateway sees it: its router, what the router says of it, and how its prompts are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, Final, cast

import grpc
import grpc.aio

from headrace.engine.text.assets import TextAssets, load_text_assets
from headrace.services.gateway.served import Served
from headrace.services.gateway.settings import ModelEntry
from headrace.services.runtime import logs
from headrace.services.runtime.callers import told_caller
from headrace.services.runtime.errors import (
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    closed_is_unavailable,
    from_rpc_error,
    told_by_peer,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.services.runtime.tls import Tls
from headrace.v1 import inference_pb2, inference_pb2_grpc

REMEMBER_S: Final = 30.0
"""How long what a router said of its model is taken for granted."""
RETRY_AFTER_S: Final = 1.0
PROBE_S: Final = 1.0
"""Routers are not asked more often whether they answer, however often probes come."""
_log = logs.get(__name__)


class Upstream(Served):
    """A model and its router. Belongs to the event loop's thread."""

    def __init__(self, entry: ModelEntry, assets: TextAssets, rpc: RpcSettings, tls: Tls | None, ask_s: float) -> None:
        """`ask_s`: longest wait for answers that cost the router nothing (L6)."""
        super().__init__(entry.name, entry.folder, assets, entry.protocol, thinking=entry.thinking)
        self.entry = entry
        self._at_router = entry.router_model or entry.name
        self._ask_s = ask_s
        self._channel = open_channel(entry.router, rpc, read_ahead=False, tls=tls)  # clients may stop reading
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._known: inference_pb2.Model | None = None
        self._known_at = float("-inf")
        self._lost = False
        """The router could not be reached, which is in the log, and has not answered since."""

    async def close(self) -> None:
        await self._channel.close()

    async def describe(self, credential: str | None) -> inference_pb2.Model:
        """What the router says, at most REMEMBER_S old. For somebody else's requests the credential does not matter: it
        is asked for with every one of them."""
        now = asyncio.get_running_loop().time()
        if self._known is None or now - self._known_at > REMEMBER_S:
            await self.ask(credential)
        assert self._known is not None
        return self._known

    async def ask(self, credential: str | None) -> inference_pb2.Model:
        """The same, asked now. Raises what the router answers, Unauthenticated for a credential that it does not
        know."""
        answer = await self._list(credential)
        for model in answer.models:
            if model.identity.name == self._at_router:
                self._known, self._known_at = model, asyncio.get_running_loop().time()
                self.identity = model.identity
                return model
        served = ", ".join(model.identity.name for model in answer.models)
        message = f"the router of {self.name} serves no model {self._at_router!r} but {served}"
        raise NotFound(f"{message}; set its router_model at the gateway", field="model")

    async def trouble(self) -> HeadraceError | None:
        """Why nobody can be served by its router now; None if it answers. That it wants a key, and this process has
        none, is an answer."""
        try:
            await self.ask(None)
        except (Unauthenticated, PermissionDenied):
            return None
        except HeadraceError as error:
            return error
        return None

    async def tenant(self, credential: str | None) -> str:
        """Whose the credential is, asked now. Raises what the router answers, as `ask` does."""
        tenant = str((await self._list(credential)).caller.tenant)
        if not tenant:
            raise Internal(f"the router at {self.entry.router} does not say who calls; it is of another version")
        return tenant

    async def count(self, prompt: inference_pb2.Prompt, credential: str | None) -> int:
        """Tokens of a prompt as the router counts them."""
        request = inference_pb2.CountTokensRequest(model=self._at_router, prompt=prompt)
        answer = await self._call(self._stub.CountTokens, request, credential)
        return int(answer.prompt_tokens)

    async def generate(
        self,
        request: inference_pb2.GenerateRequest,
        credential: str | None,
        timeout_s: float,
        hear: Callable[[inference_pb2.Caller], None],
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """Events of one request. Closing the generator cancels it at the router. Raises typed errors. Before all that
        `hear` is told who calls, unless the router refuses to know."""
        request.model = self._at_router
        call: Any = None
        try:
            with closed_is_unavailable(f"the router of {self.name}"):
                call = self._stub.Generate(request, timeout=timeout_s, metadata=_metadata(credential))
                _pass_on(await call.initial_metadata(), hear)
                self._lost = False
                async for event in call:
                    yield event
        except grpc.aio.AioRpcError as error:
            _pass_on(error.trailing_metadata(), hear)
            raise self._failure(error) from error
        finally:
            if call is not None:
                call.cancel()

    async def _list(self, credential: str | None) -> inference_pb2.ListModelsResponse:
        return cast(
            inference_pb2.ListModelsResponse,
            await self._call(self._stub.ListModels, inference_pb2.ListModelsRequest(), credential),
        )

    async def _call(self, method: Any, request: object, credential: str | None) -> Any:
        try:
            with closed_is_unavailable(f"the router of {self.name}"):
                answer = await method(request, timeout=self._ask_s, metadata=_metadata(credential))
                self._lost = False
                return answer
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error

    def _failure(self, error: grpc.aio.AioRpcError) -> HeadraceError:
        """What clients are told of a failed call. Where the router is, and why it cannot be reached, is for the log."""
        typed = from_rpc_error(error)
        if not isinstance(typed, Unavailable) or told_by_peer(error):
            return typed
        if not self._lost:
            _log.warning("a router cannot be reached", model=self.name, router=self.entry.router, error=error.details())
        self._lost = True
        return Unavailable(f"the router of {self.name} cannot be reached; try again", retry_after_s=RETRY_AFTER_S)


class Upstreams:
    """All served models, by each of their names."""

    def __init__(self, models: tuple[Upstream, ...]) -> None:
        self.models = models
        self._by_name = {name: one for one in models for name in (one.name, *one.entry.aliases)}
        self._probing = asyncio.Lock()
        self._probed_at = float("-inf")
        self._answers = False

    @property
    def names(self) -> tuple[str, ...]:
        """What clients may ask for, aliases too."""
        return tuple(self._by_name)

    def get(self, name: object) -> Upstream:
        """Raises NotFound, and InvalidArgument for what is no name."""
        if not isinstance(name, str) or not name:
            raise InvalidArgument("is needed: a name of /v1/models", field="model")
        found = self._by_name.get(name)
        if found is None:
            served = ", ".join(one.name for one in self.models)
            raise NotFound(f"no model {name[:100]!r}; served here: {served}", field="model")
        return found

    async def one_answers(self) -> bool:
        """Whether a router can be reached: then somebody can be served."""
        loop = asyncio.get_running_loop()
        async with self._probing:
            if loop.time() - self._probed_at > PROBE_S:
                self._answers = await self._ask_all()
                self._probed_at = loop.time()
            return self._answers

    async def _ask_all(self) -> bool:
        """Nobody waits for a silent one while another answers."""
        asked = [asyncio.ensure_future(one.trouble()) for one in self.models]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer is None:
                    return True
            return False
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(one.close() for one in self.models))


def load_assets(folder: Path, entry: ModelEntry) -> TextAssets:
    """Tokenizer and prompt form. Raises TextError."""
    return load_text_assets(folder, entry.protocol)


def _pass_on(metadata: Any, hear: Callable[[inference_pb2.Caller], None]) -> None:
    caller = told_caller(metadata)
    if caller is not None:
        hear(caller)


def _metadata(credential: str | None) -> grpc.aio.Metadata:
    metadata = request_metadata()
    if credential is not None:
        metadata.add("authorization", f"Bearer {credential}")
    return metadata
