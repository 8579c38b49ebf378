"""A process that shares a store: `python _process.py DIRECTORY CHAIN`, told what to do line by line on stdin.

put N    put the next N blocks of the chain, each alone; prints `durable FIRST END` once they are
read C N prints `read` and how many of blocks 0 … N - 1 of chain C came, were missed, were wrong
"""

from __future__ import annotations

import sys
from pathlib import Path

from headrace.kvcache.index.sqlite import SqliteIndex
from headrace.kvcache.store.files_posix import PosixFileLayer
from headrace.kvcache.store.segments.engine import SegmentStore
from headrace.kvcache.store.segments.settings import SegmentSettings
from tests.kvcache.store.entries import block, consume, keys, soon


def open_shared(directory: Path) -> SegmentStore:
    settings = SegmentSettings(
        segment_bytes=256 * 1024,
        queue_bytes=16 << 20,
        read_buffer_bytes=16 << 20,
        read_threads=2,
        sync_idle_s=0.005,
        sweep_s=1e9,
    )
    return SegmentStore(PosixFileLayer(directory / "store"), SqliteIndex(directory / "index.sqlite"), settings)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    store = open_shared(Path(sys.argv[1]))
    chain, done = sys.argv[2], 0
    say("open")
    for line in sys.stdin:
        words = line.split()
        if words[0] == "put":
            count = int(words[1])
            tickets = [store.put_many([block(chain, number)]) for number in range(done, done + count)]
            if all(all(ticket.durable.result(30.0)) for ticket in tickets):
                say("durable", done, done + count)
            done += count
        elif words[0] == "read":
            entries = [block(words[1], number) for number in range(int(words[2]))]
            got = consume(store.get_many(keys(entries), soon()))
            came = sum(one == entry.payload for one, entry in zip(got, entries, strict=True))
            missed = sum(not isinstance(one, bytes) for one in got)
            say("read", came, missed, len(got) - came - missed)
    store.close()


if __name__ == "__main__":
    main()
