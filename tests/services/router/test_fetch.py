"""Fetching an image cannot reach inside (L26): private addresses, rebinding, redirects, size, slowness, compression."""

from __future__ import annotations

import asyncio
import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.certificates import issue, make_authority
from headrace.services.router.fetch import THREADS, ImageFetcher, images_of, is_public
from headrace.services.router.settings import FetchSection
from headrace.services.runtime.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unimplemented
from headrace.services.runtime.peers import Peer, PeerRole
from headrace.v1 import inference_pb2

IMAGE = b"\x89PNG" + b"x" * 996
LIMIT = 2000


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path; remembers what it was asked."""

    asked: list[tuple[str, str]] = []  # noqa: RUF012 - one list for all, on purpose
    hold = threading.Event()
    begun = threading.Semaphore(0)
    """Once for each slow answer that has begun."""

    def do_GET(self) -> None:
        self.asked.append((self.headers["Host"], self.path))
        match self.path.strip("/").split("/"):
            case ["ok"]:
                self.answer(IMAGE, {"Content-Length": str(len(IMAGE))})
            case ["big"]:
                self.answer(b"x" * (LIMIT + 1), {"Content-Length": str(LIMIT + 1)})
            case ["endless"]:
                self.answer(b"x" * (LIMIT * 4), {})
            case ["packed"]:
                self.answer(IMAGE, {"Content-Encoding": "gzip"})
            case ["empty"]:
                self.answer(b"", {"Content-Length": "0"})
            case ["absurd"]:
                self.answer(b"", {"Content-Length": "many"})
            case ["loop"]:
                self.go("/loop")
            case ["to", *rest]:
                self.go("/".join(rest).replace("%3A", ":"))
            case ["slow"]:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"x")
                self.wfile.flush()
                self.begun.release()
                self.hold.wait(30)
            case ["missing", "after", count]:
                for _ in range(int(count)):
                    self.begun.acquire(timeout=30)
                self.send_error(404)
            case _:
                self.send_error(404)

    def go(self, where: str) -> None:
        self.send_response(302)
        self.send_header("Location", where)
        self.end_headers()

    def answer(self, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            self.wfile.write(body)
        except ConnectionError:
            return

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def port() -> Iterator[int]:
    Handler.asked.clear()
    Handler.hold.clear()
    Handler.begun = threading.Semaphore(0)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    Handler.hold.set()
    server.shutdown()
    server.server_close()
    thread.join()


def prompt(*urls: str) -> inference_pb2.Prompt:
    images = [inference_pb2.Image(url=url) for url in urls]
    return inference_pb2.Prompt(text=inference_pb2.TextPrompt(text="x", images=images))


def fetcher(
    port: int, *, inside: Callable[[str], bool] = lambda address: address == "127.0.0.1", **settings: Any
) -> ImageFetcher:
    """Names that end in .example are the test's server, `inside.example` a private address beside it."""

    def resolve(host: str, _: int) -> list[str]:
        if host == "inside.example":
            return ["127.0.0.1", "10.0.0.7"]
        if host.endswith(".example"):
            return ["127.0.0.1"]
        return [host]

    section = FetchSection(enabled=True, schemes=("http",), ports=(port,), **{"timeout_seconds": 10, **settings})
    return ImageFetcher(section, LIMIT, resolve=resolve, allowed=inside)


async def get(one: ImageFetcher, url: str) -> bytes:
    wanted = prompt(url)
    try:
        await one.fill(wanted, 4, None)
    finally:
        await one.close()
    return wanted.text.images[0].data


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        *(
            (inside, False)
            for inside in [
                "127.0.0.1",
                "0.0.0.0",
                "10.1.2.3",
                "172.16.0.1",
                "192.168.1.1",
                "169.254.169.254",
                "100.64.0.1",
                "192.0.2.1",
                "198.18.0.1",
                "224.0.0.1",
                "240.0.0.1",
                "255.255.255.255",
                "::1",
                "::",
                "fe80::1",
                "fc00::1",
                "ff02::1",
                "2001:db8::1",
                "::ffff:10.0.0.1",
                "::ffff:127.0.0.1",
                "2002:a00:1::",
                "64:ff9b::a00:1",
                "2001:0:a00:1::",
                "fd00:ec2::254",
                "localhost",
            ]
        ),
    ],
)
def test_what_is_outside(address: str, public: bool) -> None:
    """Wrapped ones too: mapped, 6to4, NAT64, Teredo."""
    assert is_public(address) is public


async def test_an_image_is_fetched_from_the_vetted_address_by_its_name(port: int) -> None:
    assert await get(fetcher(port), f"http://pictures.example:{port}/ok?size=1".replace("?size=1", "")) == IMAGE
    assert Handler.asked == [(f"pictures.example:{port}", "/ok")]


