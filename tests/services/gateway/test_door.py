"""The listener and what every request passes: limits, the end of the process, HTTPS."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import structlog.testing
from starlette.applications import Starlette

from headrace.cli.certificates import files_of, issue, make_authority, own_hosts
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.gateway.server import HttpServer, HttpsFiles
from headrace.services.gateway.settings import GatewaySettings, HttpsSection
from headrace.services.gateway.upstream import Upstream
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.services.runtime.settings import ListenSettings, RpcSettings
from headrace.services.runtime.settings_load import SettingsError
from headrace.v1 import inference_pb2
from tests.services.gateway.fakes import PATIENCE_S, World, a_world, until

HI: Any = [{"role": "user", "content": "Hi"}]


async def test_too_many_at_once_and_the_end(tmp_path: Path) -> None:
    """L12, L19: what runs is finished, what comes is told when to come back."""
    async with a_world(tmp_path, max_requests=1, max_body_bytes=4096) as world:
        go_on = asyncio.Event()

        async def script(request: inference_pb2.GenerateRequest) -> Any:
            await go_on.wait()
            async for event in hello(request):
                yield event

        hello = world.router.script
        world.router.script = script
        async with openai.AsyncOpenAI(base_url=f"{world.url}/v1", api_key="k", max_retries=0) as client:
            running = asyncio.ensure_future(client.chat.completions.create(model="plain", messages=HI))
            await until(lambda: bool(world.router.requests))
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="plain", messages=HI)
            world.gateway.door.closing = True
            with pytest.raises(openai.InternalServerError) as told:
                await client.models.list()
            assert told.value.response.headers["retry-after"] == "1"
            go_on.set()
            assert (await running).choices[0].message.content == "hello"
            await asyncio.wait_for(world.gateway.door.idle(), 60)
            world.gateway.door.closing = False
            with pytest.raises(openai.APIStatusError) as large:
                await client.chat.completions.create(model="plain", messages=[{"role": "user", "content": "x" * 5000}])
            assert large.value.status_code == 413


async def test_who_sends_slowly_or_without_end_is_left(tmp_path: Path) -> None:
    """L6, L12: heads and bodies have a time, heads a length; a connection that is left is closed, and others go on."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"

    async def answered(url: str, *pieces: bytes) -> bytes:
        """What comes until the connection is closed."""
        host, _, port = url.removeprefix("http://").rpartition(":")
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            for piece in pieces:
                writer.write(piece)
            got = await reader.read()
            writer.close()
            return got

    async with a_world(tmp_path, read_seconds=0.3) as world:
        assert (await answered(world.url)).startswith(b"HTTP/1.1 408")
        assert (await answered(world.url, head)).startswith(b"HTTP/1.1 408")
        assert (await answered(world.url, head, b"x: " + b"y" * 300_000)).startswith(b"HTTP/1.1 431")
        body = await answered(world.url, head, b"content-length: 100\r\n\r\n", b"{")
        assert body.startswith(b"HTTP/1.1 408")
        assert b"the body did not come" in body
        whole = head + b"content-length: 2\r\n\r\n{}"
        several = await answered(world.url, whole, whole, head)
        assert (several.count(b"HTTP/1.1 400"), several.count(b"HTTP/1.1 408")) == (2, 1)


