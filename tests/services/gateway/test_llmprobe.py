"""npm llmprobe: what it does not find in order stands by name in llmprobe_expected.txt.

npm pack llmprobe@0.6.12 && tar xzf llmprobe-0.6.12.tgz
HEADRACE_LLMPROBE=package/bin/dist/llmprobe.mjs python -m pytest -n0 -s tests/services/gateway/test_llmprobe.py

Before a router whose model does what the checks want (oracle.py), everything that is served passes, by both protocols;
that takes a minute. SmolLM2 does not know everything, and takes a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import fetch
from headrace.v1 import inference_pb2
from tests.services.gateway.fakes import World
from tests.services.gateway.oracle import Oracle

EXPECTED = Path(__file__).with_name("llmprobe_expected.txt")
SURFACES = ("chat", "responses", "messages", "count-tokens", "models")
PROGRAM = os.environ.get("HEADRACE_LLMPROBE")
RUNS = {"smollm2": "smollm2", "template": "plain", "v4.1": "v41"}
"""Run of the file → model."""
needs_program = pytest.mark.skipif(PROGRAM is None, reason="HEADRACE_LLMPROBE names no llmprobe.mjs")


def expected(run: str) -> dict[str, set[str]]:
    """Check → what may come of it."""
    lines = (line.partition("#")[0].split() for line in EXPECTED.read_text(encoding="utf-8").splitlines())
    return {words[1]: set(words[2].split("|")) for words in lines if words and words[0] == run}


def command(url: str, model: str, report: Path, *more: str) -> list[str]:
    run = ["node", str(PROGRAM), f"{url}/v1", "--model", model, "--no-bench", "--no-save", "--no-color"]
    return [*run, "--reasoning", "default", "--timeout", "180", "--save", str(report), *more]


def findings(report: Path) -> dict[str, Mapping[str, Any]]:
    """Check → its result, of those that were made. Tells counts, and llmprobe's reasons for what did not pass."""
    document = json.loads(report.read_text(encoding="utf-8"))
    assert "incomplete" not in document, document["incomplete"]
    results = document["conformance"]["results"]
    found = {one["id"]: one for one in results if one["surface"] in SURFACES and one["outcome"] != "skipped"}
    for surface in SURFACES:
        tell(f"{surface} {dict(Counter(one['outcome'] for one in results if one['surface'] == surface))}")
    for name, one in found.items():
        reasons = [one["reason"]] if one.get("reason") else []
        reasons += [f"{each['severity']} {each['id']}: {each['message']}" for each in one["failures"]]
        if reasons:
            tell(f"{name} {one['outcome']}: {'; '.join(reasons)}")
    return found


def tell(line: str) -> None:
    """For those who run it with -s."""
    sys.stdout.write(f"{line}\n")


def test_the_file_says_why() -> None:
    for line in EXPECTED.read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or (line.split()[0] in RUNS and "  # " in line), line


@needs_program
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("run", ["template", "v4.1"])
async def test_everything_that_is_served_passes(world: World, tmp_path: Path, run: str) -> None:
    """Whatever llmprobe asserts, its recommendations too, but for what the file names."""
    world.router.script, world.router.max_tokens = Oracle(), 2**16
    level = inference_pb2.RateLevel(limit=1000, remaining=999, reset_ms=60)
    world.router.levels = inference_pb2.Caller(requests=level, tokens=level)
    report = tmp_path / "report.json"
    probing = await asyncio.create_subprocess_exec(*command(world.url, RUNS[run], report, "--full"))
    await probing.wait()
    found = findings(report)
    others = {name: one["outcome"] for name, one in found.items() if one["outcome"] != "pass" or one["failures"]}
    assert {name: {outcome} for name, outcome in others.items()} == expected(run)


@needs_program
@pytest.mark.timeout(3600)
def test_smollm2_fails_where_it_lacks_knowledge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding depends on what runs beside it, so that what stands in the file may pass as well."""
    monkeypatch.delenv("HEADRACE_LLMPROBE")  # which is no setting of a service
    folder = next(one for one in fetch("smollm2", None, None) if one.name == "smollm2-bfloat16")
    report = tmp_path / "report.json"
    with (
        LocalCluster(ClusterSpec(folder, model_name="smollm2")) as cluster,
        LocalGateway([served(cluster, "template")]) as gateway,
    ):
        subprocess.run(command(gateway.url, "smollm2", report), check=False, timeout=3000)
    found, allowed = findings(report), expected("smollm2")
    outcomes = {name: one["outcome"] for name, one in found.items()}
    tell(f"of the file passed: {[name for name in allowed if outcomes[name] == 'pass']}")
    assert not {name: one for name, one in outcomes.items() if one not in {"pass", *allowed.get(name, ())}}
