"""Random orders of reserve, push, commit, cancel, expiry and death between two engines (L7, L11, L16)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import (
    Cancel,
    FinishReason,
    HandedOver,
    Prefill,
    PrefillDone,
    Renew,
    Reserve,
    RowsReady,
    SenderDied,
    Submit,
    TransferEnded,
    Unpin,
)

FREQUENT = ["reserve", "here", "prefill", "prefill", "prefill", "commit", "decode"]
RARE = ["cancel_prefill", "cancel_decode", "retry", "renew", "tick", "notice", "death"]
OPS = st.lists(
    st.tuples(
        st.sampled_from(FREQUENT * 3 + RARE),
        st.integers(0, 99),
    ),
    min_size=8,
    max_size=60,
)


class Way:
    """One attempt on its way from prefill to decode, as the services would track it."""

    def __init__(self, request: Any, reserved: Any) -> None:
        self.request = request
        self.reserved = reserved
        self.handle = reserved.handle
        self.events: list[Any] = []
        self.unpinned = False

    @property
    def done(self) -> bool:
        return any(isinstance(event, PrefillDone) for event in self.events)

    @property
    def rows(self) -> tuple[int, ...]:
        rows = [entry.row for event in self.events if isinstance(event, RowsReady) for entry in event.rows]
        tails = [event.tail.row for event in self.events if isinstance(event, PrefillDone) and event.tail]
        return (*rows, *tails)

    @property
    def slot(self) -> bool:
        return any(isinstance(event, PrefillDone) and event.slot for event in self.events)


def wire_is_quiet(pair: Any, way: Way) -> None:
    """Every transfer of an attempt is terminal: prefill may unpin."""
    if not way.unpinned and way.events:
        if way.rows or way.slot:
            pair.prefill.apply(Unpin(way.request.key, way.rows, slot=way.slot))
        way.unpinned = True
        if way.done:
            pair.prefill.apply(HandedOver(way.request.key))


def pump(pair: Any, ways: dict[Any, Way]) -> None:
    for event in pair.prefill.drain_events():
        ways[event.key].events.append(event)


@pytest.mark.parametrize("slots", [False, True], ids=["rows", "slots"])
def test_any_order_ends_clean(kit: Any, pair_of: Any, slots: bool) -> None:
    """Whatever happens on the way, tokens shown are right, nothing leaks, and both sides end idle."""
    model = kit.model(slots=slots)
    alone: dict[str, list[int]] = {}

    def undisturbed(request: Any) -> list[int]:
        name = request.key.request_id
        if name not in alone:
            engine = kit.engine(model, prefix_reuse=False)
            engine.apply(Submit(replace(request, deadline=None)))
            alone[name] = kit.collect(kit.run(engine))[name].tokens[0]
        return alone[name]

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(ops=OPS)
    def run(ops: list[tuple[str, int]]) -> None:
        pair = pair_of(model, prefill_rows=20, rows=16, max_sequences=4)
        ways: dict[Any, Way] = {}
        here: dict[Any, Any] = {}
        shown: list[Any] = []
        expected = {ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.ABORTED, ErrorCode.NOT_FOUND, ErrorCode.FAILED_PRECONDITION}
        refusals: set[ErrorCode] = set()
        for name, number in ops:
            live = [way for way in ways.values() if name != "commit" or (way.done and not way.unpinned)]
            way = live[number % len(live)] if live else None
            try:
                if name == "reserve" or (name == "retry" and way is not None):
                    key_changes = {} if name == "reserve" or way is None else {"attempt": way.request.key.attempt + 1}
                    base = kit.request(f"w{number % 6}", 5 + 17 * (number % 6), max_tokens=6)
                    request = base if name == "reserve" or way is None else way.request
                    request = replace(request, key=replace(request.key, **key_changes))
                    reserved = pair.decode.apply(Reserve(request, sender="prefill-1"))
                    if request.key not in ways:
                        ways[request.key] = Way(request, reserved)
                        pair.prefill.apply(Prefill(request, reserved.held_blocks))
                elif name == "prefill":
                    for _ in range(1 + number % 8):
                        pair.prefill.step()
                elif name == "decode":
                    for _ in range(1 + number % 3):
                        pair.decode.step()
                elif name == "tick":
                    pair.clock.now += number % 4
                    pair.decode.expire()
                elif name == "here":
                    # Decode computes it by itself, among those that are landed; now and then it is given up.
                    request = kit.request(f"h{number % 4}", 5 + 13 * (number % 4), max_tokens=6)
                    if number % 3 == 0:
                        pair.decode.apply(Cancel(request.key))
                    else:
                        assert pair.decode.apply(Reserve(request, compute_here=True)).handle is None
                        here[request.key] = request
                elif way is None:
                    continue
                elif name == "commit":
                    commit = pair.push(way.reserved, way.events, way.handle)
                    if number % 5 == 0 and commit.handle.parts[0].rows:
                        pair.landing.rows[commit.handle.parts[0].rows[0], 0] ^= 255
                    reply = pair.decode.apply(commit)
                    if reply.resend is not None:
                        way.handle = reply.resend
                    else:
                        wire_is_quiet(pair, way)
                elif name == "cancel_prefill":
                    pair.prefill.apply(Cancel(way.request.key))
                elif name == "cancel_decode":
                    pair.decode.apply(Cancel(way.request.key, FinishReason.DEADLINE))
                elif name == "renew":
                    pair.decode.apply(Renew((*ways, *here)))
                elif name == "notice" and not way.done:
                    pair.decode.apply(TransferEnded(way.handle.transfer_id, complete=False))
                elif name == "death" and number % 10 == 0:
                    pair.decode.apply(SenderDied("prefill-1"))
            except EngineError as error:
                refusals.add(error.code)
            pump(pair, ways)
            shown += pair.decode.drain_events()
            assert pair.prefill.integrity() == ()
            assert pair.decode.integrity() == ()
        assert refusals <= expected
        for way in ways.values():
            pair.prefill.apply(Cancel(way.request.key))
            pump(pair, ways)
            wire_is_quiet(pair, way)
            pair.decode.apply(TransferEnded(way.handle.transfer_id, complete=False))
        while pair.decode.step():
            pass
        pair.clock.now += 100
        shown += kit.run(pair.decode)
        pair.assert_idle()
        by_key: dict[Any, list[Any]] = {}
        for event in shown:
            by_key.setdefault(event.key, []).append(event)
        for key, events in by_key.items():
            outcome = kit.collect(events)[key.request_id]
            tokens = outcome.tokens.get(0, [])
            request = ways[key].request if key in ways else here[key]
            assert tokens == undisturbed(request)[: len(tokens)]
            assert outcome.finished.keys() == {0}
            assert outcome.finished[0].reason is not FinishReason.ERROR
            if outcome.finished[0].reason in kit.done:
                assert len(tokens) == 6

    run()
