"""The whole way of a request where rows may go by stream alone, as between hosts with TLS and no trusted network."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.engine.sampling_params import SamplingParams
from tests.services.cluster import PATIENCE_S, Cluster, WorkerProcess
from tests.services.conftest import Offline
from tests.services.driver import Driver, attached, make_request, prompt_of, spec_of
from tests.services.test_images import embedded, encode, picture, with_images

pytestmark = pytest.mark.asyncio(loop_scope="session")
BY_STREAM = "transfer.transport=stream"


@dataclass
class Streaming:
    """Senders that use streams, beside the shared clusters' decodes."""

    v3: Driver
    v41: Driver
    encoder: WorkerProcess
    clusters: tuple[Cluster, Cluster]

    async def until_idle(self) -> None:
        for cluster in self.clusters:
            await cluster.until_idle()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def streaming(v3_cluster: Cluster, v41_cluster: Cluster) -> AsyncIterator[Streaming]:
    v3, v41, encoder = await asyncio.gather(
        v3_cluster.start("prefill", BY_STREAM),
        v41_cluster.start("prefill", BY_STREAM),
        v41_cluster.start("encoder", BY_STREAM),
    )
    async with AsyncExitStack() as stack:
        drivers = [
            await stack.enter_async_context(attached(prefill, cluster["decode"]))
            for prefill, cluster in ((v3, v3_cluster), (v41, v41_cluster))
        ]
        yield Streaming(*drivers, encoder, (v3_cluster, v41_cluster))
    for worker in (v3, v41, encoder):
        await worker.kill()


@pytest.fixture(params=["v3", "v41"])
def family(request: pytest.FixtureRequest, streaming: Streaming) -> Any:
    """(driver, offline) of each family."""
    return getattr(streaming, request.param), request.getfixturevalue(f"{request.param}_offline")


async def test_tokens_equal_one_process(family: Any, streaming: Streaming) -> None:
    """L5: greedy, at the lengths around a block's edge and over several chunks, and two seeded choices, all at once."""
    driver, offline = family
    requests = [make_request(f"stream{n}", prompt_of(f"st{n}", n)) for n in (1, 16, 17, 100)]
    sampling = SamplingParams(temperature=0.9, top_p=0.95)
    requests.append(make_request("stream-n", prompt_of("stream-n", 45), sampling=sampling, n=2, seed=99))
    answers = await asyncio.gather(*(driver.generate(request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.tokens == offline.tokens(request), request.key
        assert answer.report.prefill.transport == "stream"
        assert answer.report.prefill.kv_bytes
    await streaming.until_idle()


async def test_embeddings_come_by_stream(streaming: Streaming, v41_offline: Offline, v41_folder: Path) -> None:
    """L5: an image through three processes, nothing of it by shared memory."""
    data = picture((10, 90, 30))
    encoders: Any = {"encoder": streaming.encoder}
    encoded = await encode(encoders, "streamed-picture", data)
    request = with_images("streamed-picture", encoded)
    answer = await streaming.v41.generate(request, embeddings=[each.handle for each in encoded.images])
    assert answer.tokens == v41_offline.tokens(embedded(request, v41_folder, data))
    assert answer.report.prefill.embedding_bytes
    await streaming.until_idle()


async def test_a_cancelled_run_gives_its_rows_back(streaming: Streaming) -> None:
    """L7, L10: the client leaves in mid-push."""
    driver = streaming.v3
    spec = spec_of(make_request("left", prompt_of("left", 600)), driver.decode)
    reserved = await driver.reserve(spec)
    driver.stream.keep(spec.id)
    call: Any = driver.run(spec, reserved)
    async for response in call:
        if response.HasField("progress") and response.progress.rows_pushed:
            break
    call.cancel()
    await driver.release(spec.id)
    await streaming.until_idle()


async def test_a_frozen_sender_spoils_nothing_and_a_dead_one_leaves_nothing(
    streaming: Streaming, v3_cluster: Cluster, v3_offline: Offline
) -> None:
    """L6, L7: SIGSTOP in mid-push until the reservation is over, another request over the same decode, SIGCONT; then
    kill -9 in mid-push: every landing row is free, every token right."""
    driver = streaming.v3
    frozen = await driver.freeze_in_push("frozen", 600)
    driver.stream.forget(frozen.id)
    async with asyncio.timeout(PATIENCE_S):
        while (await driver.decode.status()).requests.live:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    request = make_request("next", prompt_of("next", 200))
    async with attached(v3_cluster["prefill"], driver.decode, v3_cluster["prefill"].peer) as other:
        running = asyncio.ensure_future(other.generate(request))
        driver.prefill.send(signal.SIGCONT)
        assert (await running).tokens == v3_offline.tokens(request)
    *_, last = [response async for response in frozen.call]
    assert last.failed.target_lost, "nobody waits for it any more"
    await streaming.until_idle()

    dying = await driver.freeze_in_push("dying", 600)
    await driver.prefill.kill()
    await driver.release(dying.id)
    await v3_cluster.until_idle()
