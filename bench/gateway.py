"""What the HTTP gateway costs: added time to the first token, and tokens a second, against gRPC, 1 to 256 streams.

    python -m bench.gateway --json

The router behind it computes nothing, so that what is seen is the gateway. Times to the first token are of streams of
20 tokens a second; tokens a second are of streams that are sent as fast as they are taken. `slow_reader` is the
throughput of 16 streams beside one that reads nothing, against the same without it. `gateway_cpu_us_per_token` does not
depend on what else the machine does.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import grpc.aio
import psutil

from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.gateway_harness.clients import One, over_grpc, over_http, request_bytes, together
from bench.gateway_harness.talking_router import make_folder
from headrace.cli.child import Child, ChildSpec, address_file
from headrace.cli.local_gateway import LocalGateway

FAST, PACED = "talk:0", "talk:20"
PACED_TOKENS = 5
SLOW_STREAMS = 16
START_S = 60.0
ROUTER = "router"


def start_router(scratch: Path) -> tuple[Child, str]:
    """The process and its address."""
    command = (sys.executable, "-m", "bench.gateway_harness.talking_router", str(address_file(scratch, ROUTER)))
    child = Child(ChildSpec(ROUTER, "router", command, os.environ), scratch)
    deadline = time.monotonic() + START_S
    while (address := child.address) is None:
        if child.status is not None or time.monotonic() > deadline:
            child.kill()
            raise SystemExit(f"the talking router did not start:\n{child.tail()}")
        time.sleep(0.05)
    return child, address


def cpu_s(process: psutil.Process) -> float:
    """Time that the process has computed for so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(
    address: str, url: str, gateway: psutil.Process, counts: list[int], tokens: int
) -> tuple[list[dict[str, Scalar]], float]:
    """A row for each number of streams, and what a slow reader leaves of the others' throughput."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    rows: list[dict[str, Scalar]] = []
    async with grpc.aio.insecure_channel(address) as channel:
        ways: dict[str, One] = {"grpc": over_grpc(channel), "http": over_http(host, port)}
        for one in ways.values():
            await together(one, FAST, 1, 10)
        for streams in counts:
            row: dict[str, Scalar] = {"streams": streams}
            for name, one in ways.items():
                row[f"{name}_first_ms"] = round((await together(one, PACED, streams, PACED_TOKENS)).first_ms, 2)
                each = max(10, tokens // streams)
                before = cpu_s(gateway)
                row[f"{name}_tokens_per_s"] = round((await together(one, FAST, streams, each)).tokens_per_s)
                if name == "http":
                    row["gateway_cpu_us_per_token"] = round(1e6 * (cpu_s(gateway) - before) / (streams * each))
            row["added_first_ms"] = round(float(row["http_first_ms"] or 0) - float(row["grpc_first_ms"] or 0), 2)
            rows.append(row)
        alone = await together(ways["http"], FAST, SLOW_STREAMS, tokens // SLOW_STREAMS)
        reader, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(request_bytes(FAST, 1_000_000))
        await reader.readexactly(100)
        beside = await together(ways["http"], FAST, SLOW_STREAMS, tokens // SLOW_STREAMS)
        writer.close()
    return rows, beside.tokens_per_s / alone.tokens_per_s


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=positive, default=8192, help="of all fast streams together")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        router, address = start_router(scratch)
        try:
            folder = str(make_folder(scratch))
            models = [
                {"name": model, "router": address, "folder": folder, "protocol": "template"} for model in (FAST, PACED)
            ]
            with LocalGateway(models, sets=["log.level=warning"]) as gateway:
                rows, slow = asyncio.run(
                    measure(address, gateway.url, psutil.Process(gateway.child.pid), options.streams, options.tokens)
                )
        finally:
            router.kill()
    results: dict[str, JsonValue] = {"slow_reader": round(slow, 3), "load_average": round(os.getloadavg()[0], 1)}
    notes = ["client, router and gateway share the machine's cores; with one core each, figures are better"]
    emit(Report("gateway", results, rows, notes), as_json=options.json)


if __name__ == "__main__":
    main()
