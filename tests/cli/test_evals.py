"""`headrace evals`: run, grade, report; asking and grading are apart."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.evals_grade import grade, report
from headrace.cli.evals_run import RunOptions, run
from headrace.cli.exits import CliError, Exit
from headrace.cli.judges import Judge
from headrace.cli.sources import Source
from headrace.evals.datasets import load_dataset
from headrace.evals.run_folder import Sampling
from headrace.services.runtime.errors import TABLE
from headrace.v1 import common_pb2
from tests.cli.router_double import RouterDouble

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 120.0
GRADE_TWICE = """
import sys
for name in ("torch", "headrace.cli.offline_engine"):
    sys.modules[name] = None  # importing it is an error
from headrace.cli.evals_grade import grade
from pathlib import Path
print(*(grade(Path(sys.argv[1]), None) for _ in range(2)))
"""


def entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def solved(name: str, wrong: set[str]) -> Any:
    """What answers the questions of a shipped set rightly, but for those in `wrong`."""
    known = {item.turns[-1].text: item for item in load_dataset(name).items}
    return lambda text: "no idea" if known[text].identifier in wrong else f"Answer: {known[text].answer}"


def test_a_run_is_continued_graded_and_reported(
    router: str, double: RouterDouble, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    double.answer = solved("facts", {"facts-01", "facts-09"})
    items = load_dataset("facts").items
    first = items[0].turns[0].text
    double.faults[first] = [TABLE[common_pb2.ERROR_CODE_INTERNAL].error("a defect")]
    options, source = RunOptions("facts", out), Source(router=router, concurrency=4)
    assert run(source, options) == Exit.FAILED
    assert grade(out, None) == Exit.FAILED, "one answer is missing"
    double.asked.clear()
    assert run(source, options) == Exit.DONE
    assert double.asked == [first]
    answers = entries(out / "answers.jsonl")
    assert len(answers) == len(items)
    last = answers[-1]
    assert (last["item"], last["repeat"], last["finish_reason"], last["fingerprint"]) == (
        "facts-01",
        0,
        "stop",
        "00" * 32,
    )
    assert last["usage"] == {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": len("no idea")}
    assert (last["prompt"][0]["text"], last["sampling"]["max_tokens"]) == (first, 1024)
    assert len({one["seed"] for one in answers}) == len(items)

    assert grade(out, None) == Exit.DONE
    report(out, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["total"]["correct"], document["total"]["items"]) == (len(items) - 2, len(items))
    assert document["total"]["no_answer"] == 2
    assert document["total"]["interval"]["method"] == "wilson"
    assert [row["subset"] for row in document["subsets"]] == [
        "facts/geography",
        "facts/science",
        "facts/words",
        "facts/time",
    ]
    report(out, as_json=False)
    table = capsys.readouterr().out
    assert "facts/geography" in table
    assert "wilson" in table

    with pytest.raises(CliError, match="another run: seed 0, not 1"):
        run(source, RunOptions("facts", out, seed=1))
    with pytest.raises(CliError, match="is no run folder"):
        grade(tmp_path, None)


def test_grading_starts_no_model(tiny: Path, tmp_path: Path) -> None:
    """Show 7: a model of this process answers; it is gone, and torch cannot be imported, when both gradings run."""
    model, out = tmp_path / "model", tmp_path / "run"
    shutil.copytree(tiny, model)
    options = RunOptions("arithmetic", out, limit=1, sampling=Sampling(max_tokens=4))
    assert run(Source(folder=model, threads=1), options) == Exit.DONE
    answers = entries(out / "answers.jsonl")
    assert len(answers) == 3
    assert all(one["usage"]["completion_tokens"] <= 4 and len(one["fingerprint"]) == 64 for one in answers)
    shutil.rmtree(model)
    done = subprocess.run(
        [sys.executable, "-c", GRADE_TWICE, str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.stdout.split() == ["0", "0"], done.stderr
    assert len(entries(out / "grades.jsonl")) == 3


@contextmanager
def judging(asked: list[dict[str, Any]]) -> Iterator[str]:
    """An OpenAI-compatible API that finds answers right which say `yes`; overloaded at the first call."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append({**body, "path": self.path, "key": self.headers["authorization"]})
            if len(asked) == 1:
                self.send_response(429)
                self.send_header("retry-after", "0")
                self.end_headers()
                return
            candidate = body["messages"][0]["content"].partition("<candidate>")[2].partition("</candidate>")[0]
            verdict = "CORRECT" if "yes" in candidate else "INCORRECT"
            message = {"role": "assistant", "content": f"FOUND: it\nVERDICT: {verdict}"}
            data = json.dumps({"choices": [{"message": message}]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_judge_is_asked_once(router: str, double: RouterDouble, tmp_path: Path) -> None:
    """HLE: verdicts are stored, so that the second grading asks nobody: its judge is gone by then."""
    rows = [{"id": str(number), "question": f"q{number}", "answer": "it", "category": "Other"} for number in range(3)]
    rows[2]["image"] = "data:image/png;base64,AAE="
    (tmp_path / "hle.json").write_text(json.dumps(rows))
    double.answer = lambda text: "yes" if text == "q1" else "no"
    out = tmp_path / "run"
    assert run(Source(router=router), RunOptions("hle", out, data=tmp_path / "hle.json")) == Exit.DONE
    with pytest.raises(CliError, match="3 answers need a judge"):
        grade(out, None)
    asked: list[dict[str, Any]] = []
    with judging(asked) as url:
        judge = Judge(url, "judge-1", api_key="secret", concurrency=1)
        assert grade(out, judge) == Exit.DONE
        assert [(one["path"], one["key"], one["model"]) for one in asked[1:]] == [
            ("/v1/chat/completions", "Bearer secret", "judge-1")
        ] * 3
    first = (out / "grades.jsonl").read_bytes()
    assert [one["correct"] for one in entries(out / "grades.jsonl")] == [False, True, False]
    assert grade(out, judge) == Exit.DONE
    assert grade(out, None) == Exit.DONE
    assert (out / "grades.jsonl").read_bytes() == first
    assert len(asked) == 4
    assert "secret" not in "".join(path.read_text() for path in out.iterdir())


def test_a_router_judges_too(router: str, double: RouterDouble, tmp_path: Path) -> None:
    (tmp_path / "hle.json").write_text(json.dumps([{"id": "a", "question": "q", "answer": "it"}]))
    out = tmp_path / "run"
    assert run(Source(router=router), RunOptions("hle", out, data=tmp_path / "hle.json")) == Exit.DONE
    double.answer = lambda _: "I cannot tell."
    assert grade(out, Judge(router, None)) == Exit.FAILED, "that is no verdict, and is asked again"
    double.answer = lambda _: "VERDICT: CORRECT"
    assert grade(out, Judge(router, None)) == Exit.DONE
    assert entries(out / "verdicts.jsonl")[0]["judge"] == router


def test_what_cannot_be_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(CliError, match="needs a --temperature"):
        run(Source(router="127.0.0.1:1"), RunOptions("facts", tmp_path / "run", repeats=2))
    with pytest.raises(CliError, match="no set 'x'"):
        run(Source(router="127.0.0.1:1"), RunOptions("x", tmp_path / "run"))
