"""From states to events: what a watch has told, and what it must tell next. Both implementations use it."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.services.runtime.registry.base import Added, Changed, Event, Removed, Replica, Role


class Follower:
    """What one watch has told so far. Each method takes news and returns the events that they amount to."""

    def __init__(self, roles: frozenset[Role] = frozenset()) -> None:
        self._roles = roles
        self._known: dict[str, Replica] = {}

    def reset(self, living: Iterable[Replica]) -> list[Event]:
        """News: these are all members now. Removals come first, then the rest by id."""
        now = {replica.id: replica for replica in living}
        events: list[Event] = []
        for identifier in sorted(self._known.keys() - now.keys()):
            events += self.removed(identifier)
        for identifier in sorted(now):
            events += self.put(now[identifier])
        return events

    def put(self, replica: Replica) -> list[Event]:
        """News: this member is so now."""
        old = self._known.get(replica.id)
        if old == replica:
            return []
        if old is not None and old.incarnation == replica.incarnation:
            self._known[replica.id] = replica
            return self._wanted(Changed(replica))
        events = [] if old is None else self.removed(replica.id)
        self._known[replica.id] = replica
        return events + self._wanted(Added(replica))

    def removed(self, identifier: str, incarnation: str | None = None) -> list[Event]:
        """News: this id has no member any more; with `incarnation`, only if that one was the member."""
        old = self._known.get(identifier)
        if old is None or incarnation not in (None, old.incarnation):
            return []
        del self._known[identifier]
        return self._wanted(Removed(old))

    def _wanted(self, event: Event) -> list[Event]:
        return [event] if not self._roles or event.replica.role in self._roles else []
