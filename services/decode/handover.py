"""What of a request goes to a router that takes it over for its client: decided here, told by attach.py. No RPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.services.decode.journal import RequestJournal
from headrace.services.runtime.ids import part_id
from headrace.v1 import decode_pb2


@dataclass
class Handed:
    """What becomes of a request's journals; those of another request of its name are in neither list."""

    response: decode_pb2.AdoptResponse
    taken: list[tuple[RequestJournal, str]] = field(default_factory=list)
    """Handed over, and the router that each was of before."""
    left: list[RequestJournal] = field(default_factory=list)
    """To be ended."""


def hand_over(
    journals: Sequence[RequestJournal],
    request_id: str,
    content: bytes,
    offsets: Sequence[int],
    router: str,
    now: float,
    single_content: Callable[[int], bytes],
) -> Handed:
    """Hand over the newest attempt that can go on after `offsets` tokens of each choice, or choices one by one where
    they are continued by themselves. `journals`: all of the request and its parts, the highest attempt first.
    `content`: digest of what the client asks for, `single_content` that of a choice by itself: what is of another
    tenant, or another request, is not found, and nothing becomes of it.
    """
    highest = max((journal.key.attempt for journal in journals), default=0)
    handed = Handed(decode_pb2.AdoptResponse(highest_attempt=highest))

    def take(journal: RequestJournal, after: Sequence[int]) -> decode_pb2.AdoptResponse | None:
        former = journal.router
        adopted = journal.adopt(router, after, now)
        if adopted is None:
            handed.left.append(journal)
        else:
            handed.taken.append((journal, former))
        return adopted

    for journal in journals:
        if journal.key.request_id != request_id or journal.content != content:
            continue
        if handed.taken:
            handed.left.append(journal)
        elif (adopted := take(journal, offsets)) is not None:
            handed.response.MergeFrom(adopted)
    choices = {part_id(request_id, choice): choice for choice in range(len(offsets))}
    found = set(choices.values()) if handed.taken else set()
    for journal in journals:
        if journal.key.request_id == request_id:
            continue
        choice = choices.get(journal.key.request_id)
        if choice is None or journal.content != single_content(choice):
            continue
        if choice in found:
            handed.left.append(journal)
        elif (adopted := take(journal, [offsets[choice]])) is not None:
            found.add(choice)
            state, (received,) = adopted.choices[0], adopted.received_tokens
            state.choice = choice
            handed.response.single.add(id=adopted.id, state=state, received_tokens=received)
    return handed
