"""What all tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.zygote import HEADRACE, ZYGOTE

# That an example or its making takes long on a busy machine is no finding: nothing is asserted about seconds.
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")


@pytest.fixture(scope="session", autouse=True)
def _services_are_forked() -> Iterator[None]:
    """Processes of local clusters are forked from one that has imported everything (tests/zygote.py). Launchers that
    tests start as programs start theirs themselves, as users do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "headrace.cli.child.subprocess",
            SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired),
        )
        yield


def _popen(command: Sequence[str], *, env: Mapping[str, str], stdout: Any, **options: Any) -> Any:
    if tuple(command[:4]) == (sys.executable, "-m", HEADRACE, "serve"):
        return ZYGOTE.popen(HEADRACE, command[3:], environ=env, log=Path(stdout.name))
    return subprocess.Popen(command, env=env, stdout=stdout, **options)
