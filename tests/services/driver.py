"""A router in small for tests of the workers: reserves, attaches, runs; every call is real gRPC.

The steps stand apart, so that a test can stop between any two of them.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.seeds import choice_seed
from headrace.services.runtime.ids import new_incarnation
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, encoder_pb2, prefill_pb2, prefill_pb2_grpc
from tests.services.cluster import PATIENCE_S, WorkerProcess

RENEW_S = 0.5
FREEZES = 20
"""Tries to stop a prefill before it has handed over."""
ROOT = bytes(range(32))
ROUTER = common_pb2.PeerId(replica_id="test-router", incarnation=new_incarnation())


def prompt_of(name: str, length: int, *, low: int = 3, high: int = 250) -> tuple[int, ...]:
    """Plain token ids that depend on the name, so that prompts of different names share no prefix."""
    seed = sum(name.encode()) + 7 * len(name)
    return tuple(low + (seed * 31 + index * index * 17 + index * 5) % (high - low) for index in range(length))


def prompt_of_its_own(name: str, length: int) -> tuple[int, ...]:
    """Differs from the first token on from that of any other name: nothing of it is cached anywhere."""
    dice = random.Random(name)
    return tuple(dice.randrange(3, 250) for _ in range(length))


def make_request(name: str, prompt: Sequence[int], **changes: object) -> EngineRequest:
    """What `offline` would run; `spec_of` gives its wire form."""
    fields: dict[str, object] = {
        "key": RequestKey(name, 1),
        "prompt_ids": tuple(prompt),
        "key_root": ROOT,
        "sampling": SamplingParams(temperature=0.0),
        "seed": 11,
        "max_tokens": 12,
        "ignore_eos": True,
        **changes,
    }
    return EngineRequest(**fields)  # type: ignore[arg-type]


def spec_of(
    request: EngineRequest,
    worker: WorkerProcess,
    *,
    attempt: int = 1,
    time_left_s: float = 60.0,
    router: common_pb2.PeerId = ROUTER,
) -> common_pb2.RequestSpec:
    """As the router fills it in."""
    sampling = request.sampling
    replica = worker.replica
    return common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id=request.key.request_id, attempt=attempt),
        model=common_pb2.ModelIdentity(
            name=replica.model_name, model_fingerprint=replica.model_fp, layout_fingerprint=replica.layout_fp
        ),
        token_ids=request.prompt_ids,
        image_spans=[
            common_pb2.ImageSpan(start=image.start, length=image.length, content_digest=image.digest)
            for image in request.images
        ],
        prompt_tokens=len(request.prompt_ids),
        keep_tokens=request.keep_tokens or 0,
        replay_mode=common_pb2.REPLAY_MODE_COMPACT,
        root_key=request.key_root,
        sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=request.seed,
            n=request.n,
            logprobs=sampling.logprobs,
        ),
        stop=common_pb2.StopParams(
            max_tokens=request.max_tokens,
            min_tokens=request.min_tokens,
            ignore_eos=request.ignore_eos,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
        ),
        choices=[
            common_pb2.ChoiceState(
                choice=choice,
                seed=choice_seed(request.seed, choice),
                delivered_token_ids=request.delivered_to(choice),
            )
            for choice in range(request.n)
        ],
        time_left_ms=round(time_left_s * 1000),
        router=router,
        traffic_class=common_pb2.TrafficClass.Value(f"TRAFFIC_CLASS_{request.traffic.name}"),
        cache_namespace=b"" if request.cache is None else request.cache.namespace,
        tenant_tag=b"" if request.cache is None else request.cache.tenant_tag,
    )


@dataclass
class Answer:
    """What one request brought."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finished: dict[int, common_pb2.FinishedEvent] = field(default_factory=dict)
    report: decode_pb2.DecodeReport | None = None

    def add(self, events: decode_pb2.RequestEvents) -> None:
        """Checks order on the way: dense offsets, nothing after an end (L28)."""
        assert self.report is None, "events after the report"
        for tokens in events.tokens:
            assert tokens.choice not in self.finished, "tokens after the terminal event"
            known = self.tokens.setdefault(tokens.choice, [])
            assert tokens.offset == len(known), f"offset {tokens.offset} after {len(known)} tokens"
            known.extend(tokens.token_ids)
            self.text[tokens.choice] = self.text.get(tokens.choice, "") + tokens.text
            self.logprobs.setdefault(tokens.choice, []).extend(each.chosen.logprob for each in tokens.logprobs)
        for finished in events.finished:
            assert finished.choice not in self.finished, "a second terminal event"
            self.finished[finished.choice] = finished
        if events.HasField("report"):
            self.report = events.report


