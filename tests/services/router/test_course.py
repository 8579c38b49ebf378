"""Course: attempts until every choice has ended, whatever fails on the way (L15, L16, L28)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.router.request import RoutingRequest
from headrace.router.topology import RankId, Role
from headrace.services.router.adoption import Adopted
from headrace.services.router.attach import Overtaken
from headrace.services.router.course import Course, Means
from headrace.services.router.event_stream import EventStream
from headrace.services.router.images import EncodedImages
from headrace.services.router.parts import Part
from headrace.services.router.place import Placed
from headrace.services.router.report import RequestLog
from headrace.services.router.settings import RequestSection
from headrace.services.runtime.clock import SystemClock
from headrace.services.runtime.errors import (
    Aborted,
    Cancelled,
    HeadraceError,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from headrace.v1 import common_pb2, decode_pb2, encoder_pb2, inference_pb2, prefill_pb2

TOKENS = 6
"""Of every choice."""


def token(choice: int, offset: int) -> int:
    """What a seed draws: the same in every attempt."""
    return 100 * choice + offset


@dataclass
class Asked:
    """One attempt as a worker gets it."""

    name: str
    attempt: int
    delivered: list[list[int]]
    avoided: frozenset[RankId]


@dataclass
class Site:
    """Workers that generate, and fail when told to."""

    fail: Callable[[Asked], tuple[int, HeadraceError] | None] = lambda asked: None
    """After how many tokens of the attempt, and with what; None: not."""
    prefill_gone: bool = False
    handed_over: bool = True
    refuse: list[HeadraceError] = field(default_factory=list)
    """By the next reservations."""
    unclear: frozenset[RankId] = frozenset()
    """Ranks that did not answer those in time."""
    refuse_later: list[HeadraceError] = field(default_factory=list)
    """By the reservations after the first attempt."""
    full: list[HeadraceError | None] = field(default_factory=list)
    """By the next encodings; None: no refusal."""
    encoder_leaves: bool = False
    """While the request waits for room."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Of the newest encodings."""
    room_comes: bool = False
    """For who waits for it in the queue."""
    asked: list[Asked] = field(default_factory=list)
    abandoned: int = 0
    encoded: int = 0
    members: dict[Role, list[RankId]] = field(
        default_factory=lambda: {role: [RankId(f"{role.value}-{i}", "1", 0) for i in range(2)] for role in Role}
    )

    async def reserve(
        self, placed: Placed, attempt: int, deadline: float, failed: set[RankId], unclear: set[RankId]
    ) -> Any:
        assert not unclear
        if self.refuse:
            unclear |= self.unclear
            raise self.refuse.pop(0)
        if self.asked and self.refuse_later:
            raise self.refuse_later.pop(0)
        spec = placed.spec
        delivered = [list(state.delivered_token_ids) for state in spec.choices]
        self.asked.append(Asked(spec.id.request_id, attempt, delivered, frozenset(failed)))
        ranks = {role: sorted(self.members[role], key=failed.__contains__)[0] for role in (Role.PREFILL, Role.DECODE)}
        pair = SimpleNamespace(
            prefill=SimpleNamespace(id=ranks[Role.PREFILL], role=Role.PREFILL, host=""),
            decode=SimpleNamespace(id=ranks[Role.DECODE], role=Role.DECODE, host=""),
        )
        return SimpleNamespace(
            pair=pair,
            seconds=0.0,
            transfer_us=0,
            handed_over=self.handed_over,
            prefill=prefill_pb2.PrefillReport(computed_tokens=10),
            prefill_failed=self.prefill_gone,
            prefill_gone=self.prefill_gone,
            feed=SimpleNamespace(begun=True, put=lambda item: None),
        )

    async def events(self, placed: Placed, *_: object) -> AsyncIterator[decode_pb2.RequestEvents]:
        asked = next(asked for asked in reversed(self.asked) if asked.name == placed.spec.id.request_id)
        failure = self.fail(asked)
        numbers = [int(asked.name.partition("/")[2])] if "/" in asked.name else list(range(len(asked.delivered)))
        sent = 0
        for offset in range(TOKENS):
            for local, choice in enumerate(numbers):
                if offset < len(asked.delivered[local]):
                    continue
                if failure is not None and sent == failure[0]:
                    raise failure[1]
                sent += 1
                event = common_pb2.TokensEvent(choice=local, offset=offset, token_ids=[token(choice, offset)])
                await asyncio.sleep(0)
                yield decode_pb2.RequestEvents(tokens=[event])
        ends = [
            common_pb2.FinishedEvent(choice=local, reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=TOKENS)
            for local in range(len(numbers))
        ]
        usage = common_pb2.Usage(prompt_tokens=10, computed_tokens=10)
        yield decode_pb2.RequestEvents(finished=ends, report=decode_pb2.DecodeReport(usage=usage))

    def abandon(self, reservation: object) -> None:
        self.abandoned += 1

    @asynccontextmanager
    async def leased(self, prepared: Any, *_: object) -> AsyncIterator[EncodedImages]:
        if self.full and (refusal := self.full.pop(0)) is not None:
            raise refusal
        self.encoded += 1
        image = encoder_pb2.EncodedImage(content_digest=b"d" * 32)
        encoder = SimpleNamespace(id=self.members[Role.ENCODER][0], role=Role.ENCODER, host="")
        self.gone = asyncio.Event()
        yield EncodedImages((image,), encoder, gone=self.gone) if prepared.images else EncodedImages()  # type: ignore[arg-type]

    async def adopted(
        self, adopted: Adopted, placed: Placed, deadline: float
    ) -> AsyncIterator[decode_pb2.RequestEvents]:
        """What follows of one choice that was found."""
        (state,) = adopted.states
        for offset in range(len(state.delivered_token_ids), TOKENS):
            event = common_pb2.TokensEvent(offset=offset, token_ids=[token(state.choice, offset)])
            await asyncio.sleep(0)
            yield decode_pb2.RequestEvents(tokens=[event])
        end = common_pb2.FinishedEvent(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=TOKENS)
        usage = common_pb2.Usage(prompt_tokens=10, computed_tokens=10)
        yield decode_pb2.RequestEvents(finished=[end], report=decode_pb2.DecodeReport(usage=usage))

    async def run(
        self,
        choices: int = 1,
        *,
        images: bool = False,
        received: dict[int, int] | None = None,
        found: tuple[int, ...] = (),
        **limits: float,
    ) -> list[Any]:
        spec = common_pb2.RequestSpec(
            id=common_pb2.AttemptId(request_id="r@t"),
            sampling=common_pb2.SamplingParams(seed=3, n=choices),
            prompt_tokens=10,
            choices=[common_pb2.ChoiceState(choice=index, seed=index) for index in range(choices)],
        )
        placed = Placed(spec, RoutingRequest("r", 10, TOKENS, choices, 0, b"k", 1e9), 0)
        fleet = SimpleNamespace(candidates=lambda role: [SimpleNamespace(id=rank) for rank in self.members[role]])
        workers = SimpleNamespace(fleet=fleet, broken=lambda: (), group=lambda: None)
        clock, log = SystemClock(), RequestLog(arrived=0.0)
        section = RequestSection(**{"recovery_seconds": 0.2, **limits})  # type: ignore[arg-type]
        adoption = SimpleNamespace(events=self.adopted)
        means: Any = Means(section, workers, self, self, adoption, self, clock)  # type: ignore[arg-type]
        prepared: Any = _Prepared((inference_pb2.Image(),) if images else ())
        turn: Any = SimpleNamespace(
            placed=lambda: None, delivered=lambda: None, correct=lambda tokens: None, again=self._again
        )
        async with AsyncExitStack() as stack:
            tenant: Any = SimpleNamespace(keys=None)
            course = Course(means, prepared, tenant, 1e9, log, turn, stack)
            await course.encode()
            course.stream = EventStream(placed, log, True, clock, name="r", received=received)
            part = Part(placed, tuple(range(choices)), 0)
            singles = {choice: self._single(choice, (received or {}).get(choice, 0)) for choice in found}
            way = course.run_singly(part, singles) if singles else course.run(part)
            async with aclosing(way) as responses:
                out = [response async for response in responses]
            return out + course.stream.end()

    def _single(self, choice: int, received: int) -> Adopted:
        known = [token(choice, offset) for offset in range(received)]
        worker: Any = SimpleNamespace(ranks=())
        identifier = common_pb2.AttemptId(request_id=f"r@t/{choice}", attempt=4)
        return Adopted(
            worker, None, identifier, (common_pb2.ChoiceState(choice=choice, delivered_token_ids=known),), (0,)
        )

    async def _again(self) -> None:
        if self.encoder_leaves:
            self.gone.set()
        if not self.room_comes:
            raise ResourceExhausted("no room", retry_after_s=1.0)


