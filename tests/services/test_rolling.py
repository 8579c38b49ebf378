"""Show 4: a rolling restart, and a worker that changes its role and back, under load: no request fails."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli import role
from headrace.cli.ask import Answer, gather, token_prompt
from headrace.cli.client import RouterClient, change_role, drain_replica
from headrace.cli.client_tls import ENV_IDENTITY, OPERATOR, TLS_FOLDER
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.rolling import plan, roll
from headrace.services.runtime.errors import HeadraceError
from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.registry.wire import role_to_wire
from headrace.v1 import common_pb2, inference_pb2, registry_pb2

CLIENTS = 3
TOKENS = 24
PAUSE_S = 0.1
"""Between two requests of a client, so that starts get on, too."""
pytestmark = pytest.mark.timeout(1200)
EXACT = ("load.dtype=float32", "load.entry_format=float32", "load.batch_invariant=true", "load.native_kernels=false")
SETS = (*EXACT, "stop.drain_seconds=3", "engine.max_sequences=8")


@pytest.fixture(scope="module")
def cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    spec = ClusterSpec(v3_folder, {"prefill": 2, "decode": 2}, sets=SETS)
    with LocalCluster(spec, run_dir=tmp_path_factory.mktemp("run")) as running:
        yield running


def request(index: int) -> inference_pb2.GenerateRequest:
    """Twelve different ones; each is always answered alike."""
    kind = index % 12
    ids = [3 + (kind * 7 + i * (kind + 1)) % 200 for i in range(20 + 30 * kind)]
    return inference_pb2.GenerateRequest(
        prompt=token_prompt(ids),
        sampling=common_pb2.SamplingParams(temperature=0.8, seed=kind),
        stop=common_pb2.StopParams(max_tokens=TOKENS, ignore_eos=True),
    )


class Load:
    """Clients that ask one request after another until they are told to stop."""

    def __init__(self, router: str) -> None:
        self._router = router
        self._stop = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self._answers: dict[int, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def client(self, first: int) -> None:
        with RouterClient(self._router) as client:
            index = first
            while not self._stop.is_set():
                try:
                    answer = gather(client.generate(request(index), timeout_s=120))
                except HeadraceError as error:
                    self.note("failed", f"{index}: {error!r}")
                else:
                    self.check(index, answer)
                index += CLIENTS
                self._stop.wait(PAUSE_S)

    def check(self, index: int, answer: Answer) -> None:
        choice = answer.choice(0)
        if choice.reason != "length":
            self.note("failed", f"{index}: {choice.finished}")
            return
        tokens = tuple(choice.token_ids)
        with self._lock:
            known = self._answers.setdefault(index % 12, tokens)
        self.note("finished" if tokens == known else "wrong", f"{index}: {tokens}")

    def note(self, outcome: str, detail: str) -> None:
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome != "finished":
                self.failures.append(detail)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self.client, args=(index,)) for index in range(CLIENTS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()


def roles(cluster: LocalCluster) -> dict[str, common_pb2.Role.ValueType]:
    ready = registry_pb2.REPLICA_STATE_READY
    return {one.peer.replica_id: one.role for one in cluster.status().members if one.state == ready}


def test_a_rolling_restart_fails_no_request(cluster: LocalCluster) -> None:
    """L5, L19: one of each role, or with HEADRACE_TORTURE=full all of them, are other processes afterwards, and every
    answer is the one that it always is."""
    names = cluster.spec.names[1:] if os.environ.get("HEADRACE_TORTURE") == "full" else ("prefill-0", "decode-0")
    before = {name: cluster.child(name).pid for name in names}
    load, told = Load(cluster.router), []
    with load.running():
        roll(cluster, plan(cluster.spec, names), lambda event, name: told.append((event, name)))
    assert (load.failures, load.outcomes["finished"] > CLIENTS) == ([], True)
    assert told == [(event, name) for name in names for event in ("restarting", "ready")]
    assert all(cluster.child(name).pid != before[name] for name in names)


def test_a_role_change_there_and_back_fails_no_request(cluster: LocalCluster) -> None:
    """L5, L14, L19: prefill → decode → prefill, then decode → prefill → decode, in the same processes."""
    before = {child.name: child.pid for child in cluster.children[1:]}
    load = Load(cluster.router)
    with load.running():
        for name, there, back in (("prefill-1", "decode", "prefill"), ("decode-1", "prefill", "decode")):
            for wanted in (there, back):
                role.role(cluster.router, None, name, wanted, wait_s=3, force=False, as_json_text=False)
                assert roles(cluster)[name] == role_to_wire(Role(wanted))
    assert (load.failures, load.outcomes["finished"] > CLIENTS) == ([], True)
    assert {child.name: child.pid for child in cluster.children[1:]} == before


def test_a_drain_hands_over_and_is_undone(cluster: LocalCluster) -> None:
    """L19: with no time at all the other decode goes on with what ran there."""
    load = Load(cluster.router)
    with load.running():
        member = next(one for one in cluster.status().members if one.peer.replica_id == "decode-0")
        assert drain_replica(member.endpoint, wait_s=0, hand_over=True).live == 0
        drain_replica(member.endpoint, resume=True)
        cluster.settle(60)
    assert load.failures == []


def test_a_drained_worker_is_restarted_as_it_is(cluster: LocalCluster) -> None:
    """A drained one holds nothing up; and the only one beside it that takes requests is not restarted."""
    member = next(one for one in cluster.status().members if one.peer.replica_id == "decode-0")
    drain_replica(member.endpoint, wait_s=0)
    deadline = time.monotonic() + 60
    while "decode-0" in roles(cluster):
        assert time.monotonic() < deadline, "the router does not hear of the drain"
        time.sleep(0.05)
    with pytest.raises(CliError, match="alone in its role now"):
        roll(cluster, plan(cluster.spec, ("decode-1",)), lambda event, name: None)
    before = cluster.child("decode-0").pid
    roll(cluster, plan(cluster.spec, ("decode-0",)), lambda event, name: None)
    assert cluster.child("decode-0").pid != before
    assert "decode-0" in roles(cluster)


def test_the_last_one_of_a_role_stays(cluster: LocalCluster) -> None:
    """Without --force, what would make requests fail is refused before anything is touched."""
    router = cluster.router
    role.role(router, None, "prefill-1", "decode", wait_s=3, force=False, as_json_text=True)
    with pytest.raises(CliError, match="the only prefill"):
        role.role(router, None, "prefill-0", "decode", wait_s=3, force=False, as_json_text=False)
    with pytest.raises(CliError, match="the only prefill"):
        role.drain(router, None, "prefill-0", wait_s=0, hand_over=False, resume=False, force=False)
    with pytest.raises(CliError, match="alone in its role"):
        roll(cluster, plan(cluster.spec, ["prefill-0"]), lambda event, name: None)
    with pytest.raises(CliError, match="no replica 'prefill-9'"):
        role.role(router, None, "prefill-9", "decode", wait_s=3, force=False, as_json_text=False)
    role.role(router, None, "prefill-1", "prefill", wait_s=3, force=False, as_json_text=False)


def test_a_role_changes_under_tls(v3_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L25: a worker's certificate is good for both roles, and for no other replica; without one nobody changes it."""
    spec = ClusterSpec(v3_folder, {"prefill": 1, "decode": 2}, sets=SETS, tls=True)
    with LocalCluster(spec, run_dir=tmp_path / "run") as cluster:
        address = cluster.child("decode-1").address
        assert address is not None
        with pytest.raises(HeadraceError):
            change_role(address, common_pb2.ROLE_PREFILL, 1.0)
        monkeypatch.setenv(ENV_IDENTITY, str(tmp_path / "run" / TLS_FOLDER / OPERATOR))
        for wanted in ("prefill", "decode"):
            role.role(cluster.router, None, "decode-1", wanted, wait_s=3, force=False, as_json_text=False)
            assert roles(cluster)["decode-1"] == role_to_wire(Role(wanted))
            answers = [gather(cluster.client.generate(request(index), timeout_s=120)) for index in range(4)]
            assert [answer.choice(0).reason for answer in answers] == ["length"] * 4


def test_the_router_comes_back_at_its_address(cluster: LocalCluster) -> None:
    """L14: it holds the registry: workers register again, under the incarnations that they have."""
    address, workers = cluster.router, {child.name: child.pid for child in cluster.children[1:]}
    before = {one.peer.replica_id: one.peer.incarnation for one in cluster.status().members}
    roll(cluster, plan(cluster.spec, ["router-0"]), lambda event, name: None)
    assert cluster.router == address
    assert {child.name: child.pid for child in cluster.children[1:]} == workers
    assert {one.peer.replica_id: one.peer.incarnation for one in cluster.status().members} == before
    answer = gather(cluster.client.generate(request(1), timeout_s=120))
    assert answer.choice(0).reason == "length"
