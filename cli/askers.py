"""Who answers many requests: a running cluster, or an engine in this process. Both give the same replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from headrace.cli.ask import Answer, Choice
from headrace.cli.bounded import Bounded
from headrace.cli.client import RouterClient
from headrace.services.runtime.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    Internal,
    Unavailable,
    from_proto,
)
from headrace.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from headrace.cli.offline_engine import OfflineRunner, Result

PATIENCE_S: Final = 60.0
"""A request that finds no room, or nobody, is repeated for so long."""


@dataclass(frozen=True)
class Identity:
    """Which model answers."""

    name: str
    fingerprint: str
    """SHA-256 of weights, config and numeric mode, in hex; empty where nobody tells it."""


@dataclass(frozen=True)
class ReplyChoice:
    """One finished choice."""

    text: str
    token_ids: tuple[int, ...]
    reason: str
    """`stop` or `length`."""


@dataclass(frozen=True)
class Reply:
    """A request's whole answer."""

    request_id: str
    model: Identity
    seed: int
    choices: tuple[ReplyChoice, ...]
    usage: common_pb2.Usage
    events: tuple[inference_pb2.GenerateResponse, ...] = ()
    """Of which it is made."""


Settle = Callable[[int, Reply | HeadraceError], None]
"""Called once for each request, as soon as its end is known, one at a time."""


class Asker(Protocol):
    """Answers requests."""

    @property
    def model(self) -> inference_pb2.Model:
        """The model, as a cluster describes it. Raises HeadraceError."""

    @property
    def identity(self) -> Identity:
        """Which model. Raises HeadraceError."""

    def ask(self, requests: Sequence[inference_pb2.GenerateRequest], settle: Settle) -> None:
        """Answer all. A refused request is settled with its error and spoils no other (L13). Raises HeadraceError when
        nobody answers any more; what is settled stays so."""


class RouterAsker:
    """A cluster, `concurrency` requests at a time."""

    def __init__(self, client: RouterClient, *, concurrency: int, timeout_s: float) -> None:
        """`timeout_s` is the deadline of each request. The client is closed by an interrupt."""
        self._client = client
        self._concurrency = concurrency
        self._timeout_s = timeout_s

    @property
    def model(self) -> inference_pb2.Model:
        models = self._client.models().models
        if not models:
            raise Unavailable("the cluster serves no model yet; try again when its workers are ready")
        return models[0]

    @property
    def identity(self) -> Identity:
        return _identity(self.model.identity)

    def ask(self, requests: Sequence[inference_pb2.GenerateRequest], settle: Settle) -> None:
        def call(index: int) -> Reply:
            return reply_of(tuple(self._client.generate(requests[index], self._timeout_s)))

        Bounded(call, settle, self._client.close, self._concurrency, PATIENCE_S).run(len(requests))


class EngineAsker:
    """The model of this process, all requests together."""

    def __init__(self, runner: OfflineRunner) -> None:
        self._runner = runner

    @property
    def model(self) -> inference_pb2.Model:
        return self._runner.model

    @property
    def identity(self) -> Identity:
        return _identity(self.model.identity)

    def ask(self, requests: Sequence[inference_pb2.GenerateRequest], settle: Settle) -> None:
        def on_result(index: int, result: Result) -> None:
            settle(index, result.error or reply_of(self._runner.events(result)))

        self._runner.run(requests, on_result)


def reply_of(events: tuple[inference_pb2.GenerateResponse, ...]) -> Reply:
    """A stream's events as one reply. Raises the error that ended a choice."""
    answer = Answer()
    for event in events:
        answer.take(event)
    choices = tuple(_choice(choice) for _, choice in sorted(answer.choices.items()))
    if answer.started is None or not choices or answer.usage is None:
        raise Internal("the stream ended before the answer did; this is a defect of the server")
    return Reply(
        request_id=answer.started.request_id,
        model=_identity(answer.started.model),
        seed=answer.started.seed,
        choices=choices,
        usage=answer.usage,
        events=events,
    )


def _choice(choice: Choice) -> ReplyChoice:
    if choice.finished is not None and choice.reason == "error":
        raise from_proto(choice.finished.error)
    if choice.reason == "deadline":
        raise DeadlineExceeded("the deadline passed before the answer was whole; give it more time or fewer tokens")
    if choice.reason not in ("stop", "length"):
        raise Cancelled(f"the request ended with {choice.reason or 'nothing'}; repeat it")
    return ReplyChoice(choice.text, tuple(choice.token_ids), choice.reason)


def _identity(model: common_pb2.ModelIdentity) -> Identity:
    return Identity(model.name, model.model_fingerprint.hex())
