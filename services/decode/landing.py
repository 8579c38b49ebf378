"""The landing memory of a decode process: made, opened to peers' writes, replaced when too much of it is lost.

Rows that a silent peer may still write are in quarantine, and a worker with too much of that cannot take prompts any
more (spec/protocol.md). It then turns unready, opens a fresh region, and is ready again after a canary. The old memory
stays registered until its last transfer is terminal: what was posted lands even after deregistration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.engine.errors import EngineError
from headrace.engine.messages import EngineStatus, RebuildLanding, TakeDrainedLandings
from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity
from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.services.decode.settings import DecodeSettings
from headrace.services.runtime import logs
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import State
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.worker.canary import CanaryFailed
from headrace.services.worker.engine_host import LoadedModel
from headrace.services.worker.engine_link import EngineLink
from headrace.v1 import common_pb2

_log = logs.get(__name__)
AGAIN_S = 1.0
"""Until the next canary after one that failed."""


def make_landing(settings: DecodeSettings, loaded: LoadedModel, incarnation: str) -> LandingRegion:
    """Landing rows, and slots where the layout has any, within decode.landing_bytes."""
    layout, limit = loaded.pool.layout, int(settings.decode.landing_bytes)
    slots = settings.decode.landing_slots if layout.slot_bytes else 0
    rest = limit - slots * layout.slot_bytes
    most = settings.engine.max_sequences * layout.blocks_for(loaded.model.context_tokens)
    if rest < layout.block_bytes:
        needed = slots * layout.slot_bytes + layout.block_bytes
        raise SettingsError(
            f"decode.landing_bytes of {limit} holds no row beside {slots} slots; give at least {needed}"
        )
    host = loaded.pool.device.type == "cpu"
    return LandingRegion(
        LandingIdentity(
            incarnation=incarnation,
            layout_fingerprint=loaded.facts.layout_fp,
            model_fingerprint=loaded.facts.model_fp,
            checksum_kind=ChecksumKind.XXH3_64 if host else ChecksumKind.LANES_64,
        ),
        row_bytes=layout.block_bytes,
        slot_bytes=layout.slot_bytes,
        num_rows=min(rest // layout.block_bytes, most),
        num_slots=slots,
        device=loaded.pool.device,
        quarantine_limit=settings.decode.quarantine_limit,
    )


def register_landing(transfer: TransferEngine, landing: LandingRegion) -> None:
    """Open a landing region to peers' writes."""
    rows, slots = _names(landing)
    version = landing.version
    transfer.register(MemoryRegion(rows, landing.rows, RegionRole.LANDING_ROWS, version=version))
    if landing.slots.numel():
        transfer.register(MemoryRegion(slots, landing.slots, RegionRole.LANDING_SLOTS, version=version))


def _names(landing: LandingRegion) -> tuple[str, str]:
    return f"landing rows {landing.version}", f"landing slots {landing.version}"


class LandingKeeper:
    """Replaces the landing region when the engine says that too much of it is in quarantine."""

    def __init__(
        self,
        process: ServiceProcess,
        transfer: TransferEngine,
        link: EngineLink,
        announce: Callable[[], common_pb2.TransferAgent],
        canary: Callable[[], Awaitable[None]],
        max_regions: int,
    ) -> None:
        """`announce` describes the landing memory anew, for reservations and for the registry."""
        self._process = process
        self._transfer = transfer
        self._link = link
        self._announce = announce
        self._canary = canary
        self._max_regions = max_regions
        self._sound = True
        self._news = asyncio.Event()
        self.regions = 1
        """Registered ones: the newest, and replaced ones whose transfers are not all terminal."""

    def see(self, status: EngineStatus) -> None:
        """The engine's latest status."""
        if status.landing_sound != self._sound or self.regions > 1:
            self._sound = status.landing_sound
            self._news.set()

    async def run(self) -> None:
        """A background task of the process."""
        while True:
            await self._news.wait()
            self._news.clear()
            await self._drop_drained()
            if not self._sound:
                await self._lose()
            elif not self._process.health.ready:
                await self._recover()

    async def _drop_drained(self) -> None:
        if self.regions == 1:
            return
        for region in await self._link.call(TakeDrainedLandings()):
            rows, slots = _names(region)
            self._transfer.deregister(rows)
            if region.slots.numel():
                self._transfer.deregister(slots)
            self.regions -= 1
            _log.info("a former landing region is drained", version=region.version)

    async def _lose(self) -> None:
        await self._process.health.unready("too much of the landing memory is in quarantine")
        self._publish(State.UNREADY)
        if self.regions >= self._max_regions:
            _log.error("no fresh landing region: too many former ones may still be written", regions=self.regions)
            return
        region = await self._link.call(RebuildLanding())
        register_landing(self._transfer, region)
        self.regions += 1
        self._sound = True
        agent = self._announce()
        if self._process.membership is not None:
            self._process.membership.publish(agents={0: agent.SerializeToString()})
        _log.warning("a fresh landing region is open", version=region.version)
        await self._recover()

    async def _recover(self) -> None:
        if self._process.server.draining:
            return
        try:
            await self._process.health.become_ready(self._canary)
        except (CanaryFailed, EngineError) as error:
            # As when a drain hands over what runs, the canary with it. What else runs here goes on.
            _log.warning("not ready yet: the canary failed", error=str(error))
            await asyncio.sleep(AGAIN_S)
            self._news.set()
            return
        self._publish(State.READY)

    def _publish(self, state: State) -> None:
        if self._process.membership is not None and not self._process.server.draining:
            self._process.membership.publish(state=state)
