"""Kind and retention class of a row in one small integer, the same in every index."""

from __future__ import annotations

from headrace.kvcache.entries import EntryKind, RetentionClass
from headrace.kvcache.index.base import IndexRow

# A table, since making an enum's member of a number takes longer than everything else about reading a row.
WHAT = {kind << 4 | retention: (kind, retention) for kind in EntryKind for retention in RetentionClass}


def pack_what(row: IndexRow) -> int:
    """The key of WHAT that stands for a row's kind and class."""
    return row.kind << 4 | row.retention
