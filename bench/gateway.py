"""What the HTTP gateway costs: added time to the first token, and tokens a second, against gRPC, 1 to 256 streams.

    python -m bench.gateway --json

The router behind it computes nothing, so that what is seen is the gateway. Times to the first token are of streams of
20 tokens a second; tokens a second are of streams that are sent as fast as they are taken. `slow_reader` is the
throughput of 16 streams beside 16 endless ones whose readers have stopped, against the same without them, measured
before and afterwards; `stalled_readers` has the latency of paced streams and the gateway's memory and CPU, too. CPU per
token hardly depends on what else the machine does.
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

from bench._progress import Advance, Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.gateway_harness.clients import One, over_grpc, over_http, together
from bench.gateway_harness.stalled import Load, cpu_s, others, rss_mb, stalled, table
from bench.gateway_harness.talking_router import MODELS, make_folder
from headrace.cli.child import Child, ChildSpec, address_file
from headrace.cli.local_gateway import LocalGateway

FAST, PACED, FLOOD = MODELS
PACED_TOKENS, PACED_TOKENS_BESIDE = 5, 20
STALLED_STREAMS = 16
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


async def compare(
    address: str, url: str, gateway: psutil.Process, counts: list[int], tokens: int, advance: Advance
) -> list[dict[str, Scalar]]:
    """A row for each number of streams."""
    rows: list[dict[str, Scalar]] = []
    async with grpc.aio.insecure_channel(address) as channel:
        ways: dict[str, One] = {"grpc": over_grpc(channel), "http": over_http(*place_of(url))}
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
            advance()
    return rows


async def disturb(url: str, gateway: psutil.Process, readers: int, tokens: int, advance: Advance) -> dict[str, Scalar]:
    """Streams that are read, without, beside and again without readers that have stopped."""
    place = place_of(url)
    load = Load(over_http(*place), STALLED_STREAMS, FAST, tokens // STALLED_STREAMS, PACED, PACED_TOKENS_BESIDE)
    alone, memory = [await others(load, gateway)], {"rss_mb_before": rss_mb(gateway)}
    advance()
    async with stalled(*place, FLOOD, readers, gateway):
        memory["rss_mb_standing"] = rss_mb(gateway)
        advance()
        beside = [await others(load, gateway), await others(load, gateway)]
        memory["rss_mb_beside"] = rss_mb(gateway)
        advance()
    alone.append(await others(load, gateway))
    advance()
    return {"readers": readers, **memory, **table(alone, beside)}


def place_of(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 0


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=positive, default=8192, help="of all fast streams together")
    parser.add_argument("--stalled", type=positive, default=16, help="readers that stop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        router, address = start_router(scratch)
        try:
            folder = str(make_folder(scratch))
            models = [{"name": model, "router": address, "folder": folder, "protocol": "template"} for model in MODELS]
            with LocalGateway(models, sets=["log.level=warning"]) as gateway, Phases() as phases:
                process = psutil.Process(gateway.child.pid)
                with phases.phase("numbers of streams", len(options.streams)) as advance:
                    rows = asyncio.run(compare(address, gateway.url, process, options.streams, options.tokens, advance))
                with phases.phase("stalled readers", 4) as advance:
                    beside = asyncio.run(disturb(gateway.url, process, options.stalled, options.tokens, advance))
        finally:
            router.kill()
    results: dict[str, JsonValue] = {
        "slow_reader": round(float(beside["tokens_per_s_beside"] or 0) / float(beside["tokens_per_s_alone"] or 1), 3),
        "stalled_readers": dict(beside),
        "load_average": round(os.getloadavg()[0], 1),
    }
    notes = ["client, router and gateway share the machine's cores; with one core each, figures are better"]
    emit(Report("gateway", results, rows, notes), as_json=options.json)


if __name__ == "__main__":
    main()
