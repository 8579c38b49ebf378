"""Who answers many requests, from a command's flags: a model loaded in this process, or a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.cli.askers import Asker, EngineAsker, RouterAsker
from headrace.cli.client import RouterClient
from headrace.cli.client_tls import client_tls
from headrace.cli.exits import CliError
from headrace.cli.failures import cli_error
from headrace.cli.state import cluster_of, find_router
from headrace.services.runtime.errors import HeadraceError
from headrace.services.runtime.memory import read_budget

if TYPE_CHECKING:
    from headrace.cli.offline_engine import OfflineRunner

MEMORY_FRACTION: Final = 0.8
KV_SHARE: Final = 0.65
"""Of what is left of the host's memory after the weights (L29); the rest is for spilled sequences and activations."""
BASE_BYTES: Final = 512 << 20
SHARED_WEIGHTS: Final = 64 << 20
"""Models below this size run on one thread unless told otherwise: their operators are shorter than the wait of one
thread for another, which on a busy machine made V4.1-tiny a hundred times slower with two."""


@dataclass(frozen=True)
class Source:
    """Who answers: the model of a folder, loaded here, or else a cluster."""

    folder: Path | None = None
    router: str | None = None
    """HOST:PORT; None: that of the user's running `headrace up`."""
    text_folder: Path | None = None
    """Of the cluster's model: tokenizer and chat template. None: the folder that the user's own cluster serves."""
    name: str | None = None
    """Name of the folder's model in requests; None: the folder's own."""
    threads: int = 0
    config: Path | None = None
    sets: tuple[str, ...] = ()
    api_key: str | None = None
    concurrency: int = 32
    timeout_s: float = 600.0


@contextmanager
def open_asker(source: Source) -> Iterator[Asker]:
    """Load the model, or connect. Errors inside become CliError."""
    if source.folder is not None:
        yield EngineAsker(load_runner(source, source.folder))
        return
    router = find_router(source.router)
    try:
        with RouterClient(router, api_key=source.api_key, tls=client_tls(router)) as client:
            yield RouterAsker(client, concurrency=source.concurrency, timeout_s=source.timeout_s)
    except HeadraceError as error:
        raise cli_error(error, router) from error


def text_folder(source: Source) -> Path:
    """Where the tokenizer and the chat template of whoever answers lie. Raises CliError."""
    for folder in (source.folder, source.text_folder):
        if folder is not None:
            return folder
    router = find_router(source.router)
    cluster = cluster_of(router)
    if cluster is None:
        raise CliError(
            f"the cluster of {router} is not one of yours here: name with --folder the folder of its model, of which "
            "tokenizer and chat template are needed, or send the requests to a gateway"
        )
    return Path(cluster.folder)


def load_runner(source: Source, folder: Path) -> OfflineRunner:
    """The model of a folder with the settings that it, a file and flags give. Raises CliError."""
    from headrace.cli.offline_engine import OfflineRunner, OfflineSettings
    from headrace.engine.loading import ModelError
    from headrace.engine.sizing import TooLittleMemory
    from headrace.engine.text.errors import TextError
    from headrace.services.runtime.settings_load import SettingsError, load

    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    rest = int(read_budget().available_bytes * MEMORY_FRACTION) - weights - BASE_BYTES
    derived = [
        f"model.folder={folder}",
        f"model.name={source.name or folder.name}",
        f"engine.kv_bytes={max(1, int(rest * KV_SHARE))}",
        f"engine.threads={source.threads or (1 if weights < SHARED_WEIGHTS else len(os.sched_getaffinity(0)))}",
        "log.level=warning",
    ]
    try:
        return OfflineRunner(load(OfflineSettings, source.config, [*derived, *source.sets]), folder)
    except (SettingsError, ModelError, TooLittleMemory, TextError) as error:
        raise CliError(str(error)) from error
