"""Batch files of the OpenAI API: against a double of a router, and with a model in the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.batch import is_batch, read_batch
from headrace.cli.batch_bodies import CHAT, COMPLETIONS, to_request
from headrace.cli.exits import CliError, Exit
from headrace.cli.offline import offline
from headrace.cli.sources import Source
from headrace.services.runtime.errors import (
    TABLE,
    HeadraceError,
    ResourceExhausted,
    Unavailable,
    http_status,
)
from headrace.v1 import common_pb2, inference_pb2
from tests.cli.router_double import RouterDouble

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
PROGRAM = """
import signal
from headrace.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
main()
"""


def chat(custom_id: str, text: str, **more: Any) -> dict[str, Any]:
    body = {"model": "double", "messages": [{"role": "user", "content": text}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def written(path: Path, entries: list[Any]) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in entries))
    return path


def results(path: Path) -> dict[str | None, dict[str, Any]]:
    return {entry["custom_id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


def test_answers_and_errors_by_line(router: str, double: RouterDouble, tmp_path: Path) -> None:
    """L13: what is wrong with one line is told in its own line, by the field's name, and spoils no other."""
    lines = [
        chat("good", "hello", seed=7, max_completion_tokens=9),
        {"custom_id": "text", "method": "POST", "url": COMPLETIONS, "body": {"model": "double", "prompt": "raw"}},
        chat("tools", "x", tools=[{"type": "function"}]),
        chat("range", "x", n=-1),
        {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}},
        "{torn",
        "[" * 100_000,
        chat("refused", "refuse me"),
    ]
    refusal = TABLE[common_pb2.ERROR_CODE_INVALID_ARGUMENT].error("too long", field="prompt.chat.messages[0].content")
    double.faults["refuse me"] = [refusal]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert offline(Source(router=router, concurrency=2), file, output) == Exit.USAGE
    found = results(output)
    assert set(found) == {"good", "text", "tools", "range", "url", None, "refused"}
    body = found["good"]["response"]["body"]
    assert found["good"]["error"] is None
    assert (found["good"]["response"]["status_code"], found["good"]["response"]["request_id"]) == (200, "r-hello")
    assert (body["object"], body["choices"][0]["message"]) == (
        "chat.completion",
        {"role": "assistant", "content": "echo hello"},
    )
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert found["text"]["response"]["body"]["choices"][0]["text"] == "echo raw"
    params = {name: entry["response"]["body"]["error"]["param"] for name, entry in found.items() if entry["error"]}
    assert params == {"tools": "tools", "range": "n", "url": "url", None: None, "refused": "messages[0].content"}
    assert {found[name]["response"]["status_code"] for name in params} == {400}
    assert found["tools"]["error"]["code"] == "unsupported_parameter"


def test_a_second_run_asks_only_what_is_not_answered(router: str, double: RouterDouble, tmp_path: Path) -> None:
    lines = [chat(str(number), f"q{number}") for number in range(6)]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    double.faults["q3"] = [TABLE[common_pb2.ERROR_CODE_INTERNAL].error("a defect")]
    assert offline(Source(router=router), file, output) == Exit.USAGE
    assert results(output)["3"]["response"]["status_code"] == 500
    kept = [line for line in output.read_text().splitlines() if '"status_code": 200' in line]
    with output.open("a") as tail:
        tail.write('{"id": "batch_req_torn", "custom_id": "2", "resp')  # as a kill in the middle of a write leaves it
    double.asked.clear()
    assert offline(Source(router=router), file, output) == Exit.DONE
    assert double.asked == ["q3"]
    assert output.read_text().splitlines()[:5] == kept
    assert set(results(output)) == {str(number) for number in range(6)}
    double.asked.clear()
    assert offline(Source(router="127.0.0.1:1"), file, output) == Exit.DONE, "nobody is asked when nothing is left"


def test_overload_is_waited_out_and_concurrency_is_bounded(router: str, double: RouterDouble, tmp_path: Path) -> None:
    """L12: a refusal for overload is repeated when it says; the line is answered in the end."""
    double.faults["q0"] = [ResourceExhausted("full", retry_after_s=0.01), Unavailable("gone", retry_after_s=0.01)]
    file = written(tmp_path / "in.jsonl", [chat(str(number), f"q{number}") for number in range(12)])
    assert offline(Source(router=router, concurrency=3), file, tmp_path / "out.jsonl") == Exit.DONE
    assert double.asked.count("q0") == 3
    assert double.most_running <= 3


