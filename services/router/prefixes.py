"""What is known of a prompt's prefix, for the balancers: the index of workers' tiers and the view of the store.

All of it is a hint (L3): prefill looks again and says what it used. A hint that was wrong corrects the index and is
never an error.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from headrace.router.index.base import HolderTier, PrefixMatch, no_match
from headrace.router.index.index import BlockIndex
from headrace.router.index.store_view import StoreQuestion, StoreView
from headrace.router.native.build import NativeRouter
from headrace.router.ranks import RankNumbers
from headrace.router.request import RoutingRequest
from headrace.router.topology import RankId
from headrace.services.router.cache_feed import CacheFeed, Expectation
from headrace.services.router.settings import IndexSection
from headrace.services.router.store_lookup import StoreLookup
from headrace.services.router.workers import Worker
from headrace.services.runtime.clock import Clock
from headrace.services.runtime.registry.base import Role
from headrace.v1 import common_pb2, prefill_pb2

FRESH_S: Final = 0.01
"""A match is used again for so long: a request that need not wait is matched once, for its place in the queue and for
its ranks."""
MOST_SOURCES: Final = 4
"""Peers named in a hint: as many as a worker asks at once."""


class Prefixes:
    """Belongs to the event loop's thread."""

    def __init__(
        self,
        settings: IndexSection,
        numbers: RankNumbers,
        clock: Clock,
        lookup: StoreLookup | None,
        native: NativeRouter | None = None,
    ) -> None:
        self._numbers = numbers
        self._block_tokens = 1
        """The workers', as soon as there is one."""
        self._clock = clock
        self.lookup = lookup
        self._deadline_s = settings.deadline_ms / 1000
        self._most_keys = settings.lookup_keys
        self.index = BlockIndex(int(settings.budget_bytes), native)
        self.view = StoreView(settings.store_view_entries, settings.present_seconds, settings.absent_seconds)
        self.feed = CacheFeed(self.index, self.view, clock)
        self._asking: set[asyncio.Task[None]] = set()
        self._last: tuple[RoutingRequest, PrefixMatch, float] | None = None
        """The last match, and when it was made."""
        self.store_misses: Counter[str] = Counter()
        """Prompts whose prefix in the store was not known in time, by cause."""
        self.hints: Counter[str] = Counter()
        """What prefill found of what its own events promised: `right`, or less: `evicted` meanwhile, or `wrong`."""

    def local(self, request: RoutingRequest) -> PrefixMatch:
        """What is known without asking anybody."""
        last, now = self._last, self._clock.monotonic()
        if last is not None and last[0] is request and now - last[2] < FRESH_S:
            return last[1]
        found = self._match(request, now)
        self._last = request, found, now
        return found

    def _match(self, request: RoutingRequest, now: float) -> PrefixMatch:
        count = self._count(request)
        if count == 0:
            return no_match(self._numbers.size)
        self.index.ranks = max(self.index.ranks, self._numbers.size)
        store = self.view.prefix(request.blocks, request.snapshots, count, now)
        return self.index.match(request.blocks, request.snapshots, count, store)

    async def match(self, request: RoutingRequest, deadline: float) -> PrefixMatch:
        """The same after the store's index was asked, where that is needed and answers in its few milliseconds."""
        now = self._clock.monotonic()
        count = self._count(request)
        if self.lookup is not None and count:
            question = self.view.question(request.blocks, request.snapshots, count, now, self._most_keys)
            if question:
                await self._ask(request, question, max(0.0, min(self._deadline_s, deadline - now)))
                self._last = None
        return self.local(request)

    async def _ask(self, request: RoutingRequest, question: StoreQuestion, wait_s: float) -> None:
        """An answer that comes late is learned all the same: the prompt's next turn wants it."""
        assert self.lookup is not None
        task = asyncio.create_task(self._learn(self.lookup, request, question), name="store-lookup")
        self._asking.add(task)
        task.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait({task}, timeout=wait_s)
        if not done:
            self.store_misses["late"] += 1

    async def _learn(self, lookup: StoreLookup, request: RoutingRequest, question: StoreQuestion) -> None:
        blocks, snapshots = request.blocks, request.snapshots
        keys = [blocks[position] for position in question.blocks]
        if snapshots is not None:
            keys += [snapshots[number - 1] for number in question.snapshots]
        present = await lookup.present(keys)
        if present is None:
            self.store_misses["unknown"] += 1
            return
        self.view.answered(blocks, snapshots, question, present, self._clock.monotonic())

    def _count(self, request: RoutingRequest) -> int:
        """Blocks of the prompt that a cached prefix may have."""
        if not request.usable_tokens or not request.blocks:
            return 0
        return min(len(request.blocks), request.usable_tokens // self._block_tokens)

    # --- workers ---------------------------------------------------------------------------------------------------

    def joined(self, worker: Worker) -> None:
        """Follow its events, if it keeps prefixes."""
        if worker.replica.role in (Role.PREFILL, Role.DECODE):
            self._block_tokens = worker.replica.capacity.block_tokens or self._block_tokens
            numbers = [number for rank in worker.ranks if (number := self._numbers.get(rank)) is not None]
            self.feed.join(worker.peer, worker.channel, numbers)

    def left(self, worker: Worker) -> None:
        """What it held is forgotten, before its ranks' numbers are given to others (L14)."""
        self.feed.leave(worker.replica.incarnation)
        self._last = None

    def problems(self) -> tuple[str, ...]:
        """L11: without workers the index is empty."""
        if self.feed.sources == 0 and self.index.entries:
            return (f"no worker is known, but the prefix index holds {self.index.entries} entries",)
        return ()

    # --- hints to prefill ------------------------------------------------------------------------------------------

    def sources(
        self, request: RoutingRequest, match: PrefixMatch, rank: RankId
    ) -> tuple[prefill_pb2.PrefixSource, ...]:
        """Whose host tiers hold blocks of the prompt beyond what the rank has itself: its loader asks them first."""
        number = self._numbers.get(rank)
        if number is None or number >= len(match.local):
            return ()
        begin, end = int(match.local[number]), match.reach_of(number)
        if end <= begin:
            return ()
        sources = []
        for holder, first, blocks in self.index.peers(request.blocks[:end], begin, number, MOST_SOURCES):
            peer = self._numbers.rank(holder)
            wire = common_pb2.PeerId(replica_id=peer.replica_id, incarnation=peer.incarnation)
            sources.append(prefill_pb2.PrefixSource(peer=wire, first_block=first, blocks=blocks))
        return tuple(sources)

    def expect(self, request: RoutingRequest, match: PrefixMatch, rank: RankId) -> Expectation | None:
        """What the rank's device pool should have of the prompt, from now until prefill has looked."""
        number = self._numbers.get(rank)
        if number is None or number >= len(match.device) or not match.device[number]:
            return None
        blocks = int(match.device[number])
        keys = [request.blocks[blocks - 1]]
        if request.snapshots is not None:
            keys.append(request.snapshots[blocks - 1])
        if not all(self.index.holders(key).get(number, 0) & HolderTier.DEVICE for key in keys):
            return None  # gone since the match
        return self.feed.expect(rank.incarnation, blocks, keys)

    def used(self, expectation: Expectation | None, report: prefill_pb2.PrefillReport) -> None:
        """Prefill says what it found. Less than its own events promised, without a word of a removal since, means that
        the index is wrong about that worker, which is then asked for everything: a wrong hint corrects the index.
        (The report alone cannot: by now the worker has computed what was missing, and holds it.)"""
        if expectation is None:
            return
        self.feed.settle(expectation)
        found = report.cached_tokens // self._block_tokens
        if found >= expectation.blocks:
            self.hints["right"] += 1
        elif expectation.withdrawn:
            self.hints["evicted"] += 1
        else:
            self.hints["wrong"] += 1
            self.feed.suspect(expectation.incarnation)

    def drop(self, expectation: Expectation | None) -> None:
        """The attempt is over, whether prefill has looked or not."""
        if expectation is not None:
            self.feed.settle(expectation)

    async def close(self) -> None:
        """End every task."""
        await self.feed.close()
        for task in tuple(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        if self.lookup is not None:
            await self.lookup.close()