async def test_https_follows_its_files(tmp_path: Path, world: World) -> None:
    """New handshakes show the new certificate; files that do not fit leave the former one in force."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        make_authority(folder)
        issue(folder, Peer(PeerRole.ROUTER, "gateway"), own_hosts(), name="gateway")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def install(cert_of: Path, key_of: Path) -> None:
        cert.write_bytes(files_of(cert_of, "gateway").cert.read_bytes())
        key.write_bytes(files_of(key_of, "gateway").key.read_bytes())

    async def trusted(folder: Path) -> bool:
        context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        host, _, port = server.address.rpartition(":")
        try:
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        except ssl.SSLCertVerificationError:
            return False
        writer.close()
        return True

    install(folders[0], folders[0])
    files = HttpsFiles(cert, key, reload_s=0.02)
    server = HttpServer(Starlette(), ListenSettings(), files, 60.0)
    tasks = [asyncio.ensure_future(server.serve()), asyncio.ensure_future(files.follow())]
    try:
        assert await trusted(folders[0])
        install(folders[1], folders[0])
        await asyncio.sleep(0.2)
        assert await trusted(folders[0])
        install(folders[1], folders[1])
        async with asyncio.timeout(60):
            while not await trusted(folders[1]):  # noqa: ASYNC110 - files of the system's
                await asyncio.sleep(0.02)
    finally:
        await server.stop()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_what_settings_refuse(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="plain HTTP"):
        GatewaySettings(listen=ListenSettings(host="0.0.0.0"), metrics={"enabled": False})
    with pytest.raises(ValueError, match="belong together"):
        HttpsSection(cert=tmp_path)
    with pytest.raises(SettingsError, match="https"):
        HttpsFiles(tmp_path / "none", tmp_path / "none", 1)


@pytest.mark.parametrize("half", [b'"\\ud800"', b'"\xed\xa0\x80"'])
async def test_half_a_surrogate_pair_is_no_text(world: World, half: bytes) -> None:
    """L13: wherever it stands, a key of an unknown field included; whole pairs are characters."""
    async with httpx2.AsyncClient(base_url=world.url) as client:
        for body in (
            b'{"model":"plain","prompt":%s}',
            b'{"model":"plain","prompt":"x",%s:1}',
            b'{"model":"plain","input":"x","metadata":{"a":%s}}',
            b'{"model":"plain","input":"x","previous_response_id":%s}',
        ):
            path = "/v1/responses" if b"input" in body else "/v1/completions"
            answer = await client.post(path, content=body % half)
            assert (answer.status_code, world.router.requests) == (400, [])
        pair = await client.post("/v1/completions", content=b'{"model":"plain","prompt":"\\ud83d\\ude00"}')
        assert (pair.status_code, world.router.requests[-1].prompt.text.text) == (200, "😀")


async def test_ready_while_a_router_answers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """L18: one that says nothing keeps nobody waiting while another answers; without any, whoever balances over
    gateways hears so."""
    silent = asyncio.Event()
    monkeypatch.setattr(world.gateway.upstreams.models[0], "trouble", silent.wait)
    async with httpx2.AsyncClient(base_url=world.url) as client:
        assert (await client.get("/ready")).json() == {"status": "starting"}
        world.gateway.started = True
        assert (await client.get("/ready")).json() == {"status": "ready"}
        monkeypatch.undo()
        await world.server.stop(None)
        async with asyncio.timeout(PATIENCE_S):
            while (answer := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110 - remembered for a second
                await asyncio.sleep(0.05)
        assert (answer.status_code, answer.json()) == (503, {"status": "no router answers"})
        assert (await client.get("/health")).status_code == 200


async def test_what_would_pass_for_nothing(world: World) -> None:
    """What is not understood is named: a body that is packed, a format that is no object."""
    message = {"model": "plain", "max_tokens": 3, "messages": HI}
    async with httpx2.AsyncClient(base_url=world.url) as client:
        for more, headers, named in (
            ({}, {"content-encoding": "gzip"}, "content-encoding"),
            ({"output_config": {"format": []}}, {}, "format"),
        ):
            answer = await client.post("/v1/messages", json=message | more, headers=headers)
            assert answer.status_code == 400
            assert named in answer.json()["error"]["message"]
        assert (await client.post("/v1/messages", json=message)).status_code == 200


@pytest.mark.parametrize("depth", [200, 960])
async def test_deep_bodies_and_odd_kinds(world: World, depth: int) -> None:
    """L13: what is nested deeper than something can read is the client's mistake; so is a kind that is no text."""
    deep = "[" * depth + "]" * depth
    async with httpx2.AsyncClient(base_url=world.url) as client:
        for path, field in (
            ("chat/completions", f'"messages":[{{"role":"user","content":{deep}}}]'),
            ("chat/completions", f'"messages":[{{"role":"user","content":"x"}}],"metadata":{deep}'),
            ("responses", f'"input":[{{"type":"message","role":"user","content":{deep}}}]'),
            ("responses", '"input":[{"type":[]}]'),
            ("responses", '"input":[{"type":{}}]'),
        ):
            answer = await client.post(f"/v1/{path}", content=f'{{"model":"v41",{field}}}')
            assert answer.status_code == 400, (path, field[:40], answer.text)


@pytest.mark.parametrize("model", ["v41", "plain"])
async def test_what_cannot_fit_is_not_tokenised(world: World, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12: megabytes of text would hold the process, and everybody's streams, for seconds."""

    def never(*_: Any) -> Any:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode_plain", never)
    monkeypatch.setattr(Tokenizer, "encode_trusted", never)
    body = {"model": model, "messages": [{"role": "user", "content": "ab " * 200_000}]}
    async with httpx2.AsyncClient(base_url=world.url) as client:
        answer = await client.post("/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert "the model takes at most 4096" in answer.text


async def test_a_router_that_is_gone(tmp_path: Path) -> None:
    """L12: unavailable, with a time to come back; nobody outside is told where it was."""
    async with a_world(tmp_path) as world, httpx2.AsyncClient(base_url=world.url) as client:
        body = {"model": "plain", "messages": HI}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        upstream = world.gateway.upstreams.get("plain")
        await upstream.close()
        entry = upstream.entry.model_copy(update={"router": "127.0.0.1:1"})
        gone = Upstream(entry, upstream.assets, RpcSettings(), None, 60.0)
        world.gateway.upstreams._by_name["plain"] = gone
        with structlog.testing.capture_logs() as logged:
            for _ in range(3):
                answer = await client.post("/v1/chat/completions", json=body, timeout=60)
        await gone.close()
    assert [line["router"] for line in logged if "router" in line] == ["127.0.0.1:1"]  # once
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["message"] == "the router of plain cannot be reached; try again"