class Stream:
    """An Attach stream: answers by (request, attempt), and unknown ids."""

    def __init__(self, decode: WorkerProcess, router: common_pb2.PeerId) -> None:
        self._outgoing: asyncio.Queue[decode_pb2.AttachRequest | None] = asyncio.Queue()
        self.answers: dict[tuple[str, int], Answer] = {}
        self.unknown: list[tuple[str, int]] = []
        self.responses: list[decode_pb2.AttachResponse] = []
        self.changed = asyncio.Condition()
        self._call = decode_pb2_grpc.DecodeServiceStub(decode.channel).Attach(self._requests())
        self.task = asyncio.create_task(self._read())
        self._router = router
        self._kept: dict[tuple[str, int], decode_pb2.AttachedRequest] = {}
        self._renewing = asyncio.create_task(self._renew())

    async def _requests(self) -> AsyncIterator[decode_pb2.AttachRequest]:
        while (message := await self._outgoing.get()) is not None:
            yield message

    async def _read(self) -> None:
        async for response in self._call:
            async with self.changed:
                self.responses.append(response)
                for events in response.requests:
                    self.answers.setdefault((events.id.request_id, events.id.attempt), Answer()).add(events)
                self.unknown += [(each.request_id, each.attempt) for each in response.unknown]
                self.changed.notify_all()

    def send(
        self,
        *requests: decode_pb2.AttachedRequest,
        cancels: Iterable[decode_pb2.AttachCancel] = (),
        first: bool = False,
    ) -> None:
        self._outgoing.put_nowait(
            decode_pb2.AttachRequest(router=self._router if first else None, requests=requests, cancels=cancels)
        )

    def keep(self, identifier: common_pb2.AttemptId, credit: int = 1 << 20) -> None:
        """Grant credit, and renew the request's lease from now on."""
        attached = decode_pb2.AttachedRequest(id=identifier, credit_tokens=credit)
        self._kept[identifier.request_id, identifier.attempt] = attached
        self.send(attached)

    def forget(self, identifier: common_pb2.AttemptId) -> None:
        """Renew its lease no more."""
        self._kept.pop((identifier.request_id, identifier.attempt), None)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            live = [
                each for key, each in self._kept.items() if key not in self.answers or self.answers[key].report is None
            ]
            self.send(*live)

    async def until(self, condition: str, check: object) -> None:
        """Wait for `check()`; says `condition` when it never comes."""
        try:
            async with asyncio.timeout(PATIENCE_S), self.changed:
                await self.changed.wait_for(check)  # type: ignore[arg-type]
        except TimeoutError:
            raise AssertionError(f"never: {condition}; have {self.answers}") from None

    def answer(self, identifier: common_pb2.AttemptId) -> Answer:
        return self.answers.setdefault((identifier.request_id, identifier.attempt), Answer())

    def start_at(self, request_id: str, attempt: int, delivered: dict[int, list[int]]) -> None:
        """The answer begins with what an earlier attempt delivered."""
        tokens = {choice: list(ids) for choice, ids in delivered.items()}
        self.answers[request_id, attempt] = Answer(tokens=tokens)

    async def complete(self, identifier: common_pb2.AttemptId) -> Answer:
        """The whole answer, report included."""
        await self.until("the report", lambda: self.answer(identifier).report is not None)
        return self.answer(identifier)

    async def close(self) -> None:
        self._renewing.cancel()
        self._outgoing.put_nowait(None)
        self._call.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Frozen:
    """A request whose prefill was stopped in mid-push."""

    id: common_pb2.AttemptId
    call: AsyncIterator[prefill_pb2.RunResponse]
    rows: int
    """Landing rows that it was granted."""


