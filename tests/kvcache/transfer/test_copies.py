"""Byte ranges read from, and written to, another process's registered memory: real processes, real NIXL."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from headrace.kvcache.transfer.base import TransferSettings
from headrace.kvcache.transfer.copies import Direction, Span
from headrace.kvcache.transfer.errors import CopyDeadline, CopyRefused, PeerLost, PushRefused, Refusal, TransferBusy
from headrace.kvcache.transfer.nixl import NixlTransferEngine
from headrace.kvcache.transfer.pushes import RowMove
from headrace.kvcache.transfer.regions import MemoryRegion, RegionRole
from headrace.kvcache.transfer.wire_job import PushState

Make = Callable[..., Any]
CMA = TransferSettings(allowed_transports=frozenset({"cma"}))
TCP = TransferSettings(allowed_transports=frozenset({"tcp"}))
WIRES = pytest.mark.parametrize("settings", [CMA, TCP], ids=["cma", "tcp"])
BUFFER = 1 << 20


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Bounded polling."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.001)


class Reader:
    """In the test's own process: a buffer that reads go into."""

    def __init__(self, process: ModuleType, incarnation: str, settings: TransferSettings) -> None:
        self.incarnation = incarnation
        self.buffer = torch.zeros((16, BUFFER // 16), dtype=torch.uint8)
        self.engine = NixlTransferEngine(
            incarnation=incarnation,
            layout_fingerprint=process.LAYOUT,
            model_fingerprint=process.MODEL,
            settings=settings,
        )
        self.engine.register(MemoryRegion("fetched", self.buffer, RegionRole.FETCHED))

    def read(self, peer: str, *spans: Span, timeout_s: float = 30.0) -> Any:
        return self.engine.copy(Direction.READ, peer, spans, region="fetched", timeout_s=timeout_s)

    def bytes(self, offset: int, length: int) -> bytes:
        return self.buffer.view(-1)[offset : offset + length].numpy().tobytes()


@pytest.fixture
def make_reader(process: ModuleType, incarnation: Make) -> Iterator[Callable[[TransferSettings], Reader]]:
    readers: list[Reader] = []

    def make(settings: TransferSettings) -> Reader:
        readers.append(Reader(process, incarnation(), settings))
        return readers[-1]

    yield make
    for reader in readers:
        reader.engine.close()


@WIRES
def test_spans_are_read(settings: TransferSettings, make_reader: Make, make_sender: Make, incarnation: Make) -> None:
    """Of any offset and length, without the other process's doing; nothing else in the buffer changes."""
    reader, lessor_id = make_reader(settings), incarnation()
    lessor = make_sender(lessor_id, settings, seed=5, rows=8)
    reader.engine.connect(lessor.call("share")).result(30)
    source = lessor.pool.numpy().tobytes()
    spans = (Span(64, 1001, 5000), Span(100_000, 300_000, 400_001), Span(700_000, 0, 1))
    result = reader.read(lessor_id, *spans).wait(30)
    assert result.nbytes == 405_002
    assert result.transport == next(iter(settings.allowed_transports or ()))
    expected = bytearray(BUFFER)
    for span in spans:
        expected[span.local : span.local + span.length] = source[span.remote : span.remote + span.length]
    assert reader.bytes(0, BUFFER) == bytes(expected)
    stats = reader.engine.stats()
    assert stats.idle
    assert (stats.copies_done, stats.copies_open, stats.bytes_copied) == (1, 0, 405_002)


@WIRES
def test_a_lessor_writes_into_the_readers_buffer(
    settings: TransferSettings, make_reader: Make, make_sender: Make, incarnation: Make
) -> None:
    reader, lessor_id = make_reader(settings), incarnation()
    lessor = make_sender(lessor_id, settings, seed=6, rows=8)
    lessor.call("share")
    lessor.call("connect", reader.engine.describe())
    lessor.call("copy", Direction.WRITE, reader.incarnation, (Span(1000, 77, 300_000),))
    assert reader.bytes(77, 300_000) == lessor.pool.numpy().tobytes()[1000:301_000]
    assert not any(reader.bytes(0, 77))


def test_what_is_not_exact_is_refused(make_reader: Make, make_sender: Make, incarnation: Make) -> None:
    """L1, L10: before a byte moves; nothing stays open."""
    reader, lessor_id, bare_id = make_reader(CMA), incarnation(), incarnation()
    lessor, bare = make_sender(lessor_id, CMA, rows=2), make_sender(bare_id, CMA, rows=2)
    size = lessor.pool.numel()

    def refusal(peer: str, *spans: Span, region: str = "fetched", way: Direction = Direction.READ) -> Refusal:
        with pytest.raises(CopyRefused) as caught:
            reader.engine.copy(way, peer, spans, region=region)
        return caught.value.reason

    assert refusal(lessor_id, Span(0, 0, 1)) is Refusal.NOT_CONNECTED
    reader.engine.connect(lessor.call("share")).result(30)
    reader.engine.connect(bare.call("describe")).result(30)
    assert refusal(bare_id, Span(0, 0, 1)) is Refusal.TARGET
    assert refusal(lessor_id) is Refusal.SIZES
    assert refusal(lessor_id, Span(0, 0, 1), region="pool") is Refusal.SOURCE
    assert refusal(lessor_id, Span(0, 0, 1), way=Direction.WRITE) is Refusal.SOURCE
    for span in (Span(0, 0, 0), Span(-1, 0, 1), Span(BUFFER - 1, 0, 2)):
        assert refusal(lessor_id, span) is Refusal.SOURCE
    for span in (Span(0, -1, 1), Span(0, size - 1, 2)):
        assert refusal(lessor_id, span) is Refusal.TARGET
    assert reader.read(lessor_id, Span(0, size - 1, 1)).wait(30).nbytes == 1
    reader.engine.disconnect(lessor_id).result(30)
    assert refusal(lessor_id, Span(0, 0, 1)) is Refusal.INCARNATION
    assert reader.engine.stats().idle


def test_a_push_into_a_host_tier_or_a_buffer_is_refused(
    process: ModuleType, make_reader: Make, make_sender: Make, incarnation: Make
) -> None:
    """L7: pushes land in landing regions only, whatever else is published."""
    pusher, lessor_id = make_reader(CMA), incarnation()
    lessor = make_sender(lessor_id, CMA)
    lessor.call("share")
    description = lessor.call("fetch", 4)
    pusher.engine.register(MemoryRegion("pool", torch.zeros((4, process.ROW_BYTES), dtype=torch.uint8)))
    pusher.engine.connect(description).result(30)
    grant = process.handle(description, "t", (0,))
    for role in (RegionRole.FETCHED, RegionRole.READABLE):
        with pytest.raises(PushRefused, match="L7"):
            pusher.engine.push(grant, [RowMove("pool", (0,), (0,), role)])


def test_a_copy_counts_against_the_bound(make_reader: Make, make_sender: Make, incarnation: Make) -> None:
    """L12."""
    reader, lessor_id = (
        make_reader(TransferSettings(allowed_transports=frozenset({"tcp"}), max_pushes=1)),
        incarnation(),
    )
    lessor = make_sender(lessor_id, TCP, rows=2)
    reader.engine.connect(lessor.call("share")).result(30)
    lessor.signal(signal.SIGSTOP)
    until(lambda: lessor.state() == "T", "the lessor stops")
    try:
        waiting = reader.read(lessor_id, Span(0, 0, 100_000), timeout_s=0.2)
        with pytest.raises(TransferBusy):
            reader.read(lessor_id, Span(0, 0, 1))
        with pytest.raises(CopyDeadline):
            waiting.wait(30)
    finally:
        lessor.signal(signal.SIGCONT)
    assert waiting.terminal.result(30) is PushState.DONE


def test_a_read_of_a_stopped_lessor_over_tcp_is_not_terminal_until_it_wakes(
    make_reader: Make, make_sender: Make, incarnation: Make
) -> None:
    """L6, L7: the deadline ends the wait; the buffer may still change until the read is terminal."""
    reader, lessor_id = make_reader(TCP), incarnation()
    lessor = make_sender(lessor_id, TCP, rows=4)
    reader.engine.connect(lessor.call("share")).result(30)
    lessor.signal(signal.SIGSTOP)
    until(lambda: lessor.state() == "T", "the lessor stops")
    copy = reader.read(lessor_id, Span(0, 0, 400_000), timeout_s=0.1)
    with pytest.raises(CopyDeadline):
        copy.wait(30)
    assert not copy.terminal.done()
    stats = reader.engine.stats()
    assert (stats.copies_open, stats.idle) == (1, False)
    with pytest.raises(ValueError, match="L7"):
        reader.engine.deregister("fetched")
    lessor.signal(signal.SIGCONT)
    assert copy.terminal.result(30) is PushState.DONE
    assert reader.engine.stats().idle


@WIRES
def test_a_lessor_killed_in_mid_read_ends_the_read(
    settings: TransferSettings, make_reader: Make, make_sender: Make, incarnation: Make
) -> None:
    """L6: terminal without anybody's doing; later reads say PeerLost at once."""
    reader, lessor_id = make_reader(settings), incarnation()
    lessor = make_sender(lessor_id, settings, rows=8)
    reader.engine.connect(lessor.call("share")).result(30)
    lessor.signal(signal.SIGSTOP)
    until(lambda: lessor.state() == "T", "the lessor stops")
    if settings is TCP:
        copy = reader.read(lessor_id, Span(0, 0, 800_000))
        lessor.kill()
    else:
        # CMA reads a stopped process's memory without its doing, so it has to be dead before.
        lessor.kill()
        copy = reader.read(lessor_id, Span(0, 0, 800_000))
    with pytest.raises(PeerLost):
        copy.wait(60)
    assert copy.terminal.result(30) is PushState.FAILED
    with pytest.raises(PeerLost):
        reader.read(lessor_id, Span(0, 0, 1))
    assert reader.engine.stats().idle


def test_closing_the_engine_ends_a_read_that_waits(make_reader: Make, make_sender: Make, incarnation: Make) -> None:
    """L6."""
    reader, lessor_id = make_reader(TCP), incarnation()
    lessor = make_sender(lessor_id, TCP, rows=4)
    reader.engine.connect(lessor.call("share")).result(30)
    lessor.signal(signal.SIGSTOP)
    until(lambda: lessor.state() == "T", "the lessor stops")
    try:
        copy = reader.read(lessor_id, Span(0, 0, 400_000))
        reader.engine.close(timeout_s=0.1)
        with pytest.raises(Exception, match="clos"):
            copy.wait(30)
    finally:
        lessor.signal(signal.SIGCONT)
