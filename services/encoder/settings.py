"""Settings of an encoder process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import ByteSize, Field

from headrace.engine.loading import ModelSettings
from headrace.services.runtime.registry.base import Role
from headrace.services.runtime.settings import Section, ServiceSettings
from headrace.services.worker.transfer_settings import TransferSection


class EncoderSection(Section):
    """The vision tower and its embedding pool."""

    pool_bytes: ByteSize = Field(default=ByteSize(64 * 1024 * 1024), ge=1024)
    """Host memory for embeddings, leased and cached."""
    lease_seconds: float = Field(default=10.0, gt=0)
    """Life of an embedding's lease between two renewals (L8)."""
    max_images: int = Field(default=16, ge=1)
    """Most images of one request."""
    max_pending: int = Field(default=64, ge=1)
    """Images that may wait for the tower; more are refused (L12)."""
    max_image_bytes: ByteSize = Field(default=ByteSize(20 * 1024 * 1024), ge=1024)
    """Largest image file."""
    max_image_pixels: int = Field(default=64_000_000, ge=1)
    """Most pixels of an image before scaling; checked before it is unpacked (L26)."""
    threads: int = Field(default=1, ge=0)
    """torch threads of the tower; 0 leaves torch's choice."""


class EncoderSettings(ServiceSettings):
    """`headrace serve encoder`."""

    ROLE: ClassVar[Role] = Role.ENCODER

    load: ModelSettings = ModelSettings()
    """How the model is loaded; equal to prefill's and decode's, since it decides the model's fingerprint."""
    encoder: EncoderSection = EncoderSection()
    transfer: TransferSection = TransferSection()
