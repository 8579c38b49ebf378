"""The journals of a decode process: found by attempt and by request, forgotten after a while.

A request whose router says nothing any more is an orphan. Its client may resume at another router, so it lives on for
`orphan_s` from the router's last word, within its credit; then its lease ends it (L8).
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.request import RequestKey
from headrace.services.decode.journal import RequestJournal
from headrace.services.runtime.ids import whole_id


class Journals:
    """Belongs to the event loop's thread. Times are on the clock of the caller's `now`."""

    def __init__(self, *, linger_s: float, orphan_s: float, lease_s: float) -> None:
        """`linger_s`: how long an end that was sent is kept. `lease_s`: the engine's, which a renewal extends."""
        self._linger_s = linger_s
        self._orphan_s = orphan_s
        self._lease_s = lease_s
        self._journals: dict[RequestKey, RequestJournal] = {}
        self._by_request: dict[str, dict[RequestKey, RequestJournal]] = {}

    def __len__(self) -> int:
        return len(self._journals)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._journals

    def get(self, key: RequestKey) -> RequestJournal | None:
        return self._journals.get(key)

    def all(self) -> tuple[RequestJournal, ...]:
        return tuple(self._journals.values())

    def of(self, request_id: str) -> tuple[RequestJournal, ...]:
        """Every attempt of a request and of its parts, the highest attempt first."""
        found = self._by_request.get(whole_id(request_id), {})
        return tuple(sorted(found.values(), key=lambda journal: -journal.key.attempt))

    def begin(self, journal: RequestJournal) -> bool:
        """Keep a journal from now on; False when there is one of this key, which stays."""
        if self._journals.setdefault(journal.key, journal) is not journal:
            return False
        self._by_request.setdefault(whole_id(journal.key.request_id), {})[journal.key] = journal
        return True

    def drop(self, key: RequestKey) -> None:
        """Forget a journal; an unknown one is no error."""
        if self._journals.pop(key, None) is None:
            return
        whole = whole_id(key.request_id)
        del self._by_request[whole][key]
        if not self._by_request[whole]:
            del self._by_request[whole]

    def orphans(self, now: float) -> tuple[RequestKey, ...]:
        """Requests whose router is silent and whose lease is to be renewed in its stead: it ends `orphan_s` after the
        router's last word. A reservation that nobody has committed is worth nothing to anybody else."""
        return tuple(
            journal.key
            for journal in self._journals.values()
            if journal.ended_at is None
            and journal.begun
            and self._lease_s / 3 < now - journal.renewed_at <= self._orphan_s - self._lease_s
        )

    def reap(self, now: float, attached: Callable[[str], bool]) -> None:
        """Forget requests that ended long enough ago; those that an attached router has yet to take stay (L9). One that
        adopted a request and has not come for it in an orphan's time is not waited for."""
        for key, journal in tuple(self._journals.items()):
            if journal.ended_at is None:
                continue
            kept_s = self._linger_s if journal.delivered else max(self._linger_s, self._orphan_s)
            waited_for = not journal.delivered and not journal.adopted and attached(journal.router)
            if now - journal.ended_at >= kept_s and not waited_for:
                self.drop(key)
