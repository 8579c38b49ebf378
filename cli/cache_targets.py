"""What `headrace cache` works on: a running cluster through its router, or a store's folder without one.

Both answer with the messages of ControlService, so that what is shown does not depend on the way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from headrace.cli.client import RouterClient
from headrace.cli.client_tls import client_tls
from headrace.cli.exits import CliError, Exit
from headrace.cli.store_secret import SECRET_FILE, VARIABLE, store_secret
from headrace.services.runtime.errors import NotFound
from headrace.v1 import control_pb2, inference_pb2


class CacheTarget(Protocol):
    """The operations; each raises HeadraceError."""

    def cache_stats(self) -> control_pb2.CacheStatsResponse: ...

    def clear_cache(self, request: control_pb2.ClearCacheRequest) -> control_pb2.ClearCacheResponse: ...

    def find_cache(self, request: control_pb2.FindCacheRequest) -> control_pb2.FindCacheResponse: ...

    def pin_cache(self, request: control_pb2.PinCacheRequest) -> control_pb2.PinCacheResponse: ...

    def collect_cache(self) -> control_pb2.CollectCacheResponse: ...

    def verify_cache(self) -> Iterator[control_pb2.VerifyCacheResponse]: ...


class OfflineStore:
    """A store opened by this process. `name_keys` turns a prompt and a tenant into keys, for find and pin; `tag` turns
    a tenant into its tag."""

    def __init__(
        self,
        store: object,
        name_keys: Callable[[inference_pb2.Prompt, str], tuple[control_pb2.CacheKeys, int, int]],
        tag: Callable[[str], bytes],
    ) -> None:
        from headrace.kvcache.store.base import Store
        from headrace.services.runtime.cache_control import ProcessCaches
        from headrace.services.runtime.cache_operations import CacheControls

        assert isinstance(store, Store)
        self._caches = ProcessCaches(CacheControls(store=store))
        self._name_keys = name_keys
        self._tag = tag

    def cache_stats(self) -> control_pb2.CacheStatsResponse:
        """Of the store alone."""
        return asyncio.run(self._caches.stats(control_pb2.CacheStatsRequest(), ()))

    def clear_cache(self, request: control_pb2.ClearCacheRequest) -> control_pb2.ClearCacheResponse:
        """In the store alone. Raises NotFound for a tenant of whom there is nothing."""
        if request.WhichOneof("scope") != "tenant":
            return asyncio.run(self._caches.clear(request, ()))
        by_tag = control_pb2.ClearCacheRequest(tenant_tag=self._tag(request.tenant))
        answer = asyncio.run(self._caches.clear(by_tag, ()))
        if not (answer.blocks or answer.snapshots):
            raise NotFound(
                f"the store holds nothing of a tenant {request.tenant!r}; check the name, and that the secret is the "
                "cluster's",
                field="tenant",
            )
        return answer

    def find_cache(self, request: control_pb2.FindCacheRequest) -> control_pb2.FindCacheResponse:
        """Which blocks the store has."""
        keys, length, block_tokens = self._name_keys(request.prompt, request.tenant)
        found = asyncio.run(self._caches.find(control_pb2.FindCacheRequest(keys=keys), ()))
        for index, block in enumerate(found.blocks):
            block.end_tokens = (index + 1) * block_tokens
        found.prompt_tokens, found.block_tokens = length, block_tokens
        found.needs_snapshots = bool(keys.snapshots)
        return found

    def pin_cache(self, request: control_pb2.PinCacheRequest) -> control_pb2.PinCacheResponse:
        """Keep what the store has of a prompt."""
        keys, length, block_tokens = self._name_keys(request.prompt, request.tenant)
        answer = asyncio.run(self._caches.pin(control_pb2.PinCacheRequest(keys=keys), ()))
        answer.usable_tokens, answer.prompt_tokens = answer.usable_blocks * block_tokens, length
        return answer

    def collect_cache(self) -> control_pb2.CollectCacheResponse:
        """One pass of the sweeper, if no other process is at it."""
        return asyncio.run(self._caches.collect(control_pb2.CollectCacheRequest(), ()))

    def verify_cache(self) -> Iterator[control_pb2.VerifyCacheResponse]:
        """Progress, and the result last."""
        with asyncio.Runner() as runner:
            messages = self._caches.verify(control_pb2.VerifyCacheRequest(), ())
            while True:
                try:
                    yield runner.run(_next(messages))
                except StopAsyncIteration:
                    return


async def _next(messages: object) -> control_pb2.VerifyCacheResponse:
    return await anext(messages)  # type: ignore[call-overload,no-any-return]


@contextmanager
def cluster(router: str, api_key: str | None) -> Iterator[CacheTarget]:
    """A running cluster, by its router."""
    with RouterClient(router, api_key=api_key, tls=client_tls(router)) as client:
        yield client


@contextmanager
def store_folder(
    folder: Path, index: str, model: Path | None, sets: Sequence[str], secret: str | None
) -> Iterator[CacheTarget]:
    """A store on disk. `model`, `sets` and `secret` say what prompts and tenants are there; find, pin and drop-tenant
    need them. Raises CliError when there is no store, or it cannot be written."""
    from headrace.kvcache.store.base import StoreError
    from headrace.kvcache.store.open import StoreSettings, open_store

    try:
        found = (folder / "v1").is_dir() or (folder / "writers").is_dir()
    except OSError as error:
        raise CliError(f"{folder} cannot be read: {error.strerror}; run this as the store's owner") from error
    if not found:
        raise CliError(f"{folder} is no store (it has neither v1 nor writers); name the directory of cache.store")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise CliError(
            f"{folder} cannot be written: even to look into a store is to open it, with a lock and an index; run this "
            "as its owner, mount it writable, or copy it elsewhere"
        )
    try:
        store = open_store(StoreSettings(f"file://{folder.resolve()}", index=index))
    except StoreError as error:
        raise CliError(str(error)) from error

    def name_keys(prompt: inference_pb2.Prompt, tenant: str) -> tuple[control_pb2.CacheKeys, int, int]:
        if model is None:
            raise CliError("--store needs --model to name a prompt's keys")
        from headrace.cli.cache_keys import offline_keys

        return offline_keys(model, sets, _secret(folder, secret), prompt, tenant)

    def tag(tenant: str) -> bytes:
        from headrace.services.router.tenants import tenant_tag

        return tenant_tag(_secret(folder, secret).encode(), tenant)

    try:
        yield OfflineStore(store, name_keys, tag)
    finally:
        store.close()


def _secret(folder: Path, secret: str | None) -> str:
    """The one given, else the one that `headrace up --store` keeps beside the store."""
    if secret is not None:
        return secret
    if not (folder / SECRET_FILE).is_file():
        raise CliError(
            f"{folder} has no {SECRET_FILE}, and without a router the cluster's secret is needed: put its "
            f"router.salt_secret into {VARIABLE}",
            Exit.USAGE,
        )
    return store_secret(folder)
