"""What masters and volume servers may answer, played by small doubles."""

from __future__ import annotations

import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kvcache.entries import Loaded, Miss
from headrace.kvcache.store.seaweedfs.cluster import Cluster, ClusterError, Location, VolumeUnknown
from headrace.kvcache.store.seaweedfs.http import Reply, Servers, ServerTimeout, ServerUnreachable
from headrace.kvcache.store.seaweedfs.needles import (
    Needle,
    collection_of,
    fill_header,
    header_for,
    new_record,
    row_for,
)
from headrace.kvcache.store.seaweedfs.reader import RecordReader
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings
from tests.kvcache.store.entries import NAMESPACE, block, soon

ENTRY = block("a", 0)
NEEDLE = Needle(3, 17, 0xC0FFEE)
HEADER = header_for(ENTRY.info, NEEDLE, collection_of("headrace", NAMESPACE), 1, 2_000_000_000)
RECORD = new_record(ENTRY.payload)
fill_header(RECORD, HEADER)
ROW = row_for(HEADER, NEEDLE)
GOOD = bytes(RECORD)
ELSEWHERE = new_record(ENTRY.payload)
fill_header(ELSEWHERE, header_for(ENTRY.info, Needle(3, 18, 1), collection_of("headrace", NAMESPACE), 1, 2_000_000_000))
ANSWERS: dict[str, tuple[Reply | Exception, Miss | None]] = {
    "good": (Reply(200, GOOD), None),
    "absent": (Reply(404, b""), Miss.ABSENT),
    "digest": (Reply(200, GOOD[:-1] + bytes([GOOD[-1] ^ 1])), Miss.DIGEST),
    "short": (Reply(200, GOOD[:-1]), Miss.SHORT),
    "long": (Reply(200, GOOD + b"x"), Miss.SHORT),
    "header": (Reply(200, b"\x00" + GOOD[1:]), Miss.HEADER),
    "elsewhere": (Reply(200, bytes(ELSEWHERE)), Miss.HEADER),
    "error": (Reply(500, b"oops"), Miss.SERVER),
    "timeout": (ServerTimeout("late"), Miss.TIMEOUT),
    "away": (ServerUnreachable("gone"), Miss.NOT_CONNECTED),
}
ORDER = [Miss.DIGEST, Miss.HEADER, Miss.SHORT, Miss.TIMEOUT, Miss.SERVER, Miss.NOT_CONNECTED, Miss.ABSENT]


@dataclass
class FakeServers:
    """Answers by server, or by (server, path)."""

    answers: dict[str, Reply | Exception]
    down: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def up(self, server: str) -> bool:
        return server not in self.down

    def call(self, method: str, server: str, path: str, deadline: float, **_: object) -> Reply:
        self.asked.append(server)
        answer = self.answers[server]
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class FakeCluster:
    copies: tuple[Location, ...]

    def locations(self, volume: int, deadline: float, *, fresh: bool = False) -> tuple[Location, ...]:
        if not self.copies:
            raise VolumeUnknown(volume)
        return self.copies


def reader_over(
    answers: dict[str, Reply | Exception], down: set[str] | None = None
) -> tuple[RecordReader, FakeServers]:
    servers = FakeServers(answers, down or set())
    cluster = FakeCluster(tuple(Location(server, "") for server in answers))
    return RecordReader(SeaweedSettings(("m:1",)), servers, cluster), servers  # type: ignore[arg-type]


@given(st.lists(st.sampled_from(sorted(ANSWERS)), min_size=1, max_size=3))
def test_any_whole_copy_is_enough(states: list[str]) -> None:
    """L3, L17: a read fails only if no copy is whole, with the heaviest cause, and names a row dangling only if as many
    copies as were written deny the needle."""
    reader, servers = reader_over({f"s{n}": ANSWERS[state][0] for n, state in enumerate(states)})
    outcome = reader.read(ROW, soon())
    if "good" in states:
        assert isinstance(outcome.result, Loaded)
        assert bytes(outcome.result.payload) == ENTRY.payload
        assert not outcome.gone
    else:
        causes = {ANSWERS[state][1] for state in states}
        assert outcome.result is min((cause for cause in causes if cause), key=ORDER.index)
        assert outcome.gone == (set(states) == {"absent"} and len(states) >= 2)
        assert len(servers.asked) == len(states), "each copy is asked once"


