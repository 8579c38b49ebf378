"""One USRBIO ring with its shared memory: synchronous transfers with a deadline over an asynchronous ring.

A transfer is cut into pieces of a slot each, all in flight together. Callers prepare and submit under one lock; one
thread waits for completions (the library allows one of each). Completions come in any order and are matched by a token
that is never used twice. A caller whose deadline passes leaves; its slots are freed when their completions arrive.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.kvcache.store.threefs.abi import Completion, Cqe, Library
from headrace.kvcache.store.threefs.slots import Slot, SlotPool

_REAP_S = 0.1
"""How often the waiting thread looks whether the ring is being closed."""


class _Transfer:
    """Pieces on their way, and whoever waits for them. Guarded by the ring's lock."""

    __slots__ = ("abandoned", "done", "left", "results")

    def __init__(self, pieces: int) -> None:
        self.results: list[int] = [0] * pieces
        self.left = pieces
        self.done = threading.Event()
        self.abandoned = False


@dataclass(frozen=True, slots=True)
class _Piece:
    transfer: _Transfer
    number: int
    nbytes: int
    slot: Slot


@dataclass(frozen=True)
class RingStats:
    in_flight: int
    """Pieces that the file system has not answered."""
    held_slots: int
    late: int
    """Completions that came after their caller had left."""
    stray: int
    """Completions with a token that nothing waits for: ignored."""


