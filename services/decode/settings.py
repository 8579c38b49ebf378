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
    orphan_seconds: float = Field(default=10.0, ge=0)
    """How long a request lives on whose router is gone or silent, from the router's last word, so that its client can
    resume it at another router. Less than engine.lease_s: it ends with its lease."""
    journal_tokens: int = Field(default=4096, ge=1)
    """Tokens of a request, over all choices, whose events are kept after they were sent. Of a longer one the oldest are
    forgotten: a client that resumes it is answered by generating it anew."""


class DecodeSettings(WorkerSettings):
    """`headrace serve decode`."""

    ROLE: ClassVar[Role] = Role.DECODE

    decode: DecodeSection = DecodeSection()
