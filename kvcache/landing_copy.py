"""Copying a landed transfer into the receiver's own memory and verifying the copy (L1, L3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kernels.reference.rows import copy_rows
from headrace.kernels.rows import row_ops
from headrace.kernels.upload import upload
from headrace.kvcache.checksum import checksums, unsigned
from headrace.kvcache.handle import ChecksumKind, Handle, LandingPart
from headrace.kvcache.landing_types import LandingError, PartChecksums, PartTarget

FromTo = tuple[torch.Tensor, torch.Tensor]
"""Landing units and the receiver's units, uint8 [·, unit bytes] each, on one device."""


def copy_verified(
    handle: Handle, sums: Sequence[PartChecksums], targets: Sequence[PartTarget], rows: FromTo, slots: FromTo | None
) -> tuple[LandingPart, ...]:
    """Copy every part to its target, then compare the copies with ``sums``; returns what did not match.

    The check reads the copies, never the landing bytes: what a frozen sender changes between the two is then either in
    the copy, and seen, or not in it.

    Raises:
        LandingError: counts differ from the handle's (truncated); nothing is copied.
    """
    _check_shape(handle, sums, targets, slots)
    bad: list[LandingPart] = []
    for part, part_sums, target in zip(handle.parts, sums, targets, strict=True):
        good_rows = _copy(rows, part.rows, target.rows, part_sums.rows, handle.checksum_kind)
        good_slot = True
        if part.slot is not None and target.slot is not None and part_sums.slot is not None and slots is not None:
            (good_slot,) = _copy(slots, (part.slot,), (target.slot,), (part_sums.slot,), handle.checksum_kind)
        if not (good_slot and all(good_rows)):
            positions = [position for position, good in enumerate(good_rows) if not good]
            bad.append(
                LandingPart(
                    choice=part.choice,
                    blocks=tuple(part.blocks[position] for position in positions),
                    rows=tuple(part.rows[position] for position in positions),
                    slot=None if good_slot else part.slot,
                )
            )
    return tuple(bad)


def _check_shape(
    handle: Handle, sums: Sequence[PartChecksums], targets: Sequence[PartTarget], slots: FromTo | None
) -> None:
    if not len(sums) == len(targets) == len(handle.parts):
        raise LandingError(
            f"{len(handle.parts)} parts, {len(sums)} checksums, {len(targets)} targets: one each is needed"
        )
    for part, part_sums, target in zip(handle.parts, sums, targets, strict=True):
        if not len(part_sums.rows) == len(target.rows) == len(part.rows):
            raise LandingError(
                f"part of {len(part.rows)} rows has {len(part_sums.rows)} checksums and {len(target.rows)} targets"
            )
        if (part_sums.slot is None) != (part.slot is None) or (target.slot is None) != (part.slot is None):
            raise LandingError("a slot's checksum and target are given exactly when the part has a slot")
        if part.slot is not None and slots is None:
            raise LandingError("the handle has a slot but no slots tensor is given")


def _copy(
    units: FromTo, origins: Sequence[int], places: Sequence[int], sums: Sequence[int], kind: ChecksumKind
) -> list[bool]:
    """Copy units origin → place; which copies have their checksum."""
    if not origins:
        return []
    landing, mine = units
    where = upload(origins, torch.int64, landing.device), upload(places, torch.int64, mine.device)
    if kind is ChecksumKind.LANES_64:
        # A kernel may copy and sum in one pass: it sums the very words that it stores.
        found = unsigned(row_ops(mine.device.type).copy_checksummed(landing, where[0], mine, where[1]))
    else:
        copy_rows(landing, where[0], mine, where[1])
        found = checksums(mine, places, kind)
    return [one == told for one, told in zip(found, sums, strict=True)]
