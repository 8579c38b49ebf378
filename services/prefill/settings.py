"""Settings of a prefill process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ByteSize, Field

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import Section
from headrace.services.worker.settings import WorkerSettings


class PrefillSection(Section):
    """Runs and what they wait for."""

    max_runs: int = Field(default=256, ge=1)
    """Runs at once, from the call to the last word of their transfers; more are refused (L12)."""
    max_resends: int = Field(default=2, ge=0)
    """How often rows that did not match their checksum are sent again before the run fails."""
    commit_retries: int = Field(default=2, ge=0)
    """How often a commit whose answer was lost is repeated; commits are idempotent."""
    embedding_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=1024)
    """Landing memory for image embeddings, where the model takes images."""


class PrefillSettings(WorkerSettings):
    """`headrace serve prefill`."""

    ROLE: ClassVar[Role] = Role.PREFILL

    prefill: PrefillSection = PrefillSection()
