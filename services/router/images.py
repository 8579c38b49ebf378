"""Images of a request at an encoder: geometry first, embeddings leased until the request is handed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio

from headrace.engine.vision.config import VisionConfig
from headrace.router.balancers.base import EncodedImage, EncoderBalancer, ImageWork
from headrace.router.topology import Candidate
from headrace.services.router.image_work import described
from headrace.services.router.prepare import Prepared
from headrace.services.router.tenants import TenantKeys
from headrace.services.router.workers import ModelGroup, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import HeadraceError, Internal, Unavailable, closed_is_unavailable, typed
from headrace.services.runtime.intercept import request_metadata
from headrace.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc

_log = logs.get(__name__)
RELEASE_TIMEOUT_S = 2.0
MISSED_RENEWALS = 2
"""Unanswered in a row: with the third the leases would have run out."""


@dataclass(frozen=True)
class EncodedImages:
    """What is known of a request's images; empty for a text request."""

    images: tuple[encoder_pb2.EncodedImage, ...] = ()
    encoder: Candidate | None = None
    seconds: float = 0.0
    """Until the geometry was known."""
    cached: int = field(default=0)
    """Images that were there, or in the making, before."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """The encoder does not answer any more: what was not fetched from it has to be encoded again."""
    settle: Callable[[], None] = lambda: None
    """To be called once prefill has the embeddings, as the encoder is done with them then. Again is no error."""


class ImageStage:
    """Sends images to an encoder replica and keeps their leases alive."""

    def __init__(
        self,
        workers: Workers,
        balancer: EncoderBalancer,
        vision: VisionConfig | None,
        router: common_pb2.PeerId,
        clock: Clock,
    ) -> None:
        self._workers = workers
        self._balancer = balancer
        self._vision = vision
        self._router = router
        self._clock = clock

    @asynccontextmanager
    async def leased(
        self, prepared: Prepared, tenant: TenantKeys, group: ModelGroup, deadline: float
    ) -> AsyncIterator[EncodedImages]:
        """The request's images, leased for the block and given back at its end (L10)."""
        if not prepared.images:
            yield EncodedImages()
            return
        started = self._clock.monotonic()
        works = await described(prepared.images, tenant.image_key, self._vision)
        candidate, response = await self._encode(prepared, works, tenant, group, deadline)
        answers = _answers(works, response)

        def settle() -> None:
            self._balancer.ended(candidate.id, prepared.request_id, answers, self._clock.monotonic())

        try:
            stub = self._workers.encoder(candidate.id)
            leases = [image.handle.lease_id for image in response.images]
            gone = asyncio.Event()
            renewal = asyncio.create_task(_renew(stub, leases, response.lease_ms / 3000, gone))
            try:
                seconds, cached = self._clock.monotonic() - started, sum(image.cached for image in answers)
                yield EncodedImages(tuple(response.images), candidate, seconds, cached, gone, settle)
            finally:
                renewal.cancel()
                self._workers.spawn(_release(stub, leases))
        finally:
            settle()

    async def _encode(
        self, prepared: Prepared, works: Sequence[ImageWork], tenant: TenantKeys, group: ModelGroup, deadline: float
    ) -> tuple[Candidate, encoder_pb2.EncodeResponse]:
        """Ask the encoders in the balancer's order; the first that takes the images has them."""
        request = encoder_pb2.EncodeRequest(
            id=common_pb2.AttemptId(request_id=prepared.request_id, attempt=1),
            model=common_pb2.ModelIdentity(model_fingerprint=group.model_fp),
            images=prepared.images,
            image_key=tenant.image_key,
            router=self._router,
        )
        failure: HeadraceError = Unavailable("no encoder replica is ready; try again shortly", retry_after_s=1.0)
        for candidate in self._balancer.order(works, self._clock.monotonic()):
            self._balancer.sent(candidate.id, prepared.request_id, works, self._clock.monotonic())
            taken = False
            try:
                response = await self._ask(candidate, request, deadline, len(works))
                taken = True
            except (grpc.aio.AioRpcError, HeadraceError) as error:
                failure = typed(error)
                if not retry_elsewhere(failure):
                    raise failure from error
                _log.info("encoder refused", replica=candidate.id.replica_id, error=str(failure))
                continue
            finally:
                if not taken:
                    self._balancer.failed(candidate.id, prepared.request_id, works, self._clock.monotonic())
            now = self._clock.monotonic()
            self._balancer.answered(candidate.id, prepared.request_id, _answers(works, response), now)
            return candidate, response
        raise failure

    async def _ask(
        self, candidate: Candidate, request: encoder_pb2.EncodeRequest, deadline: float, images: int
    ) -> encoder_pb2.EncodeResponse:
        left = max(0.001, deadline - self._clock.monotonic())
        request.time_left_ms = round(left * 1000)
        with closed_is_unavailable(f"encoder replica {candidate.id.replica_id}"):
            response = await self._workers.encoder(candidate.id).Encode(
                request, timeout=left, metadata=request_metadata()
            )
        if len(response.images) != images:
            raise Internal(f"encoder {candidate.id.replica_id} answered {len(response.images)} images of {images}")
        return response


def _answers(works: Sequence[ImageWork], response: encoder_pb2.EncodeResponse) -> tuple[EncodedImage, ...]:
    """The encoder's answers, for the balancer."""
    return tuple(
        EncodedImage(work.key, image.tokens, image.cached) for work, image in zip(works, response.images, strict=True)
    )


def retry_elsewhere(error: HeadraceError) -> bool:
    """Whether another replica may do what this one did not."""
    retryable = {
        common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED,
        common_pb2.ERROR_CODE_UNAVAILABLE,
        common_pb2.ERROR_CODE_NEVER_FITS,
        common_pb2.ERROR_CODE_NOT_FOUND,
        common_pb2.ERROR_CODE_ABORTED,
        common_pb2.ERROR_CODE_CORRUPT,
        common_pb2.ERROR_CODE_FAILED_PRECONDITION,
        common_pb2.ERROR_CODE_INTERNAL,
        # Between processes of the cluster: one of them has another secret or certificate. Never the client's fault.
        common_pb2.ERROR_CODE_PERMISSION_DENIED,
        common_pb2.ERROR_CODE_UNAUTHENTICATED,
    }
    return error.code in retryable


async def _renew(
    stub: encoder_pb2_grpc.EncoderServiceAsyncStub, leases: list[str], period_s: float, gone: asyncio.Event
) -> None:
    """Keep leases alive until the encoder is known to be gone, or has not answered until they have run out."""
    missed = 0
    while not gone.is_set():
        await asyncio.sleep(period_s)
        try:
            with closed_is_unavailable("the encoder"):
                await stub.Renew(encoder_pb2.EncoderServiceRenewRequest(lease_ids=leases), timeout=period_s)
            missed = 0
        except (Unavailable, grpc.aio.AioRpcError) as failure:
            error = typed(failure)
            missed += 1
            if isinstance(error, Unavailable) or missed >= MISSED_RENEWALS:
                gone.set()
            _log.warning("embedding leases not renewed", error=str(error), gone=gone.is_set())


async def _release(stub: encoder_pb2_grpc.EncoderServiceAsyncStub, leases: list[str]) -> None:
    try:
        with closed_is_unavailable("the encoder"):
            await stub.Release(encoder_pb2.EncoderServiceReleaseRequest(lease_ids=leases), timeout=RELEASE_TIMEOUT_S)
    except (Unavailable, grpc.aio.AioRpcError) as failure:
        _log.info("embedding leases are left to expire", error=str(typed(failure)))
