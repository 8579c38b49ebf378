"""What issue 3 shows of faults: a volume server killed under load; a Redis killed under load, that comes back empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.tier_harness.load import Load, make_block, read_back, write
from bench.tier_harness.processes import Server
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.store.base import Store
from headrace.kvcache.store.rebuild import RebuildProgress

_REFILL_S = 120.0


class RebuildingStore(Protocol):
    """A store whose index is refilled (both engines)."""

    @property
    def rebuild(self) -> RebuildProgress: ...


@dataclass(frozen=True)
class KillReport:
    """A volume server of SeaweedFS is killed while entries are read and written."""

    blocks: int
    """Durable before and after the kill."""
    written_after_kill: int
    read_back: int
    """Of these, right when read after the load ended. The promise: all of them."""
    wrong: int
    refused_writes: int
    """Entries that were never called durable."""
    worst_stall_ms: float
    """Longest read of 16 blocks from the kill on."""
    quiet_worst_ms: float
    """The same before the kill."""
    misses_under_load: dict[str, int]


def kill_volume_server(
    cluster: WeedCluster, store: Store, blocks: int, quiet_s: float, after_s: float, told: Callable[[], None]
) -> KillReport:
    """Kill the second volume server with SIGKILL. `told` is called after each stage (4)."""
    durable = write(store, [make_block(number) for number in range(blocks)])
    told()
    load = Load([store], durable, readers=2, deadline_s=2.0, first_new=blocks)
    began = time.monotonic()
    load.start()
    time.sleep(quiet_s)
    told()
    before = len(durable)
    killed = time.monotonic()
    cluster.volumes[1].kill()
    time.sleep(after_s)
    load.stop()
    told()
    outcomes = read_back(store, durable, deadline_s=5.0)
    told()
    under_load = load.outcomes(began)
    return KillReport(
        blocks=len(durable),
        written_after_kill=len(durable) - before,
        read_back=outcomes["hit"],
        wrong=outcomes["wrong"] + under_load["wrong"],
        refused_writes=load.refused,
        worst_stall_ms=1e3 * load.worst_s(killed),
        quiet_worst_ms=1e3 * load.worst_before_s(killed),
        misses_under_load={cause: count for cause, count in under_load.items() if cause not in ("hit", "wrong")},
    )


@dataclass(frozen=True)
class LossReport:
    """The shared Redis index is killed under load, and comes back empty."""

    blocks: int
    deadline_ms: float
    """Of every read."""
    worst_read_ms: float
    """Longest read of 16 blocks while Redis was away."""
    reads_while_away: int
    """Blocks asked for meanwhile; all are misses, none an error."""
    hits_while_away: int
    misses_while_away: dict[str, int]
    refill_s: float
    """From Redis listening again until the index is complete."""
    rows: int
    """Read from records by whoever was elected."""
    rebuilds: list[int]
    """Finished by each node: one of them did it."""
    hit_ratio: float
    """Afterwards, over all nodes. The promise: at least 0.99."""
    wrong: int


def lose_redis(
    redis: Server,
    stores: Sequence[Store],
    rebuilding: Sequence[RebuildingStore],
    blocks: int,
    away_s: float,
    deadline_s: float,
    told: Callable[[], None],
) -> LossReport:
    """`stores` are nodes that share records and index; `redis` has no persistence. `told` is called after each stage
    (4)."""
    _until_one_finished(rebuilding, [1] * len(stores))
    finished = [store.rebuild.rebuilds for store in rebuilding]
    durable = write(stores[0], [make_block(number) for number in range(blocks)])
    told()
    load = Load(stores, durable, readers=2 * len(stores), deadline_s=deadline_s)
    load.start()
    time.sleep(min(1.0, away_s))
    redis.kill()
    killed = time.monotonic()
    time.sleep(away_s)
    told()
    back = time.monotonic()
    redis.start()
    redis.wait_until_it_listens()
    listening = time.monotonic()
    _until_one_finished(rebuilding, [count + 1 for count in finished])
    complete = time.monotonic()
    told()
    load.stop()
    after = [read_back(store, durable, deadline_s=5.0) for store in stores]
    told()
    away = load.outcomes(killed, back)
    return LossReport(
        blocks=len(durable),
        deadline_ms=1e3 * deadline_s,
        worst_read_ms=1e3 * load.worst_s(killed, back),
        reads_while_away=sum(away.values()),
        hits_while_away=away["hit"],
        misses_while_away={cause: count for cause, count in away.items() if cause != "hit"},
        refill_s=complete - listening,
        rows=max(store.rebuild.rows for store in rebuilding),
        rebuilds=[store.rebuild.rebuilds - count for store, count in zip(rebuilding, finished, strict=True)],
        hit_ratio=sum(each["hit"] for each in after) / (len(stores) * len(durable)),
        wrong=load.outcomes(0)["wrong"] + sum(each["wrong"] for each in after),
    )


def _until_one_finished(rebuilding: Sequence[RebuildingStore], counts: Sequence[int]) -> None:
    """Until some node has finished as many rebuilds as `counts` says for it."""
    deadline = time.monotonic() + _REFILL_S
    while not any(store.rebuild.rebuilds >= count for store, count in zip(rebuilding, counts, strict=True)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the index was not refilled: {[store.rebuild for store in rebuilding]}")
        time.sleep(0.02)
