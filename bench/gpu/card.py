"""Which card, driver and libraries a result comes from."""

from __future__ import annotations

import importlib.metadata
import subprocess

import torch

from bench._report import JsonValue


def card(device: str) -> dict[str, JsonValue]:
    """Empty on the CPU. ``links`` is nvidia-smi's matrix of how the GPUs are connected."""
    if device == "cpu":
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "count": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30),
        "driver": _smi("--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "nixl": _version("nixl-cu13") or _version("nixl-cu12"),
        "links": [" ".join(line.split()) for line in _smi("topo", "-m").splitlines() if line.startswith("GPU")],
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _smi(*arguments: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return f"unknown: {error}"
