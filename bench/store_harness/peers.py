"""What stands beside the engine in the table: LMCache's disk backend and SeaweedFS, or why one of them is absent."""

from __future__ import annotations

import shutil
from pathlib import Path

from bench._report import Scalar
from bench.store_harness import lmcache, weed
from bench.store_harness.cases import Case, cases

_LMCACHE_THREADS = 4
_LMCACHE_ROUNDS = 3
_PEER_BYTES = 64 << 20


def row(case: Case, what: str, rate: float, threads: int, note: str = "") -> dict[str, Scalar]:
    """One line of the table; `rate` in bytes a second."""
    return {
        "record B": case.record,
        "what": what,
        "MB/s": round(rate / 1e6, 1),
        "records/s": round(rate / case.record),
        "threads": threads,
        "note": note,
    }


def lmcache_rows(directory: Path, payload: int, python: str) -> tuple[list[dict[str, Scalar]], str]:
    """Its lines, or none and why."""
    [case] = cases(_PEER_BYTES, (payload,))
    folder = directory / "lmcache"
    try:
        found = lmcache.measure(python, folder, case, _LMCACHE_ROUNDS, _LMCACHE_THREADS)
    except lmcache.LMCacheAbsent as error:
        return [], f"LMCache at {case.payload:,} B: absent ({error}). {lmcache.INSTALL}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    how = f"{found.version}, {'O_DIRECT' if found.direct else 'page cache: no multiple of a disk block'}"
    return [
        row(case, "LMCache disk: read", found.read, _LMCACHE_THREADS, f"{how}; nothing is verified"),
        row(case, "LMCache disk: write, synced by us", found.write, _LMCACHE_THREADS, "it never syncs"),
        row(case, "LMCache disk: write, not durable", found.write_unsynced, _LMCACHE_THREADS),
    ], ""


def weed_rows(directory: Path, payload: int) -> tuple[list[dict[str, Scalar]], str]:
    """The same of SeaweedFS."""
    [case] = cases(_PEER_BYTES, (payload,))
    try:
        found = weed.measure(directory, case)
    except weed.WeedAbsent as error:
        return [], f"SeaweedFS: absent ({error})"
    return [
        row(case, "SeaweedFS, two copies: verified read", found.read, 16, "servers on the same machine"),
        row(case, "SeaweedFS, two copies: durable write", found.write, 8, "fsync on both"),
    ], ""