def test_a_server_that_is_down_is_asked_last() -> None:
    """L17."""
    good = ANSWERS["good"][0]
    for down in ("a", "b"):
        reader, servers = reader_over({"a": good, "b": good}, {down})
        assert isinstance(reader.read(ROW, soon()).result, Loaded)
        assert servers.asked == [{"a": "b", "b": "a"}[down]]


def test_a_volume_that_no_server_has_is_no_proof() -> None:
    reader, _ = reader_over({})
    outcome = reader.read(ROW, soon())
    assert (outcome.result, outcome.gone) == (Miss.NOT_CONNECTED, False)


def cluster_over(answers: dict[str, Reply | Exception]) -> tuple[Cluster, FakeServers]:
    servers = FakeServers(answers)
    return Cluster(SeaweedSettings(tuple(answers)), servers), servers  # type: ignore[arg-type]


def said(document: object, status: int = 200) -> Reply:
    return Reply(status, json.dumps(document).encode())


def test_the_first_master_that_answers_is_kept() -> None:
    cluster, servers = cluster_over(
        {
            "a:1": ServerUnreachable("dead"),
            "b:1": Reply(502, b"<html>"),
            "c:1": said({"fid": "7,1bdeadbeef", "url": "v:1", "count": 5}),
        }
    )
    for _ in range(2):
        grant = cluster.assign("headrace_x", "3h", 9, soon())
        assert (grant.volume, grant.first, grant.cookie, grant.count) == (7, 0x1B, 0xDEADBEEF, 5)
    assert servers.asked == ["a:1", "b:1", "c:1", "c:1"]


def test_a_master_without_a_leader_is_passed_over() -> None:
    """L17: a follower that is cut off from the leader refuses; the others are asked."""
    grant = said({"fid": "7,1bdeadbeef", "url": "v:1", "count": 1})
    cluster, servers = cluster_over({"a:1": said({"error": "no leader"}, 503), "b:1": grant})
    for _ in range(2):
        assert cluster.assign("headrace_x", "", 1, soon()).volume == 7
    assert servers.asked == ["a:1", "b:1", "b:1"]


def test_no_room_is_told_from_no_answer() -> None:
    cluster, _ = cluster_over({"a:1": said({"error": "no free volumes"}, 503)})
    with pytest.raises(ClusterError, match="no free volumes") as caught:
        cluster.assign("headrace_x", "", 1, soon())
    assert caught.value.cause == "no_space"
    cluster, _ = cluster_over({"a:1": ServerTimeout("late")})
    with pytest.raises(ClusterError) as caught:
        cluster.assign("headrace_x", "", 1, soon())
    assert caught.value.cause == "timeout"


def test_locations_are_remembered_while_no_master_answers() -> None:
    """L17: a dead master is no reason to read nothing."""
    cluster, servers = cluster_over({"a:1": said({"locations": [{"url": "v:1", "grpcPort": 9}]})})
    assert cluster.locations(3, soon()) == (Location("v:1", "v:9"),)
    servers.answers["a:1"] = ServerUnreachable("dead")
    assert cluster.locations(3, soon()) == (Location("v:1", "v:9"),)
    assert cluster.locations(3, soon(), fresh=True) == (Location("v:1", "v:9"),)
    with pytest.raises(ClusterError):
        cluster.locations(4, soon())


def test_an_unknown_volume_is_not_asked_for_at_every_key() -> None:
    cluster, servers = cluster_over({"a:1": said({"volumeOrFileId": "3", "error": "volume id 3 not found"}, 404)})
    for _ in range(50):
        with pytest.raises(VolumeUnknown):
            cluster.locations(3, soon(), fresh=True)
    assert len(servers.asked) < 10