@dataclass
class Driver:
    """Both workers and a stream."""

    prefill: WorkerProcess
    decode: WorkerProcess
    stream: Stream
    router: common_pb2.PeerId

    async def reserve(self, spec: common_pb2.RequestSpec, *, compute_here: bool = False) -> decode_pb2.ReserveResponse:
        stub = decode_pb2_grpc.DecodeServiceStub(self.decode.channel)
        sender = None if compute_here else self.prefill.peer
        request = decode_pb2.ReserveRequest(spec=spec, sender=sender, compute_here=compute_here)
        return await stub.Reserve(request, timeout=PATIENCE_S)

    def run(
        self,
        spec: common_pb2.RequestSpec,
        reserved: decode_pb2.ReserveResponse,
        embeddings: Sequence[encoder_pb2.EmbeddingHandle] = (),
    ) -> AsyncIterator[prefill_pb2.RunResponse]:
        """The call; iterate it, or cancel it."""
        request = prefill_pb2.RunRequest(
            spec=spec,
            embeddings=embeddings,
            target=prefill_pb2.DecodeTarget(
                peer=self.decode.peer,
                endpoint=self.decode.replica.endpoint,
                agent=reserved.agent,
                landing=reserved.landing,
                held_blocks=reserved.held_blocks,
            ),
        )
        return prefill_pb2_grpc.PrefillServiceStub(self.prefill.channel).Run(request, timeout=PATIENCE_S)

    async def freeze_in_push(self, name: str, length: int) -> Frozen:
        """Begin a request of so many tokens that nothing is cached of, and stop its prefill when rows are on the way.
        It is renewed until it is forgotten. One that was handed over before prefill stood still goes on to its end."""
        for number in range(FREEZES):
            request = make_request(f"{name}-{number}", prompt_of_its_own(f"{name}-{number}", length))
            spec = spec_of(request, self.decode, router=self.router)
            reserved = await self.reserve(spec)
            self.stream.keep(spec.id)
            call = self.run(spec, reserved)
            async for response in call:
                if response.HasField("progress") and response.progress.rows_pushed:
                    break
            await self.prefill.freeze()
            rows = len(reserved.landing.parts[0].rows)
            pools = {pool.name: pool for pool in (await self.decode.status()).pools}
            if pools["landing_rows"].used == rows:
                return Frozen(spec.id, call, rows)
            self.prefill.send(signal.SIGCONT)
            async for _ in call:
                pass
            await self.stream.complete(spec.id)
        raise AssertionError("every run ended before it was frozen")

    async def generate(self, request: EngineRequest, **options: object) -> Answer:
        """The whole way of a request."""
        spec = spec_of(request, self.decode, router=self.router)
        reserved = await self.reserve(spec)
        self.stream.keep(spec.id)
        responses = [response async for response in self.run(spec, reserved, **options)]  # type: ignore[arg-type]
        kinds = [response.WhichOneof("event") for response in responses]
        assert kinds[0] == "accepted", responses
        assert kinds[-1] == "handed_over", responses
        return await self.stream.complete(spec.id)

    async def generate_here(self, request: EngineRequest) -> Answer:
        """The prompt is computed by decode: no prefill takes part."""
        spec = spec_of(request, self.decode, router=self.router)
        reserved = await self.reserve(spec, compute_here=True)
        assert not reserved.HasField("landing")
        self.stream.keep(spec.id)
        return await self.stream.complete(spec.id)

    async def release(self, identifier: common_pb2.AttemptId) -> bool:
        stub = decode_pb2_grpc.DecodeServiceStub(self.decode.channel)
        response = await stub.Release(
            decode_pb2.DecodeServiceReleaseRequest(id=identifier, reason=common_pb2.FINISH_REASON_CANCELLED),
            timeout=PATIENCE_S,
        )
        return response.found


@asynccontextmanager
async def attached(
    prefill: WorkerProcess, decode: WorkerProcess, router: common_pb2.PeerId = ROUTER
) -> AsyncIterator[Driver]:
    """A driver with an open stream."""
    stream = Stream(decode, router)
    stream.send(first=True)
    try:
        await stream.until("an open stream", lambda: bool(stream.responses))
        assert stream.responses[0].decode == decode.peer
        yield Driver(prefill, decode, stream, router)
    finally:
        await stream.close()