async def test_a_name_that_resolves_anew_gains_nothing(port: int) -> None:
    """DNS rebinding: the second answer is never asked for."""
    answers = [["127.0.0.1"], ["10.0.0.7"]]
    section = FetchSection(enabled=True, schemes=("http",), ports=(port,))
    one = ImageFetcher(
        section, LIMIT, resolve=lambda host, at: answers.pop(0), allowed=lambda address: address == "127.0.0.1"
    )
    assert await get(one, f"http://rebound.example:{port}/ok") == IMAGE
    assert answers == [["10.0.0.7"]]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("big", "at most 2000"),
        ("endless", "more than 2000"),
        ("packed", "compresses"),
        ("empty", "empty"),
        ("absurd", "could not be fetched"),
        ("gone", "does not give it out"),
        ("loop", "redirects too often"),
        ("to/http%3A//inside.example%3APORT/ok", "public network"),
        ("to/http%3A//10.0.0.7%3APORT/ok", "public network"),
        ("to/file%3A///etc/passwd", "must begin with"),
        ("to/http%3A//pictures.example%3A22/", "port"),
    ],
)
async def test_bad_answers_are_refused_in_words_that_tell_nothing_of_inside(port: int, path: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as caught:
        await get(fetcher(port), f"http://pictures.example:{port}/" + path.replace("PORT", str(port)))
    assert caught.value.field == "prompt.text.images[0].url"
    assert "10.0.0.7" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.2:PORT/ok",
        "http://inside.example:PORT/ok",
        "http://169.254.169.254:PORT/latest/meta-data",
        "http://pictures.example/ok",
        "https://pictures.example:PORT/ok",
        "ftp://pictures.example/ok",
        "gopher://pictures.example:PORT/ok",
        "http://user:password@pictures.example:PORT/ok",
        "http://:PORT/ok",
        "http://pictures.example:99999/ok",
        "http://pictures.example:PORT/ok\r\nHost: x",
        "http://pictures.example:PORT/" + "x" * 5000,
        "//pictures.example/ok",
        "",
    ],
)
async def test_addresses_that_are_not_fetched(port: int, url: str) -> None:
    with pytest.raises(InvalidArgument):
        await get(fetcher(port), url.replace("PORT", str(port)))
    assert not Handler.asked


async def test_a_slow_server_ends_with_the_deadline_and_its_thread_too(port: int) -> None:
    """L6: one byte and silence."""
    one = fetcher(port, timeout_seconds=0.3)
    with pytest.raises(DeadlineExceeded):
        await get(one, f"http://pictures.example:{port}/slow")
    one._threads.shutdown(wait=True)


async def test_one_that_cannot_be_had_ends_the_others(port: int) -> None:
    """L12: once it is raised nothing is fetched any more, so that what counts as under way is all that is."""
    one, busy = fetcher(port), THREADS - 1
    paths = [f"missing/after/{busy}", *["slow"] * busy, *["slow"] * 3 * THREADS]
    with pytest.raises(InvalidArgument, match="does not give it out"):
        await one.fill(prompt(*(f"http://pictures.example:{port}/{path}" for path in paths)), len(paths), None)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    Handler.hold.set()
    one._threads.shutdown(wait=True)
    assert len(Handler.asked) <= 2 * THREADS, "those that had no thread yet never get one"


async def test_data_addresses(port: int) -> None:
    assert await get(fetcher(port), "data:image/png;base64,aGVsbG8=") == b"hello"
    assert await get(fetcher(port), "data:,a%20b") == b"a b"
    for bad in ("data:image/png;base64,###", "data:nothing", "data:,", "data:," + "x" * (LIMIT + 1)):
        with pytest.raises(InvalidArgument):
            await get(fetcher(port), bad)


async def test_https_checks_the_name(tmp_path: Path) -> None:
    """A certificate for another name, or of an unknown authority, is a server that is not the one meant."""
    make_authority(tmp_path)
    files = issue(tmp_path, Peer(PeerRole.ROUTER), ("pictures.example",))
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(files.cert, files.key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = serving.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    at = server.server_address[1]
    section = FetchSection(enabled=True, ports=(at,))
    known = ssl.create_default_context(cafile=str(files.ca))

    def make(context: ssl.SSLContext | None) -> ImageFetcher:
        return ImageFetcher(section, LIMIT, resolve=lambda *_: ["127.0.0.1"], allowed=lambda _: True, context=context)

    try:
        assert await get(make(known), f"https://pictures.example:{at}/ok") == IMAGE
        for one, name in ((make(known), "other"), (make(None), "pictures")):
            with pytest.raises(InvalidArgument, match="could not be fetched"):
                await get(one, f"https://{name}.example:{at}/ok")
    finally:
        server.shutdown()
        server.server_close()


async def test_off_is_the_default_and_bounds_hold(port: int) -> None:
    """L12: too many at once are refused with a time; images with data are left alone."""
    off = ImageFetcher(FetchSection(), LIMIT)
    with pytest.raises(Unimplemented):
        await off.fill(prompt("https://pictures.example/ok"), 4, None)
    sent = inference_pb2.Prompt(text=inference_pb2.TextPrompt(images=[inference_pb2.Image(data=b"x")]))
    await off.fill(sent, 4, None)
    one = fetcher(port, max_at_once=1)
    with pytest.raises(InvalidArgument, match="at most 1"):
        await one.fill(prompt(*["http://a.example/"] * 2), 1, None)
    with pytest.raises(ResourceExhausted):
        await one.fill(prompt(*["http://a.example/"] * 2), 4, None)
    await off.close()
    await one.close()


def test_images_of_every_form_are_found() -> None:
    image = inference_pb2.Image(url="u")
    part = inference_pb2.ContentPart(image=image)
    chat = inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(content=[part])]))
    tokens = inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(images=[image]))
    assert [field for _, field in images_of(chat)] == ["prompt.chat.messages[0].content[0].image.url"]
    assert [field for _, field in images_of(tokens)] == ["prompt.tokens.images[0].url"]
    assert not list(images_of(inference_pb2.Prompt()))
