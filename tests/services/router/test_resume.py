"""Which name a request has in the cluster, and which number its attempts get (L16, L25)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.services.router.adoption import Found
from headrace.services.router.attempt_numbers import FROM_S, AttemptNumbers
from headrace.services.router.generate import Generation
from headrace.services.router.prepare import Prepared
from headrace.services.router.settings import RouterSettings
from headrace.services.router.tenants import Tenant, TenantKeys
from headrace.services.runtime.clock import ManualClock, SystemClock
from headrace.services.runtime.errors import InvalidArgument
from headrace.services.runtime.ids import part_id, scoped_id, whole_id
from headrace.services.worker.spec_wire import content_digest
from headrace.v1 import common_pb2

SECRET = b"0123456789abcdef"
ACME, OTHER = (Tenant(name, TenantKeys(SECRET, name)) for name in ("acme", "other"))


def prepared(name: str = "report", resume: tuple[tuple[int, int], ...] = (), *, named: bool = True) -> Prepared:
    return Prepared(
        request_id=name,
        name=name,
        token_ids=(1,),
        images=(),
        sampling=common_pb2.SamplingParams(),
        stop=common_pb2.StopParams(),
        traffic_class=common_pb2.TRAFFIC_CLASS_CHAT,
        priority=0,
        timeout_s=1.0,
        snapshot_at=(),
        report=False,
        resume=resume,
        named=named,
    )


def generation() -> Any:
    nothing: Any = SimpleNamespace()
    return Generation(RouterSettings(), *[nothing] * 10, SystemClock())


def test_a_name_is_its_tenants_own() -> None:
    """L25: another tenant may use it at the same time, and cannot learn that somebody does."""
    router = generation()
    mine = router._named(prepared(), ACME)
    assert mine.name == "report"
    router.live.enter(mine.request_id)
    theirs = router._named(prepared(), OTHER)
    assert theirs.request_id != mine.request_id
    with pytest.raises(InvalidArgument, match="is running"):
        router._named(prepared(), ACME)


def test_a_client_that_resumes_does_not_wait_for_its_lost_stream() -> None:
    """The stream may be live here still: its client's return is the first that this router hears of its loss."""
    router = generation()
    router.live.enter(router._named(prepared(), ACME).request_id)
    again = [router._named(prepared(resume=((0, 3),)), ACME).request_id for _ in range(2)]
    assert len({*again, *router.live}) == 3


def test_later_uses_of_a_name_have_higher_numbers() -> None:
    """L16: a router that knows nothing of earlier attempts gets a higher number, above all that decode remembers of the
    request; drawn names need none."""
    clock, router = ManualClock(5.0), generation()
    router._workers.numbers = AttemptNumbers(clock, lambda: FROM_S + 1000.0)
    assert router._attempt_before(prepared(named=False), Found()) == 0
    assert router._attempt_before(prepared(), Found()) == 10_000
    clock.advance(0.2)
    assert router._attempt_before(prepared(), Found()) == 10_002
    assert router._attempt_before(prepared(), Found(highest_attempt=77_000)) == 77_000


def test_parts_name_their_whole() -> None:
    whole = scoped_id("report", ACME.keys.tag)
    assert whole_id(part_id(whole, 2)) == whole_id(whole) == whole
    assert whole != scoped_id("report", OTHER.keys.tag)


def test_the_content_of_a_request_is_the_same_in_every_attempt() -> None:
    """L25: whoever does not send the same prompt, seed and limits as the same tenant finds nothing."""
    spec = common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r", attempt=1),
        token_ids=[1, 2, 3],
        sampling=common_pb2.SamplingParams(seed=5, n=1),
        stop=common_pb2.StopParams(max_tokens=9),
        choices=[common_pb2.ChoiceState(seed=5)],
        time_left_ms=1000,
        tenant_tag=ACME.keys.tag,
        router=common_pb2.PeerId(incarnation="a"),
    )
    digest = content_digest(spec)
    later = common_pb2.RequestSpec()
    later.CopyFrom(spec)
    later.id.attempt, later.time_left_ms, later.router.incarnation = 7, 5, "b"
    later.choices[0].received_tokens, later.priority, later.report = 3, 1, True
    assert content_digest(later) == digest
    for change in ("tenant", "seed", "prompt", "limit"):
        other = common_pb2.RequestSpec()
        other.CopyFrom(spec)
        if change == "tenant":
            other.tenant_tag = OTHER.keys.tag
        elif change == "seed":
            other.sampling.seed = 6
        elif change == "prompt":
            other.token_ids[1] = 7
        else:
            other.stop.max_tokens = 10
        assert content_digest(other) != digest, change
