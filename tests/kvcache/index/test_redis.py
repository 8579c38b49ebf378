"""RedisIndex beyond the contract: a server that dies, stalls, comes back empty, refuses; TLS and ACL; the URL."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.index.base import IndexUnavailable
from headrace.kvcache.index.breaker import CircuitBreaker
from headrace.kvcache.index.open import IndexUrlError, open_index
from headrace.kvcache.index.redis import RedisIndex
from headrace.kvcache.index.redis_calls import RedisUrlError
from tests.kvcache.index.redis_server import ACL_PASSWORD, RedisServer, make_certificates
from tests.kvcache.index.rows import key, row, soon


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """One that the test may kill."""
    server = RedisServer(tmp_path / "redis")
    server.start()
    yield server
    server.kill()


def eventually(index: RedisIndex) -> str:
    """The generation, as soon as the breaker lets a probe through."""
    end = soon()
    while True:
        try:
            return index.generation(soon())
        except IndexUnavailable:
            assert time.monotonic() < end


def test_a_server_that_comes_back_empty_is_noticed_and_refilled_by_one(server: RedisServer) -> None:
    """Show 4 of issue 3: a lost memory is a new generation, and one node is elected to refill."""
    nodes = [RedisIndex(server.url, "s", breaker=CircuitBreaker(0.01, 0.05)) for _ in range(3)]
    nodes[0].put_many([row(number) for number in range(100)], soon())
    assert nodes[0].claim_rebuild("n0", 60, soon())
    assert nodes[0].finish_rebuild("n0", soon())
    before = nodes[0].generation(soon())

    server.kill()
    with pytest.raises(IndexUnavailable):
        nodes[1].get_many([key(0)], soon())
    server.start()

    after = {eventually(node) for node in nodes}
    assert len(after) == 1
    assert before not in after
    assert all(node.needs_rebuild(soon()) for node in nodes)
    assert [node.claim_rebuild(f"n{number}", 60, soon()) for number, node in enumerate(nodes)] == [True, False, False]
    assert list(nodes[2].get_many([key(0)], soon())) == [None]
    nodes[0].put_many([row(number, "refilled") for number in range(100)], soon())
    assert nodes[0].finish_rebuild("n0", soon())
    assert not any(node.needs_rebuild(soon()) for node in nodes)
    assert list(nodes[2].get_many([key(0)], soon())) == [row(0, "refilled")]


def test_a_refill_that_was_lost_in_its_middle_does_not_count(server: RedisServer) -> None:
    index = RedisIndex(server.url, "s", breaker=CircuitBreaker(0.01, 0.05))
    assert index.claim_rebuild("me", 60, soon())
    index.put_many([row(0)], soon())
    server.kill()
    server.start()
    eventually(index)
    assert not index.finish_rebuild("me", soon())
    assert index.needs_rebuild(soon())


def test_a_dead_server_is_asked_once_and_not_per_call(server: RedisServer) -> None:
    """L17: decided once per dead target."""
    now = [0.0]
    breaker = CircuitBreaker(1.0, 8.0, monotonic=lambda: now[0])
    index = RedisIndex(server.url, "s", breaker=breaker)
    index.put_many([row(0)], soon())
    server.kill()
    with socket.create_server(("127.0.0.1", server.port)) as listener:
        asked = []

        def count() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                asked.append(client)
                client.close()

        counter = threading.Thread(target=count)
        counter.start()
        for _ in range(50):
            with pytest.raises(IndexUnavailable):
                index.get_many([key(0)], soon())
        assert len(asked) == 1
        now[0] += 1.0
        for _ in range(50):
            with pytest.raises(IndexUnavailable):
                index.get_many([key(0)], soon())
        assert len(asked) == 2, "one probe after a wait"
        listener.shutdown(socket.SHUT_RDWR)
        counter.join()
    server.start()
    now[0] += 100.0
    assert list(index.get_many([key(0)], soon())) == [None]
    assert not breaker.is_open


def test_a_stopped_server_costs_the_deadline_and_its_late_answers_reach_nobody(server: RedisServer) -> None:
    """L6, L17: SIGSTOP is the worst kind of dead, since connections stay open and answers come later."""
    index = RedisIndex(server.url, "s", breaker=CircuitBreaker(0.01, 0.05))
    index.put_many([row(number) for number in range(10)], soon())
    assert list(index.get_many([key(1)], soon())) == [row(1)]
    server.signal(signal.SIGSTOP)
    try:
        for number in (2, 3):
            with pytest.raises(IndexUnavailable):
                index.get_many([key(number)], time.monotonic() + 0.1)
    finally:
        server.signal(signal.SIGCONT)
    eventually(index)
    for number in (4, 5, 6):
        assert list(index.get_many([key(number)], soon())) == [row(number)]


def test_a_caller_with_no_time_is_no_evidence_against_the_server(server: RedisServer) -> None:
    breaker = CircuitBreaker(1_000.0)
    index = RedisIndex(server.url, "s", breaker=breaker)
    index.put_many([row(0)], soon())
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(IndexUnavailable):
            index.get_many([key(0)], time.monotonic() + 0.005)
        assert not breaker.is_open
    finally:
        server.signal(signal.SIGCONT)
    assert list(index.get_many([key(0)], soon())) == [row(0)]


def test_an_idle_connection_that_the_server_closed_costs_nothing(server: RedisServer) -> None:
    breaker = CircuitBreaker(1_000.0)
    index = RedisIndex(server.url, "s", breaker=breaker)
    index.put_many([row(0)], soon())
    server.kill()
    server.start()
    assert list(index.get_many([key(0)], soon())) == [None]
    assert not breaker.is_open


def test_names_share_a_server_without_meeting(redis_plain: RedisServer) -> None:
    one, other = (RedisIndex(redis_plain.url, uuid.uuid4().hex) for _ in range(2))
    one.put_many([row(0)], soon())
    assert list(other.get_many([key(0)], soon())) == [None]
    other.clear(soon())
    assert list(one.get_many([key(0)], soon())) == [row(0)]


def test_tls_needs_the_right_authority_and_acl_the_right_password(redis_tls: RedisServer, tmp_path: Path) -> None:
    """L25: an index that cannot be trusted is no index; and no message repeats the password."""
    make_certificates(tmp_path)
    wrong_authority = redis_tls.url.replace(str(redis_tls.folder / "ca.crt"), str(tmp_path / "ca.crt"))
    for url in (
        wrong_authority,
        redis_tls.url.replace(ACL_PASSWORD, "guessed"),
        redis_tls.url.replace(f"headrace:{ACL_PASSWORD}@", ""),
        redis_tls.url.replace("rediss", "redis").split("?", maxsplit=1)[0],
    ):
        with pytest.raises(IndexUnavailable) as caught:
            RedisIndex(url, "s").get_many([key(0)], time.monotonic() + 1.0)
        assert ACL_PASSWORD not in str(caught.value)
        assert "guessed" not in str(caught.value)


def test_the_acl_keeps_the_index_to_its_own_keys(redis_tls: RedisServer) -> None:
    index = RedisIndex(redis_tls.url, "s")
    for command in (("SET", "elsewhere", "1"), ("FLUSHALL",), ("CONFIG", "GET", "*"), ("KEYS", "*")):
        with pytest.raises(IndexUnavailable, match="refused"):
            index._calls.one(command, soon())


def test_a_server_out_of_memory_refuses_writes_and_still_reads(server: RedisServer) -> None:
    index = RedisIndex(server.url, "s")
    index.put_many([row(0)], soon())
    index._calls.one(("CONFIG", "SET", "maxmemory", "1"), soon())
    with pytest.raises(IndexUnavailable, match="refused"):
        index.put_many([row(1)], soon())
    assert list(index.get_many([key(0)], soon())) == [row(0)]


def test_a_primary_that_became_a_replica_is_left(server: RedisServer) -> None:
    """L17: after a failover the address is another server's; a connection to the old one would refuse every write for
    as long as it lives."""
    index = RedisIndex(server.url, "s")
    index.put_many([row(0)], soon())
    index._calls.one(("REPLICAOF", "127.0.0.1", "1"), soon())
    assert index._calls._idle
    with pytest.raises(IndexUnavailable, match="refused"):
        index.put_many([row(1)], soon())
    assert not index._calls._idle
    assert list(index.get_many([key(0)], soon())) == [row(0)], "it still answers"
    index._calls.one(("REPLICAOF", "NO", "ONE"), soon())
    index.put_many([row(1)], soon())


def test_urls_that_cannot_be_used_are_refused_at_the_border(tmp_path: Path) -> None:
    for url in ("", "etcd://127.0.0.1", "http://user:secret@127.0.0.1", "sqlite:relative"):
        with pytest.raises(IndexUrlError) as refused:
            open_index(url, tmp_path, "s")
        assert "secret" not in str(refused.value)
    with pytest.raises(RedisUrlError) as wrong_port:
        open_index("redis://user:secret@host:port", tmp_path, "s")
    assert "secret" not in str(wrong_port.value)
    with pytest.raises(RedisUrlError, match="ssl_ca_certs"):
        open_index("redis://127.0.0.1:1?ssl_ca_certs=/ca.crt", tmp_path, "s")
    assert isinstance(open_index(f"sqlite://{tmp_path}/elsewhere.sqlite", tmp_path, "s"), object)
    assert (tmp_path / "elsewhere.sqlite").exists()


def test_the_readme_shows_the_acl_that_the_tests_run_with() -> None:
    from tests.kvcache.index.redis_server import ACL_COMMANDS

    readme = " ".join((Path(__file__).parents[3] / "kvcache/index/README.md").read_text().split())
    assert ACL_COMMANDS in readme


def test_openssl_verifies_the_certificates_that_the_tests_make(redis_tls: RedisServer) -> None:
    done = subprocess.run(
        ["openssl", "verify", "-CAfile", "ca.crt", "server.crt"], cwd=redis_tls.folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