@dataclass(frozen=True)
class _Prepared:
    images: tuple[inference_pb2.Image, ...]
    request_id: str = "r"


def tokens(responses: list[Any]) -> dict[int, list[int]]:
    """By choice; dense offsets, nothing after an end, one end each (L28)."""
    found: dict[int, list[int]] = {}
    ended: set[int] = set()
    for response in responses:
        if response.HasField("tokens"):
            event = response.tokens
            assert event.choice not in ended
            assert event.offset == len(found.setdefault(event.choice, []))
            found[event.choice] += event.token_ids
        elif response.HasField("finished"):
            assert response.finished.choice not in ended
            ended.add(response.finished.choice)
    assert ended == set(found)
    return found


WHOLE = {choice: [token(choice, offset) for offset in range(TOKENS)] for choice in range(3)}


async def test_one_choice_goes_on_at_another_decode() -> None:
    """L15, L16, L27: under the same id with the next number, from the tokens that are known, avoiding who failed."""
    site = Site(fail=lambda asked: (4, Unavailable("decode is gone")) if asked.attempt == 1 else None)
    responses = await site.run()
    assert tokens(responses) == {0: WHOLE[0]}
    first, second = site.asked
    assert (first.name, second.name, second.attempt) == ("r@t", "r@t", 2)
    assert second.delivered == [[0, 1, 2, 3]]
    assert second.avoided == {RankId("decode-0", "1", 0)}
    usage, report = responses[-2].usage, responses[-1].report
    assert (usage.computed_tokens, usage.recomputed_tokens, usage.completion_tokens) == (10, 10, TOKENS)
    assert report.attempts == 2
    assert site.abandoned == 2


