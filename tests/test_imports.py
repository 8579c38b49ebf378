"""The dependency arrows hold, in running interpreters and in the eyes of import-linter, and both can fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TORCH_FREE = (
    "headrace.router",
    "headrace.services.router",
    "headrace.services.gateway",
    "headrace.services.runtime",
    "headrace.engine.text",
    "headrace.kvcache.keys",
    "headrace.kvcache.layout",
    "headrace.kvcache.host",
    "headrace.kvcache.store",
    "headrace.kvcache.index",
    "headrace.cli",
    "headrace.evals",
)
WITH_TORCH = ("headrace.cli.offline_engine", "headrace.cli.cache_keys")
"""Modules of these packages that exist to run a model; the others import them when they are used."""
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
names = [info.name for info in pkgutil.walk_packages(getattr(package, "__path__", []), package.__name__ + ".")]
names = [name for name in names if name not in sys.argv[2:]]
for name in names:
    importlib.import_module(name)
print(len(names))
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


def import_all(package: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Import a package and all modules below it in a fresh interpreter; fails when that imports torch."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package, *WITH_TORCH],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run(
        [str(program), "--no-logo", "--no-cache"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the code in which violations may be planted."""
    for folder in ("headrace", "kernels", "kvcache", "engine", "router", "services", "cli", "evals"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize("package", TORCH_FREE)
def test_torch_is_not_imported(package: str) -> None:
    done = import_all(package)
    assert done.returncode == 0, done.stderr


def test_torch_check_sees_a_parent_package(copy: Path) -> None:
    with (copy / "engine" / "__init__.py").open("a") as source:
        source.write("\nimport torch\n")
    assert "torch was imported" in import_all("headrace.engine.text", copy).stderr


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("router/planted.py", "import headrace.kvcache.pool", "router decides"),
        ("kernels/planted.py", "import headrace.kvcache.keys", "Layers"),
        ("engine/planted.py", "from headrace.v1 import common_pb2", "The wire stays"),
        ("services/router/planted.py", "import headrace.services.decode", "Processes share"),
        ("engine/text/planted.py", "import headrace.engine.batch", "No torch"),
    ],
)
def test_import_linter_sees_violations(copy: Path, module: str, line: str, broken: str) -> None:
    (copy / module).write_text(line + "\n")
    done = lint_imports(copy)
    # "BROKEN", or "BROKEN (1 ignored import)".
    verdicts = [text for text in done.stdout.splitlines() if text.startswith(broken) and "BROKEN" in text]
    assert done.returncode == 1, done.stdout + done.stderr
    assert verdicts, done.stdout


ONLY_TORCH = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        top = name.partition(".")[0]
        if top in {"pydantic", "tokenizers", "jinja2", "PIL", "grpc", "google", "structlog", "typer", "rich"}:
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Refuse())
import headrace.engine.offline, headrace.engine.worker, headrace.engine.models.deepseek_v41.make
import headrace.engine.models.deepseek_v3.model, headrace.kvcache.landing, headrace.kvcache.transfer.nixl
import bench.gpu.spine, bench.gpu.rows, bench.gpu.row_kernels
"""


def test_the_engine_runs_where_only_torch_is_installed() -> None:
    """GPU machines may hold no more than torch, numpy, safetensors, xxhash and the NIXL wheel (bench/gpu)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ONLY_TORCH], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
