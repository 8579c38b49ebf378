"""The decision alone, in a process of its own: match, pair choice and accounting, over an index of a million blocks.

    python -m bench.router_speed_harness.decision --replicas 1000 --blocks 1000000

One decision = index.match + the pair balancer's first answer + begin at both ranks + what the balancer notes, and the
end of an older request. The objects are those of the service (services/router/balance.py), with as many prefill as
decode replicas of one rank each. Block keys are there already (`keys_us` says what they cost).

A third of the blocks lie in chains of 7, held by one rank each; a third in chains of 1,000; a third in chains of 1,000
that three ranks hold. Of the prompts one in eight begins with a shared system prompt of two blocks that every rank
holds. A 7-block prompt is 900 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.compiler import NativeUnavailable
from headrace.kvcache.keys import Key, block_keys
from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import HolderTier
from headrace.router.index.index import BlockIndex
from headrace.router.native.build import NativeRouter, load_native
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, RankId, Role
from headrace.services.router.balance import Balance
from headrace.services.router.settings import BalanceSection

BLOCK_TOKENS = 128
SHORT, LONG = 7, 1000
SHORT_TOKENS = 900
SYSTEM_BLOCKS = 2
SYSTEM_EVERY = 8
LIVE_PER_REPLICA = 8
"""Requests in flight for each decode replica."""
BUDGET_BYTES = 1 << 30


@dataclass(frozen=True)
class Times:
    """Of one kind of prompt, microseconds a decision. CPU time is not disturbed by others on the machine."""

    prompt_blocks: int
    decisions: int
    per_s: float
    """One thread, back to back."""
    p50_us: float
    p99_us: float
    cpu_p50_us: float
    cpu_p99_us: float
    match_p50_us: float
    """The index's part."""


@dataclass(frozen=True)
class Figures:
    """What one process showed."""

    native: bool
    """Whether C++ decided, or Python (no compiler, or --plain)."""
    replicas: int
    """Of each role."""
    indexed_blocks: int
    index_pairs: int
    rss_mb: float
    """Of the whole process."""
    index_rss_mb: float
    """Growth by filling the index."""
    fill_us_per_block: float
    keys_us: float
    """Making the keys of a 900-token prompt."""
    chosen: int
    """Different pairs that were chosen."""
    short: Times
    long: Times


