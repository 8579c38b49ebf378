"""The memory of one host divided among the processes of a local cluster, once, by the launcher (L29).

A worker's share pays for its interpreter and libraries, its weights, and KV. Weights are counted per worker: folders
that are mapped unchanged are shared between processes, those that are converted while loading are not.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.cli.cluster_spec import ClusterSpec, role_of
from headrace.cli.exits import CliError, Exit
from headrace.services.runtime.memory import MemoryBudget, read_budget

MIB: Final = 1 << 20
FRACTION: Final = 0.8
"""Of what is available; the rest is the system's, the page cache's and growth."""
BASE_BYTES: Final = {"router": 200 * MIB, "encoder": 600 * MIB, "prefill": 450 * MIB, "decode": 450 * MIB}
"""Resident size of a process before weights and KV, measured with torch 2.13 on the CPU and rounded up."""
KV_SHARE: Final = 0.65
SPILL_SHARE: Final = 0.1
LANDING_SHARE: Final = 0.15
"""Of what is left of a worker's share: KV pool, spilled sequences, landing memory (decode.landing_bytes). The rest is
for activations."""
HOST_SHARE: Final = 0.1
"""With a cache tier, for its host memory: on the CPU it comes out of the KV pool's share, whose bytes are of the same
kind and are used in place."""
HOST_SHARE_BESIDE_GPU: Final = 0.6
"""The same where KV lies on GPUs and the host's memory is free for it."""
LEAST_KV_BYTES: Final = 16 * MIB
CACHE_BUFFER_BYTES: Final = 160 * MIB
"""Of each worker with a cache tier: write queue, read buffers, arrivals from peers (settings `cache`)."""
CUDA_CONTEXT_BYTES: Final = 1024 * MIB
"""Of each process on a GPU: context, libraries, workspaces."""


@dataclass(frozen=True)
class WorkerMemory:
    """What one prefill or decode process may use for sequences."""

    kv_bytes: int
    spill_bytes: int
    landing_bytes: int
    host_bytes: int = 0
    """Of the cache tier."""


def plan_memory(spec: ClusterSpec, budget: MemoryBudget | None = None) -> dict[str, WorkerMemory]:
    """Shares by replica name, for the roles that have an engine. Raises CliError when they would be useless."""
    workers = [name for name in spec.names if role_of(name) in ("prefill", "decode")]
    if not workers:
        return {}
    budget = budget or read_budget()
    total = spec.memory_bytes if spec.memory_bytes is not None else int(budget.available_bytes * FRACTION)
    base = sum(BASE_BYTES[role_of(name)] for name in spec.names)
    if spec.store is not None:
        base += len(workers) * CACHE_BUFFER_BYTES
    weights = weight_bytes(spec.folder)
    on_device = spec.device == "cuda"
    rest = (total - base) // len(workers) - (0 if on_device else weights)
    if rest * KV_SHARE < LEAST_KV_BYTES:
        raise CliError(
            f"{total // MIB} MiB ({budget.source}) are too little for {len(spec.names)} processes with weights of "
            f"{weights // MIB} MiB: use fewer replicas, a smaller model or --memory",
            Exit.FAILED,
        )
    host_share = 0.0 if spec.store is None else HOST_SHARE_BESIDE_GPU if on_device else HOST_SHARE
    kv_share = KV_SHARE if on_device else KV_SHARE - host_share
    kv = device_kv(spec, workers, weights) if on_device else dict.fromkeys(workers, _whole(rest * kv_share))
    return {
        name: WorkerMemory(
            kv_bytes=kv[name],
            spill_bytes=_whole(rest * SPILL_SHARE),
            landing_bytes=_whole(kv[name] * LANDING_SHARE / KV_SHARE),
            host_bytes=_whole(rest * host_share),
        )
        for name in workers
    }


def weight_bytes(folder: Path) -> int:
    """Size of a model folder's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def device_of(index: int, gpus: int) -> str:
    """The GPU of the index-th worker: one each, in turn."""
    return f"cuda:{index % gpus}"


def device_kv(
    spec: ClusterSpec, workers: list[str], weights: int, free: Mapping[int, int] | None = None
) -> dict[str, int]:
    """KV bytes of workers that share GPUs in turn."""
    free = gpu_free_bytes() if free is None else free
    sharing = [sum(1 for other in range(len(workers)) if other % len(free) == gpu) for gpu in range(len(free))]
    plan = {}
    for index, name in enumerate(workers):
        gpu = index % len(free)
        share = free[gpu] * FRACTION / sharing[gpu] - weights - CUDA_CONTEXT_BYTES
        if share * KV_SHARE < LEAST_KV_BYTES:
            raise CliError(
                f"GPU {gpu} has {free[gpu] // MIB} MiB free, too little for {sharing[gpu]} workers with weights of "
                f"{weights // MIB} MiB: use fewer replicas or another GPU (CUDA_VISIBLE_DEVICES)",
                Exit.FAILED,
            )
        plan[name] = _whole(share * KV_SHARE)
    return plan


def gpu_free_bytes() -> dict[int, int]:
    """Free bytes by GPU index, as the driver's own tool tells (the launcher loads no torch). Raises CliError."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        raise CliError("--device cuda: there is no nvidia-smi here; is a driver installed?", Exit.FAILED)
    command = [tool, "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]  # the tool itself does not look at it, the children do
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    lines = done.stdout.split()
    if done.returncode != 0 or not lines or not all(line.isdigit() for line in lines):
        raise CliError(f"--device cuda: nvidia-smi sees no GPU: {(done.stderr or done.stdout).strip()}", Exit.FAILED)
    return {index: int(line) * MIB for index, line in enumerate(lines)}


def _whole(value: float) -> int:
    return int(value) // MIB * MIB
