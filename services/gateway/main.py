"""The gateway process: read the tokenizers, ask the routers, serve HTTP."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from headrace.engine.text.errors import TextError
from headrace.services.gateway.app import Gateway
from headrace.services.gateway.response_store import open_store
from headrace.services.gateway.routes import make_app
from headrace.services.gateway.server import HttpServer, HttpsFiles
from headrace.services.gateway.settings import GatewaySettings, ModelEntry
from headrace.services.gateway.upstream import Upstream, Upstreams, load_assets
from headrace.services.runtime import logs
from headrace.services.runtime.lifecycle import Lifecycle, run_service
from headrace.services.runtime.metrics import Metrics
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.runtime.tls import Tls, open_tls

POLL_S: Final = 0.2
_log = logs.get(__name__)


def run(settings: GatewaySettings) -> int:
    """Serve until told to stop; returns the exit status."""
    if not settings.gateway.models:
        raise SettingsError("gateway.models is needed: name at least one model and its router (docs/gateway.md)")
    return run_service(partial(_start, settings), settings.stop)


async def _start(settings: GatewaySettings, life: Lifecycle) -> None:
    logs.configure(settings.log, role=settings.ROLE.value, replica=settings.replica_id or settings.host_name)
    files = settings.https_files
    https = None if files is None else HttpsFiles(*files, settings.https.reload_seconds)
    gateway = await make_gateway(settings, open_tls(settings.tls))
    life.on_close("routers", gateway.close)
    store = open_store(settings.responses)
    life.on_close("responses", store.close)
    server = HttpServer(make_app(gateway, store), settings.listen, https, settings.gateway.read_seconds)
    if https is not None:
        life.spawn(https.follow(), "https-files")
    life.spawn(server.serve(), "http")
    life.on_close("http", server.stop)
    life.on_stop_accepting("requests", partial(_refuse, gateway))
    life.on_drain("requests", gateway.door.idle)
    life.spawn(_become_ready(gateway), "ready")


async def make_gateway(settings: GatewaySettings, tls: Tls | None) -> Gateway:
    """A gateway before its listener; `tls` is shown to the routers. Raises SettingsError."""
    made = [await _upstream(settings, entry, tls) for entry in settings.gateway.models]
    return Gateway(settings, Upstreams(tuple(made)), Metrics(role=settings.ROLE.value))


async def _upstream(settings: GatewaySettings, entry: ModelEntry, tls: Tls | None) -> Upstream:
    try:
        assets = await asyncio.to_thread(load_assets, entry.folder, entry)
    except TextError as error:
        raise SettingsError(f"gateway.models: {entry.name}: {error}") from error
    return Upstream(entry, assets, settings.rpc, tls, settings.gateway.connect_seconds)


async def _refuse(gateway: Gateway) -> None:
    gateway.door.closing = True


async def _become_ready(gateway: Gateway) -> None:
    """Begin to take requests once each router has answered."""
    for upstream in gateway.upstreams.models:
        told = ""
        while (error := await upstream.trouble()) is not None:
            if str(error) != told:
                _log.warning("waiting for a router", model=upstream.name, error=str(error))
            told = str(error)
            await asyncio.sleep(POLL_S)
    gateway.started = True
    _log.info("ready")
