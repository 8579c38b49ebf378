"""L29: the memory budget is the tightest of the machine and every cgroup above us, v1 or v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.services.runtime.memory import MemoryBudget, read_budget

GIB = 1 << 30
V2_MOUNT = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


def _host(tmp: Path, mountinfo: str, cgroup: str, files: dict[str, str]) -> Path:
    meminfo = f"MemTotal: {64 << 20} kB\nMemFree: {10 << 20} kB\nMemAvailable: {48 << 20} kB\n"
    everything = {
        "proc/meminfo": meminfo,
        "proc/self/mountinfo": mountinfo,
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in everything.items():
        path = tmp / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp


def test_a_machine_without_limits(tmp_path: Path) -> None:
    files = {"memory.max": "max", "a/memory.max": "max"}
    host = _host(tmp_path, V2_MOUNT.format(root="/"), "0::/a\n", files)
    assert read_budget(host) == MemoryBudget(64 * GIB, 48 * GIB, "physical memory")


def test_v2_nested_the_tightest_ancestor_counts(tmp_path: Path) -> None:
    """L29: a pod's limit stands above the container's; dropped page cache is available."""
    files = {
        "pod/memory.max": str(8 * GIB),
        "pod/memory.current": str(3 * GIB),
        "pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        "pod/container/memory.max": "max",
        "pod/container/memory.current": "0",
    }
    host = _host(tmp_path, V2_MOUNT.format(root="/"), "0::/pod/container\n", files)
    assert read_budget(host) == MemoryBudget(8 * GIB, 6 * GIB, "/sys/fs/cgroup/pod/memory.max")


def test_v2_inside_a_container_with_its_own_namespace(tmp_path: Path) -> None:
    host = _host(tmp_path, V2_MOUNT.format(root="/"), "0::/\n", {"memory.max": str(2 * GIB), "memory.current": "0"})
    assert read_budget(host).limit_bytes == 2 * GIB


def test_v1_where_the_mount_shows_only_our_part_of_the_tree(tmp_path: Path) -> None:
    """Docker without cgroup namespaces: the own path repeats the root of the mount."""
    files = {
        "memory/memory.limit_in_bytes": str(4 * GIB),
        "memory/memory.usage_in_bytes": str(2 * GIB),
        "memory/memory.stat": f"total_inactive_file {GIB}\n",
    }
    host = _host(tmp_path, V1_MOUNT.format(root="/docker/id"), "4:memory:/docker/id\n0::/\n", files)
    assert read_budget(host) == MemoryBudget(4 * GIB, 3 * GIB, "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def test_v1_without_a_limit_has_a_huge_number(tmp_path: Path) -> None:
    files = {"memory/a/memory.limit_in_bytes": "9223372036854771712", "memory/a/memory.usage_in_bytes": "0"}
    host = _host(tmp_path, V1_MOUNT.format(root="/"), "4:memory:/a\n", files)
    assert read_budget(host).source == "physical memory"


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    host = _host(tmp_path, "", "", {})
    (host / "proc/self/cgroup").unlink()
    assert read_budget(host).limit_bytes == 64 * GIB


def test_this_machine_has_a_budget() -> None:
    budget = read_budget()
    assert 0 < budget.available_bytes <= budget.limit_bytes


def test_division_among_children() -> None:
    """L29: read once, divided; the parts never exceed the whole."""
    parts = MemoryBudget(10 * GIB, 10 * GIB, "x").divide({"prefill": 1, "decode": 3}, fraction=0.8)
    assert parts == {"prefill": 2 * GIB, "decode": 6 * GIB}
    with pytest.raises(ValueError, match="weight"):
        MemoryBudget(1, 1, "x").divide({"a": 0})
    with pytest.raises(ValueError, match="fraction"):
        MemoryBudget(1, 1, "x").divide({"a": 1}, fraction=1.5)
