"""Transfers without any network (TLS on, nothing trusted): no listener, the same guarantees inside one host."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import psutil
import pytest

from headrace.kvcache.transfer.base import NO_NETWORK, TransferSettings
from headrace.kvcache.transfer.errors import PeerLost, PeerRefused, Refusal
from headrace.kvcache.transfer.pushes import Outcome, RowMove
from headrace.kvcache.transfer.regions import MemoryRegion
from headrace.kvcache.transfer.ucx import wire_environment
from headrace.kvcache.transfer.wire import decode_envelope, encode_envelope
from headrace.services.runtime.settings_load import SettingsError
from headrace.services.worker.transfer_settings import TransferSection

Make = Callable[..., Any]
LOCAL = TransferSettings(net_devices=NO_NETWORK)


def listeners(pid: int) -> list[tuple[str, int]]:
    """Addresses on which a process takes TCP connections."""
    found = psutil.Process(pid).net_connections("inet")
    return [(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN]


def test_the_listener_is_there_in_a_trusted_network_alone(make_sender: Make, incarnation: Make) -> None:
    """UCX takes connections of anybody on the trusted interface, and of nobody without one (Show 6 of issue 5)."""
    trusted = TransferSection(trusted_network="lo").engine_settings(tls=True)
    open_to_all = make_sender(incarnation(), trusted)
    (address,) = set(listeners(open_to_all.pid))
    assert address[0] == "127.0.0.1"
    socket.create_connection(address, timeout=10).close()
    closed = make_sender(incarnation(), TransferSection().engine_settings(tls=True))
    assert closed.pid != open_to_all.pid
    assert not listeners(closed.pid)


def test_rows_arrive_by_shared_memory(
    process: ModuleType, make_sender: Make, make_receiver: Make, incarnation: Make
) -> None:
    receiver = make_receiver(incarnation(), LOCAL)
    sender = make_sender(incarnation(), LOCAL, seed=3)
    assert sender.call("connect", receiver.description) == "cma"
    grant = process.handle(receiver.description, "t1", (7, 8, 40))
    receiver.engine.expect("t1")
    sender.call("push", grant, (RowMove("pool", (1, 2, 3), (7, 8, 40)),), True)
    notices: list[Any] = []
    deadline = time.monotonic() + 60
    while not notices and time.monotonic() < deadline:
        notices = receiver.engine.take_notices()
        time.sleep(0.001)
    assert [notice.outcome for notice in notices] == [Outcome.OK]
    assert receiver.landing[7].equal(sender.pool[1])


def test_a_killed_receiver_is_lost_and_the_sender_goes_on(
    process: ModuleType, make_sender: Make, make_receiver: Make, incarnation: Make
) -> None:
    """L6, L14: UCX has no handler of deaths here, and a post to a dead process ends with an error all the same."""
    here = make_receiver(incarnation(), LOCAL)
    here.engine.register(MemoryRegion("source", process.pattern(1, 16, process.ROW_BYTES)))
    mortal = process.Sender()
    try:
        mortal.start(incarnation(), LOCAL)
        there = mortal.call("land", 16)
        assert here.engine.connect(there).result(30) == "cma"
        first = process.handle(there, "t1", (1, 2))
        here.engine.push(first, (RowMove("source", (1, 2), (1, 2)),), last=True).wait(30)
        mortal.kill()
        second = process.handle(there, "t2", (3, 4))
        with pytest.raises(PeerLost):
            here.engine.push(second, (RowMove("source", (1, 2), (3, 4)),), last=True).wait(30)
    finally:
        mortal.close()
    other = make_sender(incarnation(), LOCAL)
    again = other.call("land", 16)
    assert here.engine.connect(again).result(30) == "cma"
    third = process.handle(again, "t3", (1,))
    assert here.engine.push(third, (RowMove("source", (1,), (1,)),), last=True).wait(30).transport == "cma"


def test_a_peer_on_another_host_is_refused_with_what_to_do(make_receiver: Make, incarnation: Make) -> None:
    """L12: no wait for a wire that cannot be, and no silent way around."""
    here, there = make_receiver(incarnation(), LOCAL), make_receiver(incarnation(), LOCAL)
    envelope = decode_envelope(there.description.agent_metadata)
    elsewhere = replace(envelope, process=replace(envelope.process, boot_id="another"))
    description = replace(there.description, agent_metadata=encode_envelope(elsewhere))
    with pytest.raises(PeerRefused, match="trusted_network") as caught:
        here.engine.connect(description).result(30)
    assert caught.value.reason is Refusal.TRANSPORT


def test_settings_choose_the_network() -> None:
    """Without TLS net_devices counts; with it trusted_network alone, and wires of a network need one."""
    assert wire_environment(TransferSection().engine_settings(tls=False))["UCX_NET_DEVICES"] == "lo"
    assert (
        wire_environment(TransferSection(trusted_network="eth1").engine_settings(tls=True))["UCX_NET_DEVICES"] == "eth1"
    )
    local = wire_environment(TransferSection(net_devices="all").engine_settings(tls=True))["UCX_TLS"]
    assert not {"tcp", "rc", "ud", "dc"} & set(local.split(","))
    assert {"cma", "posix", "self"} <= set(local.split(","))
    with pytest.raises(SettingsError, match="trusted_network"):
        TransferSection(allowed_transports=("tcp",)).engine_settings(tls=True)
    assert TransferSection(allowed_transports=("tcp",), trusted_network="lo").engine_settings(tls=True)
