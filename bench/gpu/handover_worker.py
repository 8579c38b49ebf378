"""One of the two processes of handover.py: a role engine on its thread, a transfer engine, a pipe to the parent."""

from __future__ import annotations

import threading
import time
import traceback
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from headrace.engine.core import Engine
from headrace.engine.decode import decode_role
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.messages import (
    BlockRow,
    CheckIntegrity,
    Command,
    Commit,
    Event,
    HandedOver,
    Prefill,
    PrefillDone,
    PrefillFailed,
    RowsReady,
    Unpin,
)
from headrace.engine.prefill import PrefillRole
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.settings import EngineSettings
from headrace.engine.worker import EngineWorker
from headrace.kvcache.handle import ChecksumKind, Handle
from headrace.kvcache.landing import LandingRegion
from headrace.kvcache.landing_types import LandingIdentity, PartChecksums
from headrace.kvcache.pool import KVPool
from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import Outcome, Push, RowMove
from headrace.kvcache.transfer.pushes import Ready as Passed
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole

MODEL = b"m" * 32
"""Both children load one folder; what it is called does not matter here."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a child is to be."""

    role: str
    device: str
    folder: Path
    model: ModelSettings
    engine: EngineSettings
    rows: int
    """Of the pool, and of decode's landing region."""


@dataclass(frozen=True)
class Ready:
    """Loaded; where rows can be pushed to."""

    peer: PeerDescription


@dataclass(frozen=True)
class Connected:
    transport: str


@dataclass(frozen=True)
class Ask:
    """A command for the engine; Answer has its number."""

    number: int
    command: Command[Any]


@dataclass(frozen=True)
class Answer:
    number: int
    value: object


@dataclass(frozen=True)
class Run:
    """Prefill this and push it there."""

    request: EngineRequest
    held_blocks: int
    handle: Handle


@dataclass(frozen=True)
class Computed:
    """Every row has landed; this is for decode."""

    commit: Commit


@dataclass(frozen=True)
class HandOverDone:
    """Decode runs the request."""

    key: RequestKey


@dataclass(frozen=True)
class Told:
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Failed:
    text: str


@dataclass(frozen=True)
class Reports:
    """Asks for a Report."""


@dataclass(frozen=True)
class Report:
    transports: tuple[str, ...]
    bytes_sent: int
    pushes: int
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    """End."""


def work(parent: Connection, spec: WorkerSpec) -> None:
    """A child's main: until Stop, or the parent hangs up."""
    torch.set_num_threads(1)
    mouth = Mouth(parent)
    try:
        Child(mouth, spec).run(parent)
    except BaseException:
        mouth.say(Failed(traceback.format_exc()))
        raise


class Mouth:
    """The pipe to the parent, shared by the main, the engine and the transfer thread."""

    def __init__(self, parent: Connection) -> None:
        self._parent = parent
        self._lock = threading.Lock()

    def say(self, message: object) -> None:
        with self._lock:
            try:
                self._parent.send(message)
            except (BrokenPipeError, ConnectionResetError):
                return  # the parent is gone, and with it everybody who would listen


