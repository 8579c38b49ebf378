"""Operators' cache calls at the router: who asks, which keys a prompt has, and all workers' answers as one.

The store is one for all workers that share it: what has to be done once there (verify, collect, pin, an entry's place)
is asked of one worker, what changes what each holds of all. A worker that fails is told beside the others' answers,
never left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import grpc.aio

from headrace.kvcache.keys import Key, block_keys, namespace, root_key, snapshot_key
from headrace.services.router.model import ServedModel
from headrace.services.router.prepare import tokenize
from headrace.services.router.settings import RouterSettings
from headrace.services.router.shared_stores import merge_drops, merge_stats
from headrace.services.router.tenants import TENANT, TenantKeys, Tenants
from headrace.services.router.workers import ModelGroup, Worker, Workers
from headrace.services.runtime import logs
from headrace.services.runtime.cache_operations import Metadata
from headrace.services.runtime.errors import (
    FailedPrecondition,
    HeadraceError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unimplemented,
    closed_is_unavailable,
    from_rpc_error,
    to_proto,
)
from headrace.services.runtime.intercept import request_metadata
from headrace.services.runtime.registry.base import Role
from headrace.v1 import control_pb2, control_pb2_grpc, inference_pb2

T = TypeVar("T")
_log = logs.get(__name__)
ASK_SECONDS: Final = 15.0
"""Deadline of a worker's answer to a question."""
CHANGE_SECONDS: Final = 300.0
"""Deadline of a worker's change: dropping a tenant walks an index."""
HEAD_START_SECONDS: Final = 30.0
"""How long a change waits for the one worker before the others: a hung one must not keep them from an erasure."""
LEADERS: Final = 4
"""Workers that are asked one after the other for the first with a store."""
_Stub: TypeAlias = "control_pb2_grpc.ControlServiceAsyncStub"


