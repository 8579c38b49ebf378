"""One round: a cluster of one model, its right answers found in calm, then load and faults together, then quiet."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.cli.leftovers import left_behind, shared_memory
from headrace.services.runtime.server import open_channel
from headrace.services.runtime.settings import RpcSettings
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.checker import GOOD_ENDS, Answer, Books, Watch
from tests.chaos.clients import Clients, Trace
from tests.chaos.clock import WallClock
from tests.chaos.faults import Done, Faults
from tests.chaos.leaks import Footprint, footprint, quiesce, store_problems
from tests.chaos.processes import ChaosCluster
from tests.chaos.requests import templates
from tests.chaos.schedule import LONG, Rates, faults
from tests.services.tiny import make_v3, make_v41

STORE_BYTES = 48 << 20
CALM_S = 240.0
CALM_AT_ONCE = 4
DRAIN_S = 300.0
"""Longest end of the requests that are under way when the load stops."""
SAMPLE_S = 5.0
FOREIGN_S = 10.0
"""How long another program's file in shared memory may be mapped by nobody."""
ENDS = ("finished", "cancelled", "deadline", "failed", "refused", "invalid", "unavailable")
"""Fields of Conservation."""
Told = Callable[[str], None]


@dataclass(frozen=True)
class Shape:
    """What a round is like."""

    family: str
    """v3 or v41."""
    seconds: float
    replicas: Mapping[str, int]
    clients: int
    templates: int
    tokens: int
    """Of a choice, about."""
    rates: Rates = LONG
    grace_s: float = 120.0
    """How much later than planned the last faults may come on a busy machine; the load goes on meanwhile."""


@dataclass
class Found:
    """What a round showed."""

    family: str
    seconds: float
    books: Books = field(default_factory=Books)
    traces: list[Trace] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    planned: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    breaks: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """Of processes: ends and states that should not have been."""
    starts_repeated: int = 0
    """Workers that were started while the store's disk was full, and again."""
    leaks: list[str] = field(default_factory=list)
    footprints: dict[str, list[Footprint]] = field(default_factory=dict)
    """By process, of its last life, over time."""
    at_routers: dict[str, Counter[str]] = field(default_factory=dict)
    """How requests ended as a router itself counts, over its lives, by its name."""


async def play(seed: int, shape: Shape, folder: Path, told: Told) -> Found:
    """One round in `folder`. Raises RuntimeError when the cluster does not even start or answer in calm."""
    found = Found(shape.family, shape.seconds)
    before = shared_memory()
    await asyncio.to_thread(folder.mkdir, parents=True)
    model = (make_v3 if shape.family == "v3" else make_v41)(folder / "model")
    clock = WallClock(folder)
    with own_file_system(folder / "store", told) as store:
        told(f"{shape.family}: starting {sum(shape.replicas.values())} processes")
        async with ChaosCluster(model, folder / "run", shape.replicas, store, clock) as cluster:
            await _play(seed, shape, cluster, found, told)
        found.problems += cluster.problems
        found.leaks += cluster.left
        found.starts_repeated = cluster.starts_repeated
    found.leaks += [f"/dev/shm/{name}" for name in sorted(await left_for_good(before))]
    return found


async def left_for_good(before: set[str]) -> set[str]:
    """What stays in shared memory: a file of somebody else's may be nobody's for a moment."""
    left, until = left_behind(before), time.monotonic() + FOREIGN_S
    while left and time.monotonic() < until:
        await asyncio.sleep(0.5)
        left &= left_behind(before)
    return left


