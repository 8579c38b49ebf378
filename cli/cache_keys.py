"""Keys of a prompt without a cluster: what a router and its workers would name it, from a model folder. Loads torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.exits import CliError
from headrace.cli.offline_engine import OfflineSettings
from headrace.engine.loading import ModelError
from headrace.services.router.caches import prompt_keys
from headrace.services.router.model import load_served_model
from headrace.services.router.settings import ReplaySection, RouterSettings
from headrace.services.router.tenants import TENANT, TenantKeys
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.settings_load import SettingsError, load
from headrace.services.worker.engine_host import load as load_worker
from headrace.v1 import control_pb2, inference_pb2


def offline_keys(
    folder: Path, sets: Sequence[str], secret: str, prompt: inference_pb2.Prompt, tenant: str
) -> tuple[control_pb2.CacheKeys, int, int]:
    """(keys, length of the prompt, tokens per block). `sets` are the workers' settings of [load]: they shape keys.

    Raises CliError for settings or a folder that do not do, HeadraceError for a prompt that a router would refuse.
    """
    try:
        # The smallest pool: it is made on the way to the layout, and holds nothing here.
        given = [f"model.folder={folder.resolve()}", "engine.max_sequences=1", f"engine.kv_bytes={1 << 30}", *sets]
        # The secret's own variable is a router's setting, which a worker's settings refuse.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_ROUTER__")}
        settings = load(OfflineSettings, None, given, environ)
        loaded = load_worker(settings, folder)
        served = load_served_model(settings.model.name, folder, "auto")
    except (SettingsError, ModelError) as error:
        raise CliError(str(error)) from error
    facts, block_tokens = loaded.facts, loaded.pool.layout.block_tokens
    group = ModelGroup(facts.model_fp, facts.layout_fp, facts.row_fp, block_tokens, loaded.model.context_tokens)
    router = RouterSettings(
        requests=settings.requests,
        replay=ReplaySection(mode=settings.engine.replay, backtracking=settings.load.backtracking),
    )
    keys = TenantKeys(secret.encode(), tenant or TENANT)
    wire, length = prompt_keys(prompt, keys, served, group, router)
    return wire, length, block_tokens
