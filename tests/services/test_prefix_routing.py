"""Real workers under a router's eyes: a second turn goes where the first one's prefix lies (L14, L21, L24)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.kvcache.keys import block_keys
from headrace.router.index.base import PrefixMatch
from headrace.router.request import RoutingRequest, usable_tokens
from headrace.services.router.prefixes import Prefixes
from headrace.services.router.settings import RouterSettings
from headrace.services.router.workers import Workers
from headrace.services.runtime.clock import SystemClock
from headrace.v1 import common_pb2
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess
from tests.services.driver import ROOT, attached, make_request, prompt_of
from tests.services.tiny import BLOCK

pytestmark = pytest.mark.asyncio(loop_scope="session")


class Router:
    """What a router process has of membership, balancers and prefixes, in the test's own process."""

    def __init__(self, settings: RouterSettings) -> None:
        self.clock = SystemClock()
        peer = common_pb2.PeerId(replica_id="router", incarnation="test")
        self.workers = Workers(settings, peer, self.clock)
        self.prefixes = Prefixes(settings.index, self.workers.fleet.numbers, self.clock, None)
        self.workers.on_joined, self.workers.on_left = self.prefixes.joined, self.prefixes.left

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for news of workers to come through, boundedly."""
        for _ in range(int(PATIENCE_S / 0.05)):
            if true():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never: {self.prefixes.index.entries} entries, {self.prefixes.feed.counts()}")

    def column(self, worker: WorkerProcess) -> int:
        """The worker's place in a match."""
        for known in self.workers.all():
            if known.replica.incarnation == worker.replica.incarnation:
                number = self.workers.fleet.numbers.get(known.ranks[0])
                assert number is not None
                return number
        raise AssertionError(f"{worker.replica.id} is not known")

    async def match(self, request: RoutingRequest) -> PrefixMatch:
        return await self.prefixes.match(request, self.clock.monotonic() + PATIENCE_S)

    async def best(self, request: RoutingRequest) -> str:
        """Incarnation of the prefill replica that the request would go to."""
        match = await self.match(request)
        pair = next(self.workers.balance.pairs.order(request, match, self.clock.monotonic()))
        return pair.prefill.id.incarnation


@asynccontextmanager
async def routing(cluster: Cluster, workers: int) -> AsyncIterator[Router]:
    """A router that has just started, when it knows all workers."""
    router = Router(RouterSettings.model_validate({"model": {"name": cluster.workers[0].replica.model_name}}))
    following = asyncio.create_task(router.workers.follow(cluster.registry))
    try:
        await router.until(lambda: router.prefixes.feed.sources == workers)
        yield router
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await router.prefixes.close()
        await router.workers.close()


def routed(name: str, tokens: tuple[int, ...]) -> RoutingRequest:
    """As place.py makes it, for a model without a window."""
    blocks = block_keys(ROOT, tokens, BLOCK)
    return RoutingRequest(
        name,
        len(tokens),
        4,
        1,
        0,
        name.encode(),  # so that ties fall differently for every chat
        SystemClock().monotonic() + PATIENCE_S,
        blocks=blocks,
        usable_tokens=usable_tokens(len(tokens), 0, 0, True),
    )


async def test_the_second_turn_goes_where_the_first_left_its_prefix(v3_folder: Path, tmp_path: Path) -> None:
    """L14, L24, issue part 5: events lead every chat's next turn to the worker that holds its prefix; a killed worker's
    part of the index dies with it and nobody else's; a router that starts anew knows the same as the old one."""
    chats = {name: prompt_of(name, 160) for name in ("one", "two", "three", "four", "five", "six")}
    nexts = {name: (*tokens, *prompt_of(f"more of {name}", 20)) for name, tokens in chats.items()}
    async with Cluster(v3_folder, tmp_path, ttl_seconds=5.0) as cluster:
        # One after the other: side by side they outlast their time on a busy machine.
        first, second, decode = [await cluster.start(role) for role in ("prefill", "prefill", "decode")]
        homes = {name: (first, second)[number % 2] for number, name in enumerate(chats)}
        async with routing(cluster, 3) as router:
            for name, tokens in chats.items():
                async with attached(homes[name], decode) as driver:
                    await driver.generate(make_request(name, tokens, max_tokens=2))
            index = router.prefixes.index
            await router.until(lambda: index.entries >= 2 * 10 * len(chats))
            for name, tokens in nexts.items():
                request = routed(name, tokens)
                match = await router.match(request)
                other = second if homes[name] is first else first
                assert match.device[router.column(homes[name])] == 10
                assert match.device[router.column(other)] == 0
                assert await router.best(request) == homes[name].replica.incarnation
            held = {worker: index.held(router.column(worker)) for worker in (first, second, decode)}
            assert sum(held.values()) == index.entries
            async with routing(cluster, 3) as restarted:
                await restarted.until(lambda: restarted.prefixes.index.entries == index.entries)
                for request in (routed(name, tokens) for name, tokens in nexts.items()):
                    assert await restarted.best(request) == await router.best(request)
            await first.kill()
            await cluster.gone(first)
            await router.until(lambda: router.prefixes.feed.sources == 2)
            assert index.entries == held[second] + held[decode]
            for request in (routed(name, tokens) for name, tokens in nexts.items()):
                assert await router.best(request) == second.replica.incarnation
            await asyncio.gather(second.kill(), decode.kill())
            await router.until(lambda: router.prefixes.feed.sources == 0)
            assert index.entries == 0
            assert router.prefixes.problems() == ()
