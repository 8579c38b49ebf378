"""Requests from plain values, and their events gathered into one result: for the CLI, the demo, benches and tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from headrace.v1 import common_pb2, inference_pb2

ChatRole = Literal["system", "user", "assistant"]
_ROLES: Final = {
    "system": inference_pb2.CHAT_ROLE_SYSTEM,
    "user": inference_pb2.CHAT_ROLE_USER,
    "assistant": inference_pb2.CHAT_ROLE_ASSISTANT,
    "tool": inference_pb2.CHAT_ROLE_TOOL,
}


@dataclass(frozen=True)
class Message:
    """One turn of a chat; images stand before the text."""

    role: str
    text: str
    images: tuple[bytes, ...] = ()


def text_prompt(text: str, images: Sequence[bytes] = ()) -> inference_pb2.Prompt:
    """A raw prompt; special tokens spelt in it count, and each image needs its placeholder."""
    pictures = [inference_pb2.Image(data=data) for data in images]
    return inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=text, images=pictures))


def token_prompt(token_ids: Sequence[int], images: Sequence[bytes] = ()) -> inference_pb2.Prompt:
    """Token ids as they are."""
    pictures = [inference_pb2.Image(data=data) for data in images]
    return inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=token_ids, images=pictures))


def chat_prompt(messages: Iterable[Message], *, thinking: bool | None = None) -> inference_pb2.Prompt:
    """A conversation for the model's template. Raises ValueError for a role that no chat has."""
    turns = []
    for message in messages:
        if message.role not in _ROLES:
            raise ValueError(f"role {message.role!r} is none of {', '.join(_ROLES)}")
        parts = [inference_pb2.ContentPart(image=inference_pb2.Image(data=data)) for data in message.images]
        if message.text or not parts:
            parts.append(inference_pb2.ContentPart(text=message.text))
        turns.append(inference_pb2.ChatMessage(role=_ROLES[message.role], content=parts))
    return inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=turns, thinking=thinking))


@dataclass
class Choice:
    """One choice as far as it has come."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[common_pb2.PositionLogprobs] = field(default_factory=list)
    finished: common_pb2.FinishedEvent | None = None

    @property
    def reason(self) -> str:
        """`stop`, `length`, …; empty while it runs."""
        if self.finished is None:
            return ""
        return common_pb2.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_").lower()

    @property
    def stop(self) -> str | int | None:
        """The stop string or token that ended it."""
        matched = None if self.finished is None else self.finished.WhichOneof("matched")
        return None if matched is None or self.finished is None else getattr(self.finished, matched)


@dataclass
class Answer:
    """The events of one request, gathered."""

    choices: dict[int, Choice] = field(default_factory=dict)
    started: inference_pb2.StartedEvent | None = None
    usage: common_pb2.Usage | None = None
    report: inference_pb2.RequestReport | None = None
    first_token_s: float | None = None
    """From the call to the first token, on this client's clock."""
    total_s: float = 0.0
    """From the call to the last event."""
    _began: float = field(default_factory=time.monotonic, repr=False)

    def take(self, event: inference_pb2.GenerateResponse) -> None:
        """Add one event."""
        self.total_s = time.monotonic() - self._began
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "tokens":
                if self.first_token_s is None:
                    self.first_token_s = self.total_s
                choice = self.choice(event.tokens.choice)
                choice.token_ids += event.tokens.token_ids
                choice.text += event.tokens.text
                choice.logprobs += event.tokens.logprobs
            case "finished":
                self.choice(event.finished.choice).finished = event.finished
            case "usage":
                self.usage = event.usage
            case "report":
                self.report = event.report

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    @property
    def text(self) -> str:
        """Of choice 0."""
        return self.choice(0).text

    @property
    def token_ids(self) -> list[int]:
        """Of choice 0."""
        return self.choice(0).token_ids

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens after the first over the time after the first, all choices together; None for a single token."""
        tokens = sum(len(choice.token_ids) for choice in self.choices.values()) - len(self.choices)
        if self.first_token_s is None or tokens < 1 or self.total_s <= self.first_token_s:
            return None
        return tokens / (self.total_s - self.first_token_s)


def gather(
    events: Iterable[inference_pb2.GenerateResponse],
    on_text: Callable[[int, str], None] = lambda _choice, _text: None,
) -> Answer:
    """Read a request to its end; `on_text` gets (choice, new text) as it comes."""
    answer = Answer()
    for event in events:
        answer.take(event)
        if event.WhichOneof("event") == "tokens" and event.tokens.text:
            on_text(event.tokens.choice, event.tokens.text)
    return answer
