"""The other process of a benchmark between two: registers memory, tells where, and waits until the first hangs up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe

from headrace.kvcache.transfer.base import PeerDescription, TransferEngine

ANSWER_S = 120.0
END_S = 60.0


@contextmanager
def other_side(module: str, flag: str, *asked: object) -> Iterator[PeerDescription]:
    """`python -m module flag DESCRIPTOR` as a child, which is sent `asked` and answers by `stay`."""
    ours, theirs = Pipe()
    child = subprocess.Popen([sys.executable, "-m", module, flag, str(theirs.fileno())], pass_fds=(theirs.fileno(),))
    theirs.close()
    try:
        ours.send(asked)
        if not ours.poll(ANSWER_S):
            raise RuntimeError("the other process does not answer; see its output above")
        yield ours.recv()
    finally:
        ours.close()
        child.wait(END_S)


def stay(descriptor: int, make: Callable[..., tuple[TransferEngine, Callable[[], None]]]) -> None:
    """The child: `make` of what was asked gives the engine and what closes it; describe it and wait for the end."""
    parent = Connection(descriptor)
    engine, close = make(*parent.recv())
    parent.send(engine.describe())
    try:
        parent.recv()
    except EOFError:
        close()