class Ring:
    """For reads or for writes. Thread-safe. Every call raises OSError."""

    def __init__(self, library: Library, mount: str, *, read: bool, slots: int, slot_bytes: int) -> None:
        self._library = library
        self._read = read
        self._iov = library.create_memory(mount, slots * slot_bytes)
        try:
            # A full ring cannot happen: every piece has a slot. One entry of a ring stays free in 3FS.
            self._ior = library.create_ring(mount, slots + 2, read=read)
        except OSError:
            library.destroy_memory(self._iov)
            raise
        self.id = bytes(self._ior.iov.id)
        self._slots = SlotPool(int(self._iov.base), slots, slot_bytes)
        self._round = max(1, slots // 2) * slot_bytes
        self._tokens = itertools.count(1)
        self._submit = threading.Lock()
        self._changed = threading.Condition()
        self._pieces: dict[int, _Piece] = {}
        self._users = 0
        self._late = 0
        self._stray = 0
        self._closed = False
        self._broken: OSError | None = None
        self._reaper = threading.Thread(target=self._reap, name=f"3fs-{'read' if read else 'write'}", daemon=True)
        self._reaper.start()

    @property
    def stats(self) -> RingStats:
        with self._changed:
            return RingStats(len(self._pieces), self._slots.held, self._late, self._stray)

    @property
    def _over(self) -> bool:
        """Closed, and nobody waits for a completion any more; late ones are of no interest then."""
        return self._closed and self._users == 0

    def transfer(self, fd: int, buffers: Sequence[memoryview], offset: int, deadline: float) -> int:
        """Read into or write from `buffers` at `offset` of a registered file. Returns bytes moved, fewer than asked at
        the end of what the file has. TimeoutError at `deadline` (time.monotonic seconds), ENODATA for a hole, EBUSY
        without free slots, ENOTCONN when the ring is closed, or what the file system says."""
        with self._changed:
            if self._closed or self._broken is not None:
                raise OSError(errno.ENOTCONN, "this ring is closed")
            self._users += 1
        try:
            total = sum(map(len, buffers))
            done = 0
            while done < total:
                wanted = min(self._round, total - done)
                moved = self._once(fd, buffers, done, wanted, offset + done, deadline)
                done += moved
                if moved < wanted:
                    break
            return done
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def _once(
        self, fd: int, buffers: Sequence[memoryview], start: int, total: int, offset: int, deadline: float
    ) -> int:
        size = self._slots.nbytes
        slots = self._slots.take(-(-total // size))
        pieces = [(i * size, min(size, total - i * size), slot) for i, slot in enumerate(slots)]
        if not self._read:
            for at, nbytes, slot in pieces:
                _copy(buffers, start + at, slot.view[:nbytes], to_slot=True)
        transfer = _Transfer(len(pieces))
        try:
            self._start(transfer, fd, offset, pieces)
        except OSError:
            with self._changed:
                self._abandon(transfer, slots)
            raise
        transfer.done.wait(max(0.0, deadline - time.monotonic()))
        with self._changed:
            if self._broken is not None:
                raise OSError(errno.ENOTCONN, f"the ring broke: {self._broken}")
            if not transfer.done.is_set():
                self._abandon(transfer, slots)
                raise TimeoutError(errno.ETIMEDOUT, "3FS did not answer by the deadline")
        try:
            moved = _outcome([nbytes for _, nbytes, _ in pieces], transfer.results)
            if self._read:
                for at, nbytes, slot in pieces:
                    _copy(buffers, start + at, slot.view[: max(0, min(nbytes, moved - at))], to_slot=False)
            return moved
        finally:
            for slot in slots:
                self._slots.give(slot)

    def _start(self, transfer: _Transfer, fd: int, offset: int, pieces: Sequence[tuple[int, int, Slot]]) -> None:
        """Hand all pieces to the ring. After an OSError some of them may be on their way."""
        with self._submit:
            for number, (at, nbytes, slot) in enumerate(pieces):
                token = next(self._tokens)
                with self._changed:
                    self._pieces[token] = _Piece(transfer, number, nbytes, slot)
                    self._changed.notify_all()
                try:
                    self._library.prepare(self._ior, self._iov, slot.address, fd, offset + at, nbytes, token)
                except OSError:
                    with self._changed:
                        del self._pieces[token]
                    raise
            self._library.submit(self._ior)

    def _abandon(self, transfer: _Transfer, slots: Sequence[Slot]) -> None:
        """The caller leaves (lock held): slots of pieces on their way stay with them, the others are free."""
        transfer.abandoned = True
        away = {piece.slot.number for piece in self._pieces.values() if piece.transfer is transfer}
        for slot in slots:
            if slot.number not in away:
                self._slots.give(slot)

    def _reap(self) -> None:
        space = (Cqe * 64)()
        while True:
            with self._changed:
                while not self._pieces and not self._over:
                    self._changed.wait()
                if self._over:
                    return
            try:
                completions = self._library.wait(self._ior, space, time.time() + _REAP_S)
            except OSError as error:
                self._break(error)
                return
            for completion in completions:
                self._complete(completion)

    def _complete(self, completion: Completion) -> None:
        with self._changed:
            piece = self._pieces.pop(completion.token, None)
            if piece is None:
                self._stray += 1
                return
            transfer = piece.transfer
            # More bytes than asked cannot be trusted to be any bytes of this file.
            transfer.results[piece.number] = completion.result if completion.result <= piece.nbytes else -errno.EIO
            transfer.left -= 1
            if transfer.abandoned:
                self._late += 1
                self._slots.give(piece.slot)
            elif transfer.left == 0:
                transfer.done.set()

    def _break(self, error: OSError) -> None:
        """The library no longer tells what completes: fail whoever waits; their slots stay held."""
        with self._changed:
            self._broken = error
            for piece in self._pieces.values():
                piece.transfer.done.set()

    def close(self, timeout_s: float) -> bool:
        """Refuse new transfers, wait for those inside (each has a deadline), then destroy ring and memory. Late I/O
        then lands in the FUSE process's own mapping of the memory, which lives until the I/O ends. May hang with the
        mount, since destruction removes names there: for a thread that may. False: callers were still inside, and
        nothing was destroyed."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            while self._users:
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    return False
        self._reaper.join()
        self._library.destroy_ring(self._ior)
        self._library.destroy_memory(self._iov)
        return True


def _outcome(asked: Sequence[int], results: Sequence[int]) -> int:
    """Bytes moved by pieces that follow each other. A piece that failed fails all; bytes behind a short piece mean a
    hole before them, which the file system sees only within one piece."""
    for result in results:
        if result < 0:
            raise OSError(-result, "3FS failed an I/O")
    moved = 0
    ended = False
    for nbytes, result in zip(asked, results, strict=True):
        if ended and result > 0:
            raise OSError(errno.ENODATA, "a hole in the file")
        moved += result
        ended = ended or result < nbytes
    return moved


def _copy(buffers: Sequence[memoryview], start: int, part: memoryview, *, to_slot: bool) -> None:
    """Copy between `part` and the bytes from `start` on of `buffers` laid end to end."""
    done = 0
    for buffer in buffers:
        if start >= len(buffer):
            start -= len(buffer)
            continue
        count = min(len(buffer) - start, len(part) - done)
        if count <= 0:
            return
        if to_slot:
            part[done : done + count] = buffer[start : start + count]
        else:
            buffer[start : start + count] = part[done : done + count]
        done += count
        start = 0
