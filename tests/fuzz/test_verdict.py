"""Each kind of violation is caught: what the fuzzer says was well, was."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest

from headrace.services.worker.signing import Signer
from headrace.v1 import common_pb2, control_pb2, inference_pb2, prefill_pb2
from tests.fuzz.campaign import plan, resign
from tests.fuzz.canary import Canaries, tokens_of
from tests.fuzz.methods import all_methods
from tests.fuzz.send import Outcome
from tests.fuzz.verdict import Tally, distinct, grown, uncounted, verdict, violation_of
from tests.fuzz.watch import Life, Watch, bad_lines, held


def outcome(status: str = "OK", code: str = "", details: str = "", **fields: Any) -> Outcome:
    fields = {"method": "DecodeService/Reserve", "port": "decode-0", "parses": True, **fields}
    return Outcome(status=status, code=f"ERROR_CODE_{code}" if code else "", details=details, **fields)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (outcome(), ""),
        (outcome("LEFT"), ""),
        (outcome("INVALID_ARGUMENT", "INVALID_ARGUMENT"), ""),
        (outcome("DATA_LOSS", "CORRUPT"), ""),
        (outcome("NOT_FOUND", method="Health/Check"), ""),
        (outcome("HANGS"), "no answer"),
        (outcome("INTERNAL", "INTERNAL"), "a defect"),
        (outcome("UNKNOWN"), "a defect"),
        (outcome("UNKNOWN", method="Health/List"), "a defect"),
        (outcome("RESOURCE_EXHAUSTED"), "without its type"),
        (outcome("UNAVAILABLE", details="Connection reset by peer"), "without its type"),
    ],
)
def test_answers_that_no_message_may_get(seen: Outcome, why: str) -> None:
    """L13: typed errors only."""
    assert why in violation_of(seen)
    assert bool(violation_of(seen)) is bool(why)


@pytest.mark.parametrize(
    ("seen", "reached"),
    [
        (outcome(), True),
        (outcome("INVALID_ARGUMENT", "INVALID_ARGUMENT"), True),
        (outcome("NOT_FOUND", method="Health/Check"), True),
        (outcome("LEFT", method="EventService/Watch"), True),
        (outcome("LEFT", method="PrefillService/Run"), True),
        (outcome("LEFT", method="ControlService/Status"), False),
        (outcome("INVALID_ARGUMENT", "INVALID_ARGUMENT", parses=False), False),
        (outcome("PERMISSION_DENIED", "PERMISSION_DENIED", "a certificate of role client does not allow this"), False),
        (outcome("UNAVAILABLE", "UNAVAILABLE", "this replica is draining; send it elsewhere"), False),
        (outcome("RESOURCE_EXHAUSTED"), False),
        (outcome("UNAVAILABLE"), False),
    ],
)
def test_what_counts_as_reached(seen: Outcome, reached: bool) -> None:
    """Neither the door's answers, nor the parser's, nor gRPC's own."""
    assert seen.reached is reached


def test_the_tally_counts_by_method_and_names_those_that_few_messages_reach() -> None:
    tally = Tally()
    for index in range(30):
        tally.add(outcome(parses=index % 3 == 0))
    tally.add(outcome("UNKNOWN"))
    assert (tally.sent, tally.parsed, tally.reached, len(tally.violations)) == (31, 11, 10, 1)
    assert tally.unmet() == ["decode-0 DecodeService/Reserve: 10 of 31 messages reached a handler"]
    assert tally.rows()["decode-0 DecodeService/Reserve"]["statuses"] == {"OK": 30, "UNKNOWN": 1}


def test_the_servers_own_count_stands() -> None:
    """The front door is the router's; services of gRPC have names of their own."""
    tally = Tally()
    for port in ("front", "router-0"):
        tally.add(outcome(port=port, method="Health/Check"))
    name = "grpc.health.v1.Health/Check"
    before, enough = {"router-0": Counter({name: 5})}, {"router-0": Counter({name: 7})}
    assert uncounted(tally, before, enough) == []
    assert uncounted(tally, before, {"router-0": Counter({name: 6})}) == [
        "router-0 counted 1 messages of Health/Check, the fuzzer 2"
    ]


def test_a_run_is_well_only_if_everything_is() -> None:
    assert verdict([], [], 10, 5)
    assert verdict([], [], 0, 0, attacks=3)
    assert not verdict([], [], 10, 4)
    assert not verdict([], [], 0, 0)
    assert not verdict(["a leak"], [], 10, 10)
    assert not verdict([], [{}], 10, 10)


def test_logs_that_tell_of_a_defect() -> None:
    fine = json.dumps({"level": "warning", "event": "a sender left"})
    error = json.dumps({"level": "error", "event": "call failed"})
    caught = json.dumps({"level": "info", "event": "x", "exception": "Traceback"})
    lines = [fine, error, caught, "Fatal Python error: Segmentation fault", "hello"]
    assert bad_lines(lines) == [error, caught, "Fatal Python error: Segmentation fault"]


