"""Too much quarantine: unready, a fresh landing region, ready again; the old one goes when its last sender is quiet."""

from __future__ import annotations

import pytest

from headrace.v1 import decode_pb2, decode_pb2_grpc
from tests.services.cluster import PATIENCE_S, Cluster
from tests.services.driver import attached, make_request, prompt_of, spec_of

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROW_BYTES = 5376


async def test_a_fresh_region_takes_over(v3_mortal: Cluster) -> None:
    """L6: nothing is reused by age; the worker serves on from new memory, and a late notice frees the old."""
    prefill = await v3_mortal.ensure("prefill")
    decode = await v3_mortal.start("decode", f"decode.landing_bytes={8 * ROW_BYTES}")
    async with attached(prefill, decode) as driver:
        before = make_request("rebuilt-before", prompt_of("before", 40))
        assert len((await driver.generate(before)).tokens[0]) == before.max_tokens
        lost = spec_of(make_request("rebuilt-lost", prompt_of("lost", 40)), decode)
        granted = await driver.reserve(lost)
        await driver.release(lost.id)
        await decode.until_logged("a fresh landing region is open")
        request = make_request("rebuilt-after", prompt_of("after", 100))
        spec = spec_of(request, decode)
        reserved = await driver.reserve(spec)
        assert reserved.landing.metadata_version == 2
        assert reserved.agent.regions[0].base_address != granted.agent.regions[0].base_address
        driver.stream.keep(spec.id)
        responses = [response async for response in driver.run(spec, reserved)]
        assert responses[-1].HasField("handed_over"), responses[-1]
        assert len((await driver.stream.complete(spec.id)).tokens[0]) == request.max_tokens
        await decode_pb2_grpc.DecodeServiceStub(decode.channel).EndTransfer(
            decode_pb2.EndTransferRequest(landing=granted.landing, outcome=decode_pb2.TRANSFER_OUTCOME_QUIET),
            timeout=PATIENCE_S,
        )
        await decode.until_logged("a former landing region is drained")
        assert (await decode.until_idle()).ready
    assert await decode.stop() == 0
