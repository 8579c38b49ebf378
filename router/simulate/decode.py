"""One decode replica in simulated time. Its ranks step together: the one that takes longest sets the pace.

All running requests advance by one token per step, so the end of each is known in steps when it is admitted: ends are a
heap by step number, and a step costs the same however many run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from headrace.router.reports import Report
from headrace.router.simulate.clock import Clock
from headrace.router.simulate.models import DecodeModel
from headrace.router.simulate.request import Attempt, Stage

Ints = npt.NDArray[np.int64]


class DecodeReplica:
    """Generates tokens."""

    def __init__(
        self,
        number: int,
        ranks: int,
        clock: Clock,
        model: DecodeModel,
        kv_tokens: int,
        slots: int,
        admitted: Callable[[Attempt], None],
        done: Callable[[Attempt], None],
    ) -> None:
        """`kv_tokens`, `slots` (0: unlimited): what each rank holds. `admitted`: decode is the only emitter, and sends
        a request's first token when it admits it at a step boundary. `done`: its last token is sent."""
        self.number = number
        self.alive = True
        self.slowdown = 1.0
        self._clock = clock
        self._model = model
        self._kv_limit = kv_tokens
        self._slots = slots
        self._admitted = admitted
        self._done = done
        self.requests: Ints = np.zeros(ranks, np.int64)
        """Running, by rank."""
        self.kv: Ints = np.zeros(ranks, np.int64)
        """KV tokens of the running ones."""
        self.booked: Ints = np.zeros(ranks, np.int64)
        """KV tokens of reservations whose prompt is still under way."""
        self._reserved: Ints = np.zeros(ranks, np.int64)
        self._landed: list[tuple[Attempt, int]] = []
        """(attempt, rank): complete, to be admitted at the next step."""
        self._heap: list[tuple[int, int, Attempt, int]] = []
        """(last step, order, attempt, rank)."""
        self._order = 0
        self._stepping = False
        self.life = 0
        self.steps = 0
        self.last_step_s = 0.0
        self.stepped_at = 0.0
        """When the last step ended."""
        self.tokens = 0

    @property
    def ranks(self) -> int:
        return len(self.requests)

    @property
    def running(self) -> int:
        return int(self.requests.sum())

    @property
    def idle(self) -> bool:
        return not self._stepping and not self._landed and not self._reserved.any()

    def reserve(self, attempt: Attempt, rank: int) -> bool:
        """Promise room (L23); False when there is none."""
        if not self.alive:
            return False
        needs = attempt.prompt_tokens + 1
        if self.kv[rank] + self.booked[rank] + needs > self._kv_limit:
            return False
        if self._slots and self.requests[rank] + self._reserved[rank] >= self._slots:
            return False
        attempt.decode_life = self.life
        self.booked[rank] += needs
        self._reserved[rank] += 1
        return True

    def release(self, attempt: Attempt, rank: int) -> None:
        """Give a reservation back that was not used; one of an earlier life went with it."""
        if attempt.decode_life != self.life:
            return
        self.booked[rank] -= attempt.prompt_tokens + 1
        self._reserved[rank] -= 1

    def admit(self, attempt: Attempt, rank: int) -> None:
        """The prompt has landed, with its first token: it runs from the next step on."""
        attempt.stage = Stage.DECODE
        self._landed.append((attempt, rank))
        if not self._stepping:
            self._step()

    def report(self, rank: int) -> Report:
        """What a rank says of itself."""
        return Report(
            running_requests=int(self.requests[rank]),
            reserved_requests=int(self._reserved[rank]),
            kv_tokens=min(int(self.kv[rank] + self.booked[rank]), self._kv_limit),
            slots_used=int(self.requests[rank] + self._reserved[rank]),
            step=self.steps,
            step_s=self.last_step_s,
        )

    def progress(self, attempt: Attempt) -> int:
        """Tokens of this attempt so far; it has been handed over."""
        waiting = any(landed is attempt for landed, _ in self._landed)
        return 1 if waiting else attempt.output_tokens - (attempt.finish_step - self.steps)

    def die(self) -> list[Attempt]:
        """The process is gone. Returns the requests that ran or had landed; reservations are the router's to repeat."""
        lost = [attempt for *_, attempt, _ in self._heap] + [attempt for attempt, _ in self._landed]
        for attempt in lost:
            attempt.request.delivered += self.progress(attempt)
        self.life += 1
        self.alive = self._stepping = False
        self._heap, self._landed = [], []
        for column in (self.requests, self.kv, self.booked, self._reserved):
            column[:] = 0
        return lost

    def come_back(self) -> None:
        """A new life, with nothing in it."""
        self.alive, self.slowdown, self.steps, self.last_step_s = True, 1.0, 0, 0.0

    def _step(self) -> None:
        """Admit what has landed, then take as long as the fullest rank needs."""
        self._stepping = True
        while self._landed:
            landed, self._landed = self._landed, []
            for attempt, rank in landed:
                self.release(attempt, rank)
                self.requests[rank] += 1
                self.kv[rank] += attempt.prompt_tokens
                attempt.finish_step = self.steps + attempt.output_tokens - 1
                self._order += 1
                self._admitted(attempt)
                heapq.heappush(self._heap, (attempt.finish_step, self._order, attempt, rank))
            self._retire()  # those whose first token was their last; more may land meanwhile
        if not self._heap:
            self._stepping = False
            return
        seconds = self.slowdown * float(self._model.seconds(self.requests, self.kv).max())
        self.last_step_s = seconds
        self._clock.after(seconds, self._stepped, self.life)

    def _stepped(self, life: int) -> None:
        if life != self.life:
            return
        self.steps += 1
        self.stepped_at = self._clock.now
        self.tokens += self.running
        self.kv += self.requests
        self._retire()
        self._step()

    def _retire(self) -> None:
        while self._heap and self._heap[0][0] <= self.steps:
            _, _, attempt, rank = heapq.heappop(self._heap)
            self.requests[rank] -= 1
            self.kv[rank] -= attempt.prompt_tokens + attempt.output_tokens - 1
            self._done(attempt)
