"""How a process ends: the order, the deadlines, the parent's death. Signals are tested on real processes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import pytest

from headrace.services.runtime.lifecycle import EXIT_FAILED, EXIT_HARD, Lifecycle, _start_and_settle
from headrace.services.runtime.settings import StopSettings

PATIENCE = 60.0


def _never(status: int) -> None:
    raise AssertionError(f"hard exit {status}")


async def _life(start: Any, settings: StopSettings | None = None) -> tuple[int, Lifecycle]:
    life = Lifecycle(settings or StopSettings(), hard_exit=_never)
    async with asyncio.timeout(PATIENCE):
        return await life.run(start), life


async def test_the_end_has_an_order() -> None:
    """L19: stop accepting, drain, then close, later things first."""
    order: list[str] = []

    async def start(life: Lifecycle) -> None:
        def step(name: str) -> Any:
            async def run() -> None:
                order.append(name)

            return run

        life.on_close("first", step("close first"))
        life.on_close("second", step("close second"))
        life.on_drain("d", step("drain"))
        life.on_stop_accepting("a", step("stop accepting"))
        life.stop("test")

    assert (await _life(start))[0] == 0
    assert order == ["stop accepting", "drain", "close second", "close first"]


async def test_a_drain_that_does_not_end_is_cut_off_at_its_deadline() -> None:
    """L6."""
    closed = []

    async def start(life: Lifecycle) -> None:
        async def for_ever() -> None:
            await asyncio.Event().wait()

        async def close() -> None:
            closed.append(1)

        life.on_drain("stuck", for_ever)
        life.on_close("c", close)
        life.stop("test")

    assert (await _life(start, StopSettings(drain_seconds=0.05)))[0] == 0
    assert closed == [1]


async def test_a_second_stop_ends_the_drain() -> None:
    async def start(life: Lifecycle) -> None:
        async def again() -> None:
            life.stop("second")
            await asyncio.Event().wait()

        life.on_drain("stuck", again)
        life.stop("first")

    assert (await _life(start, StopSettings(drain_seconds=3600)))[0] == 0


async def test_a_failed_step_is_told_and_the_others_still_run() -> None:
    """L10."""
    closed = []

    async def start(life: Lifecycle) -> None:
        async def fail() -> None:
            raise RuntimeError("cannot close")

        async def close() -> None:
            closed.append(1)

        life.on_close("good", close)
        life.on_close("bad", fail)
        life.stop("test")

    assert (await _life(start))[0] == EXIT_FAILED
    assert closed == [1]


async def test_a_background_task_that_fails_ends_the_process() -> None:
    """No silent death of a reaper or a renewal."""

    async def start(life: Lifecycle) -> None:
        async def die() -> None:
            raise RuntimeError("boom")

        async def live() -> None:
            await asyncio.Event().wait()

        life.spawn(live(), "healthy")
        life.spawn(die(), "reaper")

    assert (await _life(start))[0] == EXIT_FAILED


async def test_a_failed_start_closes_what_it_opened() -> None:
    closed = []

    async def start(life: Lifecycle) -> None:
        async def close() -> None:
            closed.append(1)

        life.on_close("opened", close)
        raise OSError("port taken")

    assert (await _life(start))[0] == EXIT_FAILED
    assert closed == [1]


async def test_a_stop_during_a_long_start_cancels_the_start() -> None:
    async def start(life: Lifecycle) -> None:
        asyncio.get_running_loop().call_soon(life.stop, "signal")
        await asyncio.Event().wait()

    assert (await _life(start))[0] == 0


async def test_a_loop_that_hangs_is_ended_hard() -> None:
    """L6: the last resort does not need the event loop."""
    ended = threading.Event()
    status: list[int] = []

    def hard_exit(code: int) -> None:
        status.append(code)
        ended.set()

    life = Lifecycle(StopSettings(drain_seconds=0, close_seconds=0.01), hard_exit)
    life.stop("test")
    assert ended.wait(PATIENCE)  # the loop does not run meanwhile
    assert status == [EXIT_HARD]


def test_incarnations_differ() -> None:
    """L14."""
    settings = StopSettings()
    assert Lifecycle(settings).incarnation != Lifecycle(settings).incarnation


SERVICE = textwrap.dedent(
    """
    import asyncio, sys
    from headrace.services.runtime.lifecycle import run_service
    from headrace.services.runtime.settings import StopSettings

    async def start(life):
        async def tell(word):
            print(word, flush=True)
        async def drain():
            print("draining", flush=True)
            await asyncio.Event().wait()
        life.on_drain("d", drain)
        life.on_close("c", lambda: tell("closed"))
        print("up", flush=True)

    sys.exit(run_service(start, StopSettings(drain_seconds=3600, parent_pid=PARENT)))
    """
)


def _lines(child: subprocess.Popen[str], *expected: str) -> None:
    assert child.stdout is not None
    for line in expected:
        assert child.stdout.readline() == line + "\n"


def test_one_signal_drains_and_a_second_hurries() -> None:
    source = SERVICE.replace("PARENT", str(os.getpid()))
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        _lines(child, "up")
        child.send_signal(signal.SIGTERM)
        _lines(child, "draining")
        child.send_signal(signal.SIGINT)
        _lines(child, "closed")
        assert child.wait(PATIENCE) == 0


def test_a_child_dies_with_its_parent_and_closes_properly() -> None:
    """`headrace up` killed by SIGKILL leaves no process: the children close without draining."""
    parent_source = textwrap.dedent(
        f"""
        import os, subprocess, sys
        source = {SERVICE!r}.replace("PARENT", str(os.getpid()))
        child = subprocess.Popen([sys.executable, "-P", "-c", source])
        child.wait()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", parent_source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        _lines(parent, "up")
        parent.kill()
        # The child holds the pipe: the end of file after its last word is its end.
        assert parent.stdout is not None
        assert parent.stdout.read() == "closed\n"


@pytest.mark.parametrize("parent", [1, 4_194_305])
def test_a_child_whose_parent_is_gone_already_does_not_start(parent: int) -> None:
    """It has a new parent, or the number names nobody (pids end at 2²²)."""
    source = SERVICE.replace("PARENT", str(parent))
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (done.returncode, done.stdout) == (EXIT_FAILED, "")


@pytest.mark.parametrize("value", [0, -1])
def test_a_parent_pid_is_a_pid(value: int) -> None:
    with pytest.raises(ValueError, match="greater than"):
        StopSettings(parent_pid=value)


async def test_what_stands_after_the_start_is_left_alone_by_the_collector() -> None:
    """Full collections hold everything up, and nothing of a start ever becomes garbage."""
    started = []

    async def start(life: Lifecycle) -> None:
        started.append(life)

    life = Lifecycle(StopSettings())
    try:
        await _start_and_settle(start, life)
        assert started == [life]
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