async def test_three_choices_are_continued_one_by_one() -> None:
    """L15: two that were cut off after one and two tokens, and one more failure of one of them."""
    broken: list[str] = []

    def fail(asked: Asked) -> tuple[int, HeadraceError] | None:
        if asked.attempt == 1:
            return 5, Unavailable("decode is gone")
        if asked.name == "r@t/1" and not broken:
            broken.append(asked.name)
            return 1, Unavailable("and the next one, too")
        return None

    site = Site(fail=fail)
    assert tokens(await site.run(3)) == WHOLE
    assert [asked.delivered for asked in site.asked if asked.name == "r@t/1"] == [[[100, 101]], [[100, 101, 102]]]
    assert [asked.attempt for asked in site.asked if asked.name == "r@t/1"] == [2, 3]


async def test_before_the_first_token_all_choices_are_tried_again() -> None:
    site = Site(fail=lambda asked: (0, Unavailable("prefill is gone")) if asked.attempt < 3 else None)
    assert tokens(await site.run(3)) == WHOLE
    assert [asked.name for asked in site.asked] == ["r@t"] * 3


async def test_choices_that_were_found_go_on_and_the_others_are_made_anew() -> None:
    """L15, L28: resumed after a failure had cut the request up: of three choices one runs at a decode, one has ended at
    another, and nobody has the third. Every event that the client lacks comes once."""
    site = Site()
    received = {0: 2, 1: TOKENS, 2: 3}
    responses = await site.run(3, received=received, found=(0, 1))
    got: dict[int, list[tuple[int, int]]] = {}
    ends = [response.finished.choice for response in responses if response.HasField("finished")]
    for response in responses:
        if response.HasField("tokens"):
            event = response.tokens
            got.setdefault(event.choice, []).extend(enumerate(event.token_ids, event.offset))
    assert got == {
        choice: [(offset, token(choice, offset)) for offset in range(received[choice], TOKENS)] for choice in (0, 2)
    }
    assert sorted(ends) == [0, 1, 2]
    assert [(asked.name, asked.delivered) for asked in site.asked] == [("r@t/2", [[]])]
    assert [response.HasField("usage") for response in responses].count(True) == 1
    assert next(each.usage for each in responses if each.HasField("usage")).completion_tokens == 3 * TOKENS


