"""Dynamo's frontend in KV mode over its own mocker workers, in an interpreter that has it; absent, and why, where none
has."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench._ports import free_ports
from bench.overhead_harness.cpu import CpuTimes

INSTALL = (
    "To have it: python -m venv DIR; DIR/bin/pip install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1;"
    " DIR/bin/pip install aiohttp msgspec prometheus-client pyzmq redis tqdm transformers zstandard uvloop"
    " 'pydantic<=2.13.5'; and --dynamo-python DIR/bin/python. (--no-deps, since its aisimulate is a placeholder that"
    " fetches from the vendor's own index; workers without a performance model do not import it.) Neither etcd nor NATS"
    " is needed: discovery through files, requests over TCP, events over ZeroMQ"
)
START_S = 120.0
MODEL = "mock"
_CHILD = Path(__file__).with_name("dynamo_child.py")
_COMMON = ("--discovery-backend", "file", "--request-plane", "tcp", "--event-plane", "zmq")


@dataclass(frozen=True)
class DynamoFigures:
    """What it showed over the same prompts."""

    version: str
    workers: int
    clients: int
    requests: int
    routing_ms_per_request: float
    """Mean of its own router_overhead_total_ms."""
    routing_idle_ms: float
    """The same with one request in flight."""
    requests_per_s: float
    frontend_cpu_ms_per_request: float
    requests_per_cpu_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float


class DynamoAbsent(Exception):
    """It cannot be measured here; the message says why."""


def measure(python: str, model: Path, workers: int, clients: int, requests: int, prompt_tokens: int) -> DynamoFigures:
    """`model`: a folder with config.json and tokenizer.json. Raises DynamoAbsent."""
    version = _version(python)
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="dynamo-") as scratch:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment |= {"DYN_FILE_KV": f"{scratch}/kv", "DYN_LOG": "error", "HF_HUB_OFFLINE": "1"}
        mocker = [python, "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", MODEL]
        mocker += ["--num-workers", str(workers), "--speedup-ratio", "0", "--block-size", "128"]
        mocker += ["--kv-bytes-per-token", "1000", *_COMMON]
        frontend = [python, "-m", "dynamo.frontend", "--router-mode", "kv", "--kv-cache-block-size", "128"]
        frontend += ["--http-host", "127.0.0.1", "--http-port", str(port), *_COMMON]
        with _running(mocker, Path(scratch), environment), _running(frontend, Path(scratch), environment) as process:
            _until_served(port, process)
            pids = {"frontend": process.pid}
            _load(python, port, clients, 4 * clients, prompt_tokens, 1, seed=1)
            before = _overhead(port)
            _load(python, port, 1, 100, prompt_tokens, 1, seed=2)
            idle = _overhead(port)
            cpu = CpuTimes.now(pids)
            seen = _load(python, port, clients, requests, prompt_tokens, 1, seed=3)
            used = CpuTimes.now(pids).since(cpu, 1.0)["frontend"]["all"]
            after = _overhead(port)
    return DynamoFigures(
        version=version,
        workers=workers,
        clients=clients,
        requests=requests,
        routing_ms_per_request=_mean(idle, after),
        routing_idle_ms=_mean(before, idle),
        requests_per_s=round(requests / seen["seconds"], 1),
        frontend_cpu_ms_per_request=round(1e3 * used / requests, 3),
        requests_per_cpu_s=round(requests / max(used, 1e-9), 1),
        ttft_p50_ms=round(1e3 * seen["ttft_p50_s"], 2),
        ttft_p99_ms=round(1e3 * seen["ttft_p99_s"], 2),
    )


def _version(python: str) -> str:
    program = "import importlib.metadata as m, dynamo.frontend, dynamo.mocker; print(m.version('ai-dynamo'))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(
            [python, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DynamoAbsent(str(error)) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise DynamoAbsent(lines[-1] if lines else f"exit status {done.returncode}")
    return done.stdout.strip()


@contextmanager
def _running(command: list[str], scratch: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child for the block, its output in a file of its own."""
    log = scratch / f"{command[2]}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, cwd=scratch, env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until_served(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DynamoAbsent(f"its frontend ended with status {process.returncode}")
        try:
            if json.loads(_get(port, "/v1/models"))["data"]:
                return
        except (OSError, urllib.error.URLError):
            pass  # it does not listen yet
        time.sleep(0.2)
    raise DynamoAbsent(f"its frontend served no model within {START_S:.0f} s")


def _load(
    python: str, port: int, clients: int, requests: int, prompt_tokens: int, tokens: int, *, seed: int
) -> dict[str, float]:
    numbers = (port, clients, requests, prompt_tokens, tokens, seed)
    command = [python, "-P", str(_CHILD), MODEL, *(str(number) for number in numbers)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise DynamoAbsent(f"a request failed: {lines[-1] if lines else done.returncode}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _overhead(port: int) -> tuple[float, float]:
    """(milliseconds, requests) that its router has counted."""
    found = {"sum": 0.0, "count": 0.0}
    for line in _get(port, "/metrics").splitlines():
        for kind in found:
            if line.startswith(f"dynamo_router_overhead_total_ms_{kind}"):
                found[kind] += float(line.rpartition(" ")[2])
    return found["sum"], found["count"]


def _mean(before: tuple[float, float], after: tuple[float, float]) -> float:
    requests = after[1] - before[1]
    if not requests:
        raise DynamoAbsent("its metric router_overhead_total_ms counted no request")
    return round((after[0] - before[0]) / requests, 4)


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return str(answer.read().decode())
