"""What test_isolated.py runs apart: it obeys."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from headrace.engine.isolated import Refused, serve


def begin(set_up: bytes) -> Callable[[bytes], bytes]:
    def work(frame: bytes) -> bytes:
        match frame:
            case b"sleep":
                time.sleep(60)
            case b"die":
                os._exit(3)
            case b"grow":
                bytearray(1 << 30)
            case b"refuse":
                raise Refused("no")
            case b"print":
                print("no frame", flush=True)  # noqa: T201
        return set_up + frame + str(os.getpid()).encode()

    return work


if __name__ == "__main__":
    serve(begin)
