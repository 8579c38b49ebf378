"""`headrace keys`: API keys of a store that routers follow (services/router/key_stores.py)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from headrace.cli.exits import CliError, Exit
from headrace.services.router.api_keys import KeyRecord, KeyRole, KeysDocument, TenantLimits, mint
from headrace.services.router.key_stores import Change, KeyStore, KeyStoreError, open_keys
from headrace.services.router.settings import RouterSettings
from headrace.services.runtime.settings_load import SettingsError, load
from headrace.services.runtime.tls import open_tls


@dataclass(frozen=True)
class StoreOptions:
    """Which store: `where` as router.keys has it, or what the settings say."""

    where: str | None
    config: Path | None
    sets: Sequence[str]


def create(
    store: StoreOptions,
    role: KeyRole,
    name: str,
    *,
    days: float | None,
    limits: dict[str, Any],
    as_json: bool,
) -> None:
    """Make a key and print it, once. `limits`: fields of TenantLimits; given ones replace the tenant's."""
    try:
        key, record = mint(role, name, seconds=None if days is None else days * 86400)
        given = TenantLimits.model_validate(limits) if limits else None
    except ValidationError as error:
        raise CliError(_problem(error)) from None

    def change(document: KeysDocument) -> KeysDocument:
        if given is not None and role is KeyRole.TENANT:
            before = document.tenants.get(name, TenantLimits())
            merged = before.model_copy(update={field: getattr(given, field) for field in limits})
            return document.with_key(record, merged)
        return document.with_key(record)

    _run(store, change)
    if as_json:
        print(json.dumps({"key": key, **_shown(record, time.time())}))
    else:
        print(key)


def revoke(store: StoreOptions, key_id: str) -> None:
    """End a key. Routers refuse it within seconds."""

    def change(document: KeysDocument) -> KeysDocument:
        try:
            return document.without(key_id, time.time())
        except KeyError:
            raise CliError(f"no key has the id {key_id}; see `headrace keys list`") from None

    _run(store, change)
    print(f"{key_id} is revoked")


def show(store: StoreOptions, *, as_json: bool) -> None:
    """List keys, never their values."""
    document = _run(store, None)
    now = time.time()
    rows = [_shown(key, now) for key in document.keys]
    if as_json:
        tenants = {name: limits.model_dump() for name, limits in document.tenants.items()}
        print(json.dumps({"keys": rows, "tenants": tenants}, indent=1))
        return
    table = Table(header_style="bold")
    for column in ("id", "role", "name", "state", "created", "expires"):
        table.add_column(column)
    for row in rows:
        times = (_date(row["created"]), _date(row["expires"]))
        table.add_row(row["id"], row["role"], row["name"], row["state"], *times)
    Console().print(table)


def _shown(key: KeyRecord, now: float) -> dict[str, Any]:
    return {
        "id": key.id,
        "role": key.role.value,
        "name": key.name,
        "state": key.state(now),
        "created": key.created,
        "expires": key.expires,
        "revoked": key.revoked,
    }


def _date(seconds: float | None) -> str:
    return "–" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _run(options: StoreOptions, change: Change | None) -> KeysDocument:
    async def work() -> KeysDocument:
        store = _open(options)
        try:
            return await store.read() if change is None else await store.update(change)
        finally:
            await store.close()

    try:
        return asyncio.run(work())
    except (KeyStoreError, SettingsError) as error:
        raise CliError(str(error), Exit.FAILED) from error


def _open(options: StoreOptions) -> KeyStore:
    settings = load(RouterSettings, options.config, options.sets)
    where = options.where or settings.router.keys
    if where is None:
        raise CliError("which keys? name --store FILE, --store etcd, or a --config that sets router.keys")
    return open_keys(where, settings.registry, settings.rpc, open_tls(settings.tls))


def _problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where}: {problem['msg']}"
