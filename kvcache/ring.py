"""Sliding-window rings of different sizes: converting a slot's window to the wire ring and back (spec §17.3, §20.9)."""

from __future__ import annotations

import torch

from headrace.kvcache.layout import KVLayout, LayoutError


def resize_ring(source: torch.Tensor, target: torch.Tensor, end: int) -> None:
    """Copy the window that ends before position ``end`` from a ring of ρₛ places to one of ρₜ.

    source [ρₛ, ...], target [ρₜ, ...], the same trailing shape; position q lies at q mod ρ. The last
    min(ρₛ, ρₜ, end) positions are copied, the target's other places stay as they are.
    """
    from_places, to_places = source.shape[0], target.shape[0]
    count = min(from_places, to_places, end)
    positions = torch.arange(end - count, end, device=source.device)
    target[positions % to_places] = source[positions % from_places]


def ring_view(layout: KVLayout, slot: torch.Tensor, layer: int) -> torch.Tensor:
    """Bytes of one layer's ring in a slot (or, for stored layers, a snapshot): uint8 [ring_tokens, entry bytes].

    ``slot`` uint8 [slot_bytes]. The view shares memory. Raises KeyError for a layer without a ring.
    """
    section = layout.ring(layer)
    return slot[section.offset : section.offset + section.bytes].view(layout.ring_tokens, -1)


def resize_slot(
    source_layout: KVLayout, source: torch.Tensor, layout: KVLayout, target: torch.Tensor, end: int
) -> None:
    """Convert every ring of ``source`` uint8 [slot_bytes or snapshot_bytes] to ``layout``'s ring size in ``target``.

    A snapshot holds the stored rings only, so the layers present in both are converted. Compression state is not ring
    shaped and is left alone: at a block boundary, where snapshots are taken, no group is open.

    Raises:
        LayoutError: the layouts differ in more than their ring.
    """
    if source_layout.row_fingerprint != layout.row_fingerprint or len(source_layout.rings) != len(layout.rings):
        raise LayoutError("resize_slot: the layouts differ in more than the ring, their entries are not the same bytes")
    for here, there in zip(source_layout.rings, layout.rings, strict=True):
        if here.offset + here.bytes <= source.numel() and there.offset + there.bytes <= target.numel():
            resize_ring(ring_view(source_layout, source, here.layer), ring_view(layout, target, there.layer), end)
