"""`headrace up` as its user sees it: one whole cluster, asked, disturbed, stopped."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.ask import Answer, text_prompt
from headrace.cli.client import RouterClient
from headrace.cli.exits import Exit
from headrace.cli.leftovers import shared_memory
from headrace.v1 import common_pb2, inference_pb2

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0


@dataclass
class Up:
    """A running `headrace up --json --keep-going`."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    environ: dict[str, str]
    errors: Path

    def headrace(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "headrace.cli.main", *arguments]
        return subprocess.run(
            command,
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
            stdin=subprocess.DEVNULL,
        )

    def pid(self, name: str) -> int:
        return next(one["pid"] for one in self.ready["replicas"] if one["name"] == name)


@pytest.fixture(scope="module")
def up(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    scratch = tmp_path_factory.mktemp("up")
    environ = {**os.environ, "HEADRACE_RUNTIME": str(scratch / "runtime"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "headrace.cli.main", "up", "--model", str(tiny), "--json", "--keep-going"]
    command += ["--replicas", "encoder=1,prefill=1,decode=1", "--memory", "4GiB", "--pin", "prefill=0"]
    with (scratch / "errors").open("w") as errors:
        process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (scratch / "errors").read_text()
        yield Up(process, json.loads(line), environ, scratch / "errors")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_the_state_of_a_cluster(up: Up) -> None:
    assert [one["name"] for one in up.ready["replicas"]] == ["router-0", "encoder-0", "prefill-0", "decode-0"]
    assert os.sched_getaffinity(up.pid("prefill-0")) == {0}
    done = up.headrace("status", "--json", "--check")
    state = json.loads(done.stdout)
    assert done.returncode == 0, state["problems"]
    assert state["healthy"]
    assert set(state["replicas"]) == {"encoder-0", "prefill-0", "decode-0"}
    assert all(one["integrity"]["checked"] for one in state["replicas"].values())
    table = up.headrace("status")
    assert table.returncode == 0
    for name in ("router-0", "decode-0", "ready"):
        assert name in table.stdout


def plain(text: str) -> str:
    """Without what the gateway writes otherwise: special tokens by their names, and no character that is incomplete."""
    return re.sub("<｜[^｜]*｜>", "", text).rstrip("\ufffd")


def test_cluster_and_offline_say_the_same(up: Up, tiny: Path, tmp_path: Path) -> None:
    """L5: text, an image, several choices: the same tokens from one process and from four."""
    import PIL.Image

    PIL.Image.new("RGB", (40, 30), (200, 30, 30)).save(tmp_path / "red.png")
    sampling = {"temperature": 0.8, "n": 2, "seed": 5, "max_tokens": 12}
    content = [{"image": "red.png"}, {"text": "\n\nWhat is this?"}]  # as DeepSeek joins parts
    lines = [
        {"id": "text", "text": "The water runs", "temperature": 0, "max_tokens": 12},
        {"id": "image", "chat": [{"role": "user", "content": content}], **sampling},
        {"id": "wrong", "text": "x", "top_p": 7},
    ]
    (tmp_path / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    done = up.headrace("offline", "--model", str(tiny), str(tmp_path / "requests.jsonl"), "--threads", "1")
    assert done.returncode == Exit.USAGE, done.stderr
    assert "1 of 3 requests failed" in done.stderr
    alone = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["id"] for one in alone] == ["text", "image", "wrong"]
    assert "top_p" in alone[2]["error"]["message"]

    flags = ["--max-tokens", "12", "--json"]
    text = up.headrace("generate", "The water runs", "--temperature", "0", *flags, "--report")
    assert text.returncode == 0, text.stderr
    together = json.loads(text.stdout)
    assert together["choices"][0]["token_ids"] == alone[0]["choices"][0]["token_ids"]
    assert together["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert [one["peer"]["replica_id"] for one in together["report"]["replicas"]] == ["prefill-0", "decode-0"]
    flags += ["--temperature", "0.8", "--n", "2", "--seed", "5"]
    image = up.headrace("generate", "\n\nWhat is this?", "--image", str(tmp_path / "red.png"), *flags)
    assert image.returncode == 0, image.stderr
    choices = json.loads(image.stdout)["choices"]
    assert [one["token_ids"] for one in choices] == [one["token_ids"] for one in alone[1]["choices"]]
    assert json.loads(image.stdout)["usage"]["image_tokens"] == alone[1]["usage"]["image_tokens"] > 0

    # The same once more as a batch file of the OpenAI API, by the cluster.
    address = "data:image/png;base64," + base64.b64encode((tmp_path / "red.png").read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "What is this?"}]
    bodies = [
        ("/v1/completions", {"prompt": "The water runs", "temperature": 0, "max_tokens": 12}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": parts}], **sampling}),
        ("/v1/completions", {"prompt": "x", "top_p": 7}),
    ]
    batch = [{"custom_id": str(at), "url": url, "body": body} for at, (url, body) in enumerate(bodies)]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, batch)))
    done = up.headrace("offline", str(tmp_path / "batch.jsonl"))
    assert done.returncode == Exit.USAGE, done.stderr
    answered = {entry["custom_id"]: entry["response"] for entry in map(json.loads, done.stdout.splitlines())}
    assert answered["0"]["body"]["choices"][0]["text"] == alone[0]["choices"][0]["text"]
    texts = [choice["message"]["content"] for choice in answered["1"]["body"]["choices"]]
    assert list(map(plain, texts)) == [plain(choice["text"]) for choice in alone[1]["choices"]]
    assert (answered["2"]["status_code"], answered["2"]["body"]["error"]["param"]) == (400, "top_p")


def test_refusals_have_their_status(up: Up) -> None:
    done = up.headrace("generate", "x", "--n", "99")
    assert (done.returncode, done.stdout) == (Exit.USAGE, "")
    assert done.stderr.startswith("headrace: sampling.n: ")


def test_a_client_from_the_proto_alone(up: Up) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "client.py"), up.ready["router"], "hello"],
        env={key: value for key, value in up.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout) > 1
    assert len((ROOT / "examples" / "client.py").read_text().splitlines()) <= 40


def test_a_worker_that_dies_is_told_and_the_rest_goes_on(up: Up) -> None:
    os.kill(up.pid("encoder-0"), signal.SIGKILL)
    while "encoder-0 ended with signal SIGKILL; going on" not in up.errors.read_text():
        assert up.process.poll() is None
    assert up.headrace("generate", "x", "--max-tokens", "2").returncode == 0


def test_an_interrupt_finishes_what_runs_and_leaves_nothing(up: Up) -> None:
    """L19: the request in flight gets all its tokens; then no process, no shared memory, no file is left."""
    request = inference_pb2.GenerateRequest(
        prompt=text_prompt("The water runs"), stop=common_pb2.StopParams(max_tokens=40, ignore_eos=True)
    )
    answer = Answer()
    with RouterClient(up.ready["router"]) as client:
        for event in client.generate(request, PATIENCE_S):
            answer.take(event)
            if event.WhichOneof("event") == "started":
                up.process.send_signal(signal.SIGINT)
    assert (answer.choice(0).reason, len(answer.token_ids)) == ("length", 40)
    assert up.process.wait(PATIENCE_S) == 0, up.errors.read_text()
    for one in up.ready["replicas"]:
        assert not Path(f"/proc/{one['pid']}").exists()
        assert not any(str(one["pid"]) in name for name in shared_memory())
    assert not Path(up.ready["run_dir"]).exists()
    assert up.headrace("status").returncode == Exit.UNREACHABLE
