"""What a restart comprises, what it refuses, and how a command and the launcher speak to each other."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from headrace.cli import rolling
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.rolling import Request, ask, plan, take_request

TWO = ClusterSpec(Path("m"), {"prefill": 2, "decode": 2})
ONE = ClusterSpec(Path("m"), {"prefill": 2, "decode": 1})


def test_workers_go_first_and_the_router_only_if_asked() -> None:
    workers = ("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert plan(TWO).names == workers
    assert plan(TWO, with_router=True).names == (*workers, "router-0")
    assert plan(TWO, ["decode-1", "prefill-0"]).names == ("prefill-0", "decode-1")
    assert plan(TWO, ["router-0"]).names == ("router-0",)


def test_what_would_make_requests_fail_is_refused() -> None:
    """L19: the only replica of a role, unless a gap is allowed."""
    with pytest.raises(CliError, match="decode-0: the only replica of its role"):
        plan(ONE)
    assert plan(ONE, ["prefill-1"]).names == ("prefill-1",)
    assert plan(ONE, allow_gap=True).names == ("prefill-0", "prefill-1", "decode-0")
    with pytest.raises(CliError, match="no replica 'decode-7'"):
        plan(TWO, ["decode-7"])


def launcher(state_dir: Path, answers: list[tuple[str, dict[str, str]]], seen: list[Request]) -> None:
    request = None
    while request is None:
        request = take_request(state_dir)
    seen.append(request)
    for event, fields in answers:
        request.tell(event, **fields)


def talk(state_dir: Path, *answers: tuple[str, dict[str, str]]) -> tuple[list[dict[str, str]], Request]:
    seen: list[Request] = []
    thread = threading.Thread(target=launcher, args=(state_dir, list(answers), seen))
    thread.start()
    lines = list(ask(state_dir, {"names": ["a"], "with_router": True, "allow_gap": False}))
    thread.join()
    return lines, seen[0]


@pytest.mark.parametrize("last", [("done", {}), ("failed", {"error": "no"})])
def test_a_command_follows_the_launcher_to_the_end(tmp_path: Path, last: tuple[str, dict[str, str]]) -> None:
    lines, request = talk(tmp_path, ("taken", {}), ("ready", {"replica": "a"}), last)
    assert lines == [{"event": "taken"}, {"event": "ready", "replica": "a"}, {"event": last[0], **last[1]}]
    assert (request.names, request.with_router, request.allow_gap) == (("a",), True, False)
    assert list(tmp_path.iterdir()) == []


def test_nobody_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: the wait for a launcher ends, and takes the request back."""
    monkeypatch.setattr(rolling, "TAKEN_SECONDS", 0.0)
    with pytest.raises(CliError, match="does not take the request"):
        list(ask(tmp_path, {"names": [], "with_router": False, "allow_gap": False}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / rolling.REQUEST).write_text("{}")
    with pytest.raises(CliError, match="another restart"):
        list(ask(tmp_path, {"names": [], "with_router": False, "allow_gap": False}))
