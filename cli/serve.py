"""`headrace serve ROLE`: one process in the foreground, as an orchestrator or `headrace up` starts it."""

from __future__ import annotations

import importlib
from pathlib import Path

from headrace.cli.exits import CliError
from headrace.services.runtime.registry.base import CHANGEABLE_ROLES, Role
from headrace.services.runtime.settings_load import SettingsError, load, settings_class

ROLES = ("gateway", "router", "encoder", "prefill", "decode")


def serve(role: str, config: Path | None, sets: list[str]) -> int:
    """Run a role until it ends; its exit status. Raises CliError for a bad role or settings."""
    if role not in ROLES:
        raise CliError(f"serve {role!r}: no such role; choose from {', '.join(ROLES)}")
    try:
        run = importlib.import_module(f"headrace.services.{role}.main").run
        settings = load(settings_class(Role(role)), config, sets)
        if role not in CHANGEABLE_ROLES:
            return int(run(settings))
        from headrace.services.worker.lives import Sources

        return int(run(settings, Sources(config, sets)))
    except SettingsError as error:
        raise CliError(str(error)) from error