async def test_attempts_are_bounded() -> None:
    """L6, L28: then the open choices end, with the error; the usage adds up."""
    site = Site(fail=lambda asked: (1, Unavailable("again")))
    responses = await site.run(max_attempts=3)
    assert len(site.asked) == 3
    (end,) = [response.finished for response in responses if response.HasField("finished")]
    assert end.error.code == common_pb2.ERROR_CODE_UNAVAILABLE
    assert end.completion_tokens == 3
    assert responses[-2].usage.computed_tokens == 10


@pytest.mark.parametrize("error", [Overtaken("newer"), InvalidArgument("bad")])
async def test_what_no_attempt_can_do_better_is_not_tried_again(error: HeadraceError) -> None:
    """L16: a newer attempt is the end of this one."""
    site = Site(fail=lambda asked: (1, error))
    responses = await site.run()
    assert len(site.asked) == 1
    (end,) = [response.finished for response in responses if response.HasField("finished")]
    assert end.error.code == error.code


async def test_before_anything_was_sent_the_error_is_raised() -> None:
    site = Site(fail=lambda asked: (0, InvalidArgument("bad")))
    with pytest.raises(InvalidArgument):
        await site.run()
    assert site.abandoned == 1


async def test_workers_that_refuse_one_another_are_not_the_clients_fault() -> None:
    """L25: one has another secret: somebody else does it, and if nobody can, the client is told of no missing right."""
    refused = PermissionDenied("this was not signed by the cluster")
    site = Site(fail=lambda asked: (0, refused) if asked.attempt == 1 else None)
    assert tokens(await site.run()) == {0: WHOLE[0]}
    assert site.asked[1].avoided == {RankId("decode-0", "1", 0)}
    with pytest.raises(Unavailable, match="refuse one another"):
        await Site(fail=lambda asked: (0, refused)).run(max_attempts=2)


@pytest.mark.parametrize("known", [0, 2])
async def test_what_a_worker_cancelled_is_not_the_clients_cancel(known: int) -> None:
    """L28: decode calls a run back from prefill when the reservation's lease has ended, since this router stood still;
    prefill's word of it may be read before decode's. The client, who waits, gets its answer."""
    recalled = Cancelled("the run was cancelled")
    site = Site(fail=lambda asked: (known, recalled) if asked.attempt == 1 else None)
    assert tokens(await site.run()) == {0: WHOLE[0]}
    with pytest.raises(Unavailable, match="ended the attempt"):
        await Site(fail=lambda asked: (0, recalled)).run(max_attempts=2)


async def test_a_first_reservation_that_nobody_answers_is_told_at_once() -> None:
    site = Site(refuse=[Unavailable("no replica")])
    with pytest.raises(Unavailable):
        await site.run()
    assert not site.asked


async def test_a_name_that_was_used_before_gets_a_higher_number() -> None:
    site = Site(refuse=[Aborted("attempt 1 is over")])
    assert tokens(await site.run()) == {0: WHOLE[0]}
    assert [asked.attempt for asked in site.asked] == [2]


@pytest.mark.parametrize("late", [True, False])
async def test_a_number_that_may_be_given_back_yet_is_not_used_again(*, late: bool) -> None:
    """L16, L10: one decode had no room, another did not answer in time. What it then promises is given back, whose
    number must be no running attempt's; where all have refused, the number stays."""
    site = Site(refuse=[ResourceExhausted("full", retry_after_s=1.0)], room_comes=True)
    site.unclear = frozenset({RankId("decode-1", "1", 0)} if late else ())
    assert tokens(await site.run()) == {0: WHOLE[0]}
    assert [asked.attempt for asked in site.asked] == [2 if late else 1]


