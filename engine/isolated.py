"""Work whose length nobody can foretell, in a process of its own that is killed when its time is up (L6, L13).

A library that compiles what a client has written can neither be interrupted nor trusted with a server's memory.
`Isolated` starts `python -m MODULE` at the first call and keeps it; the module's main is `serve(begin)`. Frames on its
standard input and output: eight bytes of length (LE64), then the bytes; an answer begins with one byte that says what
it is.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

START_S = 120.0
"""Longest start of the process: what it imports may take seconds on a busy machine."""
_LENGTH = struct.Struct("<Q")
_READY, _DONE, _REFUSED = b"r", b"d", b"n"
_PIECE = 1 << 16
_SPARE_S = 5
"""After this much more the process ends by itself, should its parent be dead."""


class Refused(Exception):
    """The work cannot be done as it was given; the text says why."""


class TimeUp(Refused):
    """It took too long and was killed."""


class CannotStart(Exception):
    """The process does not come up."""


class Isolated:
    """One process for one kind of work, one piece at a time. Thread-safe."""

    def __init__(self, module: str, *, memory_bytes: int, environment: dict[str, str] | None = None) -> None:
        """`memory_bytes`: what it may take beyond what its imports take."""
        self._module = module
        self._memory = memory_bytes
        self._environment = environment or {}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, work: bytes, *, limit_s: float, set_up: Callable[[], bytes] = bytes) -> bytes:
        """The answer. What `set_up` makes is handed to the module once, before the first piece of work.

        Raises Refused, TimeUp, or CannotStart when the process does not come up.
        """
        with self._lock:
            process = self._running(set_up)
            try:
                self._send(process, struct.pack("<d", limit_s) + work, time.monotonic() + limit_s)
                kind, answer = self._receive(process, time.monotonic() + limit_s)
            except TimeoutError:
                self._kill()
                raise TimeUp(f"it takes more than {limit_s:g} s") from None
            except (OSError, EOFError):
                self._kill()
                raise Refused("it is more than the process that compiles it can do") from None
        if kind == _REFUSED:
            raise Refused(answer.decode())
        return answer

    def close(self) -> None:
        """End the process; a later call starts another."""
        with self._lock:
            self._kill()

    # --- the process -------------------------------------------------------------------------------------------

    def _running(self, set_up: Callable[[], bytes]) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._kill()
        frame = set_up()
        command = [sys.executable, "-m", self._module, str(self._memory)]
        environment = {**os.environ, **self._environment}
        self._process = process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
        try:
            self._send(process, frame, time.monotonic() + START_S)
            kind, answer = self._receive(process, time.monotonic() + START_S)
        except (OSError, EOFError) as error:  # TimeoutError is an OSError
            code = process.poll()
            self._kill()
            raise CannotStart(f"{' '.join(command)} does not start (exit status {code}: {error!r})") from error
        if kind != _READY:
            self._kill()
            raise CannotStart(answer.decode())
        return process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _send(self, process: subprocess.Popen[bytes], data: bytes, until: float) -> None:
        assert process.stdin is not None
        pipe, rest = process.stdin.fileno(), memoryview(_LENGTH.pack(len(data)) + data)
        while rest:
            _wait(pipe, select.POLLOUT, until)
            rest = rest[os.write(pipe, rest[:_PIECE]) :]

    def _receive(self, process: subprocess.Popen[bytes], until: float) -> tuple[bytes, bytes]:
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        size = _LENGTH.unpack(_read(pipe, _LENGTH.size, until))[0]
        frame = _read(pipe, size, until)
        return frame[:1], frame[1:]


def _wait(pipe: int, event: int, until: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
        raise TimeoutError


def _read(pipe: int, size: int, until: float) -> bytes:
    out = bytearray()
    while len(out) < size:
        _wait(pipe, select.POLLIN, until)
        piece = os.read(pipe, min(size - len(out), 1 << 20))
        if not piece:
            raise EOFError
        out += piece
    return bytes(out)


# --- inside the process ----------------------------------------------------------------------------------------------


def serve(begin: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """The whole life of the process: `begin` takes the set-up and gives the function that does the work, which raises
    Refused for what it cannot do. The first command line argument bounds the memory."""
    into, out = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no frame
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for the parent, whose end is this one's
    work = begin(_next(into.read))
    limit = _virtual_bytes() + int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    _answer(out.write, _READY)
    out.flush()
    while True:
        try:
            frame = _next(into.read)
        except EOFError:
            return
        signal.alarm(int(struct.unpack("<d", frame[:8])[0]) + 1 + _SPARE_S)
        try:
            answer = _DONE + work(frame[8:])
        except Refused as refused:
            answer = _REFUSED + str(refused).encode()
        except (MemoryError, RecursionError) as error:
            answer = _REFUSED + f"it is too large ({type(error).__name__})".encode()
        signal.alarm(0)
        _answer(out.write, answer)
        out.flush()


def _next(read: Callable[[int], bytes]) -> bytes:
    head = read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    return read(_LENGTH.unpack(head)[0])


def _answer(write: Callable[[bytes], int], frame: bytes) -> None:
    write(_LENGTH.pack(len(frame)))
    write(frame)


def _virtual_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