class Scene:
    """A fleet with load, a filled index, and prompts."""

    def __init__(self, replicas: int, blocks: int, seed: int = 1, native: NativeRouter | None = None) -> None:
        self.random = random.Random(seed)
        self.fleet = Fleet(RankNumbers())
        self.index = BlockIndex(BUDGET_BYTES, native)
        self.balance = Balance(self.fleet, BalanceSection(), native)
        self.prefill = [self._join(Role.PREFILL, number) for number in range(replicas)]
        self.decode = [self._join(Role.DECODE, number) for number in range(replicas)]
        self.index.ranks = self.fleet.numbers.size
        self.system = self._chain(SYSTEM_BLOCKS)
        for candidate in self.prefill:
            self._hold(candidate, self.system)
        self.short = self._fill(blocks // 3, SHORT, 1)
        self.long = self._fill(blocks // 3, LONG, 1) + self._fill(blocks // 3, LONG, min(3, replicas))
        self._live: deque[tuple[RankId, RankId, str]] = deque()
        self._count = 0
        self.now = 100.0
        for candidate in (*self.prefill, *self.decode):
            self._report(candidate)

    def _join(self, role: Role, number: int) -> Candidate:
        name = f"{role.value}-{number}"
        rank = RankId(name, f"{number:032x}")
        candidate = Candidate(rank, role, "local", f"host-{number}", 1 << 20, 4096, BLOCK_TOKENS, 1 << 20)
        self.fleet.put(name, rank.incarnation, (candidate,))
        return candidate

    def _report(self, candidate: Candidate) -> None:
        kv = self.random.randrange(1 << 16) if candidate.role is Role.DECODE else 0
        waiting = self.random.randrange(4) if candidate.role is Role.PREFILL else 0
        report = Report(waiting, 700 * waiting, running_requests=kv >> 12, kv_tokens=kv, step=1, step_s=0.02)
        self.fleet.report(candidate.id, report, self.now)

    def _chain(self, blocks: int) -> tuple[Key, ...]:
        return tuple(Key(self.random.randbytes(32)) for _ in range(blocks))

    def _hold(self, candidate: Candidate, keys: tuple[Key, ...]) -> None:
        number = self.fleet.numbers.get(candidate.id)
        assert number is not None
        self.index.stored(number, HolderTier.DEVICE, keys)

    def _fill(self, blocks: int, length: int, holders: int) -> list[tuple[Key, ...]]:
        chains = []
        for _ in range(max(1, blocks // length)):
            chains.append(self._chain(length))
            for candidate in self.random.sample(self.prefill, holders):
                self._hold(candidate, chains[-1])
        return chains

    def prompts(self, long: bool) -> Iterator[RoutingRequest]:
        """A known prompt up to some block and new from there, or a system prompt and something new."""
        chains, blocks = (self.long, LONG) if long else (self.short, SHORT)
        while True:
            known = self.random.choice(chains)[: self.random.randint(0, blocks)]
            if self.random.randrange(SYSTEM_EVERY) == 0:
                known = self.system
            keys = (*known, *self._chain(blocks - len(known)))
            self._count += 1
            yield RoutingRequest(
                request_id=str(self._count),
                prompt_tokens=blocks * BLOCK_TOKENS + SHORT_TOKENS - SHORT * BLOCK_TOKENS,
                max_tokens=256,
                choices=1,
                image_tokens=0,
                affinity_key=keys[0],
                deadline=self.now + 600,
                blocks=keys,
                usable_tokens=blocks * BLOCK_TOKENS,
            )

    def decide(self, request: RoutingRequest) -> tuple[RankId, RankId]:
        """What the service does between a request's keys and its Reserve, and at its end."""
        match = self.index.match(request.blocks, None, request.usable_tokens // BLOCK_TOKENS)
        pair = next(self.balance.pairs.order(request, match, self.now))
        work = Amount(
            tokens=pair.prediction.new_tokens,
            hit_tokens=pair.prediction.hit_tokens,
            requests=1,
            seconds=pair.prediction.compute_s,
        )
        self.fleet.begin(pair.decode.id, request.request_id, Amount(request.prompt_tokens, requests=1), self.now)
        self.fleet.begin(pair.prefill.id, request.request_id, work, self.now)
        self.balance.pairs.chosen(request, pair, self.now)
        self._live.append((pair.prefill.id, pair.decode.id, request.request_id))
        if len(self._live) > LIVE_PER_REPLICA * len(self.decode):
            prefill, decode, name = self._live.popleft()
            self.fleet.end(prefill, name, self.now)
            self.fleet.end(decode, name)
        return pair.prefill.id, pair.decode.id


def measure(replicas: int, blocks: int, decisions: int, plain: bool = False) -> Figures:
    """All of it, in this process."""
    native = None if plain else native_or_none()
    before = resident_bytes()
    start = time.perf_counter()
    scene = Scene(replicas, blocks, native=native)
    filled = time.perf_counter() - start
    gc.collect()
    gc.freeze()  # as the service does after its start; a million keys in the prompts' chains are the bench's own
    index_rss = resident_bytes() - before
    pairs: set[tuple[RankId, RankId]] = set()
    short = _times(scene, decisions, pairs, long=False)
    long = _times(scene, max(100, decisions // 10), pairs, long=True)
    return Figures(
        native=native is not None,
        replicas=replicas,
        indexed_blocks=SYSTEM_BLOCKS + SHORT * len(scene.short) + LONG * len(scene.long),
        index_pairs=scene.index.entries,
        rss_mb=round(resident_bytes() / 1e6, 1),
        index_rss_mb=round(index_rss / 1e6, 1),
        fill_us_per_block=round(1e6 * filled / max(1, scene.index.entries), 2),
        keys_us=round(_keys_us(scene.random), 1),
        chosen=len(pairs),
        short=short,
        long=long,
    )


def native_or_none() -> NativeRouter | None:
    """As the router does; says why it has none."""
    try:
        return load_native()
    except NativeUnavailable as reason:
        sys.stderr.write(f"Python decides: {reason}\n")
        return None


def _times(scene: Scene, decisions: int, pairs: set[tuple[RankId, RankId]], *, long: bool) -> Times:
    prompts = scene.prompts(long)
    for _ in range(min(200, decisions)):
        scene.decide(next(prompts))
    wall, cpu, matches = [], [], []
    for number in range(decisions):
        request = next(prompts)
        scene.now += 0.001
        if number % 4 == 0:  # a report for every few decisions, as workers send them
            scene._report(scene.random.choice(scene.decode))
            began = time.thread_time_ns()
            scene.index.match(request.blocks, None, len(request.blocks))
            matches.append(time.thread_time_ns() - began)
        began_cpu, began = time.thread_time_ns(), time.perf_counter_ns()
        pair = scene.decide(request)
        wall.append(time.perf_counter_ns() - began)
        cpu.append(time.thread_time_ns() - began_cpu)
        pairs.add(pair)
    return Times(
        prompt_blocks=LONG if long else SHORT,
        decisions=decisions,
        per_s=round(1e9 * decisions / sum(wall)),
        p50_us=quantile(wall, 0.5),
        p99_us=quantile(wall, 0.99),
        cpu_p50_us=quantile(cpu, 0.5),
        cpu_p99_us=quantile(cpu, 0.99),
        match_p50_us=quantile(matches, 0.5),
    )


def _keys_us(chance: random.Random) -> float:
    ids = [chance.randrange(32_000) for _ in range(SHORT_TOKENS)]
    return best_of(5, lambda: block_keys(Key(bytes(32)), ids, BLOCK_TOKENS, [])) * 1e6


def best_of(rounds: int, work: Callable[[], object]) -> float:
    """CPU seconds of the fastest round."""
    found = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return min(found)


def quantile(nanoseconds: list[int], share: float) -> float:
    """In microseconds."""
    ordered = sorted(nanoseconds)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e3, 1)


def resident_bytes() -> int:
    """Of this process now."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8, help="of each role")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--plain", action="store_true", help="without C++")
    options = parser.parse_args()
    sys.stdout.write(
        json.dumps(asdict(measure(options.replicas, options.blocks, options.decisions, options.plain))) + "\n"
    )


if __name__ == "__main__":
    main()
