"""The lives of a worker process: prefill or decode, one after another over the same loaded model.

`run_worker` begins the first; `RoleChange` (role_change.py) lets another follow. What a life needs of the one before is
here: the model, and the sources of settings, from which each role takes its own (`[roles.decode]` …).
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, cast

from headrace.services.runtime.errors import FailedPrecondition
from headrace.services.runtime.lifecycle import Lifecycle, Start, run_service
from headrace.services.runtime.lives import Lives
from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings_load import SettingsError, load, settings_class
from headrace.services.worker.engine_host import LoadedModel, LoadedWeights, load_weights, with_pool
from headrace.services.worker.settings import WorkerSettings


@dataclass(frozen=True)
class Sources:
    """Where a process's settings come from (settings_load.py)."""

    config: Path | None = None
    sets: Sequence[str] = ()
    environ: Mapping[str, str] | None = None
    """None: the process's own."""


class StartRole(Protocol):
    """`start` of services/prefill/main.py and services/decode/main.py."""

    def __call__(self, settings: WorkerSettings, lives: WorkerLives, life: Lifecycle, /) -> Awaitable[None]: ...


class WorkerLives(Lives):
    """Belongs to the event loop's thread, but for `load`."""

    def __init__(self, sources: Sources | None) -> None:
        """`sources` None: nobody can tell the other role's settings, and the role stays."""
        super().__init__()
        self._sources = sources
        self._weights: LoadedWeights | None = None

    def load(self, settings: WorkerSettings) -> LoadedModel:
        """The model, loaded by the first life, and a pool of this one. Takes seconds for big models; to be called on a
        thread. Raises ModelError, TooLittleMemory."""
        if self._weights is None:
            assert settings.model.folder is not None
            self._weights = load_weights(settings, settings.model.folder)
        return with_pool(self._weights, settings)

    def settings_of(self, role: Role, current: WorkerSettings) -> WorkerSettings:
        """Settings of another role of this process. Raises FailedPrecondition when it cannot have them."""
        if self._sources is None:
            raise FailedPrecondition("this process was started without the sources of its settings; start another one")
        kind = cast(type[WorkerSettings], settings_class(role))
        try:
            settings = load(kind, self._sources.config, self._sources.sets, self._sources.environ)
        except SettingsError as error:
            raise FailedPrecondition(f"the settings are none for a {role}: {error}") from error
        for section in ("model", "load", "registry"):
            if getattr(settings, section) != getattr(current, section):
                raise FailedPrecondition(
                    f"the section `{section}` differs between {current.ROLE} and {role}, and a process loads one model "
                    "for one cluster; make them equal, or start another process"
                )
        return settings


def start_of(settings: WorkerSettings, lives: WorkerLives) -> Start:
    """What begins a life of the settings' role. By name, as the folders of roles do not know each other."""
    main = importlib.import_module(f"headrace.services.{settings.ROLE}.main")
    return partial(cast(StartRole, main.start), settings, lives)


def run_worker(settings: WorkerSettings, sources: Sources | None) -> int:
    """Serve until told to stop, in one role or several; returns the exit status."""
    if settings.model.folder is None:
        raise SettingsError("model.folder is needed: name the model's folder")
    return run_service(start_of(settings, WorkerLives(sources)), settings.stop)