async def test_it_waits_for_somebody_to_take_a_dead_ones_place() -> None:
    """The only prefill died: another one that joins meanwhile is used."""
    site = Site(fail=lambda asked: (0, Unavailable("prefill is gone")) if asked.attempt == 1 else None)
    site.prefill_gone = True
    site.handed_over = False
    (first, second), site.members[Role.PREFILL] = site.members[Role.PREFILL], site.members[Role.PREFILL][:1]
    running = asyncio.ensure_future(site.run(recovery_seconds=30.0))
    while not site.asked:  # noqa: ASYNC110 - the fake has no event
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert len(site.asked) == 1
    site.members[Role.PREFILL] = [first, second]
    assert tokens(await running) == {0: WHOLE[0]}
    assert site.asked[1].avoided == {first}


@pytest.mark.parametrize("patience", [60.0, 0.0])
async def test_encoders_that_are_full_for_a_moment_end_no_request_that_runs(patience: float) -> None:
    """L15, L12: its encoder died, and the others are busy: it waits a while. A new one is turned away at once."""
    full = ResourceExhausted("the embedding pool is full of leased images", retry_after_s=0.01)
    site = Site(fail=lambda asked: (2, Unavailable("gone")) if asked.attempt == 1 else None, handed_over=False)
    site.full = [None, full, full]
    responses = await site.run(images=True, recovery_seconds=patience)
    if patience:
        assert tokens(responses) == {0: WHOLE[0]}
    else:
        (end,) = [response.finished for response in responses if response.HasField("finished")]
        assert end.error.code == common_pb2.ERROR_CODE_RESOURCE_EXHAUSTED
    site = Site(full=[full])
    with pytest.raises(ResourceExhausted):
        await site.run(images=True, recovery_seconds=60.0)


@pytest.mark.parametrize(("error", "again"), [(Internal("x"), True), (NotFound("x"), True), (Aborted("newer"), False)])
async def test_a_reservation_that_fails_once_more_ends_no_request_that_runs(error: HeadraceError, again: bool) -> None:
    """L15: the only decode that is left fails once, in whatever way. A newer attempt is the end (L16)."""
    site = Site(fail=lambda asked: (2, Unavailable("gone")) if asked.attempt == 1 else None)
    site.refuse_later = [error]
    responses = await site.run()
    assert len(site.asked) == (2 if again else 1)
    (end,) = [response.finished for response in responses if response.HasField("finished")]
    assert end.HasField("error") is not again


async def test_a_choice_that_fails_late_does_not_blame_the_pictures_of_another() -> None:
    """L15: two choices use the same embeddings. One fails and has them made again; the other, which fails with the old
    ones after that, goes on with the new ones, and the first one's new attempt is not ended for it."""

    def fail(asked: Asked) -> tuple[int, HeadraceError] | None:
        lost = NotFound("this embedding lease has ended")
        return {("r@t", 1): (2, lost), ("r@t/0", 2): (1, lost), ("r@t/1", 2): (3, lost)}.get(
            (asked.name, asked.attempt)
        )

    site = Site(fail=fail, handed_over=False)
    assert tokens(await site.run(2, images=True)) == {choice: WHOLE[choice] for choice in range(2)}
    assert [(asked.name, asked.attempt) for asked in site.asked][-1][1] == 3
    assert site.encoded == 3, "for the request, after the first failure, and once for both choices"


async def test_pictures_whose_encoder_left_while_the_request_waited_for_room() -> None:
    """L15: no attempt is lost for it, of which a request has few."""
    site = Site(refuse=[ResourceExhausted("full", retry_after_s=1.0)], room_comes=True)
    site.encoder_leaves = True
    assert tokens(await site.run(images=True, max_attempts=1)) == {0: WHOLE[0]}
    assert site.encoded == 2


async def test_pictures_are_encoded_again_unless_prefill_had_them() -> None:
    """L15: whatever failed before the hand-over may have failed for want of them; after it they are needed again only
    where their encoder is gone."""
    for handed_over, encodings in ((False, 2), (True, 1)):
        site = Site(fail=lambda asked: (0, Unavailable("gone")) if asked.attempt == 1 else None)
        site.handed_over = handed_over
        assert tokens(await site.run(images=True)) == {0: WHOLE[0]}
        assert site.encoded == encodings
