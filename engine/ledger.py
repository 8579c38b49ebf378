"""Which requests live in this worker, and what became of the others (L11), by (request, attempt) (L16)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.live import LiveRequest
from headrace.engine.messages import Conservation, FinishReason
from headrace.engine.request import RequestKey

REMEMBERED_ATTEMPTS = 16384
"""Request ids whose highest attempt is remembered after the end; a late lower attempt of an older one runs again."""

_WORST_FIRST = (FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.CANCELLED)


class Ledger:
    """The one path into and out of the live set. Every request that was opened is live or counted once as ended."""

    def __init__(self) -> None:
        self._live: dict[RequestKey, LiveRequest] = {}
        self._highest: OrderedDict[str, int] = OrderedDict()
        self._accepted = 0
        self.highest_attempt = 0
        """Of any request that was opened."""
        self._ended: Counter[FinishReason] = Counter()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(tuple(self._live.values()))

    def get(self, key: RequestKey) -> LiveRequest | None:
        return self._live.get(key)

    def next_order(self) -> int:
        """Age of the next request."""
        return self._accepted

    def claim(self, key: RequestKey) -> tuple[LiveRequest, ...]:
        """Ask for the right to open `key`; answers live lower attempts, which the caller ends first (L16).

        Raises EngineError ABORTED when this or a higher attempt was here already; the caller has looked for a live
        request of exactly `key` before.
        """
        highest = self._highest.get(key.request_id)
        if highest is not None and key.attempt <= highest:
            raise EngineError(
                ErrorCode.ABORTED,
                f"attempt {key.attempt} of {key.request_id} is over or overtaken by attempt {highest}; send a higher",
            )
        return self.of_request(key.request_id)

    def of_request(self, request_id: str) -> tuple[LiveRequest, ...]:
        """Live attempts of one request."""
        return tuple(live for live in self._live.values() if live.key.request_id == request_id)

    def open(self, live: LiveRequest) -> None:
        self._live[live.key] = live
        self._accepted += 1
        self._highest[live.key.request_id] = live.key.attempt
        self.highest_attempt = max(self.highest_attempt, live.key.attempt)
        self._highest.move_to_end(live.key.request_id)
        while len(self._highest) > REMEMBERED_ATTEMPTS + len(self._live):
            self._highest.popitem(last=False)

    def close(self, live: LiveRequest, reason: FinishReason) -> None:
        """Count the end of a live request. Raises KeyError on a second end (L28)."""
        del self._live[live.key]
        self._ended[reason] += 1

    def conservation(self) -> Conservation:
        return Conservation(
            accepted=self._accepted,
            live=len(self._live),
            finished=self._ended[FinishReason.STOP] + self._ended[FinishReason.LENGTH],
            cancelled=self._ended[FinishReason.CANCELLED],
            deadline=self._ended[FinishReason.DEADLINE],
            failed=self._ended[FinishReason.ERROR],
        )


def request_reason(live: LiveRequest) -> FinishReason:
    """One reason for a request of several choices: the worst, else how choice 0 ended."""
    reasons = set(live.reasons.values())
    return next((worst for worst in _WORST_FIRST if worst in reasons), live.reasons.get(0, FinishReason.STOP))
