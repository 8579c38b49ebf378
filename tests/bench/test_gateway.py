"""bench.gateway measures what it says: every token arrives by both ways."""

from __future__ import annotations

import json

import pytest

from bench import gateway


def test_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The clients assert that no token is missing; nothing is asserted about times."""
    arguments = ["--json", "--streams", "1", "2", "--tokens", "160", "--stalled", "2"]
    monkeypatch.setattr("sys.argv", ["bench.gateway", *arguments])
    gateway.main()
    report = json.loads(capsys.readouterr().out)
    assert [row["streams"] for row in report["rows"]] == [1, 2]
    assert {"added_first_ms", "grpc_tokens_per_s", "http_tokens_per_s", "gateway_cpu_us_per_token"} <= set(
        report["rows"][0]
    )
    assert report["slow_reader"] > 0
    assert report["stalled_readers"]["readers"] == 2
