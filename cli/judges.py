"""Who judges answers: an OpenAI-compatible HTTP API, or a router of Headrace."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

from headrace.cli.ask import Message, chat_prompt
from headrace.cli.askers import PATIENCE_S, Reply, RouterAsker
from headrace.cli.bounded import Bounded
from headrace.cli.client import RouterClient
from headrace.cli.client_tls import client_tls
from headrace.cli.exits import CliError
from headrace.cli.failures import cli_error
from headrace.services.runtime.errors import (
    HeadraceError,
    Internal,
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from headrace.v1 import common_pb2, inference_pb2

Settle = Callable[[int, str | HeadraceError], None]
Ask = Callable[[Sequence[str], Settle], None]
"""Puts (prompts) to the judge and settles each with its text. Raises HeadraceError when nobody answers."""
_RETRY_S: Final = 1.0
_LARGEST_BYTES: Final = 4 << 20
"""Of a response; more is no verdict."""


@dataclass(frozen=True)
class Judge:
    """The flags that name one."""

    where: str
    """A URL that ends in /v1, or HOST:PORT of a router."""
    model: str | None
    api_key: str | None = field(default=None, repr=False)
    max_tokens: int = 4096
    concurrency: int = 16
    timeout_s: float = 600.0

    @property
    def is_url(self) -> bool:
        return self.where.startswith(("http://", "https://"))

    @property
    def name(self) -> str:
        """Under which its verdicts are stored."""
        return self.model or self.where


@contextmanager
def open_judge(judge: Judge) -> Iterator[Ask]:
    """A judge to ask. Errors inside become CliError."""
    try:
        if judge.is_url:
            if judge.model is None:
                raise CliError("--judge URL needs --judge-model: the API asks for a name")
            yield _Api(judge).ask
        else:
            with RouterClient(judge.where, api_key=judge.api_key, tls=client_tls(judge.where)) as client:
                yield _router(judge, client)
    except HeadraceError as error:
        raise cli_error(error, judge.where) from error


def _router(judge: Judge, client: RouterClient) -> Ask:
    asker = RouterAsker(client, concurrency=judge.concurrency, timeout_s=judge.timeout_s)

    def ask(prompts: Sequence[str], settle: Settle) -> None:
        requests = [
            inference_pb2.GenerateRequest(
                model=judge.model or "",
                prompt=chat_prompt([Message("user", prompt)]),
                sampling=common_pb2.SamplingParams(temperature=0.0),
                stop=common_pb2.StopParams(max_tokens=judge.max_tokens),
            )
            for prompt in prompts
        ]

        def on_reply(index: int, outcome: Reply | HeadraceError) -> None:
            settle(index, outcome if isinstance(outcome, HeadraceError) else outcome.choices[0].text)

        asker.ask(requests, on_reply)

    return ask


class _Api:
    """Chat completions of a URL, a connection for each; `cancel` ends those under way."""

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._url = urlsplit(judge.where)
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def ask(self, prompts: Sequence[str], settle: Settle) -> None:
        Bounded(
            lambda index: self._call(prompts[index]), settle, self._cancel, self._judge.concurrency, PATIENCE_S
        ).run(len(prompts))

    def _cancel(self) -> None:
        with self._lock:
            for connection in self._open:
                if connection.sock is not None:
                    with suppress(OSError):  # it has ended by itself
                        connection.sock.shutdown(socket.SHUT_RDWR)

    def _call(self, prompt: str) -> str:
        body = {
            "model": self._judge.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "max_tokens": self._judge.max_tokens,
        }
        headers = {"content-type": "application/json"}
        if self._judge.api_key:
            headers["authorization"] = f"Bearer {self._judge.api_key}"
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._judge.timeout_s)
        with self._lock:
            self._open.add(connection)
        try:
            path = f"{self._url.path.rstrip('/')}/chat/completions"
            connection.request("POST", path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            return _text(response.status, response.getheader("retry-after"), response.read(_LARGEST_BYTES))
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"the judge does not answer: {error}") from error
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _text(status: int, retry_after: str | None, data: bytes) -> str:
    """The judge's words in a response. Raises HeadraceError."""
    shown = data[:200].decode(errors="replace")
    wait = float(retry_after) if retry_after is not None and retry_after.isdecimal() else _RETRY_S
    if status == 429:
        raise ResourceExhausted(f"the judge is overloaded: {shown}", retry_after_s=wait)
    if status in (502, 503, 504):
        raise Unavailable(f"the judge cannot answer now ({status}): {shown}", retry_after_s=wait)
    if status in (401, 403):
        raise Unauthenticated(f"the judge refuses the key ({status}): {shown}")
    if status != 200:
        raise InvalidArgument(f"the judge answers {status}: {shown}")
    try:
        document: Any = json.loads(data)
        content = document["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError) as error:
        raise Internal(f"the judge's response is no chat completion: {shown}") from error
    return content if isinstance(content, str) else ""
