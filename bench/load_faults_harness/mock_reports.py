"""A real worker that lies about its load: MockReports stands between the engine's state and what is told of it.

python -m bench.load_faults_harness.mock_reports decode --lie absurd --set section.field=value …

idle    nothing is ever running or waiting, and steps go on
frozen  the first report, over and over
absurd  more rows than there are, and a queue of 2^60 tokens
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from headrace.cli.serve import serve
from headrace.engine.messages import EngineStatus
from headrace.services.worker import reports
from headrace.v1 import common_pb2

LIES = ("idle", "frozen", "absurd")
ABSURD_ROWS = (1 << 32) - 1
ABSURD_TOKENS = 1 << 60


class MockReports:
    """Takes the place of services.worker.reports.load_report."""

    def __init__(self, lie: str, honest: Callable[..., common_pb2.LoadReport]) -> None:
        self._lie = lie
        self._honest = honest
        self._first: common_pb2.LoadReport | None = None

    def __call__(self, status: EngineStatus, *, rank: int = 0) -> common_pb2.LoadReport:
        report = self._honest(status, rank=rank)
        if self._first is None:
            self._first = common_pb2.LoadReport()
            self._first.CopyFrom(report)
        if self._lie == "frozen":
            return self._first
        if self._lie == "absurd":
            report.rows_used = report.queued_requests = ABSURD_ROWS
            report.queued_tokens = ABSURD_TOKENS
            return report
        return common_pb2.LoadReport(rank=rank, rows_total=report.rows_total, step=report.step)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("--lie", choices=LIES, required=True)
    parser.add_argument("--set", action="append", default=[])
    options = parser.parse_args()
    # Before the role's main module is imported, which takes the function by name.
    reports.load_report = MockReports(options.lie, reports.load_report)
    return serve(options.role, None, options.set)


if __name__ == "__main__":
    sys.exit(main())
