"""Memory known to the wire: registered regions, probe pages, and what of it peers are told. Transfer thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from headrace.kvcache.checksum import warm_up
from headrace.kvcache.handle import ChecksumKind
from headrace.kvcache.transfer.admission import LocalIdentity
from headrace.kvcache.transfer.agent import Registration, WireAgent, device_index
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.handshake import PROBE_BYTES
from headrace.kvcache.transfer.peers import ProcessIdentity
from headrace.kvcache.transfer.regions import MemoryRegion, RegionDescription, RegionRole
from headrace.kvcache.transfer.wire import Envelope, encode_envelope


class RegisteredMemory:
    """Regions by name, and one probe page per kind of memory."""

    def __init__(self, agent: WireAgent) -> None:
        self.regions: Mapping[str, MemoryRegion] = {}
        """Replaced, never changed, so that callers of the engine read it without a lock."""
        self._agent = agent
        self._version = 1
        self._registrations: dict[str, Registration] = {}
        self._probes: dict[str, tuple[torch.Tensor, Registration]] = {}
        self._add_probe(torch.device("cpu"))

    def register(self, region: MemoryRegion) -> None:
        """Raises ValueError: the name, or the (payload, role, version) of a landing region, is taken."""
        if region.name in self.regions:
            raise ValueError(f"region {region.name!r} is registered already; deregister it first")
        lands = region.role is not RegionRole.SOURCE
        if lands and any(_place(other) == _place(region) for other in self.regions.values()):
            raise ValueError(f"there is a {region.role} region {region.version} for {region.payload} already")
        self._add_probe(region.base.device)
        self._registrations[region.name] = self._agent.register(region.base)
        self.regions = {**self.regions, region.name: region}
        self._version += lands

    def deregister(self, name: str) -> None:
        """The caller has made sure that no push reads it. Raises ValueError when it is unknown."""
        region = self.regions.get(name)
        if region is None:
            raise ValueError(f"no region {name!r} is registered")
        self.regions = {key: value for key, value in self.regions.items() if key != name}
        self._agent.deregister(self._registrations.pop(name))
        self._version += region.role is not RegionRole.SOURCE

    @property
    def probes(self) -> dict[str, tuple[int, int]]:
        """Kind of memory → address and device of this process's page."""
        return {kind: (page.data_ptr(), device_index(page)) for kind, (page, _) in self._probes.items()}

    def describe(self, own: LocalIdentity, checksums: tuple[ChecksumKind, ...]) -> PeerDescription:
        """Landing regions and probe pages, with their keys and no others (L7)."""
        landing = _newest(self.regions.values())
        registrations = [registration for _, registration in self._probes.values()]
        registrations += [self._registrations[region.name] for region in landing]
        envelope = Envelope(
            self._agent.metadata(registrations),
            ProcessIdentity.own(),
            tuple(region.version for region in landing),
            tuple((kind, *where) for kind, where in self.probes.items()),
        )
        return PeerDescription(
            incarnation=own.incarnation,
            rank=own.rank,
            agent_name=self._agent.name,
            agent_metadata=encode_envelope(envelope),
            metadata_version=self._version,
            regions=tuple(_describe(region) for region in landing),
            layout_fingerprint=own.layout_fingerprint,
            model_fingerprint=own.model_fingerprint,
            checksums=checksums,
        )

    def release(self) -> None:
        """Forget everything, the agent too. No push is on the wire."""
        for registration in [*self._registrations.values(), *(entry for _, entry in self._probes.values())]:
            self._agent.deregister(registration)
        del self._agent

    def _add_probe(self, device: torch.device) -> None:
        """One page per kind of memory; device memory needs its context current on this thread."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if device.type not in self._probes:
            page = torch.zeros((1, PROBE_BYTES), dtype=torch.uint8, device=device)
            self._probes[device.type] = (page, self._agent.register(page))
            warm_up(page)


def _place(region: MemoryRegion) -> tuple[str, str, int]:
    return region.payload, region.role, region.version


def _newest(regions: Iterable[MemoryRegion]) -> list[MemoryRegion]:
    """Landing regions, the highest version of each (payload, role)."""
    newest: dict[tuple[str, str], MemoryRegion] = {}
    for region in sorted(regions, key=_place):
        if region.role is not RegionRole.SOURCE:
            newest[(region.payload, region.role)] = region
    return list(newest.values())


def _describe(region: MemoryRegion) -> RegionDescription:
    return RegionDescription(
        payload=region.payload,
        role=region.role,
        base_address=region.base.data_ptr(),
        item_bytes=region.item_bytes,
        items=region.items,
        memory=region.memory,
        device_id=device_index(region.base),
    )
