"""Shared clusters of real processes, one per model family, started when the first test asks for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from headrace.engine.loading import ModelSettings
from headrace.engine.offline import Completion, OfflineEngine
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.settings import EngineSettings
from tests.services import tiny
from tests.services.cluster import Cluster
from tests.services.driver import Driver, attached

LOAD = ModelSettings(
    dtype="float32", entry_format="float32", batch_invariant=True, block_tokens=tiny.BLOCK, native_kernels=False
)

NUMBERS = count()


@dataclass
class Offline:
    """The same model in this process, whole: what every answer is compared with (L5)."""

    folder: Path

    def __post_init__(self) -> None:
        settings = EngineSettings(
            threads=1, kv_bytes=16 << 20, max_sequences=8, max_batched_tokens=64, prefix_reuse=False
        )
        self.engine = OfflineEngine.load(self.folder, settings, LOAD)

    def __call__(self, *requests: EngineRequest) -> list[Completion]:
        # Under names of their own: an engine takes a name once, and tests of several files share this one.
        named = [replace(request, key=RequestKey(f"offline-{next(NUMBERS)}", 1)) for request in requests]
        return self.engine.generate(named)

    def tokens(self, request: EngineRequest) -> dict[int, list[int]]:
        (completion,) = self(request)
        return {index: choice.token_ids for index, choice in enumerate(completion.choices)}


@pytest.fixture(scope="session")
def v3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_v3(tmp_path_factory.mktemp("v3") / "model")


@pytest.fixture(scope="session")
def v41_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_v41(tmp_path_factory.mktemp("v41") / "model")


@pytest.fixture(scope="session")
def v3_offline(v3_folder: Path) -> Offline:
    return Offline(v3_folder)


@pytest.fixture(scope="session")
def v41_offline(v41_folder: Path) -> Offline:
    return Offline(v41_folder)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def v3_cluster(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Prefill and decode of the tiny V3."""
    async with Cluster(v3_folder, tmp_path_factory.mktemp("v3_cluster")) as cluster:
        await cluster.start_all("prefill", "decode")
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def v41_cluster(v41_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Prefill, decode and encoder of the tiny V4.1."""
    async with Cluster(v41_folder, tmp_path_factory.mktemp("v41_cluster")) as cluster:
        await cluster.start_all("prefill", "decode", "encoder")
        yield cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def v3_mortal(v3_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """A V3 cluster whose workers tests may kill; each test takes what it needs with `ensure`."""
    async with Cluster(v3_folder, tmp_path_factory.mktemp("v3_mortal"), ttl_seconds=2.0) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session")
async def v3(v3_cluster: Cluster) -> AsyncIterator[Driver]:
    """A driver of the V3 cluster; afterwards both workers must have given everything back (L11)."""
    async with attached(v3_cluster["prefill"], v3_cluster["decode"]) as driver:
        yield driver
    await v3_cluster.until_idle()


@pytest_asyncio.fixture(loop_scope="session")
async def v41(v41_cluster: Cluster) -> AsyncIterator[Driver]:
    """The same for V4.1."""
    async with attached(v41_cluster["prefill"], v41_cluster["decode"]) as driver:
        yield driver
    await v41_cluster.until_idle()
