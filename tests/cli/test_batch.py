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
from headrace.cli.batch_bodies import CHAT, COMPLETIONS, Conversion
from headrace.cli.exits import CliError, Exit
from headrace.cli.offline import offline
from headrace.cli.sources import Source
from headrace.services.gateway.errors import status_of
from headrace.services.runtime.errors import (
    TABLE,
    HeadraceError,
    ResourceExhausted,
    Unavailable,
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


def test_answers_and_errors_by_line(router: str, double: RouterDouble, text_folder: Path, tmp_path: Path) -> None:
    """L13: what is wrong with one line is told in its own line, by the field's name, and spoils no other."""
    lines = [
        chat("good", "hello", seed=7, max_completion_tokens=9),
        {"custom_id": "text", "method": "POST", "url": COMPLETIONS, "body": {"model": "double", "prompt": "raw"}},
        chat("tools", "x", tools=[{"type": "web_search"}]),
        chat("range", "x", n=-1),
        {"custom_id": "url", "method": "POST", "url": "/v1/embeddings", "body": {}},
        "{torn",
        "[" * 100_000,
        chat("refused", "refuse me"),
    ]
    refusal = TABLE[common_pb2.ERROR_CODE_INVALID_ARGUMENT].error("too long", field="stop.max_tokens")
    double.faults["refuse me"] = [refusal]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert offline(Source(router=router, text_folder=text_folder, concurrency=2), file, output) == Exit.USAGE
    found = results(output)
    assert set(found) == {"good", "text", "tools", "range", "url", None, "refused"}
    body = found["good"]["response"]["body"]
    assert found["good"]["error"] is None
    assert (found["good"]["response"]["status_code"], found["good"]["response"]["request_id"]) == (200, "r-hello")
    message = body["choices"][0]["message"]
    assert (body["object"], message["role"], message["content"]) == ("chat.completion", "assistant", "echo hello")
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert found["text"]["response"]["body"]["choices"][0]["text"] == "echo raw"
    params = {name: entry["response"]["body"]["error"]["param"] for name, entry in found.items() if entry["error"]}
    assert params == {"tools": "tools[0].type", "range": "n", "url": "url", None: None, "refused": "max_tokens"}
    assert {found[name]["response"]["status_code"] for name in params} == {400}
    assert found["tools"]["error"]["code"] == "unsupported_parameter"


def test_a_second_run_asks_only_what_is_not_answered(
    router: str, double: RouterDouble, text_folder: Path, tmp_path: Path
) -> None:
    lines = [chat(str(number), f"q{number}") for number in range(6)]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    double.faults["q3"] = [TABLE[common_pb2.ERROR_CODE_INTERNAL].error("a defect")]
    assert offline(Source(router=router, text_folder=text_folder), file, output) == Exit.USAGE
    assert results(output)["3"]["response"]["status_code"] == 500
    kept = [line for line in output.read_text().splitlines() if '"status_code": 200' in line]
    with output.open("a") as tail:
        tail.write('{"id": "batch_req_torn", "custom_id": "2", "resp')  # as a kill in the middle of a write leaves it
    double.asked.clear()
    assert offline(Source(router=router, text_folder=text_folder), file, output) == Exit.DONE
    assert double.asked == ["q3"]
    assert output.read_text().splitlines()[:5] == kept
    assert set(results(output)) == {str(number) for number in range(6)}
    double.asked.clear()
    assert offline(Source(router="127.0.0.1:1", text_folder=text_folder), file, output) == Exit.DONE, (
        "nobody is asked when nothing is left"
    )


def test_overload_is_waited_out_and_concurrency_is_bounded(
    router: str, double: RouterDouble, text_folder: Path, tmp_path: Path
) -> None:
    """L12: a refusal for overload is repeated when it says; the line is answered in the end."""
    double.faults["q0"] = [ResourceExhausted("full", retry_after_s=0.01), Unavailable("gone", retry_after_s=0.01)]
    file = written(tmp_path / "in.jsonl", [chat(str(number), f"q{number}") for number in range(12)])
    assert (
        offline(Source(router=router, text_folder=text_folder, concurrency=3), file, tmp_path / "out.jsonl")
        == Exit.DONE
    )
    assert double.asked.count("q0") == 3
    assert double.most_running <= 3


def test_ctrl_c_keeps_what_has_come(router: str, double: RouterDouble, text_folder: Path, tmp_path: Path) -> None:
    """Ctrl-C ends at once with its own status, and the next run goes on where this one ended."""
    lines = [chat(str(number), f"q{number}" if number < 4 else f"held{number}") for number in range(8)]
    file, output = written(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    double.held.clear()
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        "offline",
        str(file),
        "-o",
        str(output),
        "--router",
        router,
        "--folder",
        str(text_folder),
    ]
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
    assert offline(Source(router=router, text_folder=text_folder), file, output) == Exit.DONE
    assert sorted(double.asked) == ["held4", "held5", "held6", "held7"]
    assert set(results(output)) == {str(number) for number in range(8)}


def test_nobody_answers(tmp_path: Path, text_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr("headrace.cli.askers.PATIENCE_S", 0.0)
    file = written(tmp_path / "in.jsonl", [chat("a", "x")])
    with pytest.raises(CliError, match="nobody answers") as refused:
        offline(Source(router="127.0.0.1:1", text_folder=text_folder), file, tmp_path / "out.jsonl")
    assert refused.value.code == Exit.UNREACHABLE
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_two_lines_of_one_id_are_refused() -> None:
    with pytest.raises(CliError, match="line 3: custom_id 'a' is that of line 1"):
        read_batch(f"{json.dumps(chat('a', 'x'))}\n\n{json.dumps(chat('a', 'y'))}\n")
    assert is_batch(json.dumps(chat("a", "x")))
    assert not is_batch('{"text": "x"}')


@pytest.fixture
def conversion(text_folder: Path) -> Conversion:
    identity = common_pb2.ModelIdentity(name="double", model_fingerprint=bytes(32))
    limits = inference_pb2.ModelLimits(max_tokens=512)
    return Conversion(inference_pb2.Model(identity=identity, limits=limits), text_folder)


@pytest.mark.parametrize(
    ("url", "change", "field"),
    [
        (CHAT, {"stream": True}, "stream"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"temperature": "hot"}, "temperature"),
        (CHAT, {"bogus": 1}, "bogus"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        (CHAT, {"reasoning_effort": "high"}, "reasoning_effort"),
        (COMPLETIONS, {"echo": True}, "echo"),
        (COMPLETIONS, {"stream": True}, "stream"),
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_does_not_fit_is_named(conversion: Conversion, url: str, change: Mapping[str, Any], field: str) -> None:
    """The fields are the gateway's, whose tests say more; what is refused here beyond them is a stream."""
    body = {"messages": [{"role": "user", "content": "x"}]} if url == CHAT else {"prompt": "x"}
    with pytest.raises(HeadraceError) as refused:
        conversion.asked(url, {**body, **change})
    assert refused.value.field == field
    assert status_of(refused.value) == 400


def test_tools_and_logprobs_are_answered_as_by_a_gateway(
    router: str, double: RouterDouble, text_folder: Path, tmp_path: Path
) -> None:
    double.answer = lambda text: (
        '<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>' if "tool" in text else "ab"
    )
    function = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    file = written(
        tmp_path / "in.jsonl",
        [chat("call", "use the tool", tools=[function]), chat("sure", "x", logprobs=True, top_logprobs=1)],
    )
    assert offline(Source(router=router, text_folder=text_folder), file, tmp_path / "out.jsonl") == Exit.DONE
    found = {name: entry["response"]["body"]["choices"][0] for name, entry in results(tmp_path / "out.jsonl").items()}
    (call,) = found["call"]["message"]["tool_calls"]
    assert (found["call"]["finish_reason"], call["function"]["name"]) == ("tool_calls", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": 5}
    assert [one["token"] for one in found["sure"]["logprobs"]["content"]] == ["a", "b"]


def test_a_foreign_cluster_needs_a_folder(router: str, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="--folder"):
        offline(Source(router=router), written(tmp_path / "in.jsonl", [chat("a", "x")]), None)


def test_a_model_in_this_process_answers_in_the_gateways_words(tiny: Path, tmp_path: Path) -> None:
    """L27, L28: reasoning is taken apart, every choice ends, and tokens add up."""
    lines = [
        chat("thinks", "Why?", model=tiny.name, thinking={"type": "enabled"}, max_tokens=40, seed=1),
        chat("two", "Hi", model=tiny.name, n=2, logprobs=True, top_logprobs=2, max_tokens=40, seed=1),
        {"custom_id": "raw", "method": "POST", "url": COMPLETIONS, "body": {"prompt": [5, 6, 7], "logprobs": 1}},
        chat("other", "Hi", model="another"),
    ]
    source = Source(folder=tiny, sets=("load.native_kernels=false",))
    output = tmp_path / "out.jsonl"
    assert offline(source, written(tmp_path / "in.jsonl", lines), output) == Exit.USAGE
    found = results(output)
    assert found["other"]["response"]["status_code"] == 404
    bodies = {name: entry["response"]["body"] for name, entry in found.items() if not entry["error"]}
    assert set(bodies) == {"thinks", "two", "raw"}
    message, usage = bodies["thinks"]["choices"][0]["message"], bodies["thinks"]["usage"]
    assert message["reasoning_content"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]
    assert [choice["index"] for choice in bodies["two"]["choices"]] == [0, 1]
    assert all(len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2 for choice in bodies["two"]["choices"])
    assert bodies["raw"]["usage"]["prompt_tokens"] == 3
    assert len(bodies["raw"]["choices"][0]["logprobs"]["tokens"]) == bodies["raw"]["usage"]["completion_tokens"]
    assert {body["system_fingerprint"] for body in bodies.values()} == {bodies["raw"]["system_fingerprint"]} != {None}
