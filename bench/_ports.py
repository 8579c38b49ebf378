"""Ports for servers that are told theirs before they bind it, and that find it free again when they were killed."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator
from typing import Final

LOWEST: Final = 12_000
HIGHEST: Final = 32_000
"""Below those that outgoing connections and servers without a wish get from the system (from 32,768 on)."""
_LOCK = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has bound on 127.0.0.1 now, all different. Of another round of this process none comes again
    before all had their turn, and other processes begin elsewhere."""
    with _LOCK:
        return [next(_FREE) for _ in range(count)]


def _walk() -> Iterator[int]:
    port = random.Random(os.getpid()).randrange(LOWEST, HIGHEST)
    while True:
        port = port + 1 if port < HIGHEST else LOWEST
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        yield port


_FREE = _walk()
