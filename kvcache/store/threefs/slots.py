"""Pieces of one shared memory region, each in the hands of one I/O at a time.

A slot whose caller has given up stays with its I/O until the completion arrives, perhaps a minute later (L6, L7): what
lands late, lands there and nowhere else.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    number: int
    address: int
    view: memoryview


class SlotPool:
    """`count` slots of `nbytes` from `address` on. Thread-safe."""

    def __init__(self, address: int, count: int, nbytes: int) -> None:
        region = memoryview((ctypes.c_uint8 * (count * nbytes)).from_address(address)).cast("B")
        self._slots = [Slot(i, address + i * nbytes, region[i * nbytes : (i + 1) * nbytes]) for i in range(count)]
        self._free = list(range(count - 1, -1, -1))
        self._lock = threading.Lock()
        self.nbytes = nbytes

    @property
    def held(self) -> int:
        """Slots that some I/O has."""
        return len(self._slots) - len(self._free)

    def take(self, count: int) -> Sequence[Slot]:
        """`count` slots at once; OSError(EBUSY) when so many are not free. Never waits: reads that come back in time
        are few and short, so a pool that is empty is full of late ones."""
        with self._lock:
            if count > len(self._free):
                raise OSError(errno.EBUSY, f"{count} of {len(self._slots)} buffers wanted, {len(self._free)} are free")
            return [self._slots[self._free.pop()] for _ in range(count)]

    def give(self, slot: Slot) -> None:
        with self._lock:
            self._free.append(slot.number)
