"""One life after another in one process: who begins the next, and who ends the process. Signals are real ones."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

from headrace.services.runtime.lifecycle import EXIT_FAILED
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.registry.base import Role
from headrace.v1 import common_pb2, control_pb2

PATIENCE = 20.0
SOURCE = textwrap.dedent(
    """
    import asyncio, sys
    from headrace.services.runtime.lifecycle import run_service
    from headrace.services.runtime.settings import StopSettings

    incarnations = []

    def say(word):
        print(word, flush=True)

    async def tell(word):
        say(word)

    def a_life(name, then):
        async def start(life):
            incarnations.append(life.incarnation)
            life.on_close("c", lambda: tell(f"{name} closed"))
            say(name)
            then(life)
        return start

    def fails(life):
        raise OSError("no room")

    def stops(life):
        life.stop("done")

    def becomes(successor, otherwise=None):
        return lambda life: life.become(successor, otherwise, "a change")

    def waits(life):
        pass

    CODE
    """
)


def lives(code: str) -> subprocess.CompletedProcess[str]:
    source = SOURCE.replace("CODE", textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def test_a_life_follows_another() -> None:
    """L14: in order, the former closed before the next begins, each with an incarnation of its own."""
    done = lives(
        """
        status = run_service(a_life("first", becomes(a_life("second", stops))), StopSettings())
        say(len(set(incarnations)))
        sys.exit(status)
        """
    )
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (
        0,
        ["first", "first closed", "second", "second closed", "2"],
    )


def test_one_that_does_not_come_up_gives_way_to_another() -> None:
    """The error is handed on, and a second failure ends the process."""
    done = lives(
        """
        def otherwise(error):
            say(error)
            return a_life("back", stops)

        sys.exit(run_service(a_life("first", becomes(a_life("second", fails), otherwise)), StopSettings()))
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[2:-1] == ["second", "second closed", "no room", "back", "back closed"]
    twice = lives(
        """
        life = a_life("first", becomes(a_life("second", fails), lambda error: a_life("back", fails)))
        sys.exit(run_service(life, StopSettings()))
        """
    )
    assert (twice.returncode, twice.stdout.split("\n")[-3:-1]) == (EXIT_FAILED, ["back", "back closed"])


def test_who_ends_the_process_wins() -> None:
    """L19: a stop before or after a change ends the process; nothing follows."""
    done = lives(
        """
        def both(life):
            life.become(a_life("never", stops), None, "a change")
            life.stop("the operator")

        def other_way(life):
            life.stop("the operator")
            life.become(a_life("never", stops), None, "a change")

        run_service(a_life("first", both), StopSettings())
        sys.exit(run_service(a_life("first", other_way), StopSettings()))
        """
    )
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (0, ["first", "first closed"] * 2)


def test_a_signal_ends_the_life_that_is() -> None:
    source = SOURCE.replace("CODE", 'sys.exit(run_service(a_life("a", becomes(a_life("b", waits))), StopSettings()))')
    with subprocess.Popen(
        [sys.executable, "-P", "-c", source], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)] == ["a\n", "a closed\n", "b\n"]
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "b closed\n"
        assert child.wait(PATIENCE) == 0


def test_how_a_change_goes_on() -> None:
    """Under way until a life has joined; a failure is not made good by the old role's return."""
    told = Lives()
    told.joined()
    assert told.change is None
    told.begin(Role.PREFILL, Role.DECODE)
    assert told.changing
    told.starting()
    assert told.changing
    told.failed(OSError("no room"))
    assert not told.changing
    told.joined()
    assert told.change is not None
    assert told.change.state == control_pb2.ROLE_CHANGE_STATE_FAILED
    assert (told.change.error.code, told.change.to_role) == (common_pb2.ERROR_CODE_INTERNAL, common_pb2.ROLE_DECODE)
    told.begin(Role.PREFILL, Role.DECODE)
    told.joined()
    assert told.change.state == control_pb2.ROLE_CHANGE_STATE_DONE
    assert not told.change.HasField("error")
