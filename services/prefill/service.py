"""PrefillService: checks a run, follows it, and cleans up after it in the background."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio

from headrace.engine.messages import Cancel, Event, PrefillDone, PrefillFailed, RowsReady
from headrace.engine.request import EngineRequest, RequestKey
from headrace.kvcache.transfer.base import PeerDescription, TransferEngine
from headrace.kvcache.transfer.errors import PeerRefused, Refusal, TransferError
from headrace.services.prefill.check import Target, check_target
from headrace.services.prefill.commit import Committer
from headrace.services.prefill.embeddings import EmbeddingReceiver, Fetched, first_error
from headrace.services.prefill.hints import take_hints
from headrace.services.prefill.run import Pins, PrefillRun
from headrace.services.prefill.settings import PrefillSection
from headrace.services.prefill.target import HandOverTarget
from headrace.services.runtime import logs, peers
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    HeadraceError,
    Incompatible,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.services.worker.channels import Channels
from headrace.services.worker.constraints import with_grammar
from headrace.services.worker.engine_host import LoadedModel
from headrace.services.worker.engine_link import EngineLink
from headrace.services.worker.recalled import Recalled
from headrace.services.worker.signing import Signer
from headrace.services.worker.spec_wire import engine_request, request_key
from headrace.services.worker.tier.assembly import WorkerTier
from headrace.services.worker.tier.preload import Preloaded
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]
_log = logs.get(__name__)
RETRY_AFTER_S = 0.5
END_TIMEOUT_S = 5.0
"""Longest wait for decode to take the last word of a transfer; if it does not, its rows wait in quarantine."""


@dataclass(eq=False)
class _Entry:
    """A run from its call to its end."""

    run: PrefillRun | None = None
    """None while its embeddings are fetched."""
    stopped: HeadraceError | None = None
    """Why it is to end, told from outside."""


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Serves one engine. Everything here belongs to the event loop's thread."""

    def __init__(
        self,
        settings: PrefillSection,
        loaded: LoadedModel,
        transfer: TransferEngine,
        channels: Channels,
        peer: common_pb2.PeerId,
        receiver: EmbeddingReceiver | None,
        clock: Clock,
        tier: WorkerTier,
        draining: Callable[[], bool],
        signer: Signer,
    ) -> None:
        """`receiver` is None for a model without images."""
        self._tier = tier
        self._settings = settings
        self._loaded = loaded
        self._transfer = transfer
        self._channels = channels
        self._peer = peer
        self._receiver = receiver
        self._clock = clock
        self._draining = draining
        self._signer = signer
        self._runs: dict[RequestKey, _Entry] = {}
        self._closing: dict[asyncio.Task[None], RequestKey] = {}
        """Clean-ups of former runs: their transfers are not terminal."""
        self._recalled = Recalled[RequestKey]()
        """Attempts that were cancelled."""
        self.link: EngineLink
        """Set before the port opens; the link needs `on_events` of this object first."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the engine's load has changed."""
        self._warming: dict[RequestKey, asyncio.Future[None]] = {}
        self.refused = 0
        """Runs refused before the engine took them."""
        self.resends = 0
        """Grants for rows that did not match their checksums."""
        self.pushed_bytes: Counter[str] = Counter()
        """Bytes that landed since start, by transport."""

    @property
    def live(self) -> int:
        """Runs, and transfers of former runs that are not terminal."""
        return len(self._runs) + len(self._closing)

    # --- engine ------------------------------------------------------------------------------------------------

    def on_events(self, events: tuple[Event, ...]) -> None:
        """All events of one turn of the engine."""
        self.on_change()
        for event in events:
            warming = self._warming.get(event.key)
            if warming is not None:
                self._warm(warming, event)
            if isinstance(event, PrefillDone):
                self._tier.speed.measured(event.counts.computed, event.timings.work_s)
            entry = self._runs.get(event.key)
            if entry is not None and entry.run is not None:
                entry.run.deliver(event)
            elif isinstance(event, RowsReady | PrefillDone):
                # Crossed the run's end: nothing was pushed from these rows.
                stray = Pins()
                stray.note(event)
                stray.release(self.link, event.key)

    def await_done(self, key: RequestKey) -> asyncio.Future[None]:
        """Of a prompt that the process sends to its own engine: done with PrefillDone, or failed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._warming[key] = done
        done.add_done_callback(lambda _: self._warming.pop(key))
        return done

    @staticmethod
    def _warm(done: asyncio.Future[None], event: Event) -> None:
        if isinstance(event, PrefillDone) and not done.done():
            done.set_result(None)
        elif isinstance(event, PrefillFailed) and not done.done():
            done.set_exception(event.error)

    # --- calls -------------------------------------------------------------------------------------------------

    async def Run(self, request: prefill_pb2.RunRequest, context: _Context) -> AsyncIterator[prefill_pb2.RunResponse]:
        """See prefill.proto. Refusals are statuses; after Accepted the stream ends with handed_over or failed."""
        peers.require_claim(request.spec.router, field="spec.router")
        key = request_key(request.spec.id, "spec.id")
        if key in self._runs:
            # The first call owns the grant: it is not given up here.
            raise Aborted(f"{key} is running already")
        entry = self._runs[key] = _Entry()
        accepted: prefill_pb2.Accepted | None = None
        try:
            # Tells the router that the grant is this process's to end; only then may it close the stream.
            await context.send_initial_metadata(())
            if key in self._recalled:
                raise Cancelled("the run was cancelled before it arrived")
            checked = self._admit(request)
            self._stop(key.request_id, key.attempt - 1, Aborted(f"overtaken by attempt {key.attempt}"))
            entry.run = run = await self._prepare(request, key, checked, self._clock.monotonic())
            if entry.stopped is not None:
                raise entry.stopped
            accepted = await run.begin(request.target.held_blocks)
            self.on_change()
            yield prefill_pb2.RunResponse(accepted=accepted)
            async with aclosing(run.follow()) as responses:
                async for response in responses:
                    yield response
        finally:
            self.refused += accepted is None
            del self._runs[key]
            if entry.run is not None:
                entry.run.abandon()
            if accepted is None and self._tier.preloader is not None:
                self._tier.preloader.drop(key)
            self._spawn(self._clean_up(request, entry.run), key)

    async def Cancel(
        self, request: prefill_pb2.PrefillServiceCancelRequest, context: _Context
    ) -> prefill_pb2.PrefillServiceCancelResponse:
        """See prefill.proto. The run's stream ends with failed(CANCELLED)."""
        if request.peer.incarnation not in ("", self._peer.incarnation):
            raise FailedPrecondition("another life of this replica is meant", field="peer")
        key = request_key(request.id)
        self._recalled.add(key)
        found = self._stop(key.request_id, key.attempt, Cancelled("the run was cancelled"))
        # Of a run that is being cleaned up the last word is still to come, and this process says it (L7).
        found |= any(
            closing.request_id == key.request_id and closing.attempt <= key.attempt
            for closing in self._closing.values()
        )
        await self.link.call(Cancel(key))
        return prefill_pb2.PrefillServiceCancelResponse(found=found)

    async def hand_over(self, reason: str) -> None:
        """End every run with UNAVAILABLE, so that its router goes elsewhere (L19)."""
        error = Unavailable(f"{reason}; send the request to another replica")
        for key in tuple(self._runs):
            self._stop(key.request_id, key.attempt, error)

    # --- inside ------------------------------------------------------------------------------------------------

    def _stop(self, request_id: str, attempt: int, error: HeadraceError) -> bool:
        """End every run of a request up to an attempt (L16); whether there was one."""
        found = [entry for key, entry in self._runs.items() if key.request_id == request_id and key.attempt <= attempt]
        for entry in found:
            entry.stopped = error
            if entry.run is not None:
                entry.run.stop(error)
        return bool(found)

    def _admit(self, request: prefill_pb2.RunRequest) -> Target:
        """Everything that can be checked before anything is held (L10, L12)."""
        if self._draining():
            raise Unavailable("this replica is draining; send the request to another one")
        if self.live > self._settings.max_runs:
            raise ResourceExhausted(f"{self.live - 1} runs are under way; try again", retry_after_s=RETRY_AFTER_S)
        if self._receiver is not None:
            self._receiver.check(request.spec.image_spans, request.embeddings)
        elif request.spec.image_spans or request.embeddings:
            raise InvalidArgument("this model takes no images", field="embeddings")
        return check_target(request, self._loaded.pool.layout, self._signer)

    async def _prepare(
        self, request: prefill_pb2.RunRequest, key: RequestKey, checked: Target, now: float
    ) -> PrefillRun:
        """Shake hands with decode, fetch the embeddings, load the prefix and compile the constraint, all at once."""
        bare = engine_request(request.spec, self._loaded.facts, now)
        assert bare.deadline is not None
        try:
            async with asyncio.timeout(bare.deadline - now), asyncio.TaskGroup() as group:
                group.create_task(self._connect(checked.agent))
                fetching = group.create_task(self._fetch(request, key, bare.deadline))
                loading = group.create_task(self._load(request, bare))
                compiling = group.create_task(with_grammar(bare, self._loaded.grammars))
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before decode or the encoder answered") from None
        except BaseExceptionGroup as raised:
            raise first_error(raised) from raised
        fetched = fetching.result()
        images = tuple(
            replace(image, embeddings=tensor) for image, tensor in zip(bare.images, fetched.tensors, strict=True)
        )
        target = HandOverTarget(self._transfer, checked.handle)
        committer = self._committer(checked.wire, loading.result())
        whole = replace(compiling.result(), images=images)
        return PrefillRun(whole, target, committer, self.link, fetched, self._clock)

    def _committer(self, wire: prefill_pb2.DecodeTarget, loaded: Preloaded) -> Committer:
        def resent() -> None:
            self.resends += 1

        return Committer(
            wire,
            self._peer,
            self._channels,
            self._transfer,
            self._loaded.token_bytes,
            retries=self._settings.commit_retries,
            resends=self._settings.max_resends,
            loaded=loaded,
            on_resent=resent,
            signer=self._signer,
        )

    async def _connect(self, agent: PeerDescription) -> None:
        try:
            await asyncio.wrap_future(self._transfer.connect(agent))
        except PeerRefused as error:
            if error.reason is Refusal.INCARNATION:  # it died since the router chose it: another one will do
                raise Unavailable(f"decode is gone: {error}") from error
            raise Incompatible(f"decode's transfer agent is refused: {error}", field="target.agent") from error
        except TransferError as error:
            raise Unavailable(f"decode's transfer agent does not answer: {error}") from error

    async def _fetch(self, request: prefill_pb2.RunRequest, key: RequestKey, deadline: float) -> Fetched:
        if self._receiver is None or not request.embeddings:
            return Fetched(())
        return await self._receiver.fetch(key, request.embeddings, deadline)

    async def _load(self, wire: prefill_pb2.RunRequest, request: EngineRequest) -> Preloaded:
        """The prefix from the cache tier: what the router thought of it was a hint."""
        preloader = self._tier.preloader
        if preloader is None:
            return Preloaded()
        if self._tier.peers is not None:
            take_hints(wire, self._loaded.pool.layout, self._tier.peers.source)
        return await preloader.load(request)

    # --- the end of a run --------------------------------------------------------------------------------------

    def _spawn(self, work: Any, key: RequestKey) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._closing[task] = key
        task.add_done_callback(self._closing.pop)

    async def _clean_up(self, request: prefill_pb2.RunRequest, run: PrefillRun | None) -> None:
        """Say the last word of the transfer, then release what its pushes read (L7)."""
        if run is None:
            await self._tell(request, None)
            return
        if not run.handed_over:
            run.target.give_up()
        await run.target.silent()
        self.pushed_bytes.update(run.target.sent)
        run.pins.release(self.link, run.request.key)
        if run.handed_over:
            return
        try:
            await run.target.end()
        except TransferError as error:
            _log.info("the last word goes by RPC", error=str(error))
            await self._tell(request, run.target)

    async def _tell(self, request: prefill_pb2.RunRequest, target: HandOverTarget | None) -> None:
        """EndTransfer, where the wire cannot carry the notice or was never connected."""
        wire = request.target
        if not wire.endpoint:
            return
        landing = wire.landing if target is None else target.wire_handle(wire.peer.replica_id, self._signer)
        quiet = target is None or not target.failed
        outcome = decode_pb2.TRANSFER_OUTCOME_QUIET if quiet else decode_pb2.TRANSFER_OUTCOME_FAILED
        try:
            async with self._channels.use(wire.endpoint) as channel:
                await decode_pb2_grpc.DecodeServiceStub(channel).EndTransfer(
                    decode_pb2.EndTransferRequest(landing=landing, sender=self._peer, outcome=outcome),
                    timeout=END_TIMEOUT_S,
                    metadata=request_metadata(),
                )
        except grpc.aio.AioRpcError as failed:
            error: HeadraceError = from_rpc_error(failed)
            _log.warning("decode could not be told that a transfer ended", error=str(error))

    async def close(self) -> None:
        """Wait a little for clean-ups; what then still hangs on a silent peer is cut by the transfer engine's close."""
        if self._closing:
            await asyncio.wait(self._closing, timeout=1.0)
        for task in tuple(self._closing):
            task.cancel()
