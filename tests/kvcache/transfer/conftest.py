"""Real NIXL agents, one per process; receivers live in the test's process, senders are children (_process.py)."""

from __future__ import annotations

import importlib.util
import itertools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headrace.kvcache.transfer.base import TransferSettings


def _load(name: str) -> ModuleType:
    """A helper beside this file, imported once under one name (tests are no packages)."""
    full = f"transfer_tests.{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


@pytest.fixture(scope="session")
def process() -> ModuleType:
    """The helpers of _process.py."""
    return _load("_process")


_incarnations = itertools.count(1)


@pytest.fixture
def incarnation() -> Callable[[], str]:
    """Fresh incarnation ids, 32 hex digits."""
    return lambda: f"{next(_incarnations):032x}"


@pytest.fixture(scope="session")
def idle_senders() -> Iterator[list[Any]]:
    """Child processes that no test uses now: starting one costs seconds (it imports torch), so they are lent again."""
    senders: list[Any] = []
    yield senders
    for sender in senders:
        sender.close()


@pytest.fixture
def make_sender(process: ModuleType, idle_senders: list[Any]) -> Iterator[Callable[..., Any]]:
    used: list[Any] = []

    def make(incarnation: str, settings: TransferSettings | None = None, **more: int) -> Any:
        used.append(idle_senders.pop() if idle_senders else process.Sender())
        used[-1].start(incarnation, settings or TransferSettings(), **more)
        return used[-1]

    yield make
    for sender in used:
        if sender.is_alive:
            sender.signal(signal.SIGCONT)
            sender.call("stop")
            idle_senders.append(sender)
        else:
            sender.close()


@pytest.fixture
def make_receiver(process: ModuleType) -> Iterator[Callable[..., Any]]:
    receivers: list[Any] = []

    def make(incarnation: str, settings: TransferSettings | None = None) -> Any:
        receivers.append(process.Receiver(incarnation, settings or TransferSettings()))
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.engine.close()
