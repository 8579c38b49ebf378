"""Where running clusters of this user are written down, so that `generate` and `status` find their router."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from headrace.cli.exits import CliError, Exit
from headrace.services.runtime.files import write_whole

STATE_FILE: Final = "cluster.json"
_PREFIX: Final = "up-"


@dataclass(frozen=True)
class RunningCluster:
    """One `headrace up`."""

    pid: int
    started: int
    """Start of that process in clock ticks since boot: a number that a reused pid does not have."""
    router: str
    model: str
    folder: str
    """Of the model."""
    run_dir: str

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.started


def runtime_directory() -> Path:
    """$HEADRACE_RUNTIME, else $XDG_RUNTIME_DIR/headrace, else /tmp/headrace-UID; made for this user alone.

    Raises CliError when it belongs to somebody else.
    """
    if own := os.environ.get("HEADRACE_RUNTIME"):
        path = Path(own)
    elif xdg := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(xdg) / "headrace"
    else:
        path = Path(f"/tmp/headrace-{os.getuid()}")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"cannot make {path}: {error.strerror}; set HEADRACE_RUNTIME to a folder of yours") from error
    found = path.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022:
        raise CliError(f"{path} can be written by others; remove it, or set HEADRACE_RUNTIME to a folder of yours")
    return path


def new_run_directory() -> Path:
    """A directory for this process's cluster; those that dead launchers left are removed first."""
    base = runtime_directory()
    for left in base.glob(f"{_PREFIX}*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and start_ticks(int(pid)) is None:
            shutil.rmtree(left, ignore_errors=True)
    path = base / f"{_PREFIX}{os.getpid()}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(mode=0o700)
    return path


def remove_run_directory(run_dir: Path) -> None:
    """Of a cluster that ended cleanly; the logs go too."""
    shutil.rmtree(run_dir, ignore_errors=True)


def publish(state_dir: Path, run_dir: Path, router: str, model: str, folder: Path) -> None:
    """Write the calling process down, in its directory of `new_run_directory`, as a running cluster whose logs are in
    `run_dir`. Readers see all of it or nothing."""
    cluster = RunningCluster(os.getpid(), start_ticks(os.getpid()) or 0, router, model, str(folder), str(run_dir))
    write_whole(state_dir / STATE_FILE, f"{json.dumps(asdict(cluster))}\n".encode(), 0o666)


def running_clusters() -> list[RunningCluster]:
    """Clusters of this user whose launcher lives, newest first."""
    found = []
    for path in runtime_directory().glob(f"{_PREFIX}*/{STATE_FILE}"):
        try:
            cluster = RunningCluster(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue  # removed meanwhile, or written by another version
        if cluster.alive:
            found.append(cluster)
    return sorted(found, key=lambda cluster: (-cluster.started, cluster.router))


def find_router(given: str | None) -> str:
    """The router to speak to: the one given, else that of the only running cluster. Raises CliError."""
    if given:
        return given
    clusters = running_clusters()
    if len(clusters) == 1:
        return clusters[0].router
    if not clusters:
        raise CliError(
            "no cluster of yours runs here: start one with `headrace up`, or name --router HOST:PORT", Exit.UNREACHABLE
        )
    listed = ", ".join(f"{cluster.router} ({cluster.model})" for cluster in clusters)
    raise CliError(f"several clusters run here: {listed}; choose one with --router HOST:PORT")


def cluster_of(router: str) -> RunningCluster | None:
    """The running cluster of this user that has this router."""
    return next((cluster for cluster in running_clusters() if cluster.router == router), None)


def state_directory(router: str) -> Path:
    """Directory of the launcher whose cluster has this router. Raises CliError when it is not one of this user's."""
    cluster = cluster_of(router)
    if cluster is None:
        raise CliError(f"{router} is not the router of a `headrace up` of yours on this machine", Exit.UNREACHABLE)
    return runtime_directory() / f"{_PREFIX}{cluster.pid}"


def start_ticks(pid: int) -> int | None:
    """When a process started (proc(5), stat, field 22); None when there is none of this id, or only its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] == "Z" else int(fields[19])
