"""Where the document of API keys lies: a file, or etcd beside the membership.

A file is right for one machine, and wherever all routers mount one file system. etcd is right for several: every router
watches the key and hears of a revocation at once. Both change the document as a whole, atomically.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from headrace.services.router.api_keys import KeysDocument
from headrace.services.runtime import logs
from headrace.services.runtime.files import Stamp, stamp_of, write_whole
from headrace.services.runtime.registry._etcd import rpc_pb2 as pb
from headrace.services.runtime.registry.base import RegistryError
from headrace.services.runtime.registry.etcd_client import EtcdClient
from headrace.services.runtime.registry.open import etcd_tls
from headrace.services.runtime.settings import RegistrySettings, RpcSettings
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.runtime.tls import Tls

ETCD: Final = "etcd"
"""The value of router.keys that means the registry's etcd."""
POLL_SECONDS: Final = 1.0
"""How often a file is looked at, and the pause after a failure."""
ATTEMPTS: Final = 10
Change = Callable[[KeysDocument], KeysDocument]
_log = logs.get(__name__)


class KeyStoreError(Exception):
    """The store cannot be read or written; the message says why and names no key."""


class KeyStore(Protocol):
    """One document."""

    async def read(self) -> KeysDocument:
        """The document now; an empty one where there is none yet. Raises KeyStoreError."""
        ...

    async def update(self, change: Change) -> KeysDocument:
        """Replace it atomically by `change` of it. Raises KeyStoreError, and what `change` raises."""
        ...

    def follow(self) -> AsyncGenerator[KeysDocument, None]:
        """The document now and after every change, for ever; while the store fails, silence."""
        ...

    async def close(self) -> None: ...


def open_keys(where: str, registry: RegistrySettings, rpc: RpcSettings, tls: Tls | None) -> KeyStore:
    """The store of router.keys. Raises SettingsError."""
    if where != ETCD:
        return FileKeys(Path(where))
    if registry.kind != "etcd":
        raise SettingsError("router.keys=etcd needs registry.kind=etcd; name a file instead")
    return EtcdKeys(registry, rpc, tls)


def _parse(text: str | bytes, where: str) -> KeysDocument:
    try:
        return KeysDocument.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(str(part) for part in problem["loc"])
        raise KeyStoreError(f"{where} is no document of keys: {at or 'it'}: {problem['msg']}") from None


class FileKeys:
    """A JSON file of this user's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self) -> KeysDocument:
        return self._read()

    async def update(self, change: Change) -> KeysDocument:
        return await asyncio.to_thread(self._update, change)

    async def follow(self) -> AsyncGenerator[KeysDocument, None]:
        seen: object = ()
        told = False
        while True:
            try:
                stamp = self._stamp()
                if stamp != seen:
                    document = self._read()
                    if self._stamp() == stamp:
                        seen, told = stamp, False
                        yield document
            except KeyStoreError as error:
                if not told:
                    _log.warning("the API keys cannot be read; the former ones stay in force", error=str(error))
                told = True
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        """Nothing is open."""

    def _stamp(self) -> Stamp | None:
        try:
            return stamp_of(self._path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise KeyStoreError(f"{self._path}: {error.strerror}") from error

    def _read(self) -> KeysDocument:
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return KeysDocument()
        except OSError as error:
            raise KeyStoreError(f"cannot read {self._path}: {error.strerror}") from error
        return _parse(text, str(self._path))

    def _update(self, change: Change) -> KeysDocument:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self._path.with_name(f".{self._path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                document = change(self._read())
                write_whole(self._path, f"{document.model_dump_json(indent=1)}\n".encode(), 0o600, sync=True)
            finally:
                os.close(lock)
        except OSError as error:
            raise KeyStoreError(f"cannot write {self._path}: {error.strerror}") from error
        return document


class EtcdKeys:
    """One pair in etcd, under the registry's prefix."""

    def __init__(self, registry: RegistrySettings, rpc: RpcSettings, tls: Tls | None) -> None:
        endpoints = [endpoint.strip() for endpoint in registry.address.split(",") if endpoint.strip()]
        self._client = EtcdClient(endpoints, rpc, 5.0, etcd_tls(registry, tls))
        self._key = registry.prefix.encode() + b"api-keys"

    async def read(self) -> KeysDocument:
        document, _ = await self._read()
        return document

    async def update(self, change: Change) -> KeysDocument:
        for _ in range(ATTEMPTS):
            old, revision = await self._read()
            new = change(old)
            same = pb.Compare(result=pb.Compare.EQUAL, target=pb.Compare.MOD, key=self._key, mod_revision=revision)
            try:
                if await self._client.put_if(self._key, new.model_dump_json().encode(), 0, same):
                    return new
            except RegistryError as error:
                raise KeyStoreError(str(error)) from error
        raise KeyStoreError("the keys kept changing; try again")

    async def follow(self) -> AsyncGenerator[KeysDocument, None]:
        told = False
        while True:
            try:
                pairs, revision = await self._client.read_prefix(self._key)
                document = _parse(pairs[0].value, "etcd") if pairs else KeysDocument()
                told = False
                yield document
                async with aclosing(self._client.watch_prefix(self._key, revision + 1)) as changes:
                    async for _ in changes:
                        break
                continue
            except (RegistryError, KeyStoreError) as error:
                if not told:
                    _log.warning("the API keys cannot be read; the former ones stay in force", error=str(error))
                told = True
            await asyncio.sleep(POLL_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def _read(self) -> tuple[KeysDocument, int]:
        """The document and the revision of its last change, 0 for none."""
        try:
            pair = await self._client.read(self._key)
        except RegistryError as error:
            raise KeyStoreError(str(error)) from error
        return (KeysDocument(), 0) if pair is None else (_parse(pair.value, "etcd"), pair.mod_revision)