def test_volumes_of_other_collections_are_left_alone() -> None:
    def volume(number: int, collection: str, size: int) -> dict[str, object]:
        ttl = {"Count": 74, "Unit": 2}
        return {"Id": number, "Collection": collection, "Size": size, "FileCount": 1, "Ttl": ttl}

    nodes = {
        "s1:1": [volume(1, "headrace_x", 10), volume(2, "other", 5), volume(3, "headracing_x", 5)],
        "s2:1": [volume(1, "headrace_x", 12)],
        "s3:1": None,
    }
    cluster, _ = cluster_over({"a:1": said({"Volumes": {"DataCenters": {"dc": {"rack": nodes}}}})})
    (found,) = cluster.volumes(soon())
    assert (found.volume, found.nbytes, found.copies, found.ttl) == (1, 12, 2, "74h")


@contextmanager
def http_server(answer: Callable[[socketserver.StreamRequestHandler, int], None]) -> Iterator[str]:
    """A server on loopback; `answer` gets the connection and the number of the request on it."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            number = 0
            while self.rfile.readline().strip():
                while self.rfile.readline().strip():
                    pass
                answer(self, number)
                number += 1
                if self.wfile.closed:
                    return

    class Threads(socketserver.ThreadingTCPServer):
        allow_reuse_address = True
        daemon_threads = True

    with Threads(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_a_kept_connection_that_was_closed_is_tried_once_more() -> None:
    """A server may close an idle connection at the moment it is used: no failure of the server."""

    def answer(handler: socketserver.StreamRequestHandler, number: int) -> None:
        if number == 0:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        else:
            handler.connection.close()
            handler.wfile.close()

    servers = Servers(2, 0.5, 0.25)
    with http_server(answer) as server:
        for _ in range(3):
            assert servers.call("GET", server, "/", soon()).body == b"ok"
        assert servers.up(server)
        servers.close()


def test_a_body_that_drips_ends_at_the_deadline() -> None:
    """L6: no byte after another keeps a read alive past its deadline, and the server is taken for dead (L17)."""
    stop = threading.Event()

    def answer(handler: socketserver.StreamRequestHandler, number: int) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n")
        while not stop.wait(0.02):
            try:
                handler.wfile.write(b"x" * 20_000)
            except OSError:
                break
        handler.wfile.close()

    servers = Servers(2, 0.5, 0.1)
    with http_server(answer) as server:
        try:
            with pytest.raises(ServerTimeout):
                servers.call("GET", server, "/", time.monotonic() + 0.3)
            with pytest.raises(ServerUnreachable, match="not asked again"):
                servers.call("GET", server, "/", soon())
            assert not servers.up(server)
        finally:
            stop.set()
            servers.close()


def test_a_callers_short_deadline_is_not_the_servers_fault() -> None:
    hang = threading.Event()

    def answer(handler: socketserver.StreamRequestHandler, number: int) -> None:
        hang.wait(20)
        handler.wfile.close()

    servers = Servers(2, 0.5, 0.25)
    with http_server(answer) as server:
        with pytest.raises(ServerTimeout):
            servers.call("GET", server, "/", time.monotonic() + 0.02)
        with pytest.raises(ServerTimeout):
            servers.call("GET", server, "/", time.monotonic() - 1)
        assert servers.up(server)
        hang.set()
        servers.close()


def test_a_server_that_is_back_is_found_by_the_probe() -> None:
    """L14: no request has to try it."""
    servers = Servers(2, 0.5, 0.25)

    def answer(handler: socketserver.StreamRequestHandler, number: int) -> None:
        handler.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    with http_server(answer) as server:
        _, breaker = servers._of(server)
        breaker.failed()
        assert not servers.up(server)
        until = time.monotonic() + 60
        while not servers.up(server):
            servers.probe(1.0)
            assert time.monotonic() < until
        servers.close()
