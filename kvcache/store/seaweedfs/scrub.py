"""Read and check everything: each row of the index against its record, each record against the index."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from headrace.kvcache.entries import Loaded, Miss
from headrace.kvcache.index.base import Index, IndexRow
from headrace.kvcache.keys import Key
from headrace.kvcache.store.base import VerifyReport, WallClock
from headrace.kvcache.store.retention.classes import expired
from headrace.kvcache.store.seaweedfs.reader import ReadResult, RecordReader
from headrace.kvcache.store.seaweedfs.scan import FoundRecord, VolumeScan
from headrace.kvcache.store.seaweedfs.settings import SeaweedSettings

_BATCH = 256


class Scrub:
    """One pass. Raises IndexUnavailable and StoreError: an operator's call says what it could not do."""

    def __init__(
        self,
        settings: SeaweedSettings,
        index: Index,
        reader: RecordReader,
        scan: VolumeScan | None,
        wall: WallClock,
        progress: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._index = index
        self._reader = reader
        self._scan = scan
        self._wall = wall
        self._progress = progress
        self._bad: list[tuple[Key, Miss]] = []
        self._checked = 0
        self._dangling = 0
        self._missing = 0

    def run(self) -> VerifyReport:
        with ThreadPoolExecutor(self._settings.readers, "seaweed-scrub") as threads:
            for group in self._index.groups(self._deadline()):
                rows = [row for row in self._index.rows_of(group, self._deadline()) if self._lives(row.expires_at)]
                for start in range(0, len(rows), _BATCH):
                    batch = rows[start : start + _BATCH]
                    for row, outcome in zip(batch, threads.map(self._read, batch), strict=True):
                        self._judge(row, outcome)
        batch_of_records: list[FoundRecord] = []
        for found in self._scan.records() if self._scan is not None else ():
            if self._lives(found.header.expires_at):
                batch_of_records.append(found)
            if len(batch_of_records) == _BATCH:
                self._compare(batch_of_records)
                batch_of_records = []
        self._compare(batch_of_records)
        return VerifyReport(self._checked, tuple(self._bad), self._missing, self._dangling)

    def _read(self, row: IndexRow) -> ReadResult:
        return self._reader.read(row, time.monotonic() + self._settings.write_timeout_s)

    def _judge(self, row: IndexRow, outcome: ReadResult) -> None:
        self._checked += 1
        if not isinstance(outcome.result, Loaded):
            self._bad.append((row.key, outcome.result))
            self._dangling += outcome.gone
        elif outcome.spoilt:
            self._bad.append((row.key, Miss.DIGEST))  # in one copy
        self._progress(self._checked)

    def _compare(self, records: Sequence[FoundRecord]) -> None:
        held = self._index.get_many([found.header.info.key for found in records], self._deadline()) if records else ()
        self._missing += sum(row is None for row in held)

    def _lives(self, expires_at: int) -> bool:
        return not expired(expires_at, self._wall())

    def _deadline(self) -> float:
        return time.monotonic() + self._settings.index_timeout_s
