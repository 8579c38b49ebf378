"""Images by address, fetched by the router in such a way that nobody reaches inside through it (L26).

An address is vetted after its name is resolved, and the connection goes to that very address, so a name that answers
differently the second time (DNS rebinding) gains nothing. Every redirect is vetted anew. Bytes are counted as they
come, nothing is decompressed, and one deadline ends the whole.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

from headrace.services.router.settings import FetchSection
from headrace.services.runtime import logs
from headrace.services.runtime.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, Unimplemented
from headrace.v1 import inference_pb2

Resolve = Callable[[str, int], list[str]]
"""Name and port → addresses. Raises OSError."""
THREADS: Final = 8
RETRY_AFTER_S: Final = 1.0
CHUNK: Final = 64 * 1024
MAX_URL_CHARACTERS: Final = 4096
_PORTS: Final = {"http": 80, "https": 443}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_log = logs.get(__name__)


def is_public(address: str) -> bool:
    """Whether an address lies outside: not private, loopback, link-local, shared, reserved or multicast, nor one of
    these inside an IPv6 address that only wraps it."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            inner = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if ip.teredo is not None:
            return False
        if inner is not None:
            return is_public(str(inner))
    return ip.is_global and not ip.is_multicast


def resolve_name(host: str, port: int) -> list[str]:
    """As the system resolves it."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Refused(Exception):
    """One sentence for the client. It names neither addresses nor what lies behind them: a fetcher must not be a
    scanner."""


class _Connections:
    """Of one prompt's fetches. Their threads add and remove; once closed, whoever waits for one waits no more."""

    def __init__(self) -> None:
        self.closed = False
        self._open: set[socket.socket] = set()

    def add(self, connection: socket.socket) -> None:
        self._open.add(connection)
        if self.closed:  # looked at after adding: `close` sees it, or it sees that it is closed
            _shut(connection)

    def remove(self, connection: socket.socket) -> None:
        self._open.discard(connection)

    def close(self) -> None:
        self.closed = True
        for connection in tuple(self._open):
            _shut(connection)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


