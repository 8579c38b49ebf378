"""Messages as tables and as JSON; errors as lines and exit statuses; events as one answer."""

from __future__ import annotations

import math

import grpc
import grpc.aio
import pytest
from rich.console import Console

from headrace.cli.ask import Answer, Message, chat_prompt, gather
from headrace.cli.client import typed
from headrace.cli.exits import CliError, Exit
from headrace.cli.failures import cli_error, exit_of, told
from headrace.cli.generate import GenerateOptions, build_request, document, printable
from headrace.cli.tables import as_json, human_bytes, load_text, report_table, request_row, request_table
from headrace.services.runtime import errors
from headrace.v1 import common_pb2, control_pb2, inference_pb2, registry_pb2

EVENTS = [
    inference_pb2.GenerateResponse(started=inference_pb2.StartedEvent(request_id="r", seed=2**63, prompt_tokens=4)),
    inference_pb2.GenerateResponse(tokens=common_pb2.TokensEvent(choice=1, token_ids=[5], text="x")),
    inference_pb2.GenerateResponse(tokens=common_pb2.TokensEvent(choice=0, token_ids=[1, 2], text="ab")),
    inference_pb2.GenerateResponse(tokens=common_pb2.TokensEvent(choice=0, offset=2, token_ids=[3], text="")),
    inference_pb2.GenerateResponse(
        finished=common_pb2.FinishedEvent(choice=0, reason=common_pb2.FINISH_REASON_STOP, stop_token_id=3)
    ),
    inference_pb2.GenerateResponse(finished=common_pb2.FinishedEvent(choice=1, reason=common_pb2.FINISH_REASON_LENGTH)),
    inference_pb2.GenerateResponse(
        usage=common_pb2.Usage(prompt_tokens=4, cached_tokens=1, computed_tokens=3, completion_tokens=4)
    ),
    inference_pb2.GenerateResponse(
        report=inference_pb2.RequestReport(
            replicas=[
                inference_pb2.ReplicaReport(
                    role=common_pb2.ROLE_DECODE, peer=common_pb2.PeerId(replica_id="decode-0"), host="h", attempt=1
                )
            ],
            times=inference_pb2.RequestTimes(first_token_us=1500, prefill_us=900),
            bytes=inference_pb2.BytesMoved(kv_bytes=1536),
            transport="cma",
            seed=2**63,
        )
    ),
]


def test_events_become_an_answer() -> None:
    heard: list[tuple[int, str]] = []
    answer = gather(EVENTS, lambda choice, text: heard.append((choice, text)))
    assert heard == [(1, "x"), (0, "ab")]
    assert (answer.text, answer.token_ids) == ("ab", [1, 2, 3])
    assert (answer.choice(0).reason, answer.choice(0).stop) == ("stop", 3)
    assert (answer.choice(1).reason, answer.choice(1).stop) == ("length", None)
    told_json = document(answer)
    assert (told_json["seed"], told_json["request_id"]) == (2**63, "r")
    assert [choice["index"] for choice in told_json["choices"]] == [0, 1]
    assert told_json["usage"]["cached_tokens"] == 1
    assert told_json["report"]["bytes"]["kv_bytes"] == 1536


def test_tables_fit_a_small_terminal() -> None:
    answer = gather(EVENTS)
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(request_table([request_row("a question", answer)]))
    console.print(report_table(answer))
    text = console.export_text()
    for shown in ("a question", "decode-0", "2 ms", "1/3", "1.5 KiB", "cma", "decode-0 on h, attempt 1"):
        assert shown in text, text
    assert "…" not in text


def test_json_of_messages() -> None:
    """Counts are numbers, bytes are hexadecimal, absent fields are null, enums are names."""
    plain = as_json(
        control_pb2.StatusResponse(
            replica=registry_pb2.Replica(
                role=common_pb2.ROLE_DECODE, model=common_pb2.ModelIdentity(layout_fingerprint=b"\x01\xff")
            ),
            requests=control_pb2.Conservation(accepted=2**40),
        )
    )
    assert plain["requests"]["accepted"] == 2**40
    assert plain["replica"]["role"] == "ROLE_DECODE"
    assert plain["replica"]["model"]["layout_fingerprint"] == "01ff"
    assert plain["replica"]["capacity"] is None
    assert plain["members"] == []
    assert as_json(common_pb2.SamplingParams(seed=0))["seed"] == 0
    assert as_json(common_pb2.SamplingParams())["seed"] is None


