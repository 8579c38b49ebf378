"""What chats with the same system messages share, for two protocols and any questions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.engine.text.chat import ChatMessage, ChatProtocol, DeepseekV41Protocol, EncodedPrompt, JinjaProtocol
from headrace.engine.text.errors import TemplateError
from headrace.engine.text.system_prefix import SystemPrefix
from headrace.engine.text.tokenizer import Tokenizer
from tests.engine.text.test_text import CHATML

FILE = make_byte_tokenizer()
TOKENIZER = Tokenizer(FILE.serialized)
PROTOCOLS: dict[str, ChatProtocol] = {
    "template": JinjaProtocol(CHATML, TOKENIZER),
    "v4.1": DeepseekV41Protocol(TOKENIZER, image_token_id=FILE.image_token_id),
}


@pytest.mark.parametrize("name", PROTOCOLS)
@given(
    system=st.text(min_size=1, max_size=30), questions=st.lists(st.text(min_size=1, max_size=9), min_size=2, max_size=2)
)
def test_two_chats_share_at_least_what_is_told(name: str, system: str, questions: list[str]) -> None:
    """Every chat with these system messages begins with the told tokens, and they hold the whole system message."""
    protocol = PROTOCOLS[name]
    chats = [[ChatMessage("system", (system,)), ChatMessage("user", (question,))] for question in questions]
    ids = [protocol.encode(chat, thinking=False).token_ids for chat in chats]
    prefix = SystemPrefix(protocol)
    told = [prefix.tokens(chat, one, thinking=False) for chat, one in zip(chats, ids, strict=True)]
    shared = next((at for at, (a, b) in enumerate(zip(*ids, strict=False)) if a != b), min(map(len, ids)))
    assert min(told) <= shared or questions[0] == questions[1]
    assert TOKENIZER.decode(list(ids[0][: told[0]])).count(system) >= 1 or told[0] >= len(
        TOKENIZER.encode_plain(system)
    )


def test_nothing_is_told_without_a_system_message_or_a_question() -> None:
    protocol = PROTOCOLS["v4.1"]
    prefix = SystemPrefix(protocol)
    system, user = ChatMessage("system", ("Be brief.",)), ChatMessage("user", ("Hello",))
    for chat in ([user], [system], [user, system]):
        assert prefix.tokens(chat, protocol.encode([system, user], thinking=False).token_ids, thinking=False) == 0


class _Strict:
    """A template that takes one conversation only."""

    digest_input = b""

    def encode(self, messages: object, *, thinking: bool) -> EncodedPrompt:
        raise TemplateError("refused")


def test_a_template_that_refuses_the_probe_tells_nothing() -> None:
    protocol: ChatProtocol = _Strict()
    chat = [ChatMessage("system", ("s",)), ChatMessage("user", ("u",))]
    assert SystemPrefix(protocol).tokens(chat, [1, 2, 3], thinking=False) == 0


def test_probes_are_remembered_up_to_a_bound() -> None:
    calls: list[int] = []

    class Counting(_Strict):
        def encode(self, messages: object, *, thinking: bool) -> EncodedPrompt:
            calls.append(1)
            return EncodedPrompt((1, 2), 0)

    prefix = SystemPrefix(Counting(), remembered=2)
    for text in ("a", "a", "b", "a", "c", "b"):
        chat = [ChatMessage("system", (text,)), ChatMessage("user", ("u",))]
        assert prefix.tokens(chat, [1, 2, 3], thinking=False) == 2
    assert len(calls) == 4, "a, b, c, and b again after it had to go"