class ImageFetcher:
    """Puts bytes where a request has addresses. Belongs to the event loop's thread; connections have their own."""

    def __init__(
        self,
        settings: FetchSection,
        max_bytes: int,
        *,
        resolve: Resolve = resolve_name,
        allowed: Callable[[str], bool] = is_public,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`resolve`, `allowed` and `context` are for tests, whose servers stand on loopback."""
        self._settings = settings
        self._max_bytes = max_bytes
        self._resolve = resolve
        self._allowed = allowed
        self._context = context or ssl.create_default_context()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="image-fetch")
        self._under_way = 0

    async def fill(self, prompt: inference_pb2.Prompt, max_images: int, seconds: float | None) -> None:
        """Fetch every image of a prompt that is given by address, in place.

        Raises Unimplemented where fetching is off, InvalidArgument for one that cannot be had, ResourceExhausted,
        DeadlineExceeded.
        """
        wanted = [(image, field) for image, field in images_of(prompt) if image.WhichOneof("source") == "url"]
        if not wanted:
            return
        if not self._settings.enabled:
            raise Unimplemented(wanted[0][1], "images by address are not fetched; send their data")
        if len(wanted) > max_images:
            raise InvalidArgument(f"{len(wanted)} images; at most {max_images} are taken", field="prompt")
        if self._under_way + len(wanted) > self._settings.max_at_once:
            raise ResourceExhausted("too many images are being fetched; try again", retry_after_s=RETRY_AFTER_S)
        limit = self._settings.timeout_seconds if seconds is None else min(seconds, self._settings.timeout_seconds)
        self._under_way += len(wanted)
        try:
            async with asyncio.timeout(max(0.001, limit)):
                # One after the other would let each take the whole time.
                await self._all(wanted)
        except TimeoutError:
            raise DeadlineExceeded("an image was not fetched in time; send its data") from None
        finally:
            self._under_way -= len(wanted)

    async def _all(self, wanted: Sequence[tuple[inference_pb2.Image, str]]) -> None:
        """One that fails ends the others before it is raised: nothing is fetched after this."""
        connections = _Connections()
        tasks = [asyncio.create_task(self._one(image, field, connections)) for image, field in wanted]
        try:
            await asyncio.gather(*tasks)
        finally:
            connections.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, image: inference_pb2.Image, field: str, connections: _Connections) -> None:
        loop = asyncio.get_running_loop()
        try:
            image.data = await loop.run_in_executor(self._threads, self._fetch, image.url, connections)
        except _Refused as error:
            raise InvalidArgument(str(error), field=field) from error

    async def close(self) -> None:
        """Nothing is fetched any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- on a thread ---------------------------------------------------------------------------------------------

    def _fetch(self, url: str, connections: _Connections) -> bytes:
        """The bytes behind an address. Raises _Refused."""
        if url.startswith("data:"):
            return self._inline(url)
        for _ in range(self._settings.max_redirects + 1):
            split = self._checked(url)
            try:
                answer = self._ask(split, connections)
            except (OSError, http.client.HTTPException, ValueError) as error:
                _log.info("an image could not be fetched", error=type(error).__name__)
                raise _Refused("the image could not be fetched; send its data") from None
            if isinstance(answer, bytes):
                return answer
            url = urljoin(url, answer)
        raise _Refused("the image's address redirects too often; send its data")

    def _inline(self, url: str) -> bytes:
        header, comma, body = url.partition(",")
        if not comma or len(body) > self._max_bytes * 2:
            raise _Refused("the data: address is malformed or too large")
        try:
            data = base64.b64decode(body, validate=True) if header.endswith(";base64") else unquote_to_bytes(body)
        except (binascii.Error, ValueError):
            raise _Refused("the data: address is malformed") from None
        if not data or len(data) > self._max_bytes:
            raise _Refused(f"the image has {len(data)} bytes; 1 to {self._max_bytes} are taken")
        return data

    def _checked(self, url: str) -> SplitResult:
        try:
            if len(url) > MAX_URL_CHARACTERS or any(ord(letter) <= 32 or ord(letter) >= 127 for letter in url):
                raise ValueError
            split = urlsplit(url)
            port = split.port or _PORTS.get(split.scheme)
        except ValueError:
            raise _Refused("the image's address is malformed") from None
        if split.scheme not in self._settings.schemes or not split.hostname or split.username or split.password:
            raise _Refused(f"the image's address must begin with {' or '.join(self._settings.schemes)} and a host")
        if port not in self._settings.ports:
            raise _Refused("the image's address names a port that is not fetched from")
        return split

    def _ask(self, split: SplitResult, connections: _Connections) -> bytes | str:
        """The body, or where it is said to be. Raises _Refused, OSError, HTTPException."""
        if connections.closed:
            raise _Refused("another image of the request could not be had")
        host = split.hostname or ""
        port = split.port or _PORTS[split.scheme]
        addresses = self._resolve(host, port)
        # One inside is enough: whoever answers with both means the one inside.
        if not addresses or not all(self._allowed(address) for address in addresses):
            raise _Refused("the image's address is not one of the public network")
        connection = socket.create_connection((addresses[0], port), timeout=self._settings.timeout_seconds)
        connections.add(connection)
        try:
            if split.scheme == "https":
                connections.remove(connection)
                connection = self._context.wrap_socket(connection, server_hostname=host)
                connections.add(connection)
            client = http.client.HTTPConnection(host, port)
            client.sock = connection  # vetted; http.client must not resolve the name a second time
            target = (split.path or "/") + (f"?{split.query}" if split.query else "")
            client.request("GET", target, headers={"Accept": "image/*", "Accept-Encoding": "identity"})
            response = client.getresponse()
            if response.status in _REDIRECTS:
                return response.getheader("Location") or ""
            if response.status != 200:
                raise _Refused("the image's server does not give it out; send its data")
            if response.getheader("Content-Encoding", "identity").lower() != "identity":
                raise _Refused("the image's server compresses it; send its data")
            return self._body(response)
        finally:
            connections.remove(connection)
            connection.close()

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        announced = response.getheader("Content-Length")
        if announced is not None and int(announced) > self._max_bytes:
            raise _Refused(f"the image has {int(announced)} bytes; at most {self._max_bytes} are taken")
        data = bytearray()
        while chunk := response.read1(CHUNK):
            data += chunk
            if len(data) > self._max_bytes:
                raise _Refused(f"the image has more than {self._max_bytes} bytes")
        if not data:
            raise _Refused("the image is empty")
        return bytes(data)


def images_of(prompt: inference_pb2.Prompt) -> Iterator[tuple[inference_pb2.Image, str]]:
    """Images of any form of prompt, with the path of their source field."""
    form = prompt.WhichOneof("form")
    plain: Iterable[inference_pb2.Image] = ()
    if form == "tokens":
        plain = prompt.tokens.images
    elif form == "text":
        plain = prompt.text.images
    for index, image in enumerate(plain):
        yield image, f"prompt.{form}.images[{index}].url"
    if form == "chat":
        for at, message in enumerate(prompt.chat.messages):
            for place, part in enumerate(message.content):
                if part.WhichOneof("part") == "image":
                    yield part.image, f"prompt.chat.messages[{at}].content[{place}].image.url"
