"""The tables of fields: what the official clients can say is known, and what the page tells is what holds."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from openai.resources.responses import Responses

from headrace.services.gateway.errors import client_field
from headrace.services.gateway.fields import TABLES, check
from headrace.services.gateway.fields_page import put
from headrace.services.runtime.errors import InvalidArgument, Unimplemented

TRANSPORT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
CLIENTS: dict[str, Any] = {
    "chat": openai.resources.chat.Completions.create,
    "completions": openai.resources.Completions.create,
    "responses": Responses.create,
    "messages": anthropic.resources.messages.Messages.create,
    "count": anthropic.resources.messages.Messages.count_tokens,
}


@pytest.mark.parametrize("api", CLIENTS)
def test_the_official_clients_fields_are_known(api: str) -> None:
    assert set(inspect.signature(CLIENTS[api]).parameters) - TRANSPORT <= set(TABLES[api])


@pytest.mark.parametrize(
    ("api", "wire", "own"),
    [
        ("completions", "prompt.text.text", "prompt"),
        ("completions", "prompt.tokens.token_ids[2]", "prompt[2]"),
        ("chat", "stop.max_tokens", "max_tokens"),
        ("messages", "stop.stop", "stop_sequences"),
        ("responses", "constraint.json_schema", "text.format.json_schema"),
    ],
)
def test_fields_are_named_as_clients_write_them(api: str, wire: str, own: str) -> None:
    assert client_field(wire, api) == own


def test_what_is_said_of_a_bad_value_is_short() -> None:
    """L13: whatever a body holds."""
    long = {"model": "m", "messages": [1], "temperature": 0}
    with pytest.raises(InvalidArgument, match=r"\[0\] must satisfy type"):
        check("chat", long)
    with pytest.raises(Unimplemented, match="no audio"):
        check("chat", {"model": "m", "messages": [{}], "audio": {"voice": "x"}})
    with pytest.raises(InvalidArgument, match="is needed"):
        check("messages", {"model": "m", "messages": [{}]})


def test_the_page_has_the_tables() -> None:
    page = (Path(__file__).parents[3] / "docs" / "gateway.md").read_text(encoding="utf-8")
    assert put(page) == page, "run `python -m headrace.services.gateway.fields_page docs/gateway.md`"
