"""What a worker publishes of itself in the registry: identity, capacity, transfer agent, loads."""

from __future__ import annotations

from dataclasses import replace

from headrace.kvcache.transfer.base import TransferEngine
from headrace.services.runtime.process import ServiceProcess
from headrace.services.runtime.registry.base import Rank, Replica
from headrace.services.worker.engine_host import LoadedModel
from headrace.services.worker.reports import EngineReporter
from headrace.services.worker.settings import WorkerSettings
from headrace.services.worker.signing import Signer
from headrace.services.worker.transfer_wire import agent_to_wire


def published_replica(
    process: ServiceProcess,
    loaded: LoadedModel,
    settings: WorkerSettings,
    transfer: TransferEngine,
    reporter: EngineReporter,
    signer: Signer,
) -> Replica:
    """The membership entry. Its agent carries the process's identity, by which peers tell its death from silence."""
    agent = agent_to_wire(transfer.describe(), process.replica_id, loaded.facts.wire(), signer)
    load = reporter.load()
    return replace(
        process.replica(),
        model_name=loaded.facts.name,
        model_fp=loaded.facts.model_fp,
        layout_fp=loaded.facts.layout_fp,
        row_fp=loaded.facts.row_fp,
        capacity=loaded.capacity(settings),
        ranks=(Rank(0, settings.load.device, agent.SerializeToString()),),
        loads=() if load is None else (load.SerializeToString(),),
    )
