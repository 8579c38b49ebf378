"""bench.retention on generated traces, and that its checks can fail."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path

import pytest

from bench import retention
from bench.retention_harness.model import RECORD_BYTES, SegmentModel
from bench.retention_harness.peers import PEERS, LeafFirstLru
from bench.retention_harness.replay import replay_store
from bench.retention_harness.trace import Request, Trace, load_trace
from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.store.retention.classes import DAY
from headrace.router.simulate.traces import TraceError

CHATS, TURNS, TURN_BLOCKS = 120, 4, 3


def chats() -> list[Request]:
    """Chats of four turns, each 2.1 days after the one before, behind one of five shared system prompts."""
    chance = random.Random(7)
    requests = []
    for chat in range(CHATS):
        start = chance.uniform(0, 0.7 * DAY)
        blocks = [chat % 5]
        for turn in range(TURNS):
            fresh = 100 + (chat * TURNS + turn) * TURN_BLOCKS
            blocks = [*blocks, *range(fresh, fresh + TURN_BLOCKS)]
            requests.append(Request(start + turn * 2.1 * DAY, tuple(blocks)))
    return sorted(requests, key=lambda request: request.time_s)


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    rows = [
        {
            "timestamp": request.time_s * 1000,
            "hash_ids": list(request.blocks),
            "input_length": 512 * len(request.blocks),
            "output_length": 1,
        }
        for request in chats()
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """One run with --json; a missed limit must also be the exit status."""
    status = 0
    try:
        retention.main([*arguments, "--json"])
    except SystemExit as ended:
        status = int(ended.code or 0)
    document: dict[str, object] = json.loads(capsys.readouterr().out)
    assert status == (0 if document["limits_met"] else 1)
    return document


def best_possible() -> float:
    trace = Trace.of(chats())
    return (trace.accesses - trace.unique) / trace.accesses


def test_refresh_keeps_slow_chats_and_the_control_without_it_misses_the_limit(
    trace_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    least = str(best_possible() - 0.01)
    limits = ("--trace", str(trace_file), "--copies", "2", "--chat-limit", least, "--agent-limit", least)
    good = run(capsys, *limits)
    checks = good["checks"]
    assert isinstance(checks, dict)
    assert checks["chat_hit_ratio"]
    assert checks["agent_hit_ratio"]
    assert checks["only_unexpired_left"]
    assert checks["disk_within_quota"]
    assert good["expired_buckets_left"] == 0
    control = run(capsys, *limits, "--without-refresh")
    assert not control["limits_met"]
    assert isinstance(control["checks"], dict)
    assert not control["checks"]["agent_hit_ratio"]


def test_expired_buckets_go_while_idle() -> None:
    trace = Trace.of(chats())
    outcome = replay_store(
        trace.copies(1, 0), RetentionClass.AGENT, trace.unique * 2, start_s=1.7e9, idle_s=4 * DAY, progress=lambda: None
    )
    assert (outcome.left_buckets, outcome.left_expired_buckets) == (0, 0)
    assert outcome.expired_blocks > 0


def test_a_sweeper_that_stops_shows() -> None:
    model = SegmentModel(100 * RECORD_BYTES)
    model.request([b"a", b"b"], RetentionClass.AGENT, 1.7e9)
    end = model.bucket_ends()[0]
    assert model.request([b"a", b"b"], RetentionClass.AGENT, float(end)) == 0, "an expired block is not read"
    assert end in model.bucket_ends(), "nothing was swept yet"
    model.sweep(float(end))
    assert end not in model.bucket_ends()


def test_lru_agrees_with_a_plain_twin() -> None:
    chance = random.Random(3)
    peer, twin = LeafFirstLru(20), OrderedDict[int, int]()
    for _ in range(2_000):
        start = chance.randrange(10) * 10
        blocks = range(start, start + chance.randrange(1, 10))
        lead = next((n for n, block in enumerate(blocks) if block not in twin), len(blocks))
        assert peer.lead(blocks) == lead
        peer.use(blocks)
        for block in reversed(blocks):
            twin.pop(block, None)
            twin[block] = 1
        while len(twin) > 20:
            del twin[next(iter(twin))]


@pytest.mark.parametrize("name", PEERS)
def test_peers_stay_in_their_capacity_and_hit_what_fits(name: str) -> None:
    peer = PEERS[name](50)
    chance = random.Random(1)
    for _ in range(500):
        start = chance.randrange(100) * 5
        peer.use(range(start, start + 5))
        assert sum(block in peer.held for block in range(500)) <= 50
    small = PEERS[name](50)
    small.use(range(10))
    assert small.lead(range(12)) == 10


def test_copies_have_ids_of_their_own() -> None:
    trace = Trace.of([Request(0, (0, 1)), Request(5, (0, 2))]).stretched(100)
    copies = list(trace.copies(2, 1_000))
    assert [request.time_s for request in copies] == [0, 100, 1_000, 1_100]
    assert not {*copies[0].blocks, *copies[1].blocks} & {*copies[2].blocks, *copies[3].blocks}


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"timestamp": 1}\n', encoding="utf-8")
    with pytest.raises(TraceError, match=r"wrong\.jsonl:1"):
        load_trace(path)
