"""A whole cluster in simulated time: the way of a request as services/router/generate.py goes it.

    arrive → order → [reserve at decode → prefill → hand over → decode]* → one end

A request that finds no room waits and asks again when something ended; an attempt that dies before its first token is
repeated elsewhere with a higher number (L16); every request has exactly one end (L28).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from headrace.router.balancers.base import Rejected
from headrace.router.simulate.cache import InfiniteCache, LruCache, SharedStore
from headrace.router.simulate.clock import Clock
from headrace.router.simulate.decode import DecodeReplica
from headrace.router.simulate.prefill import PrefillRank
from headrace.router.simulate.reporting import Account, Reporting
from headrace.router.simulate.request import Attempt, End, SimRequest, Stage
from headrace.router.simulate.routing import SimRouter
from headrace.router.simulate.spec import Cluster
from headrace.router.topology import Role

CAPACITY_POLL_S = 0.25
"""Longest pause before decode is asked again for room (services/router/generate.py)."""


Failed = frozenset[tuple[Role, int]]
"""Ranks at which an attempt of the request has failed."""


class Simulation:
    """Ranks, requests, and what passes between them. `clock` is its time."""

    def __init__(self, cluster: Cluster, router: SimRouter, block_tokens: int, seed: int = 0) -> None:
        self.cluster = cluster
        self.router = router
        self.clock = Clock()
        self.block_tokens = block_tokens
        self.store: SharedStore | None = None
        if cluster.store is not None:
            self.store = SharedStore(cluster.store.tokens_per_s, cluster.store.delay_s)
            router.use_store(self.store)
        self.prefill: list[PrefillRank] = []
        self.decode: list[DecodeReplica] = []
        self.decode_ranks: list[tuple[DecodeReplica, int]] = []
        """By rank number: its replica, and its number there."""
        self.live: dict[int, SimRequest] = {}
        """Accepted and without an end (L11)."""
        self.at_prefill: dict[int, set[Attempt]] = {}
        self.at_decode: dict[int, set[Attempt]] = {}
        """Attempts by prefill rank, and by decode replica from the reservation on."""
        self.ends = dict.fromkeys(End, 0)
        self.accepted = 0
        self.rejections = 0
        """Times that the balancer said: not now."""
        self.failed_attempts = 0
        self.on_end: Callable[[SimRequest], None] = lambda request: None
        self.on_prefilled: Callable[[Attempt], None] = lambda attempt: None
        self._waiting: deque[tuple[SimRequest, Failed]] = deque()
        self._poll_at: float | None = None
        self.reports = Reporting(self.clock, router, cluster.report_s, seed)
        for number in range(cluster.prefill_ranks):
            size = cluster.ranks_per_prefill_replica
            self.add_prefill(f"prefill-{number // size}", number % size)
        for number in range(cluster.decode_ranks // cluster.decode_group if cluster.decode_ranks else 0):
            self.add_decode(f"decode-{number}", cluster.decode_group)

    # --- members -----------------------------------------------------------------------------------------------

    def add_prefill(self, replica: str, index: int, life: int = 0) -> PrefillRank:
        """A new prefill rank, taking work from now on."""
        cluster, number = self.cluster, len(self.prefill)
        cache = InfiniteCache() if cluster.cache_blocks is None else LruCache(cluster.cache_blocks)
        rank = PrefillRank(
            number,
            self.clock,
            cluster.prefill,
            cluster.batch_tokens,
            self.block_tokens,
            cache,
            self.store,
            self._publish,
            self._prefilled,
        )
        self.prefill.append(rank)
        self.at_prefill[number] = set()
        self.router.join(Role.PREFILL, number, replica, life, index)
        self.reports.begin(Role.PREFILL, number, lambda: (rank.report(), rank.last_batch) if rank.alive else None)
        return rank

    def add_decode(self, replica: str, ranks: int, life: int = 0) -> DecodeReplica:
        """A new decode replica, taking work from now on."""
        cluster, number = self.cluster, len(self.decode)
        one = DecodeReplica(
            number,
            ranks,
            self.clock,
            cluster.decode,
            cluster.kv_tokens,
            cluster.slots,
            self._first_token,
            self._decoded,
        )
        self.decode.append(one)
        self.at_decode[number] = set()
        for index in range(ranks):
            rank = len(self.decode_ranks)
            self.decode_ranks.append((one, index))
            self.router.join(Role.DECODE, rank, replica, life, index)
            self.reports.begin(Role.DECODE, rank, partial(_decode_account, one, index))
        return one

    def _publish(self, rank: int, stored: list[bytes], removed: list[bytes]) -> None:
        self.clock.after(self.cluster.event_delay_s, self._told, rank, self.prefill[rank].life, stored, removed)

    def _told(self, rank: int, life: int, stored: list[bytes], removed: list[bytes]) -> None:
        if life == self.prefill[rank].life:
            self.router.cached(rank, stored, removed)

    # --- the way of a request ----------------------------------------------------------------------------------

    def arrive(self, request: SimRequest) -> None:
        """A request comes in now."""
        self.accepted += 1
        self.live[request.number] = request
        self._try_or_wait(request, frozenset())

    def _try(self, request: SimRequest, failed: Failed) -> bool:
        """One more attempt, at the best pair that takes it; ranks that failed an earlier attempt come last. False when
        nobody has room now."""
        prompt = request.prompt_tokens + request.delivered
        output = request.output_tokens - request.delivered
        try:
            pairs = self.router.order(request, prompt, output, self.clock.now)
            for prefill, decode in _failed_last(pairs, failed) if failed else pairs:
                attempt = Attempt(request, "", prefill, decode, prompt, output)
                if self._reserve(attempt):
                    self._send(attempt, failed)
                    return True
        except Rejected as rejected:
            self.rejections += 1
            if self._patient(request):
                self.clock.after(rejected.retry_after_s, self._try_or_wait, request, failed)
            return True
        return False

    def _try_or_wait(self, request: SimRequest, failed: Failed) -> None:
        if not self._try(request, failed) and self._patient(request):
            self._waiting.append((request, failed))
            self._poll(CAPACITY_POLL_S)

    def _reserve(self, attempt: Attempt) -> bool:
        if attempt.decode_rank < 0:
            return True
        replica, index = self.decode_ranks[attempt.decode_rank]
        return replica.reserve(attempt, index)

    def _send(self, attempt: Attempt, failed: Failed) -> None:
        request, now = attempt.request, self.clock.now
        request.waited_since = None
        request.attempts += 1
        attempt.key = f"{request.number}#{request.attempts}"
        if attempt.decode_rank >= 0:
            self.at_decode[self.decode_ranks[attempt.decode_rank][0].number].add(attempt)
        self.router.accepted(attempt, now)
        if attempt.prefill_rank < 0:
            self._land(attempt)
            return
        self.at_prefill[attempt.prefill_rank].add(attempt)
        rank = self.prefill[attempt.prefill_rank]
        if rank.alive:
            rank.submit(attempt)
        else:
            self.clock.after(0.0, self.lose, attempt, failed | {(Role.PREFILL, attempt.prefill_rank)})

    def _prefilled(self, attempt: Attempt) -> None:
        if attempt.stage is not Stage.PREFILL:
            return  # it was lost at decode meanwhile
        self.at_prefill[attempt.prefill_rank].discard(attempt)
        request = attempt.request
        request.hit_tokens, request.loaded_tokens = attempt.hit_tokens, attempt.loaded_tokens
        self.router.handed_over(attempt, self.clock.now)
        self.on_prefilled(attempt)
        if attempt.decode_rank < 0:
            self._first_token(attempt)
            self._over(attempt)
            self._end(request, End.FINISHED)
        else:
            attempt.stage = Stage.TRANSFER
            self.clock.after(self.cluster.transfer_s, self._land, attempt)

    def _land(self, attempt: Attempt) -> None:
        replica, index = self.decode_ranks[attempt.decode_rank]
        if attempt.stage is Stage.OVER or attempt.decode_life != replica.life:
            return  # decode died under the transfer, and the attempt is lost when that is seen
        replica.admit(attempt, index)

    def _first_token(self, attempt: Attempt) -> None:
        request = attempt.request
        if request.first_at is None:
            request.first_at = self.clock.now

    def _decoded(self, attempt: Attempt) -> None:
        request = attempt.request
        request.delivered = request.output_tokens
        self._over(attempt)
        self._end(request, End.FINISHED)

    def _over(self, attempt: Attempt) -> None:
        """Nothing of the attempt is left anywhere but in the engine that tells."""
        attempt.stage = Stage.OVER
        if attempt.decode_rank >= 0:
            self.at_decode[self.decode_ranks[attempt.decode_rank][0].number].discard(attempt)
        if attempt.prefill_rank >= 0:
            self.at_prefill[attempt.prefill_rank].discard(attempt)
        self.router.ended(attempt, self.clock.now)

    def lose(self, attempt: Attempt, failed: Failed) -> None:
        """An attempt has failed: give everything back, and try again elsewhere if its client has nothing yet."""
        if attempt.stage is Stage.OVER:
            return
        self.failed_attempts += 1
        request, stage = attempt.request, attempt.stage
        if attempt.prefill_rank >= 0 and stage is Stage.PREFILL:
            self.prefill[attempt.prefill_rank].cancel(attempt)
        if attempt.decode_rank >= 0 and stage is not Stage.DECODE:
            replica, index = self.decode_ranks[attempt.decode_rank]
            replica.release(attempt, index)
        self._over(attempt)
        started = request.first_at is not None
        if request.attempts >= self.cluster.max_attempts or (started and not self.cluster.continuation):
            self._end(request, End.FAILED)
            return
        if started:
            request.recomputed_tokens += request.prompt_tokens + request.delivered
        self._try_or_wait(request, failed)

    def _end(self, request: SimRequest, end: End) -> None:
        if request.end is not None:
            raise RuntimeError(
                f"request {request.number} ends as {end.value} and has ended as {request.end.value} (L28)"
            )
        request.end, request.ended_at = end, self.clock.now
        request.keys = ()
        del self.live[request.number]
        self.ends[end] += 1
        self.on_end(request)
        if self._waiting:
            self._poll(0.0)

    # --- waiting for room --------------------------------------------------------------------------------------

    def _patient(self, request: SimRequest) -> bool:
        """Whether the request waits on; else it ends here (L6, L12)."""
        now = self.clock.now
        if request.waited_since is None:
            request.waited_since = now
        if now - request.waited_since < self.cluster.patience_s:
            return True
        self._end(request, End.REFUSED)
        return False

    def _poll(self, seconds: float) -> None:
        """Ask again in that time, unless that happens earlier anyway."""
        due = self.clock.now + seconds
        if self._poll_at is None or due < self._poll_at:
            self._poll_at = due
            self.clock.at(due, self._ask_again, due)

    def _ask_again(self, due: float) -> None:
        """The longest waiting first, until one finds no room."""
        if due != self._poll_at:
            return
        self._poll_at = None
        while self._waiting:
            request, failed = self._waiting[0]
            if not self._try(request, failed) and self._patient(request):
                self._poll(CAPACITY_POLL_S)
                return
            self._waiting.popleft()

    @property
    def drained(self) -> bool:
        """Nothing is under way anywhere."""
        return not self.live and all(rank.idle for rank in self.prefill) and all(one.idle for one in self.decode)


def _failed_last(pairs: Iterable[tuple[int, int]], failed: Failed) -> list[tuple[int, int]]:
    return sorted(pairs, key=lambda pair: ((Role.PREFILL, pair[0]) in failed) + ((Role.DECODE, pair[1]) in failed))


def _decode_account(replica: DecodeReplica, index: int) -> Account:
    return (replica.report(index), None) if replica.alive else None