async def _play(seed: int, shape: Shape, cluster: ChaosCluster, found: Found, told: Told) -> None:
    pictures, texts = bool(shape.replicas.get("encoder")), (cluster.folder / "tokenizer.json").exists()
    asked = templates(seed, shape.templates, pictures=pictures, texts=texts, tokens=shape.tokens)
    told(f"{shape.family}: all are ready")
    routers = [(each.name, each.proxy.address) for each in cluster.of("router")]
    known = await calm(routers[0][1], asked)
    plan = faults(seed, shape.seconds, cluster.names(), shape.rates)
    told(f"{shape.family}: {len(known)} answers are known; {len(plan)} faults in {shape.seconds:.0f} s")
    clients = Clients(seed, routers, asked, known, found.books)
    found.traces, found.planned = clients.traces, len(plan)
    begun = time.monotonic()
    end = begun + shape.seconds
    acting = Faults(
        cluster,
        clients.through,
        plan,
        lambda text: told(f"{shape.family} {time.monotonic() - begun:4.0f} s: {text}; {summary(found.books)}"),
    )
    found.done, found.left_out = acting.done, acting.left_out
    async with sampled(cluster, found):
        healing = asyncio.create_task(acting.run(begun, shape.seconds + shape.grace_s))
        # Clients go on until the last fault is healed: no process stays without load before the end.
        load = asyncio.create_task(clients.run(shape.clients, lambda: time.monotonic() < end or not healing.done()))
        try:
            await healing
            async with asyncio.timeout(DRAIN_S):
                await load
        except TimeoutError:
            found.problems.append(f"requests do not end: {sorted(found.books.open)}")
        finally:
            for task in (healing, load):
                task.cancel()
            await asyncio.gather(healing, load, return_exceptions=True)
        told(f"{shape.family}: quiet; {summary(found.books)}")
        found.leaks += await quiesce(cluster)
        found.leaks += await store_problems(cluster)
        found.breaks = dict(clients.breaks)
        found.footprints = {name: list(prints) for name, prints in found.footprints.items()}
    for process in cluster.of("router"):
        ended = found.at_routers[process.name] = Counter()
        for counts in process.counts.values():
            ended.update({name: number for name in ENDS if (number := getattr(counts, name))})


def summary(books: Books) -> str:
    counts = books.counts
    return f"{counts['finished']} finished, {counts['failed']} failed, {len(books.open)} open"


async def calm(address: str, asked: Sequence[inference_pb2.GenerateRequest]) -> list[Answer]:
    """The right answers, from the cluster before anything is done to it. Raises RuntimeError."""
    gate = asyncio.Semaphore(CALM_AT_ONCE)

    async def one(index: int, request: inference_pb2.GenerateRequest) -> Answer:
        watch = Watch(max(1, request.sampling.n), None)
        copy = inference_pb2.GenerateRequest()
        copy.CopyFrom(request)
        copy.request_id = f"calm-{index}"
        async with gate:
            async for event in stub.Generate(copy, timeout=CALM_S):
                watch.take(event)
        watch.check_end()
        if watch.event_errors or watch.reasons - set(GOOD_ENDS):
            raise RuntimeError(f"{copy.request_id} has no good answer: {watch.event_errors} {watch.reasons}")
        return watch.seen

    async with open_channel(address, RpcSettings()) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return await asyncio.gather(*(one(index, request) for index, request in enumerate(asked)))


@asynccontextmanager
async def sampled(cluster: ChaosCluster, found: Found) -> AsyncIterator[None]:
    """Footprints of every process, of its present life, while the block runs and once more at its end."""

    def sample() -> None:
        for process in cluster.processes.values():
            child = process.child
            if child is None or not process.alive:
                continue
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                taken = footprint(child.pid)
                prints = found.footprints.setdefault(process.name, [])
                if prints and prints[0].pid != taken.pid:
                    prints.clear()
                prints.append(taken)

    async def repeat() -> None:
        while True:
            sample()
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        sample()


@contextmanager
def own_file_system(folder: Path, told: Told) -> Iterator[Path]:
    """A small tmpfs for the store, so that it can be full; where there is no right to mount, a plain folder."""
    folder.mkdir()
    options = ("-t", "tmpfs", "-o", f"size={STORE_BYTES}", "tmpfs")
    mounted = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True, check=False)
    if mounted.returncode:
        told(f"the store's disk will not be full: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def seeds(seed: int, count: int) -> list[int]:
    """One for each round."""
    rng = random.Random(f"{seed} rounds")
    return [rng.randrange(1 << 32) for _ in range(count)]