class ClusterCaches:
    """CacheOperations over all prefill and decode replicas that this router knows."""

    def __init__(self, settings: RouterSettings, model: ServedModel, tenants: Tenants, workers: Workers) -> None:
        self._settings = settings
        self._model = model
        self._tenants = tenants
        self._workers = workers

    async def stats(self, request: control_pb2.CacheStatsRequest, metadata: Metadata) -> control_pb2.CacheStatsResponse:
        """See control.proto."""
        _log.info("operator asked for statistics", operator=self._tenants.operator(metadata))
        merged = control_pb2.CacheStatsResponse()
        answers, merged_failures = await self._all(lambda stub: stub.CacheStats(request, timeout=ASK_SECONDS))
        tiers = []
        for worker, answer in answers:
            for tier in answer.tiers:
                tier.replica.CopyFrom(worker.peer)
                tiers.append(tier)
        merged.tiers.extend(merge_stats(tiers))
        merged.failures.extend(merged_failures)
        return merged

    async def clear(self, request: control_pb2.ClearCacheRequest, metadata: Metadata) -> control_pb2.ClearCacheResponse:
        """See control.proto. A tenant's name becomes its tag here; a foreign namespace is not sought in device pools,
        which hold this model's alone.

        Raises NotFound for a tenant that is not served and of whom nothing was found where tenants are known: most
        likely a typing error. One that left the file is erased all the same."""
        operator = self._tenants.operator(metadata)
        asked = control_pb2.ClearCacheRequest()
        asked.CopyFrom(request)
        scope = request.WhichOneof("scope")
        if scope == "tenant":
            if not request.tenant:
                raise InvalidArgument("name the tenant", field="tenant")
            asked.tenant_tag = self._tenants.tag(request.tenant)
        if scope == "namespace" and request.namespace != self._namespace(self._workers.group()):
            device = control_pb2.CACHE_TIER_DEVICE
            known = list(request.tiers) or [control_pb2.CACHE_TIER_HOST, control_pb2.CACHE_TIER_STORE]
            asked.tiers[:] = [tier for tier in known if tier != device]
            if not asked.tiers:
                return control_pb2.ClearCacheResponse()
        in_store = not asked.tiers or control_pb2.CACHE_TIER_STORE in asked.tiers
        answers, failures = await self._all(
            lambda stub: stub.ClearCache(asked, timeout=CHANGE_SECONDS),
            # Every replica has to drop what it has in flight, but the first one finds what a shared store holds.
            alone=_has_no_store if in_store else None,
        )
        drops = []
        for worker, answer in answers:
            for drop in answer.drops:
                drop.replica.CopyFrom(worker.peer)
                drops.append(drop)
        drops = merge_drops(drops)
        merged = control_pb2.ClearCacheResponse(
            drops=drops,
            blocks=sum(drop.blocks for drop in drops),
            snapshots=sum(drop.snapshots for drop in drops),
            failures=failures,
        )
        found = any(
            drop.blocks or drop.snapshots for drop in merged.drops if drop.tier != control_pb2.CACHE_TIER_DEVICE
        )
        _log.warning(
            "operator cleared caches",
            operator=operator,
            scope=scope,
            tenant=request.tenant or None,
            namespace=request.namespace.hex() or None,
            blocks=merged.blocks,
            snapshots=merged.snapshots,
            failed=len(failures),
        )
        if scope == "tenant" and not (found or failures or self._tenants.serves(request.tenant)):
            raise NotFound(
                f"no tenant {request.tenant!r} is served by this router, and neither host tiers nor store held anything"
                " of it; check the name (device pools do not know tenants and were emptied)",
                field="tenant",
            )
        return merged

    async def find(self, request: control_pb2.FindCacheRequest, metadata: Metadata) -> control_pb2.FindCacheResponse:
        """See control.proto. The index of a shared store is asked once: the first worker's answer stands for all."""
        operator = self._tenants.operator(metadata)
        _log.info("operator looked for a prompt", operator=operator, tenant=request.tenant or TENANT)
        group = self._workers.group()
        keys, length = await self._keys(request, group)
        asked = control_pb2.FindCacheRequest(keys=keys)
        answers, failures = await self._all(lambda stub: stub.FindCache(asked, timeout=ASK_SECONDS))
        merged = control_pb2.FindCacheResponse(
            blocks=[
                control_pb2.FoundBlock(key=key, end_tokens=(index + 1) * group.block_tokens)
                for index, key in enumerate(keys.blocks)
            ],
            prompt_tokens=length,
            block_tokens=group.block_tokens,
            failures=failures,
            needs_snapshots=bool(self._model.window),
        )
        for worker, answer in answers:
            for mine, theirs in zip(merged.blocks, answer.blocks, strict=True):
                _merge(mine.places, theirs.places, worker)
                _merge(mine.snapshot_places, theirs.snapshot_places, worker)
        return merged

    async def pin(self, request: control_pb2.PinCacheRequest, metadata: Metadata) -> control_pb2.PinCacheResponse:
        """See control.proto."""
        operator = self._tenants.operator(metadata)
        group = self._workers.group()
        keys, length = await self._keys(request, group)
        asked = control_pb2.PinCacheRequest(keys=keys)
        _, answer = await self._one(lambda stub: stub.PinCache(asked, timeout=CHANGE_SECONDS))
        answer.usable_tokens = answer.usable_blocks * group.block_tokens
        answer.prompt_tokens = length
        _log.warning("operator pinned", operator=operator, pinned=answer.pinned, usable_tokens=answer.usable_tokens)
        return answer

    async def verify(
        self, request: control_pb2.VerifyCacheRequest, metadata: Metadata
    ) -> AsyncIterator[control_pb2.VerifyCacheResponse]:
        """See control.proto: one worker reads the store."""
        operator = self._tenants.operator(metadata)
        worker, _ = await self._one(self._store_of)
        _log.info("operator verifies the store", operator=operator, replica=worker.replica.id)
        call = _stub(worker).VerifyCache(request, metadata=request_metadata())
        try:
            async for response in call:
                response.replica.CopyFrom(worker.peer)
                yield response
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def collect(
        self, request: control_pb2.CollectCacheRequest, metadata: Metadata
    ) -> control_pb2.CollectCacheResponse:
        """See control.proto."""
        operator = self._tenants.operator(metadata)
        # Of the processes that share a store one is its sweeper, and only it can collect.
        worker, answer = await self._one(
            lambda stub: stub.CollectCache(request, timeout=CHANGE_SECONDS), enough=lambda found: not found.refused
        )
        answer.replica.CopyFrom(worker.peer)
        _log.info("operator collected", operator=operator, replica=worker.replica.id, freed_bytes=answer.freed_bytes)
        return answer

    # --- keys --------------------------------------------------------------------------------------------------

    def _namespace(self, group: ModelGroup) -> bytes:
        return namespace(group.model_fp, group.row_fp, self._model.text_digest)

    async def _keys(
        self, request: control_pb2.FindCacheRequest | control_pb2.PinCacheRequest, group: ModelGroup
    ) -> tuple[control_pb2.CacheKeys, int]:
        """Keys of a prompt, and its length; given keys stay as they are."""
        if request.WhichOneof("of") != "prompt":
            return request.keys, len(request.keys.blocks) * group.block_tokens
        tenant = self._tenants.keys_of(request.tenant or TENANT)
        return await asyncio.to_thread(prompt_keys, request.prompt, tenant, self._model, group, self._settings)

    # --- workers -----------------------------------------------------------------------------------------------

    def _engines(self) -> list[Worker]:
        workers = [each for each in self._workers.all() if each.replica.role in (Role.PREFILL, Role.DECODE)]
        if not workers:
            raise Unavailable("no prefill or decode replica is known; try again shortly", retry_after_s=1.0)
        return sorted(workers, key=lambda each: (each.replica.role is Role.DECODE, each.replica.id))

    async def _all(
        self, ask: Callable[[_Stub], Awaitable[T]], alone: Callable[[T], bool] | None = None
    ) -> tuple[list[tuple[Worker, T]], list[control_pb2.CacheFailure]]:
        """Every worker's answer, prefill first, and who did not give one. Raises the failure if it is everybody's.

        Together; or, given `alone`, one after the other while answers are such (of the first few workers, since most
        clusters have a store in all of them or in none), and those who are left together."""
        workers = self._engines()
        tasks: list[asyncio.Task[T | HeadraceError]] = []
        async with asyncio.TaskGroup() as asking:
            for worker in workers:
                tasks.append(task := asking.create_task(_ask(worker, ask)))
                if alone is not None and len(tasks) <= LEADERS:
                    await asyncio.wait({task}, timeout=HEAD_START_SECONDS)
                    answer = task.result() if task.done() else None
                    if answer is None or isinstance(answer, HeadraceError) or not alone(answer):
                        alone = None
        answers = [task.result() for task in tasks]
        good: list[tuple[Worker, T]] = []
        failures: list[control_pb2.CacheFailure] = []
        last: HeadraceError | None = None
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, HeadraceError):
                failures.append(control_pb2.CacheFailure(replica=worker.peer, error=to_proto(answer)))
                last = answer
            else:
                good.append((worker, answer))
        if not good and last is not None:
            raise last
        return good, failures

    async def _one(
        self, ask: Callable[[_Stub], Awaitable[T]], enough: Callable[[T], bool] = lambda answer: True
    ) -> tuple[Worker, T]:
        """The answer of the first worker that has a store, can be reached and says `enough`; else the last answer."""
        failure: HeadraceError = Unavailable("no replica answered")
        lacking: tuple[Worker, T] | None = None
        for worker in self._engines():
            answer = await _ask(worker, ask)
            if not isinstance(answer, HeadraceError):
                if enough(answer):
                    return worker, answer
                lacking = worker, answer
                continue
            failure = answer
            if not isinstance(answer, FailedPrecondition | Unavailable):
                break
        if lacking is not None:
            return lacking
        raise failure

    async def _store_of(self, stub: _Stub) -> None:
        stats = await stub.CacheStats(control_pb2.CacheStatsRequest(), timeout=ASK_SECONDS)
        if all(tier.tier != control_pb2.CACHE_TIER_STORE for tier in stats.tiers):
            raise FailedPrecondition("no worker has a store; set cache.store")


