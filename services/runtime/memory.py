"""How much memory the processes of one host may take together (L29).

The limit is the smallest of the physical memory and the limits of the own cgroup and all its ancestors, v1 or v2,
whichever controller is mounted. It is read once per host, by whoever starts the processes, and divided; a child that
read it by itself would count the same bytes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes of one host."""

    limit_bytes: int
    """What may be resident at most."""
    available_bytes: int
    """Of that, what is not in use yet (page cache that can be dropped counts as available)."""
    source: str
    """What sets the limit: 'physical memory' or the path of a cgroup file."""

    def divide(self, shares: Mapping[str, float], fraction: float = 0.8) -> dict[str, int]:
        """`fraction` of the available bytes, split in proportion to `shares` (name → weight > 0), whole MiB each.

        The rest is left to the system, page cache and growth of the processes. Raises ValueError for bad weights.
        """
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction {fraction} is not in (0, 1]")
        if not shares or any(weight <= 0 for weight in shares.values()):
            raise ValueError("every share needs a weight above 0")
        total = sum(shares.values())
        mib = 1 << 20
        return {
            name: int(self.available_bytes * fraction * weight / total) // mib * mib for name, weight in shares.items()
        }


def read_budget(root: Path = Path("/")) -> MemoryBudget:
    """The budget of this host as the current process may use it. `root` stands for / in tests."""
    meminfo = _meminfo(root / "proc/meminfo")
    limit = meminfo["MemTotal"]
    available = meminfo.get("MemAvailable", meminfo["MemFree"])
    source = "physical memory"
    for file, bound, used in _cgroup_limits(root):
        if bound < limit:
            limit, source = bound, "/" + str(file.relative_to(root))
        available = min(available, max(bound - used, 0))
    return MemoryBudget(limit, min(available, limit), source)


def _meminfo(path: Path) -> dict[str, int]:
    values = {}
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(":")
        if rest.endswith("kB"):
            values[name] = int(rest.removesuffix("kB")) * 1024
    return values


def _cgroup_limits(root: Path) -> Iterator[tuple[Path, int, int]]:
    """(limit file, limit, bytes in use that cannot be dropped) of every ancestor that has a limit."""
    own = _own_cgroups(root / "proc/self/cgroup")
    for kind, mount_root, mount_point in _cgroup_mounts(root / "proc/self/mountinfo"):
        path = own.get(kind)
        if path is None:
            continue
        limit_name, usage_name, cache_name = (
            ("memory.max", "memory.current", "inactive_file")
            if kind == "cgroup2"
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        # In a container without a cgroup namespace the own path starts with the root of the mount, which is cut off.
        inside = PurePosixPath(path)
        if inside.is_relative_to(mount_root):
            inside = PurePosixPath("/") / inside.relative_to(mount_root)
        top = root / mount_point.lstrip("/")
        for level in (inside, *inside.parents):
            folder = top / str(level).lstrip("/")
            limit = _number(folder / limit_name)
            if limit is not None:
                used = (_number(folder / usage_name) or 0) - _stat(folder / "memory.stat", cache_name)
                yield folder / limit_name, limit, max(used, 0)


def _own_cgroups(path: Path) -> dict[str, str]:
    """'cgroup2' and 'memory' (v1) → path of this process in that hierarchy."""
    own = {}
    for line in _lines(path):
        number, controllers, where = line.split(":", 2)
        if number == "0" and not controllers:
            own["cgroup2"] = where
        elif "memory" in controllers.split(","):
            own["memory"] = where
    return own


def _cgroup_mounts(path: Path) -> Iterator[tuple[str, str, str]]:
    """(kind as in _own_cgroups, root of the mount inside its hierarchy, mount point); format: proc(5), mountinfo."""
    for line in _lines(path):
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2":
            yield "cgroup2", fields[3], fields[4]
        elif tail[0] == "cgroup" and "memory" in tail[2].split(","):
            yield "memory", fields[3], fields[4]


def _lines(path: Path) -> list[str]:
    """Lines of a file that kernels without cgroups do not have."""
    try:
        return path.read_text().splitlines()
    except FileNotFoundError:
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None for 'max' and for a file that is not there (the root of v2 has none)."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return None
    return None if text == "max" else int(text)


def _stat(path: Path, name: str) -> int:
    for line in _lines(path):
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
