"""Prefill in one process, decode in another, each on its device: rows through NIXL, control over pipes.

The parent plays the router: reserve at decode, run at prefill, carry the commit, collect tokens. Everything else is the
serving code: the role engines on their threads, the transfer engine, the landing region and its verified copies.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from bench.gpu.compare import TokenCheck, compare_tokens
from bench.gpu.handover_worker import (
    Answer,
    Ask,
    Computed,
    Connected,
    Failed,
    HandOverDone,
    Ready,
    Report,
    Reports,
    Run,
    Stop,
    Told,
    WorkerSpec,
    work,
)
from bench.gpu.serving import serve
from bench.gpu.tiny import mixed_requests, prompt_of, request
from headrace.engine.loading import ModelSettings, load_model
from headrace.engine.messages import Command, Commit, Committed, Event, Finished, Reserve, Reserved, Tokens, Usage
from headrace.engine.offline import ChoiceResult, Completion
from headrace.engine.request import EngineRequest
from headrace.engine.settings import EngineSettings

_M = TypeVar("_M")
PATIENCE_S = 120.0
"""Silence of a child after which the check fails."""
CHUNK = 64


@dataclass
class HandOver:
    """One pair of processes that served the requests, and how that compares with one process."""

    devices: tuple[str, str]
    one_by_one: TokenCheck
    """Each request alone."""
    together: TokenCheck
    """All in flight at once."""
    repeated: TokenCheck
    """Prompts that begin like ones that both sides know: prefill hits its cache, decode is sent the rest only."""
    transports: list[str]
    bytes_sent: int
    pushes: int
    rows_held: int
    """Prompt blocks that decode had already, so that they were not sent."""
    seconds: float
    """All rounds; loading is not in it."""
    problems: list[str] = field(default_factory=list)
    """Broken invariants at idle in either process (L11)."""

    @property
    def ok(self) -> bool:
        same = self.one_by_one.ok and self.together.ok and self.repeated.ok
        return same and not self.problems and self.bytes_sent > 0 and self.rows_held > 0


def check_handover(
    folder: Path, devices: tuple[str, str], *, longest: int, tokens: int, block: int = 32, exact: bool = False
) -> HandOver:
    """``exact``: in batch_invariant mode, which the CPU has (L5)."""
    lengths = (1, block - 1, block, CHUNK + 5, longest)
    alone = [request(f"n{length}", prompt_of(length, 30 + length), tokens) for length in lengths]
    together = mixed_requests(longest, tokens)
    known = prompt_of(longest, 1)
    repeated = [request("known", known, tokens), request("known and more", prompt_of(longest + 40, 9, known), tokens)]
    settings = ModelSettings(device=devices[0], block_tokens=block, batch_invariant=exact, native_kernels=not exact)
    model = load_model(folder, settings)
    options = EngineSettings(max_batched_tokens=CHUNK + 32, max_sequences=32, replay="compact")
    expected, _ = serve(model, devices[0], [*alone, *together, *repeated], options)
    with _pair(folder, devices, settings, options, rows=4 * (len(together) + 2) * (longest // block + 3)) as pair:
        begun = time.perf_counter()
        first = [completion for one in alone for completion in pair.serve([one])]
        second = pair.serve(together)
        third = pair.serve(repeated)
        seconds = time.perf_counter() - begun
        reports = pair.reports()
    return HandOver(
        devices=devices,
        one_by_one=compare_tokens(expected[: len(alone)], first),
        together=compare_tokens(expected[len(alone) : -len(repeated)], second),
        repeated=compare_tokens(expected[-len(repeated) :], third),
        transports=sorted({transport for report in reports for transport in report.transports}),
        bytes_sent=sum(report.bytes_sent for report in reports),
        pushes=sum(report.pushes for report in reports),
        rows_held=pair.rows_held,
        seconds=round(seconds, 3),
        problems=[problem for report in reports for problem in report.problems],
    )


class Pair:
    """The two children as the router sees them."""

    def __init__(self, prefill: Connection, decode: Connection) -> None:
        self._prefill = prefill
        self._decode = decode
        self._asked = 0
        self.rows_held = 0
        self._completions: dict[str, Completion] = {}
        self._live: set[str] = set()

    def connect(self) -> None:
        """Wait for both to have loaded; prefill shakes hands with decode."""
        ready = [self._expect(conn, Ready) for conn in (self._prefill, self._decode)]
        self._prefill.send(ready[1])
        self._expect(self._prefill, Connected)

    def serve(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        """All requests at once, each through reservation, prefill, hand-over and decode."""
        for one in requests:
            name = one.key.request_id
            self._completions[name] = Completion(one, [ChoiceResult() for _ in range(one.n)])
            self._live.add(name)
            reserved = self._ask(Reserve(one))
            assert isinstance(reserved, Reserved)
            self.rows_held += reserved.held_blocks
            self._prefill.send(Run(one, reserved.held_blocks, reserved.handle))
        while self._live:
            self._turn()
        return [self._completions[one.key.request_id] for one in requests]

    def reports(self) -> list[Report]:
        """Counts and integrity of both, once they are idle."""
        found = []
        for conn in (self._prefill, self._decode):
            conn.send(Reports())
            found.append(self._expect(conn, Report))
        return found

    def _ask(self, command: Command[Any]) -> object:
        """A command for decode's engine; events that come first are taken."""
        self._asked += 1
        self._decode.send(Ask(self._asked, command))
        while True:
            message = self._receive(self._decode)
            if isinstance(message, Answer) and message.number == self._asked:
                return message.value
            self._take(message)

    def _turn(self) -> None:
        ready = wait([self._prefill, self._decode], PATIENCE_S)
        if not ready:
            raise TimeoutError(f"both children are silent while {sorted(self._live)} live")
        for conn in ready:
            assert isinstance(conn, Connection)
            self._take(self._receive(conn))

    def _take(self, message: object) -> None:
        match message:
            case Told(events):
                for event in events:
                    self._note(event)
            case Computed(commit):
                self._commit(commit)
            case Failed(text):
                raise RuntimeError(f"a child failed: {text}")
            case _:
                raise RuntimeError(f"unexpected message {message}")

    def _commit(self, commit: Commit) -> None:
        answer = self._ask(commit)
        if answer != Committed():
            raise RuntimeError(f"{commit.key}: rows arrived damaged: {answer}")
        self._prefill.send(HandOverDone(commit.key))

    def _note(self, event: Event) -> None:
        completion = self._completions[event.key.request_id]
        match event:
            case Tokens():
                choice = completion.choices[event.choice]
                choice.token_ids += event.token_ids
                choice.logprobs += event.logprobs
            case Finished():
                choice = completion.choices[event.choice]
                choice.reason, choice.error = event.reason, event.error
            case Usage():
                completion.counts = event.counts
                self._live.discard(event.key.request_id)

    def _expect(self, conn: Connection, kind: type[_M]) -> _M:
        message = self._receive(conn)
        if isinstance(message, Failed):
            raise RuntimeError(f"a child failed: {message.text}")
        if not isinstance(message, kind):
            raise RuntimeError(f"{kind.__name__} expected, not {message}")
        return message

    @staticmethod
    def _receive(conn: Connection) -> object:
        if not conn.poll(PATIENCE_S):
            raise TimeoutError("a child does not answer; see its output above")
        try:
            return conn.recv()
        except EOFError:
            raise RuntimeError("a child died; see its output above") from None


@contextmanager
def _pair(
    folder: Path, devices: tuple[str, str], settings: ModelSettings, options: EngineSettings, rows: int
) -> Iterator[Pair]:
    context = multiprocessing.get_context("spawn")
    ours, children = [], []
    for role, device in zip(("prefill", "decode"), devices, strict=True):
        mine, theirs = context.Pipe()
        spec = WorkerSpec(role, device, folder, settings, options, rows)
        child = context.Process(target=work, args=(theirs, spec), name=role)
        child.start()
        theirs.close()
        ours.append(mine)
        children.append(child)
    try:
        pair = Pair(*ours)
        pair.connect()
        yield pair
        for conn in ours:
            conn.send(Stop())
    finally:
        for conn in ours:
            conn.close()
        for child in children:
            child.join(30)
            if child.is_alive():
                child.kill()
                child.join()