class Child:
    """Model, pool, engine thread and transfer engine of one role."""

    def __init__(self, mouth: Mouth, spec: WorkerSpec) -> None:
        self._mouth = mouth
        device = torch.device(spec.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        model = load_model(spec.folder, replace(spec.model, device=spec.device))
        self._pool = pool = KVPool(
            model.layout, num_rows=spec.rows, num_slots=spec.engine.max_sequences + 1, num_snapshots=32, device=device
        )
        incarnation, layout = uuid.uuid4().hex, model.layout
        self._transfer = NixlTransferEngine(
            incarnation=incarnation, layout_fingerprint=layout.fingerprint, model_fingerprint=MODEL
        )
        settings = replace(spec.engine, lease_s=600.0)
        if spec.role == "prefill":
            self._transfer.register(MemoryRegion("rows", pool.rows))
            if layout.slot_bytes:
                self._transfer.register(MemoryRegion("slots", pool.slots))
            self._sender: Sender | None = Sender(self._transfer, mouth, self._call)
            engine = Engine(model, pool, settings, PrefillRole, clock=time.monotonic)
            outbox: Callable[[tuple[Event, ...]], None] = self._sender.take
        else:
            kind = ChecksumKind.XXH3_64 if device.type == "cpu" else ChecksumKind.LANES_64
            landing = LandingRegion(
                LandingIdentity(incarnation, layout.fingerprint, MODEL, kind),
                row_bytes=layout.block_bytes,
                slot_bytes=layout.slot_bytes,
                num_rows=spec.rows,
                num_slots=spec.engine.max_sequences,
                device=device,
            )
            self._transfer.register(MemoryRegion("landing rows", landing.rows, RegionRole.LANDING_ROWS))
            if layout.slot_bytes:
                self._transfer.register(MemoryRegion("landing slots", landing.slots, RegionRole.LANDING_SLOTS))
            self._sender = None
            engine = Engine(model, pool, settings, decode_role(landing), clock=time.monotonic)
            outbox = lambda events: mouth.say(Told(events))  # noqa: E731
        self._worker = EngineWorker(engine, outbox, threads=1, name=spec.role)
        self._worker.start()

    def run(self, parent: Connection) -> None:
        """Serve the parent's messages."""
        self._mouth.say(Ready(self._transfer.describe()))
        try:
            while True:
                try:
                    message = parent.recv()
                except EOFError:
                    return
                if isinstance(message, Stop):
                    return
                self._handle(message)
        finally:
            self._worker.stop(10)
            self._transfer.close()

    def _handle(self, message: object) -> None:
        match message:
            case Ready(peer):
                self._mouth.say(Connected(self._transfer.connect(peer).result(60)))
            case Ask(number, command):
                self._worker.call(command).add_done_callback(
                    lambda done: self._mouth.say(Answer(number, done.exception() or done.result()))
                )
            case Run() if self._sender is not None:
                self._sender.begin(message)
            case HandOverDone(key) if self._sender is not None:
                self._sender.finish(key)
            case Reports():
                stats = self._transfer.stats()
                problems = self._worker.call(CheckIntegrity(idle=True)).result(60)
                if not stats.idle:
                    problems = (*problems, f"the transfer engine is not idle: {stats}")
                transports = () if self._sender is None else tuple(sorted(self._sender.transports))
                self._mouth.say(Report(transports, stats.bytes_sent, stats.pushes_done, problems))
            case _:
                raise RuntimeError(f"this child knows no {message}")

    def _call(self, command: Command[Any]) -> None:
        """A command whose refusal is a fault of this program."""

        def answered(done: Future[object]) -> None:
            if (error := done.exception()) is not None:
                self._mouth.say(Failed(f"{command}: {error}"))

        self._worker.call(command).add_done_callback(answered)


@dataclass
class _Sent:
    """One run: what was pushed, and what the commit needs."""

    run: Run
    pushes: list[tuple[Push, tuple[int, ...], bool]] = field(default_factory=list)
    """(push, its blocks, whether the slot went with it)."""
    rows: list[int] = field(default_factory=list)
    done: PrefillDone | None = None
    open: int = 0
    """Pushes that have not landed."""
    complete: bool = False
    """Nothing follows, and the commit is somebody's business already."""


class Sender:
    """Pushes the rows that the engine names and commits once all have landed. Engine and transfer thread meet here."""

    def __init__(self, transfer: NixlTransferEngine, mouth: Mouth, call: Callable[[Command[Any]], None]) -> None:
        self._transfer = transfer
        self._mouth = mouth
        self._call = call
        self._runs: dict[RequestKey, _Sent] = {}
        self.transports: set[str] = set()
        """Wires that pushes took."""
        self._lock = threading.Lock()

    def begin(self, run: Run) -> None:
        self._runs[run.request.key] = _Sent(run)
        self._call(Prefill(run.request, run.held_blocks))

    def finish(self, key: RequestKey) -> None:
        sent = self._runs.pop(key)
        assert sent.done is not None
        self._call(Unpin(key, tuple(sent.rows), slot=sent.done.slot != 0))
        self._call(HandedOver(key))

    def take(self, events: tuple[Event, ...]) -> None:
        """The outbox: on the engine thread."""
        for event in events:
            match event:
                case RowsReady():
                    self._push(self._runs[event.key], event.rows, event.ready)
                case PrefillDone():
                    sent = self._runs[event.key]
                    sent.done = event
                    self._push(sent, () if event.tail is None else (event.tail,), None)
                case PrefillFailed():
                    self._mouth.say(Failed(f"{event.key}: {event.error}"))

    def _push(self, sent: _Sent, rows: tuple[BlockRow, ...], ready: Passed | None) -> None:
        (part,) = sent.run.handle.parts
        places = dict(zip(part.blocks, part.rows, strict=True))
        last = sent.done is not None
        moves = []
        if rows:
            moves.append(RowMove("rows", tuple(r.row for r in rows), tuple(places[r.block] for r in rows)))
            sent.rows += [row.row for row in rows]
        if sent.done is not None and part.slot is not None:
            moves.append(RowMove("slots", (sent.done.slot,), (part.slot,), RegionRole.LANDING_SLOTS))
        if moves:
            push = self._transfer.push(sent.run.handle, moves, last=last, ready=ready)
            with self._lock:
                sent.pushes.append((push, tuple(row.block for row in rows), last and part.slot is not None))
                sent.open += 1
            push.settled.add_done_callback(lambda done: self._settled(sent, done.exception()))
        elif last:
            self._transfer.end(sent.run.handle, Outcome.OK)
            self._commit_if_complete(sent)

    def _settled(self, sent: _Sent, error: BaseException | None) -> None:
        """On the transfer thread."""
        if error is not None:
            self._mouth.say(Failed(f"{sent.run.request.key}: {error!r}"))
            return
        with self._lock:
            sent.open -= 1
        self._commit_if_complete(sent)

    def _commit_if_complete(self, sent: _Sent) -> None:
        """Commit once, by whichever thread comes last."""
        with self._lock:
            if sent.complete or sent.open or sent.done is None or not self._all_pushed(sent):
                return
            sent.complete = True
        self._commit(sent)

    @staticmethod
    def _all_pushed(sent: _Sent) -> bool:
        (part,) = sent.run.handle.parts
        pushed = {block for _, blocks, _ in sent.pushes for block in blocks}
        return pushed == set(part.blocks) and (part.slot is None or any(slot for _, _, slot in sent.pushes))

    def _commit(self, sent: _Sent) -> None:
        (part,) = sent.run.handle.parts
        assert sent.done is not None
        sums: dict[int, int] = {}
        slot_sum: int | None = None
        for push, blocks, with_slot in sent.pushes:
            result = push.settled.result()
            self.transports.add(result.transport)
            found = list(result.checksums)
            if blocks:
                sums |= dict(zip(blocks, found.pop(0), strict=True))
            if with_slot:
                (slot_sum,) = found.pop(0)
        parts = (PartChecksums(tuple(sums[block] for block in part.blocks), slot_sum),)
        key = sent.run.request.key
        self._mouth.say(Computed(Commit(key, sent.run.handle, parts, sent.done.first, sent.done.counts)))
