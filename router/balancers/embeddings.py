"""Which encoder has which embedding, as far as this router can know: what it sent there, and what the answers said.

Encoders tell no events of their caches, so this is a guess that their answers correct, and it costs hits, never
correctness. Keys are per tenant (HMAC of the tenant's image key, L25): equal pictures of two tenants are two keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headrace.router.topology import RankId


@dataclass(slots=True)
class _Entry:
    used: int = 0
    """When it was last sent for, by the view's count of uses."""
    before: int = 0
    """The use before that."""
    sent: int = 0
    """Requests on their way with it: in flight counts as there, so that identical pictures of one burst meet."""
    told: bool = False
    """An answer has said that it is there."""


class EmbeddingView:
    """Per encoder a least-recently-used set of at most `entries` keys; about 200 bytes each."""

    def __init__(self, entries: int) -> None:
        if entries < 1:
            raise ValueError("entries must be at least 1")
        self._entries = entries
        self._views: dict[RankId, OrderedDict[bytes, _Entry]] = {}
        self._holders: dict[bytes, set[RankId]] = {}
        self._uses = 0

    def holders(self, key: bytes) -> Collection[RankId]:
        """Encoders that have the embedding, or are making it."""
        return self._holders.get(key, ())

    def __len__(self) -> int:
        """Pairs of key and encoder."""
        return sum(len(view) for view in self._views.values())

    def __iter__(self) -> Iterator[RankId]:
        """Encoders of which something is known."""
        return iter(tuple(self._views))

    def sent(self, rank: RankId, key: bytes) -> None:
        """A request with this picture is on its way there."""
        view = self._views.setdefault(rank, OrderedDict())
        entry = view.get(key)
        if entry is None:
            entry = view[key] = _Entry()
            self._holders.setdefault(key, set()).add(rank)
        self._uses += 1
        entry.before, entry.used = entry.used, self._uses
        entry.sent += 1
        view.move_to_end(key)
        if len(view) > self._entries:
            self._drop(rank, next(iter(view)))

    def answered(self, rank: RankId, key: bytes, cached: bool) -> None:
        """The encoder has it now; `cached`: it had it, or was making it, before. If it was thought to be there and was
        not, the encoder has dropped it, and what was used before it with it."""
        view = self._views.get(rank)
        entry = view.get(key) if view is not None else None
        if view is None or entry is None:
            return
        if entry.told and not cached:
            self._drop_older(rank, view, entry)
        entry.sent = max(0, entry.sent - 1)
        entry.told = True

    def failed(self, rank: RankId, key: bytes) -> None:
        """The request came to nothing there."""
        view = self._views.get(rank)
        entry = view.get(key) if view is not None else None
        if entry is not None:
            entry.sent = max(0, entry.sent - 1)
            if not entry.sent and not entry.told:
                self._drop(rank, key)

    def forget(self, rank: RankId) -> None:
        """The encoder is gone."""
        for key in tuple(self._views.get(rank, ())):
            self._drop(rank, key)

    def _drop_older(self, rank: RankId, view: OrderedDict[bytes, _Entry], gone: _Entry) -> None:
        """All that was last used before the entry that turned out to be gone, but what is on its way: an encoder drops
        what was used least recently first."""
        stale = []
        for key, entry in view.items():
            if entry.used >= gone.before:
                break
            if not entry.sent:
                stale.append(key)
        for key in stale:
            self._drop(rank, key)

    def _drop(self, rank: RankId, key: bytes) -> None:
        view = self._views[rank]
        del view[key]
        if not view:
            del self._views[rank]
        holders = self._holders[key]
        holders.discard(rank)
        if not holders:
            del self._holders[key]
