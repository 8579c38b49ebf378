"""Faults of the cache tier: servers killed under load, and what the requests saw of it.

    python bench/tier_faults.py --json

Real servers on loopback: SeaweedFS (one master, three volume servers, two copies) and Redis.
  seaweed_kill    one volume server is killed with SIGKILL while two readers and a writer go on; every durable block is
                  read back, worst stall told
  redis_segments  the shared index of two nodes of the segment engine is killed under load, comes back empty: requests
                  go on as misses within their deadline, one elected node refills it
  redis_seaweed   the same on SeaweedFS, where the refill is a scan of volumes
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.tier_harness.faults import KillReport, LossReport, kill_volume_server, lose_redis
from bench.tier_harness.processes import ServerMissing, redis_server
from bench.tier_harness.weed import WeedCluster
from headrace.kvcache.index.redis import RedisIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from headrace.kvcache.store.seaweedfs.store import SeaweedStore
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from headrace.services.worker.tier.weed_volumes import WeedVolumes

NODES = 2


def seaweed_kill(folder: Path, blocks: int, seconds: float, told: Callable[[], None]) -> KillReport:
    """Shows 4, first half."""
    with contextlib.ExitStack() as stack:
        cluster = WeedCluster(folder / "weed")
        stack.callback(cluster.stop)
        cluster.start()
        redis = redis_server(folder / "redis")
        stack.callback(redis.kill)
        redis.start()
        redis.wait_until_it_listens()
        store = open_seaweed(cluster, f"redis://{redis.address}/0")
        stack.callback(store.close)
        return kill_volume_server(cluster, store, blocks, seconds / 3, seconds, told)


def redis_segments(folder: Path, blocks: int, seconds: float, told: Callable[[], None]) -> LossReport:
    """Shows 4, second half, on files."""
    with contextlib.ExitStack() as stack:
        redis = redis_server(folder / "redis")
        stack.callback(redis.kill)
        redis.start()
        redis.wait_until_it_listens()
        stores = []
        for node in range(NODES):
            settings = SegmentSettings(node=f"node{node}", segment_bytes=32 << 20)
            index = RedisIndex(f"redis://{redis.address}/0", "bench")
            store = SegmentStore(PosixFileLayer(folder / "store"), index, settings)
            stack.callback(store.close)
            stores.append(store)
        return lose_redis(redis, stores, stores, blocks, seconds, 0.5, told)


def redis_seaweed(folder: Path, blocks: int, seconds: float, told: Callable[[], None]) -> LossReport:
    """Shows 4, second half, on SeaweedFS."""
    with contextlib.ExitStack() as stack:
        cluster = WeedCluster(folder / "weed")
        stack.callback(cluster.stop)
        cluster.start()
        redis = redis_server(folder / "redis")
        stack.callback(redis.kill)
        redis.start()
        redis.wait_until_it_listens()
        stores = [open_seaweed(cluster, f"redis://{redis.address}/0") for _ in range(NODES)]
        for store in stores:
            stack.callback(store.close)
        return lose_redis(redis, stores, stores, blocks, seconds, 0.5, told)


def open_seaweed(cluster: WeedCluster, redis: str) -> SeaweedStore:
    """One node of a SeaweedFS store whose index is that Redis."""
    settings = SeaweedSettings((cluster.master.address,), collection="bench")
    return SeaweedStore(settings, RedisIndex(redis, "bench"), files=WeedVolumes())


SCENARIOS: dict[str, Callable[[Path, int, float, Callable[[], None]], KillReport | LossReport]] = {
    "seaweed_kill": seaweed_kill,
    "redis_segments": redis_segments,
    "redis_seaweed": redis_seaweed,
}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--blocks", type=positive, default=600, help="blocks of 114,048 B stored beforehand")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long the load goes on after a server's death")
    parser.add_argument("--only", choices=sorted(SCENARIOS), help="one scenario")
    options = parser.parse_args()
    results: dict[str, JsonValue] = {}
    rows: list[dict[str, Scalar]] = []
    try:
        with Phases() as phases:
            for name, run in SCENARIOS.items():
                if options.only not in (None, name):
                    continue
                with tempfile.TemporaryDirectory(prefix="tier-faults-") as folder, phases.phase(name, 4) as told:
                    report = run(Path(folder), options.blocks, options.seconds, told)
                results[name] = asdict(report)
                rows.append(row_of(name, report))
    except ServerMissing as error:
        parser.error(str(error))
    notes = [
        "worst_ms: longest read of 16 blocks from the death on (seaweed_kill) or while Redis was away",
        "back: share of the durable blocks that were read back right afterwards; 1 and at least 0.99 are promised",
    ]
    emit(Report("tier_faults", results, rows, notes), as_json=options.json)
    return 0 if all(kept(row) for row in rows) else 1


def row_of(name: str, report: KillReport | LossReport) -> dict[str, Scalar]:
    if isinstance(report, KillReport):
        back, worst = report.read_back / report.blocks, report.worst_stall_ms
    else:
        back, worst = report.hit_ratio, report.worst_read_ms
    return {"fault": name, "blocks": report.blocks, "back": back, "wrong": report.wrong, "worst_ms": worst}


def kept(row: dict[str, Scalar]) -> bool:
    """Whether a scenario kept what issue 3 promises."""
    back, wrong = row["back"], row["wrong"]
    return isinstance(back, float) and back >= (1.0 if row["fault"] == "seaweed_kill" else 0.99) and wrong == 0


if __name__ == "__main__":
    sys.exit(main())
