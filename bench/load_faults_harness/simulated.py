"""The router's own objects (Fleet, Balance) over ranks of a simulated cluster; one of them is faulty for a while.

Arrivals are a Poisson process; prefill ranks compute one prompt after another; decode ranks step all that they have.
Everything is drawn from one seed and time is a number, so shares are exact and the same on every machine.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from headrace.router.fleet import Amount, Fleet
from headrace.router.index.base import no_match
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.request import RoutingRequest
from headrace.router.topology import Candidate, RankId, Role
from headrace.services.router.balance import Balance
from headrace.services.router.settings import BalanceSection
from headrace.v1 import common_pb2

FAULTS: Final = ("idle", "frozen", "absurd", "slow", "dead")
PREFILL_S = 0.4
"""Of one prompt on a healthy rank."""
STEP_S = 0.03
REPORT_S = 0.5
HEARTBEAT_S = 1.0
"""A dead rank is known to be so after two of them (L15)."""
SLOWDOWN = 4.0
BLOCK = 128


@dataclass(frozen=True)
class Phase:
    """One third of a run: before, during or after the fault."""

    requests: int
    faulty_share: float
    """Of the requests sent in this phase; fair would be 1 ÷ ranks."""
    healthy_largest_share: float
    healthy_ttft_p50_s: float
    healthy_ttft_p99_s: float
    lost: int
    """Attempts on a rank that was dead; each was sent again elsewhere."""


@dataclass(frozen=True)
class Run:
    """One fault at one role."""

    fault: str
    role: str
    ranks: int
    fair_share: float
    before: Phase
    during: Phase
    after: Phase
    unfinished: int
    """Requests that never ended: none may be."""
    left_in_flight: int
    """Work that the fleet still counts at the end: none may be (L11)."""


@dataclass
class _Rank:
    candidate: Candidate
    free_at: float = 0.0
    running: set[int] = field(default_factory=set)
    kv_tokens: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    step: int = 0
    told: Report | None = None
    alive: bool = True


@dataclass
class _Sent:
    arrived: float
    phase: int
    prompt: int
    prefill: _Rank
    decode: _Rank
    attempt: int = 1
    first: float | None = None

    def key(self, number: int) -> str:
        return f"{number}#{self.attempt}"


class Simulated:
    """One run."""

    def __init__(self, fault: str, role: Role, ranks: int, requests: int, seed: int, pace: float = 1.0) -> None:
        """`pace`: how many times longer everything takes; the router begins with priors for 1 and is not told."""
        self._prefill_s, self._step_s = pace * PREFILL_S, pace * STEP_S
        self._fault, self._role, self._ranks = fault, role, ranks
        self._chance = random.Random(seed)
        self._fleet = Fleet(RankNumbers())
        self._balance = Balance(self._fleet, BalanceSection())
        self._all = {
            each: [self._join(each, number) for number in range(ranks)] for each in (Role.PREFILL, Role.DECODE)
        }
        self._faulty = self._all[role][0]
        self._requests = requests
        # Four fifths of what the healthy prefill ranks can take alone, and decode with room to spare.
        self._rate = 0.8 * (ranks - 1) / self._prefill_s
        third = requests / 3 / self._rate
        self._from, self._until = third, 2 * third
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._sent: dict[int, _Sent] = {}
        self._ended: list[_Sent] = []
        self._shares = [Counter[str](), Counter[str](), Counter[str]()]
        self._lost = [0, 0, 0]

    def shares(self) -> tuple[dict[str, int], ...]:
        """Requests sent to each rank of the role, by phase, up to now."""
        return tuple(dict(phase) for phase in self._shares)

    def run(self) -> Run:
        at = 0.0
        for number in range(self._requests):
            at += self._chance.expovariate(self._rate)
            self._at(at, partial(self._arrive, number))
        for rank in (*self._all[Role.PREFILL], *self._all[Role.DECODE]):
            self._at(self._chance.random() * REPORT_S, partial(self._tell, rank))
        if self._fault == "dead":
            self._at(self._from, self._die)
            self._at(self._until, self._return)
        while self._events and (self._sent or self._events[0][0] <= at or len(self._ended) < self._requests):
            now, _, work = heapq.heappop(self._events)
            work(now)
            if now > at + 600:
                break
        return Run(
            fault=self._fault,
            role=self._role.value,
            ranks=self._ranks,
            fair_share=round(1 / self._ranks, 4),
            before=self._phase(0),
            during=self._phase(1),
            after=self._phase(2),
            unfinished=self._requests - len(self._ended),
            left_in_flight=sum(
                self._fleet.in_flight(rank.candidate.id) for ranks in self._all.values() for rank in ranks
            ),
        )

    def _at(self, when: float, work: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, work))

    def _join(self, role: Role, number: int, life: int = 0) -> _Rank:
        rank = RankId(f"{role.value}-{number}", f"{life:032x}")
        candidate = Candidate(rank, role, "local", f"host-{number}", 4096, 256, BLOCK, 1 << 17)
        self._fleet.put(rank.replica_id, rank.incarnation, (candidate,))
        return _Rank(candidate)

    def _arrive(self, number: int, now: float) -> None:
        phase = 0 if now < self._from else 1 if now < self._until else 2
        self._send(number, _Sent(now, phase, self._chance.randrange(400, 1600), self._faulty, self._faulty), now)

    def _send(self, number: int, sent: _Sent, now: float) -> None:
        """As services/router/attempt.py does it: order, reserve at the first decode that answers, run at prefill."""
        request = RoutingRequest(
            request_id=str(number),
            prompt_tokens=sent.prompt,
            max_tokens=64,
            choices=1,
            image_tokens=0,
            affinity_key=number.to_bytes(8, "little"),
            deadline=now + 600,
        )
        pair = next(self._balance.pairs.order(request, no_match(self._fleet.numbers.size), now))
        sent.prefill, sent.decode = self._rank(pair.prefill), self._rank(pair.decode)
        chosen = sent.prefill if self._role is Role.PREFILL else sent.decode
        self._shares[sent.phase][chosen.candidate.id.replica_id] += 1
        self._fleet.begin(pair.decode.id, sent.key(number), Amount(sent.prompt, requests=1), now)
        self._fleet.begin(pair.prefill.id, sent.key(number), pair.prediction.amount, now)
        self._balance.pairs.chosen(request, pair, now)
        self._sent[number] = sent
        if not (sent.prefill.alive and sent.decode.alive):
            self._lost[sent.phase] += 1
            self._at(now + 2 * HEARTBEAT_S, partial(self._again, number, sent.attempt))
            return
        rank = sent.prefill
        rank.waiting += 1
        rank.waiting_tokens += sent.prompt
        seconds = self._prefill_s * sent.prompt / 1000 * self._slowdown(rank, now)
        rank.free_at = max(rank.free_at, now) + seconds
        attempt = sent.attempt
        self._at(rank.free_at, partial(self._computed, number, attempt, seconds))

    def _rank(self, candidate: Candidate) -> _Rank:
        return next(rank for rank in self._all[candidate.role] if rank.candidate.id == candidate.id)

    def _computed(self, number: int, attempt: int, seconds: float, now: float) -> None:
        sent = self._sent.get(number)
        if sent is None or sent.attempt != attempt or not sent.prefill.alive:
            return
        rank = sent.prefill
        rank.waiting -= 1
        rank.waiting_tokens -= sent.prompt
        rank.step += 1
        self._fleet.end(rank.candidate.id, sent.key(number), now)
        load = common_pb2.LoadReport(
            step=rank.step, step_us=round(1e6 * seconds), step_requests=1, step_tokens=sent.prompt
        )
        self._balance.learn(rank.candidate.id, load, now)
        if not sent.decode.alive:
            self._again(number, attempt, now)
            return
        sent.first = now
        sent.decode.running.add(number)
        sent.decode.kv_tokens += sent.prompt
        length = 64 * self._step_s * (1 + len(sent.decode.running) / 64) * self._slowdown(sent.decode, now)
        self._at(now + length, partial(self._finished, number, attempt))

    def _finished(self, number: int, attempt: int, now: float) -> None:
        sent = self._sent.get(number)
        if sent is None or sent.attempt != attempt:
            return
        sent.decode.running.discard(number)
        sent.decode.kv_tokens -= sent.prompt
        sent.decode.step += 64
        self._fleet.end(sent.decode.candidate.id, sent.key(number))
        self._stepped(sent.decode, len(sent.decode.running) + 1, now)
        del self._sent[number]
        self._ended.append(sent)

    def _stepped(self, rank: _Rank, requests: int, now: float) -> None:
        """What decode tells with the tokens of its last step."""
        load = common_pb2.LoadReport(
            step=rank.step,
            step_us=round(1e6 * self._step_s * (1 + requests / 64) * self._slowdown(rank, now)),
            step_requests=requests,
            step_tokens=requests,
            step_context_tokens=rank.kv_tokens,
        )
        self._balance.learn(rank.candidate.id, load, now)

    def _again(self, number: int, attempt: int, now: float) -> None:
        """L15, L16: a new attempt elsewhere; everything of the old one is given back."""
        sent = self._sent.get(number)
        if sent is None or sent.attempt != attempt:
            return
        for rank in (sent.prefill, sent.decode):
            self._fleet.end(rank.candidate.id, sent.key(number), now)
        sent.attempt += 1
        sent.first = None
        self._send(number, sent, now)

    def _slowdown(self, rank: _Rank, now: float) -> float:
        slow = self._fault == "slow" and rank is self._faulty and self._from <= now < self._until
        return SLOWDOWN if slow else 1.0

    def _tell(self, rank: _Rank, now: float) -> None:
        if rank.alive:
            lies = rank is self._faulty and self._from <= now < self._until
            if rank.running:
                rank.step += 1
                self._stepped(rank, len(rank.running), now)
            self._fleet.report(rank.candidate.id, self._report(rank, lies), now)
            self._at(now + REPORT_S, partial(self._tell, rank))

    def _report(self, rank: _Rank, lies: bool) -> Report:
        honest = Report(
            queued_requests=rank.waiting,
            queued_tokens=rank.waiting_tokens,
            running_requests=len(rank.running),
            kv_tokens=rank.kv_tokens,
            slots_used=len(rank.running),
            step=rank.step,
            step_s=self._step_s,
        )
        if not lies:
            rank.told = honest
            return honest
        if self._fault == "frozen" and rank.told is not None:
            return rank.told
        if self._fault == "absurd":
            return Report(queued_requests=1 << 40, queued_tokens=1 << 60, kv_tokens=1 << 60, step=rank.step)
        if self._fault == "idle":
            return Report(step=rank.step)
        return honest

    def _die(self, now: float) -> None:
        """Its requests fail at once where a stream breaks; the fleet forgets it after two heartbeats."""
        faulty = self._faulty
        faulty.alive = False
        for number, sent in tuple(self._sent.items()):
            if faulty in (sent.prefill, sent.decode):
                self._lost[sent.phase] += 1
                attempt = sent.attempt
                self._at(now + 2 * HEARTBEAT_S, partial(self._again, number, attempt))
        self._at(now + 2 * HEARTBEAT_S, partial(self._forget, faulty))

    def _forget(self, rank: _Rank, now: float) -> None:
        self._fleet.forget(rank.candidate.id)

    def _return(self, now: float) -> None:
        """L14: a restarted replica is another member, and is readmitted."""
        number = int(self._faulty.candidate.id.replica_id.rpartition("-")[2])
        new = self._join(self._role, number, life=1)
        self._all[self._role][number] = new
        self._tell(new, now)

    def _phase(self, index: int) -> Phase:
        name = self._faulty.candidate.id.replica_id
        shares, total = self._shares[index], max(1, self._shares[index].total())
        healthy = [
            sent
            for sent in self._ended
            if sent.phase == index
            and sent.attempt == 1
            and name not in (sent.prefill.candidate.id.replica_id, sent.decode.candidate.id.replica_id)
        ]
        first = sorted(sent.first - sent.arrived for sent in healthy if sent.first is not None)
        return Phase(
            requests=total,
            faulty_share=round(shares[name] / total, 4),
            healthy_largest_share=round(max((n for each, n in shares.items() if each != name), default=0) / total, 4),
            healthy_ttft_p50_s=round(statistics.median(first), 3),
            healthy_ttft_p99_s=round(first[int(0.99 * (len(first) - 1))], 3),
            lost=self._lost[index],
        )
