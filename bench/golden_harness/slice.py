"""Cut the slice of a golden folder that a bare clone tests with: every judged case, without the outputs not judged.

``python -m bench.golden_harness.slice --dir ../shared/golden/v41 --out tests/golden_data/v41``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.golden_harness.case import Case, Entry, load_cases
from bench.golden_harness.evaluate import NOT_GATED_OUTPUTS, gating_outputs

MAX_BYTES = 8 << 20


def cut(source: Path, target: Path) -> int:
    """Write the slice; its size in bytes. ``target`` is replaced."""
    manifest = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    cases = {case.name: case for case in load_cases(source)}
    kept = [raw for raw in manifest["cases"] if gating_outputs(cases[raw["case"]])]
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for raw in kept:
        raw["outputs"] = {
            name: entry for name, entry in raw["outputs"].items() if not name.startswith(NOT_GATED_OUTPUTS)
        }
        for entry in _entries(cases[raw["case"]], raw):
            family = tensors.setdefault(entry.key.split("/", 1)[0], {})
            if entry.key not in family:
                family[entry.key] = cases[raw["case"]].files.read_stored(entry)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name, held in tensors.items():
        save_file(held, str(target / f"{name}.safetensors"))
    shutil.copytree(source / manifest["checkpoint"], target / manifest["checkpoint"])
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    manifest["cases"] = kept
    manifest["files"] = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(target.glob("*.safetensors"))
    }
    (target / "manifest.json").write_text(_one_case_per_line(manifest), encoding="utf-8")
    return sum(path.stat().st_size for path in target.rglob("*") if path.is_file())


def _entries(case: Case, raw: dict[str, Any]) -> list[Entry]:
    outputs = [entry for name, entry in case.outputs.items() if name in raw["outputs"]]
    return [*case.inputs.values(), *case.weights.values(), *outputs]


def _one_case_per_line(manifest: dict[str, Any]) -> str:
    head = json.dumps({name: value for name, value in manifest.items() if name != "cases"}, indent=1)
    cases = ",\n".join(json.dumps(raw, separators=(",", ":")) for raw in manifest["cases"])
    return f'{head.removesuffix("}").rstrip()},\n "cases": [\n{cases}\n]}}\n'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    size = cut(options.dir, options.out)
    print(f"{size:,} bytes in {options.out}")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
