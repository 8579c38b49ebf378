"""peers.py: death needs evidence, incarnations do not mix."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.kvcache.transfer.base import PeerDescription
from headrace.kvcache.transfer.errors import PeerRefused, Refusal
from headrace.kvcache.transfer.peers import Liveness, Peer, PeerTable, ProcessIdentity, check_fingerprints

MODEL, LAYOUT = b"m" * 32, b"l" * 32


def description(incarnation: str, rank: int = 0) -> PeerDescription:
    return PeerDescription(incarnation, rank, f"{rank}.{incarnation}", b"", 1, (), LAYOUT, MODEL)


def identity_of(pid: int) -> ProcessIdentity:
    own = ProcessIdentity.own()
    ticks = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]
    return replace(own, pid=pid, start_ticks=int(ticks))


def test_a_stopped_process_is_alive_and_a_killed_one_dead() -> None:
    """L6: only evidence of death frees quarantined rows; SIGSTOP is none."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = identity_of(child.pid)
        assert identity.liveness() is Liveness.ALIVE
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert identity.liveness() is Liveness.ALIVE
    finally:
        child.kill()
    # Dead, though nobody has reaped it: its threads are gone.
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert identity.liveness() is Liveness.DEAD
    child.wait()
    assert identity.liveness() is Liveness.DEAD


def test_a_reused_pid_is_another_process() -> None:
    """L14: the same PID with another start time is not the peer."""
    own = ProcessIdentity.own()
    assert own.liveness() is Liveness.ALIVE
    assert replace(own, start_ticks=own.start_ticks - 1).liveness() is Liveness.DEAD


def test_other_hosts_are_unknown() -> None:
    """L6: nothing is freed on a guess."""
    own = ProcessIdentity.own()
    assert replace(own, boot_id="other").liveness() is Liveness.UNKNOWN
    assert replace(own, pid_namespace="pid:[1]").liveness() is Liveness.UNKNOWN


def test_identity_round_trip() -> None:
    own = ProcessIdentity.own()
    assert ProcessIdentity.decode(own.encode()) == own
    with pytest.raises(ValueError, match="four"):
        ProcessIdentity.decode(b"x y z")


def test_table_forgets_a_whole_incarnation() -> None:
    """L14."""
    table = PeerTable()
    for incarnation, rank in (("a", 0), ("a", 1), ("b", 0)):
        table.put(Peer(description(incarnation, rank), ProcessIdentity.own(), (), {("cpu", "cpu"): "cma"}))
    table.mark_lost("b", 0)
    assert {peer.description.rank for peer in table.remove("a")} == {0, 1}
    assert table.find("a", 0) is None
    lost = table.find("b", 0)
    assert lost is not None
    assert lost.lost
    assert lost.transport == "cma"


def test_fingerprints() -> None:
    """L14: incompatible layouts are refused at the handshake; a peer without KV has none to differ."""
    peer = description("a")
    check_fingerprints(peer, layout_fingerprint=LAYOUT, model_fingerprint=MODEL)
    check_fingerprints(peer, layout_fingerprint=None, model_fingerprint=MODEL)
    with pytest.raises(PeerRefused) as refused:
        check_fingerprints(peer, layout_fingerprint=b"x" * 32, model_fingerprint=MODEL)
    assert refused.value.reason is Refusal.LAYOUT
    with pytest.raises(PeerRefused) as refused:
        check_fingerprints(peer, layout_fingerprint=LAYOUT, model_fingerprint=b"x" * 32)
    assert refused.value.reason is Refusal.MODEL
