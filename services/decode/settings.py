"""Settings of a decode process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ByteSize, Field

from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import Section
from headrace.services.worker.settings import WorkerSettings


class DecodeSection(Section):
    """What peers write to, and what is kept for routers."""

    landing_bytes: ByteSize = Field(default=ByteSize(256 * 1024 * 1024), ge=1)
    """Memory that prefill writes to: rows of prompts under way, and a slot for each where the layout has slots."""
    landing_slots: int = Field(default=16, ge=1)
    """Prompts that may be under way at once, where the layout has slots."""
    quarantine_limit: float = Field(default=0.25, gt=0, le=1)
    """Share of the landing memory in quarantine above which the worker is unready and rebuilds it."""
    max_landing_regions: int = Field(default=3, ge=1)
    """Landing regions at once: the open one, and former ones that peers may still write. At this bound the worker stays
    unready until a peer says that its wire is quiet, or is known to be dead."""
    linger_seconds: float = Field(default=5.0, ge=0)
    """How long the last events of a request are kept for a router whose stream broke."""


class DecodeSettings(WorkerSettings):
    """`headrace serve decode`."""

    ROLE: ClassVar[Role] = Role.DECODE

    decode: DecodeSection = DecodeSection()