def test_sizes_and_loads() -> None:
    assert [human_bytes(size) for size in (0, 1023, 1536, 5 << 30)] == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
    assert load_text(registry_pb2.Replica()) == "–"
    loads = [common_pb2.LoadReport(running_requests=2, queued_requests=1, rows_total=100, rows_used=25)]
    assert load_text(registry_pb2.Replica(loads=loads)) == "2 running, 1 waiting, KV 25 % used, 0 % cached"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.InvalidArgument("no", field="sampling.n"), Exit.USAGE),
        (errors.Unimplemented("constraint"), Exit.USAGE),
        (errors.NotFound("no"), Exit.USAGE),
        (errors.NeverFits("no"), Exit.USAGE),
        (errors.Unavailable("no"), Exit.UNREACHABLE),
        (errors.ResourceExhausted("no", retry_after_s=0.5), Exit.OVERLOADED),
        (errors.DeadlineExceeded("no"), Exit.DEADLINE),
        (errors.Cancelled("no"), Exit.INTERRUPTED),
        (errors.Internal("no"), Exit.FAILED),
        (errors.Corrupt("no"), Exit.FAILED),
    ],
)
def test_exit_statuses(error: errors.HeadraceError, status: Exit) -> None:
    """L12: overload and unavailability are told apart."""
    assert exit_of(error) is status
    with pytest.raises(CliError) as caught, told("h:1"):
        raise error
    assert caught.value.code is status
    assert "\n" not in str(caught.value)


def test_a_port_that_serves_something_else_is_no_server_that_is_gone() -> None:
    """The user named it, and waiting does not help; between processes it is another life of the peer."""
    failure = grpc.aio.AioRpcError(
        grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata(), "Method not found!"
    )
    assert exit_of(typed(failure)) is Exit.USAGE


def test_errors_say_where_and_when() -> None:
    error = errors.ResourceExhausted("the queue is full", retry_after_s=0.5, replica_id="decode-1")
    assert str(cli_error(error)) == "the queue is full [decode-1] (repeat after 0.5 s)"
    assert "nobody answers at h:1" in str(cli_error(errors.Unavailable("connection refused"), "h:1"))


def test_flags_become_a_request() -> None:
    request = build_request(GenerateOptions(prompt="hi", seed=0, stop=("x",), timeout_s=1.5))
    assert request.prompt.text.text == "hi"
    assert request.sampling.HasField("seed")
    assert not request.sampling.HasField("temperature")
    assert request.timeout_ms == 1500
    assert (request.traffic_class, request.priority, list(request.snapshot_at)) == (0, 0, [])
    for timeout in (math.inf, math.nan, 1e300):
        with pytest.raises(CliError, match="--timeout") as raised:
            build_request(GenerateOptions(prompt="hi", timeout_s=timeout))
        assert raised.value.code is Exit.USAGE
    kept = build_request(GenerateOptions(prompt="hi", traffic_class="agent", priority=2, snapshot_at=(256, 128)))
    assert kept.traffic_class == common_pb2.TRAFFIC_CLASS_AGENT
    assert (kept.priority, list(kept.snapshot_at)) == (2, [256, 128])
    with pytest.raises(CliError, match="--traffic-class 'bulk': choose from agent, chat, batch"):
        build_request(GenerateOptions(prompt="hi", traffic_class="bulk"))
    chat = build_request(GenerateOptions(prompt="hi", system="be brief"))
    assert [message.role for message in chat.prompt.chat.messages] == [
        inference_pb2.CHAT_ROLE_SYSTEM,
        inference_pb2.CHAT_ROLE_USER,
    ]
    with pytest.raises(CliError, match="out of its field's range"):
        build_request(GenerateOptions(prompt="hi", n=-1))
    with pytest.raises(CliError, match="--thinking is for chats"):
        build_request(GenerateOptions(prompt="hi", thinking=True))


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="'cook'"):
        chat_prompt([Message("cook", "x")])


def test_answers_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2J\tb\n\x07\x9bé") == "a�[2J\tb\n��é"


def test_no_tokens_no_rate() -> None:
    assert Answer().tokens_per_s is None