def prompt_keys(
    prompt: inference_pb2.Prompt,
    tenant: TenantKeys,
    model: ServedModel,
    group: ModelGroup,
    settings: RouterSettings,
) -> tuple[control_pb2.CacheKeys, int]:
    """Block and snapshot keys of a prompt as a request has them (place.py), and its length.

    Raises InvalidArgument as for a request, Unimplemented for images, whose geometry only an encoder knows.
    """
    tokenized = tokenize(prompt, model, settings.requests)
    if tokenized.images:
        raise Unimplemented("prompt", "keys of prompts with images are not told; leave the images out")
    root = root_key(group.model_fp, group.row_fp, model.text_digest, tenant.salt)
    blocks: Sequence[Key] = block_keys(root, tokenized.token_ids, group.block_tokens)
    snapshots: Sequence[Key] = ()
    if model.window:
        ring = model.window + settings.replay.backtracking
        snapshots = [snapshot_key(key, ring) for key in blocks]
    return control_pb2.CacheKeys(blocks=blocks, snapshots=snapshots), len(tokenized.token_ids)


def _stub(worker: Worker) -> _Stub:
    stub: _Stub = control_pb2_grpc.ControlServiceStub(worker.channel)
    return stub


async def _ask(worker: Worker, ask: Callable[[_Stub], Awaitable[T]]) -> T | HeadraceError:
    try:
        with closed_is_unavailable(f"replica {worker.replica.id}"):
            return await ask(_stub(worker))
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    except HeadraceError as error:
        return error


def _has_no_store(answer: control_pb2.ClearCacheResponse) -> bool:
    return all(drop.tier != control_pb2.CACHE_TIER_STORE for drop in answer.drops)


def _merge(mine: object, theirs: Sequence[control_pb2.CachePlace], worker: Worker) -> None:
    """Add a worker's places; an entry of a store that is there already comes once."""
    places: list[control_pb2.CachePlace] = mine  # type: ignore[assignment]
    for place in theirs:
        stored = place.tier == control_pb2.CACHE_TIER_STORE
        if stored and any(other.tier == place.tier and other.bucket == place.bucket for other in places):
            continue
        if not stored:
            place.replica.CopyFrom(worker.peer)
        places.append(place)
