"""InferenceService: the calls of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any

import grpc.aio

from headrace.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from headrace.services.router.fetch import ImageFetcher
from headrace.services.router.generate import Generation
from headrace.services.router.limits import Limiter, RateExceeded
from headrace.services.router.model import ServedModel
from headrace.services.router.prepare import IMPLEMENTED_FIELDS, tokenize
from headrace.services.router.settings import RouterSettings
from headrace.services.router.tenants import Tenants
from headrace.services.router.workers import Workers
from headrace.services.runtime.callers import tell_caller
from headrace.services.runtime.errors import NotFound
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
MAX_IMAGE_PIXELS = 64_000_000


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves one model to the tenants that the credentials name (L25)."""

    def __init__(
        self,
        settings: RouterSettings,
        model: ServedModel,
        tenants: Tenants,
        generation: Generation,
        workers: Workers,
        limiter: Limiter,
        fetcher: ImageFetcher,
    ) -> None:
        self._fetcher = fetcher
        self._settings = settings
        self._limiter = limiter
        self._tenants = tenants
        self._model = model
        self._generation = generation
        self._workers = workers

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        tenant = self._tenants.caller(context.invocation_metadata())
        async with AsyncExitStack() as stack:
            with self._generation.live.at_door():
                try:
                    charge = await stack.enter_async_context(self._limiter.request(tenant, request))
                except RateExceeded as error:
                    await tell_caller(context, error.caller)
                    raise
                await tell_caller(context, charge.caller)
                await self._fetcher.fill(
                    request.prompt, self._settings.requests.max_images, _time_left(request, context.time_remaining())
                )
            async with aclosing(self._generation.run(request, tenant, context.time_remaining())) as responses:
                async for response in responses:
                    charge.see(response)
                    yield response

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: _Context
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        tenant = self._tenants.caller(context.invocation_metadata())
        model, requests = self._model, self._settings.requests
        group = self._workers.group()
        default = SamplingParams()
        return inference_pb2.ListModelsResponse(
            caller=inference_pb2.Caller(tenant=tenant.name),
            models=[
                inference_pb2.Model(
                    identity=common_pb2.ModelIdentity(
                        name=model.name,
                        model_fingerprint=group.model_fp,
                        layout_fingerprint=group.layout_fp,
                        row_fingerprint=group.row_fp,
                    ),
                    family=model.family,
                    limits=inference_pb2.ModelLimits(
                        context_tokens=min(model.context_tokens, group.context_tokens),
                        max_tokens=requests.max_tokens,
                        max_n=requests.max_n,
                        max_logprobs=MAX_LOGPROBS,
                        max_stops=requests.max_stops,
                        max_images=0 if model.image_token_id is None else requests.max_images,
                        max_image_bytes=int(requests.max_image_bytes),
                        max_image_pixels=MAX_IMAGE_PIXELS,
                        max_message_bytes=int(self._settings.rpc.max_message_bytes),
                    ),
                    default_sampling=common_pb2.SamplingParams(
                        temperature=default.temperature,
                        top_p=default.top_p,
                        top_k=default.top_k,
                        min_p=default.min_p,
                        presence_penalty=default.presence_penalty,
                        frequency_penalty=default.frequency_penalty,
                        repetition_penalty=default.repetition_penalty,
                        n=1,
                    ),
                    eos_token_ids=() if model.text is None else model.text.eos_token_ids,
                    image_token_id=model.image_token_id,
                    block_tokens=group.block_tokens,
                    vocab_size=model.vocab_size,
                    implemented_fields=IMPLEMENTED_FIELDS,
                )
            ],
        )

    async def CountTokens(
        self, request: inference_pb2.CountTokensRequest, context: _Context
    ) -> inference_pb2.CountTokensResponse:
        """See inference.proto."""
        self._tenants.caller(context.invocation_metadata())
        if request.model and request.model != self._model.name:
            raise NotFound(f"no model {request.model!r}; this cluster serves {self._model.name!r}", field="model")
        prompt = await asyncio.to_thread(tokenize, request.prompt, self._model, self._settings.requests)
        return inference_pb2.CountTokensResponse(
            prompt_tokens=len(prompt.token_ids),
            token_ids=prompt.token_ids if request.include_token_ids else (),
            images=len(prompt.images),
        )


def _time_left(request: inference_pb2.GenerateRequest, remaining_s: float | None) -> float | None:
    """The nearer of the call's deadline and the request's own; None: neither has one."""
    own_s = request.timeout_ms / 1000 if request.HasField("timeout_ms") else None
    return min((left_s for left_s in (own_s, remaining_s) if left_s is not None), default=None)
