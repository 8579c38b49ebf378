"""A process that sends rows, driven by a test: ``Sender`` starts this file as a child and calls methods in it.

The child's pool holds rows that ``pattern`` computes, so a test knows every byte that should arrive.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart, PayloadKind
from headrace.kvcache.transfer.base import PeerDescription, TransferSettings, TransferStats
from headrace.kvcache.transfer.copies import CopyResult, Direction, Span
from headrace.kvcache.transfer.loop import give_way
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, Push, PushResult, RowMove, TerminalNotice
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

LAYOUT = bytes(range(32))
MODEL = bytes(range(32, 64))
ROW_BYTES = 114_048
SLOT_BYTES = 65_536


def pattern(seed: int, rows: int, row_bytes: int) -> torch.Tensor:
    """Reproducible bytes, none of them zero, so that an untouched landing row is told apart."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (rows, row_bytes), dtype=torch.uint8, generator=generator)


def handle(
    receiver: PeerDescription,
    transfer_id: str,
    rows: tuple[int, ...],
    *,
    slot: int | None = None,
    generation: int = 1,
    attempt: int = 1,
    checksum_kind: ChecksumKind = ChecksumKind.XXH3_64,
) -> Handle:
    """The grant that a receiver would give for these landing rows."""
    return Handle(
        transfer_id=transfer_id,
        incarnation=receiver.incarnation,
        request_id=f"request of {transfer_id}",
        attempt=attempt,
        generation=generation,
        layout_fingerprint=LAYOUT,
        model_fingerprint=MODEL,
        parts=(LandingPart(None, tuple(range(len(rows))), rows, slot),),
        row_bytes=ROW_BYTES,
        slot_bytes=SLOT_BYTES,
        checksum_kind=checksum_kind,
        payload=PayloadKind.KV,
    )


class Sender:
    """The child as its test sees it. ``call(method, …)`` runs the method of ``_Child`` there; exceptions come back."""

    def __init__(self) -> None:
        self._calls, theirs = Pipe()
        self.gate, their_gate = Pipe()
        fds = (theirs.fileno(), their_gate.fileno())
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *map(str, fds)], pass_fds=fds, env=environment, start_new_session=True
        )
        theirs.close()
        their_gate.close()

    def start(self, incarnation: str, settings: TransferSettings, *, seed: int = 1, rows: int = 64) -> None:
        """A new engine in the child: another incarnation as far as peers can tell."""
        self.pool = pattern(seed, rows, ROW_BYTES)
        self.slots = pattern(seed + 1000, 4, SLOT_BYTES)
        self.call("start", incarnation, settings, seed, rows)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, *arguments: object) -> Any:
        self.send(method, *arguments)
        return self.receive()

    def send(self, method: str, *arguments: object) -> None:
        self._calls.send((method, arguments))

    def receive(self, timeout_s: float = 60.0) -> Any:
        assert self._calls.poll(timeout_s), "the sender process does not answer"
        ok, value = self._calls.recv()
        if not ok:
            raise value
        return value

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def state(self) -> str:
        """R, S, T (stopped) … of the process, from /proc."""
        return Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        self._calls.close()
        self.gate.close()