def test_ctrl_c_keeps_what_has_come(router: str, double: RouterDouble, tmp_path: Path) -> None:
    """Ctrl-C ends at once with its own status, and the next run goes on where this one ended."""
    lines = [chat(str(number), f"q{number}" if number < 4 else f"held{number}") for number in range(8)]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    double.held.clear()
    command = [sys.executable, "-c", PROGRAM, "offline", str(file), "-o", str(output), "--router", router]
    process = subprocess.Popen([*command, "--concurrency", "8"], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_S
    while (
        not output.exists() or output.read_text().count("\n") < 4 or len(double.asked) < 8
    ) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == Exit.INTERRUPTED, errors
    assert "repeat the command to go on" in errors
    assert set(results(output)) == {"0", "1", "2", "3"}
    double.held.set()
    double.asked.clear()
    assert offline(Source(router=router), file, output) == Exit.DONE
    assert sorted(double.asked) == ["held4", "held5", "held6", "held7"]
    assert set(results(output)) == {str(number) for number in range(8)}


def test_nobody_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr("headrace.cli.askers.PATIENCE_S", 0.0)
    file = written(tmp_path / "in.jsonl", [chat("a", "x")])
    with pytest.raises(CliError, match="nobody answers") as refused:
        offline(Source(router="127.0.0.1:1"), file, tmp_path / "out.jsonl")
    assert refused.value.code == Exit.UNREACHABLE
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_two_lines_of_one_id_are_refused() -> None:
    with pytest.raises(CliError, match="line 3: custom_id 'a' is that of line 1"):
        read_batch(f"{json.dumps(chat('a', 'x'))}\n\n{json.dumps(chat('a', 'y'))}\n")
    assert is_batch(json.dumps(chat("a", "x")))
    assert not is_batch('{"text": "x"}')


@pytest.mark.parametrize(
    ("url", "change", "field"),
    [
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"stream": True}, "stream"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"temperature": True}, "temperature"),
        (CHAT, {"seed": -1}, "seed"),
        (CHAT, {"model": 3}, "model"),
        (CHAT, {"stop": 3}, "stop"),
        (CHAT, {"logit_bias": {"x": 1}}, "logit_bias"),
        (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (CHAT, {"max_tokens": 1.5}, "max_tokens"),
        (CHAT, {"bogus": 1}, "bogus"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages[0].name"),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}]}]},
            "messages[0].content[0].image_url"),
        (CHAT, {"response_format": {"type": "yaml"}}, "response_format.type"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, -1]}, "prompt"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(url: str, change: Mapping[str, Any], field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]} if url == CHAT else {"prompt": "x"}
    with pytest.raises(HeadraceError) as refused:
        to_request(url, {**body, **change})
    assert refused.value.field == field
    assert http_status(refused.value) in (400, 501)


def test_bodies_become_requests() -> None:
    request = to_request(CHAT, {
        "model": "m", "messages": [{"role": "developer", "content": "be brief"}, {"role": "user", "content": [
            {"type": "text", "text": "what?"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAE="}}]}],
        "temperature": 0.5, "top_k": 3, "n": 2, "stop": "end", "logit_bias": {"7": -1}, "max_tokens": 4, "seed": None,
        "user": "u", "stream": False, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}},
    })  # fmt: skip
    messages = request.prompt.chat.messages
    assert [one.role for one in messages] == [inference_pb2.CHAT_ROLE_SYSTEM, inference_pb2.CHAT_ROLE_USER]
    assert (messages[1].content[0].text, messages[1].content[1].image.data) == ("what?", b"\x00\x01")
    assert (request.sampling.temperature, request.sampling.top_k, request.sampling.n) == (0.5, 3, 2)
    assert not request.sampling.HasField("seed")
    assert (list(request.stop.stop), request.stop.max_tokens) == (["end"], 4)
    assert request.constraint.json_schema == "{}"
    tokens = to_request(COMPLETIONS, {"prompt": [[1, 2]]})
    assert (list(tokens.prompt.tokens.token_ids), tokens.stop.max_tokens) == ([1, 2], 16)
