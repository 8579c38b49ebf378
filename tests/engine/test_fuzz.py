"""Random orders of submit, cancel, deadline, credit and preemption: nothing leaks, nothing is wrong (L5, L7, L11)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engine.errors import EngineError, ErrorCode
from headrace.engine.messages import Cancel, Credit, FinishReason, Submit
from headrace.engine.sampling_params import SamplingParams

Op = tuple[str, int, int]
OPS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "cancel", "tick", "credit"]), st.integers(0, 999)
    ).flatmap(lambda op: st.tuples(st.just(op[0]), st.just(op[1]), st.integers(0, 999))),
    min_size=5,
    max_size=40,
)


def request_of(kit: Any, clock: Any, index: int, a: int, b: int) -> Any:
    """Requests from a small world: three stems that share prefixes, several lengths, choices, limits."""
    stem = kit.request(f"stem{a % 3}", 120).prompt_ids
    prompt = [*stem[: (a * 7) % 121], *[kit.letter + b % 3] * (1 + b % 5)]
    return kit.request(
        f"f{index}",
        prompt,
        n=1 + (a % 4 == 0) * (b % 3),
        max_tokens=1 + b % 40,
        sampling=SamplingParams(temperature=float(b % 2)),
        seed=b,
        deadline=clock.now + 1 + a % 40 if a % 5 == 0 else None,
        credit=b % 9 if a % 7 == 0 else None,
        priority=a % 2,
        keep_tokens=kit.keep + a % 3,
        snapshot_at=(kit.block,) if len(prompt) >= kit.block and a % 2 else (),
    )


@pytest.mark.parametrize("slots", [False, True], ids=["rows", "slots"])
@pytest.mark.parametrize("spill_bytes", [0, 6000, 1 << 20])
def test_any_order_keeps_every_law(kit: Any, slots: bool, spill_bytes: int) -> None:
    """L11 at every instant, L28 for every choice, L5 for every token that was shown."""
    model = kit.model(slots=slots)
    alone: dict[Any, dict[int, list[int]]] = {}

    def undisturbed(request: Any) -> dict[int, list[int]]:
        """What the request says when it has the worker to itself: the plain twin."""
        what = (request.prompt_ids, request.n, request.seed, request.sampling, request.keep_tokens)
        if what not in alone:
            engine = kit.engine(model, prefix_reuse=False, max_batched_tokens=512)
            changes = {"n": request.n, "seed": request.seed, "sampling": request.sampling}
            free = kit.request(
                "solo", list(request.prompt_ids), max_tokens=40, keep_tokens=request.keep_tokens, **changes
            )
            engine.apply(Submit(free))
            alone[what] = kit.collect(kit.run(engine))["solo"].tokens
        return alone[what]

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(ops=OPS)
    def run(ops: list[Op]) -> None:
        clock = kit.clock()
        engine = kit.engine(
            model, rows=11, clock=clock, spill_bytes=spill_bytes, max_sequences=5, max_batched_tokens=21, max_waiting=4
        )
        requests: dict[str, Any] = {}
        events: list[Any] = []
        refusals: set[ErrorCode] = set()
        for name, a, b in ops:
            if name == "submit":
                request = request_of(kit, clock, len(requests), a, b)
                try:
                    engine.apply(Submit(request))
                    requests[request.key.request_id] = request
                except EngineError as error:
                    refusals.add(error.code)
            elif name == "step":
                for _ in range(1 + a % 6):
                    engine.step()
            elif name == "tick":
                clock.now += a % 9
            elif requests:
                request = list(requests.values())[a % len(requests)]
                engine.apply(Cancel(request.key) if name == "cancel" else Credit(request.key, b % 30))
            events += engine.drain_events()
            assert engine.integrity() == ()
        assert refusals <= {ErrorCode.RESOURCE_EXHAUSTED, ErrorCode.NEVER_FITS, ErrorCode.INVALID_ARGUMENT}
        for request in requests.values():
            engine.apply(Credit(request.key, 10_000))
        events += kit.run(engine)
        assert engine.integrity(idle=True) == ()
        outcomes = kit.collect(events)
        assert outcomes.keys() == requests.keys()
        for key, outcome in outcomes.items():
            request = requests[key]
            assert outcome.finished.keys() == set(range(request.n))
            assert outcome.offsets_ok
            for choice, end in outcome.finished.items():
                shown = outcome.tokens.get(choice, [])
                assert shown == undisturbed(request)[choice][: len(shown)]
                assert end.completion_tokens == len(shown)
                assert end.reason is not FinishReason.ERROR
                if end.reason is FinishReason.LENGTH:
                    assert len(shown) == request.max_tokens
            counts = outcome.usage.counts
            if any(end.reason in kit.done for end in outcome.finished.values()):
                assert counts.cached + counts.computed == outcome.usage.prompt_tokens

    run()