class _Gate:
    """Stands between two polls of the transfer thread: once armed, it tells the test and waits to be let through."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._armed = threading.Event()

    def arm(self) -> None:
        self._armed.set()

    def __call__(self) -> None:
        if self._armed.is_set():
            self._armed.clear()
            self._connection.send("between two polls")
            self._connection.recv()
        give_way()


class _Child:
    def __init__(self, gate: Connection) -> None:
        self._gate = _Gate(gate)
        self._pushes: dict[str, Push] = {}

    def start(self, incarnation: str, settings: TransferSettings, seed: int, rows: int) -> None:
        self.engine = NixlTransferEngine(
            incarnation=incarnation,
            layout_fingerprint=LAYOUT,
            model_fingerprint=MODEL,
            settings=settings,
            yield_cpu=self._gate,
        )
        self._pool = pattern(seed, rows, ROW_BYTES)
        self.engine.register(MemoryRegion("pool", self._pool))
        self.engine.register(MemoryRegion("slots", pattern(seed + 1000, 4, SLOT_BYTES)))

    def stop(self) -> None:
        self.engine.close()

    def describe(self) -> PeerDescription:
        return self.engine.describe()

    def connect(self, receiver: PeerDescription) -> str:
        return self.engine.connect(receiver).result(30)

    def push(self, grant: Handle, moves: tuple[RowMove, ...], last: bool) -> PushResult:
        return self.engine.push(grant, moves, last=last).wait(30)

    def push_gated(self, grant: Handle, moves: tuple[RowMove, ...], timeout_s: float) -> None:
        """Begin a push that stops at the gate after its first post."""
        self._gate.arm()
        self._pushes[grant.transfer_id] = self.engine.push(grant, moves, timeout_s=timeout_s, last=True)

    def outcome(self, transfer_id: str) -> str:
        return str(self._pushes[transfer_id].terminal.result(30))

    def end(self, grant: Handle, outcome: Outcome) -> None:
        self.engine.end(grant, outcome).result(30)

    def disconnect(self, incarnation: str) -> None:
        self.engine.disconnect(incarnation).result(30)

    def stats(self) -> TransferStats:
        return self.engine.stats()

    def land(self, rows: int) -> PeerDescription:
        """Receive, too: landing rows in the child."""
        self._landing = torch.zeros((rows, ROW_BYTES), dtype=torch.uint8)
        self.engine.register(MemoryRegion("landing", self._landing, RegionRole.LANDING_ROWS))
        return self.engine.describe()

    def share(self) -> PeerDescription:
        """Let peers read the pool's bytes: a copy of it as a host tier."""
        self._shared = self._pool.clone()
        self.engine.register(MemoryRegion("host", self._shared, RegionRole.READABLE))
        return self.engine.describe()

    def overwrite(self, value: int) -> None:
        self._shared.fill_(value)

    def fetch(self, items: int) -> PeerDescription:
        """A buffer for reads."""
        self._buffer = torch.zeros((items, ROW_BYTES), dtype=torch.uint8)
        self.engine.register(MemoryRegion("fetched", self._buffer, RegionRole.FETCHED))
        return self.engine.describe()

    def copy(self, direction: Direction, peer: str, spans: tuple[Span, ...], timeout_s: float = 30.0) -> CopyResult:
        region = "fetched" if direction is Direction.READ else "host"
        return self.engine.copy(direction, peer, spans, region=region, timeout_s=timeout_s).wait(60)

    def copy_gated(self, direction: Direction, peer: str, spans: tuple[Span, ...], timeout_s: float) -> None:
        """Begin a copy that stops at the gate after its first post."""
        self._gate.arm()
        region = "fetched" if direction is Direction.READ else "host"
        self._copy = self.engine.copy(direction, peer, spans, region=region, timeout_s=timeout_s)

    def copy_outcome(self) -> str:
        return str(self._copy.terminal.result(30))

    def fetched(self) -> bytes:
        return self._buffer.numpy().tobytes()

    def landed(self, row: int) -> bytes:
        return self._landing[row].numpy().tobytes()

    def notices(self) -> list[TerminalNotice]:
        return self.engine.take_notices()


class Receiver:
    """The receiving side, in the test's own process: landing memory and its engine."""

    def __init__(self, incarnation: str, settings: TransferSettings, *, rows: int = 96) -> None:
        self.landing = torch.zeros((rows, ROW_BYTES), dtype=torch.uint8)
        self.slots = torch.zeros((4, SLOT_BYTES), dtype=torch.uint8)
        self.engine = NixlTransferEngine(
            incarnation=incarnation, layout_fingerprint=LAYOUT, model_fingerprint=MODEL, settings=settings
        )
        self.engine.register(MemoryRegion("landing", self.landing, RegionRole.LANDING_ROWS))
        self.engine.register(MemoryRegion("landing slots", self.slots, RegionRole.LANDING_SLOTS))
        self.description = self.engine.describe()


def main() -> None:
    calls, gate = (Connection(int(fd)) for fd in sys.argv[1:3])
    child = _Child(gate)
    while True:
        try:
            method, arguments = calls.recv()
        except EOFError:
            return
        try:
            calls.send((True, getattr(child, method)(*arguments)))
        except Exception as error:  # noqa: BLE001  the test raises it
            calls.send((False, error))


if __name__ == "__main__":
    main()
