"""The engine thread and its inbox: the only place where a thread meets the engine.

RPC code calls `call` from any thread and gets a Future; events leave through the outbox, once per turn of the loop.
Waiting is on the inbox, at most until the next deadline or lease end, so that expiry has a clock of its own (L9).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from headrace.engine.core import Engine
from headrace.engine.errors import EngineError, ErrorCode, overloaded
from headrace.engine.messages import Command, Outbox, Prefill, ReplyT, Reserve, Submit
from headrace.engine.tier_messages import BeginLoad

logger = logging.getLogger(__name__)

MAX_INBOX = 4096
"""Admissions that may stand in the inbox; commands that free something are always taken (L12)."""


class EngineWorker:
    """Runs one engine on one thread."""

    def __init__(self, engine: Engine, outbox: Outbox, *, threads: int = 0, name: str = "engine") -> None:
        """`outbox` is called on the engine thread with all events of a turn, and must not block. `threads` are torch's
        intra-op threads; 0 leaves torch's choice."""
        self._engine = engine
        self._outbox = outbox
        self._threads = threads
        self._inbox: deque[tuple[Command[Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Liveness: the thread runs and no fault of the engine itself has stopped it."""
        return self._thread.is_alive() and self._broken is None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End what lives (terminal events are emitted), then the thread. Idempotent."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def call(self, command: Command[ReplyT]) -> Future[ReplyT]:
        """Hand a command to the engine thread; thread-safe. The Future fails with EngineError only."""
        future: Future[ReplyT] = Future()
        with self._wake:
            refusal = self._refusal(command)
            if refusal is None:
                self._inbox.append((command, future))
                self._wake.notify()
        if refusal is not None:
            future.set_exception(refusal)
        return future

    def _refusal(self, command: Command[Any]) -> EngineError | None:
        if self._stopping or self._broken is not None:
            return EngineError(ErrorCode.UNAVAILABLE, "this worker stops; send the request elsewhere")
        if len(self._inbox) >= MAX_INBOX and isinstance(command, Submit | Prefill | Reserve | BeginLoad):
            return overloaded("the worker's inbox is full", self._engine.settings.retry_after_s)
        return None

    # --- the engine thread -------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        device = self._engine.pool.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        try:
            with torch.inference_mode():
                self._loop()
        except BaseException as error:
            self._broken = error
            logger.critical("the engine thread of %s died", self._thread.name, exc_info=error)
            raise
        finally:
            self._refuse_rest()

    def _loop(self) -> None:
        busy = False
        while True:
            commands, stopping = self._take(wait=not busy)
            for command, future in commands:
                self._answer(command, future)
            if stopping:
                self._engine.close()
                self._flush()
                return
            try:
                busy = self._engine.step()
            except Exception as error:
                logger.exception("a step failed outside any one request; every live request ends")
                self._engine.close(f"the engine failed ({type(error).__name__}: {error})")
                busy = False
            self._flush()

    def _take(self, *, wait: bool) -> tuple[list[tuple[Command[Any], Future[Any]]], bool]:
        with self._wake:
            if wait and not self._inbox and not self._stopping:
                expiry = self._engine.next_expiry()
                self._wake.wait(None if expiry is None else max(expiry - self._engine.clock(), 0.0))
            commands = list(self._inbox)
            self._inbox.clear()
            return commands, self._stopping

    def _answer(self, command: Command[Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            reply = self._engine.apply(command)
        except EngineError as error:
            future.set_exception(error)
        except Exception as error:
            logger.exception("%s failed", type(command).__name__)
            future.set_exception(EngineError(ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
        else:
            future.set_result(reply)

    def _flush(self) -> None:
        events = self._engine.drain_events()
        if not events:
            return
        try:
            self._outbox(events)
        except Exception:
            logger.exception("the outbox refused %d events; they are lost", len(events))

    def _refuse_rest(self) -> None:
        with self._wake:
            self._stopping = True
            rest = list(self._inbox)
            self._inbox.clear()
        for _, future in rest:
            if future.set_running_or_notify_cancel():
                future.set_exception(EngineError(ErrorCode.UNAVAILABLE, "this worker stopped; send it elsewhere"))


def monotonic() -> float:
    """The clock of a real worker; tests inject their own."""
    return time.monotonic()


Clock = Callable[[], float]
