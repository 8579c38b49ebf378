"""Generate headrace/v1 from proto/headrace/v1, or check that what is committed is what would be generated.

    python proto/generate.py            write headrace/v1
    python proto/generate.py --check    compare, change nothing, exit 1 on a difference

The generators' versions are pinned in pyproject.toml (extra `dev`), since their output differs between versions.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGE = Path("headrace") / "v1"
HAND_WRITTEN = frozenset({"__init__.py"})


def generate(out: Path) -> None:
    """Write the generated modules and stubs of every .proto into ``out``/headrace/v1.

    Raises RuntimeError when protoc refuses the sources; it has printed why.
    """
    files = sorted(str(path.relative_to(SOURCES)) for path in (SOURCES / PACKAGE).glob("*.proto"))
    (out / PACKAGE).mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    outputs = [f"--{kind}_out={out}" for kind in ("python", "grpc_python")]
    outputs += [f"--{kind}_out=quiet:{out}" for kind in ("mypy", "mypy_grpc")]
    # In a process of its own: protoc's library and NIXL's cannot live in one (the second to load aborts).
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{SOURCES}", *outputs, *files]
    if subprocess.run(command, env={**os.environ, "PATH": path}, check=False).returncode != 0:
        raise RuntimeError("protoc refused the sources; run `buf lint` and see above")


def generated_files(folder: Path) -> dict[str, bytes]:
    """Name → contents of the generated files in a headrace/v1 folder."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name not in HAND_WRITTEN
    }


def differences() -> list[str]:
    """Names of files in headrace/v1 that are missing, superfluous or other than generated now."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = generated_files(Path(scratch) / PACKAGE)
    committed = generated_files(ROOT / PACKAGE)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate headrace/v1 from proto/headrace/v1.")
    parser.add_argument("--check", action="store_true", help="compare with what is committed; write nothing")
    if parser.parse_args().check:
        differing = differences()
        if differing:
            print("headrace/v1 is not what proto/ generates; run `./build.sh proto`:", *differing, sep="\n  ")
        return 1 if differing else 0
    for name in generated_files(ROOT / PACKAGE):
        (ROOT / PACKAGE / name).unlink()
    generate(ROOT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