def test_memory_that_grows() -> None:
    level, steep = {"rss_warm_mib": 400.0, "rss_end_mib": 430.0}, {"rss_warm_mib": 400.0, "rss_end_mib": 800.0}
    assert grown({"a": level, "b": steep}) == ["b grew from 400.0 to 800.0 MiB"]


def test_pools_that_are_not_given_back() -> None:
    """L11."""
    idle = control_pb2.StatusResponse(ready=True)
    assert held(idle) == ""
    for change in (
        control_pb2.StatusResponse(ready=True, requests=control_pb2.Conservation(accepted=1, live=1)),
        control_pb2.StatusResponse(ready=True, requests=control_pb2.Conservation(accepted=2, finished=1)),
        control_pb2.StatusResponse(ready=True, pools=[control_pb2.PoolStatus(name="rows", quarantined=1)]),
        control_pb2.StatusResponse(ready=True, integrity=control_pb2.Integrity(problems=["a block is lost"])),
        control_pb2.StatusResponse(ready=False, unready_reason="draining"),
    ):
        assert held(change)


async def test_processes_that_are_not_what_they_were() -> None:
    cluster: Any = type("Cluster", (), {"dead": lambda self: []})()
    world: Any = type("World", (), {"cluster": cluster})()
    watch = Watch(world)

    def life(pid: int, incarnation: str) -> Life:
        return Life(pid, incarnation, rss=1, fds=1, cpu_s=0.0, shm=0)

    now = {"decode-0": life(1, "a")}

    async def lives() -> dict[str, Life]:
        return dict(now)

    watch._lives = lives  # type: ignore[method-assign]
    await watch.begin()
    watch.first = {"decode-0": life(1, "a")}
    assert await watch.same() == []
    now["decode-0"] = life(2, "b")
    assert len(await watch.same()) == 2
    watch.first = {"decode-0": life(2, "b")}
    now["decode-0"] = life(2, "c")
    watch.began_a_new_life("decode-0", Counter())
    assert await watch.same() == []


def response(**event: Any) -> bytes:
    return inference_pb2.GenerateResponse(**event).SerializeToString()


def answered(*tokens: int, status: str = "OK", code: str = "") -> Outcome:
    events = [
        response(tokens=common_pb2.TokensEvent(offset=index, token_ids=[token])) for index, token in enumerate(tokens)
    ]
    ended = response(finished=common_pb2.FinishedEvent(reason=common_pb2.FINISH_REASON_LENGTH))
    return outcome(status, code, responses=[*events, ended])


def test_wrong_tokens_are_a_violation_and_typed_refusals_beside_others_are_not() -> None:
    """L5: the neighbour's answer stays what it is."""
    unused: Any = None
    canaries = Canaries(unused, known={"greedy": {0: (4, 5)}})
    canaries._judge("greedy", answered(4, 5), alone=True)
    canaries._judge("greedy", answered(status="UNAVAILABLE", code="UNAVAILABLE"), alone=False)
    assert (canaries.exact, canaries.violations, canaries.refused) == (1, [], {"ERROR_CODE_UNAVAILABLE": 1})
    canaries._judge("greedy", answered(4, 6), alone=False)
    canaries._judge("greedy", answered(status="UNAVAILABLE", code="UNAVAILABLE"), alone=True)
    canaries._judge("greedy", answered(status="UNKNOWN"), alone=False)
    assert [one.split()[0] for one in canaries.violations] == ["wrong", "canary", "canary"]


def test_a_stream_that_repeats_or_never_ends_has_no_answer() -> None:
    """L28."""
    assert tokens_of(answered(4, 5)) == {0: (4, 5)}
    repeated = answered(4, 5)
    repeated.responses.insert(1, repeated.responses[0])
    unended = answered(4, 5)
    unended.responses.pop()
    twice = answered(4, 5)
    twice.responses.append(twice.responses[-1])
    assert tokens_of(repeated) is tokens_of(unended) is tokens_of(twice) is None


def test_a_plan_has_every_method_at_every_port_and_all_messages() -> None:
    ports = {"router-0": list(all_methods()), "front": list(all_methods())[:3]}
    lots = plan(random.Random(1), 1000, ports)
    assert sum(number for _, _, number in lots) == 1000
    assert {(port, method.short) for port, method, _ in lots} == {
        (port, method.short) for port, methods in ports.items() for method in methods
    }


def test_handles_anywhere_in_a_message_are_signed_anew() -> None:
    signer = Signer(("k" * 32,))
    run = prefill_pb2.RunRequest()
    run.target.landing.transfer_id = "t"
    run.embeddings.add(lease_id="l")
    assert resign(signer, run) == 2
    signer.check_handle(run.target.landing, "it", fresh=True)
    signer.check_embedding(run.embeddings[0], "it")


def test_reports_show_a_few_of_each_kind() -> None:
    rows = [{"why": "no answer", "method": "A", "port": "p"}] * 5 + [{"why": "x", "method": "A", "port": "p"}]
    assert len(distinct(rows)) == 4
