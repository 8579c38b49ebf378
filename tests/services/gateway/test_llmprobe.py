"""npm llmprobe against SmolLM2: what it does not find in order stands by name in llmprobe_expected.txt.

npm pack llmprobe@0.6.12 && tar xzf llmprobe-0.6.12.tgz
HEADRACE_LLMPROBE=package/bin/dist/llmprobe.mjs python -m pytest -n0 tests/services/gateway/test_llmprobe.py
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import fetch

EXPECTED = Path(__file__).with_name("llmprobe_expected.txt")
SURFACES = ("chat", "responses", "messages")
PROGRAM = os.environ.get("HEADRACE_LLMPROBE")


def expected() -> dict[str, str]:
    """Check → what comes of it."""
    lines = (line.partition("#")[0].split() for line in EXPECTED.read_text(encoding="utf-8").splitlines())
    return {words[0]: words[1] for words in lines if words}


def test_the_file_says_why() -> None:
    for line in EXPECTED.read_text(encoding="utf-8").splitlines():
        assert line.startswith("#") or "  # " in line, line


@pytest.mark.skipif(PROGRAM is None, reason="HEADRACE_LLMPROBE names no llmprobe.mjs; with it, a quarter of an hour")
@pytest.mark.timeout(3600)
def test_all_others_pass(tmp_path: Path) -> None:
    folder = next(one for one in fetch("smollm2", None, None) if one.name == "smollm2-bfloat16")
    report = tmp_path / "report.json"
    with (
        LocalCluster(ClusterSpec(folder, model_name="smollm2")) as cluster,
        LocalGateway([served(cluster, "template")]) as gateway,
    ):
        command = ["node", str(PROGRAM), f"{gateway.url}/v1", "--model", "smollm2", "--no-bench", "--no-save"]
        command += ["--no-color", "--reasoning", "default", "--timeout", "180", "--save", str(report)]
        subprocess.run(command, check=False, timeout=3000)
    results = json.loads(report.read_text(encoding="utf-8"))["conformance"]["results"]
    found = {one["id"]: one["outcome"] for one in results if one["surface"] in SURFACES and one["outcome"] != "pass"}
    assert found == expected()
