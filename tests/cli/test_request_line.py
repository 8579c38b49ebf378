"""Lines of a file of requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.request_line import LineError, parse_line
from headrace.v1 import inference_pb2


def parse(entry: object, folder: Path = Path()) -> inference_pb2.GenerateRequest:
    return parse_line(json.dumps(entry), folder)[1]


def test_every_form_and_field() -> None:
    request = parse({"text": "a", "temperature": 0.5, "n": 2, "seed": 2**64 - 1, "stop": ["x"], "max_tokens": 3,
                     "logit_bias": {"7": -1.5}})  # fmt: skip
    assert request.prompt.text.text == "a"
    assert request.sampling.temperature == 0.5
    assert (request.sampling.n, request.sampling.seed) == (2, 2**64 - 1)
    assert [(bias.token_id, bias.bias) for bias in request.sampling.logit_bias] == [(7, -1.5)]
    assert (list(request.stop.stop), request.stop.max_tokens) == (["x"], 3)
    assert not request.sampling.HasField("top_p")
    assert list(parse({"token_ids": [1, 2]}).prompt.tokens.token_ids) == [1, 2]
    assert parse_line('{"id": "q", "text": ""}', Path())[0] == "q"


def test_a_chat_with_an_image_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"bytes")
    content = [{"image": "a.png"}, {"text": "what?"}]
    chat = parse({"chat": [{"role": "system", "content": "be"}, {"role": "user", "content": content}]}, tmp_path).prompt
    first, second = chat.chat.messages
    assert (first.role, first.content[0].text) == (inference_pb2.CHAT_ROLE_SYSTEM, "be")
    assert (second.content[0].image.data, second.content[1].text) == (b"bytes", "what?")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("x", "one JSON object"),
        ({"text": "a", "token_ids": [1]}, "exactly one of"),
        ({}, "exactly one of"),
        ({"text": "a", "temprature": 1}, "unknown key 'temprature'"),
        ({"text": "a", "n": -1}, "does not fit"),
        ({"text": "a", "seed": 2**64}, "does not fit"),
        ({"text": "a", "stop": 3}, "does not fit"),
        ({"text": "a", "logit_bias": [1]}, "does not fit"),
        ({"text": 3}, "does not fit"),
        ({"text": "a", "id": [1]}, "id must be"),
        ({"chat": [{"role": "cook", "content": "x"}]}, "a turn of chat"),
        ({"chat": [{"role": "user", "content": [{"text": "a", "image": "b"}]}]}, "content is"),
        ({"chat": [], "images": ["a.png"]}, "stand in its content"),
        ({"text": "a", "images": ["nowhere.png"]}, "image nowhere.png: No such file"),
        ({"text": "a", "images": [7]}, "an image is a path"),
    ],
)
def test_what_is_no_request_says_why(entry: object, message: str) -> None:
    with pytest.raises(LineError, match=message):
        parse(entry, Path("/nonexistent") if isinstance(entry, dict) and "images" in entry else Path())


def test_broken_json() -> None:
    with pytest.raises(LineError, match="no JSON"):
        parse_line("{", Path())
