"""What prefill and decode processes share of their settings: the model's loading, the engine, the transfer engine."""

from __future__ import annotations

from headrace.engine.loading import ModelSettings
from headrace.engine.settings import EngineSettings
from headrace.services.runtime.settings import ServiceSettings
from headrace.services.worker.cache_settings import CacheSection
from headrace.services.worker.transfer_settings import TransferSection


class WorkerSettings(ServiceSettings):
    """Settings of a process with an engine."""

    load: ModelSettings = ModelSettings()
    """How the model is loaded; equal on all workers of a model, since it decides the model's fingerprint."""
    engine: EngineSettings = EngineSettings()
    transfer: TransferSection = TransferSection()
    cache: CacheSection = CacheSection()
