"""What the three examples of the HTTP APIs share: a gateway in front of two clusters, SmolLM2 and DeepSeek-V4.1-tiny.

HEADRACE_GATEWAY=http://host:port and HEADRACE_ROUTER=host:port use a gateway that runs already, with models of these
names, and the router of its text model, which nobody else may use meanwhile.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import PIL.Image
import PIL.ImageDraw

from headrace.cli.client import RouterClient
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import fetch, make

TEXT, IMAGES = "smollm2", "v4.1-tiny"
STORY: Final = "Write a long story about a river."
END_SECONDS: Final = 60.0
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "country": {"type": "string", "maxLength": 20}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Gateway:
    """A gateway that serves both models."""

    url: str
    """Without /v1."""
    router: RouterClient
    """Of the text model's cluster."""

    @contextmanager
    def cancels(self) -> Iterator[None]:
        """The one request that is sent inside, and left, ends at the router as cancelled, and decode works no more for
        it."""
        before = self.router.status().requests
        yield
        deadline = time.monotonic() + END_SECONDS
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.05)
        now = self.router.status().requests
        accepted, cancelled = now.accepted - before.accepted, now.cancelled - before.cancelled
        check(
            (accepted, cancelled, running) == (1, 1, 0),
            f"a stream was left: {accepted} accepted by the router, {cancelled} cancelled, {running} still running",
        )

    def _running(self) -> int:
        """Requests at the router, and in its workers by their last report."""
        status = self.router.status()
        return status.requests.live + sum(load.running_requests for one in status.members for load in one.loads)


@contextmanager
def gateway() -> Iterator[Gateway]:
    """One that runs already, or one with its clusters for as long as it is used."""
    if running := os.environ.get("HEADRACE_GATEWAY"):
        router = os.environ.get("HEADRACE_ROUTER") or sys.exit("HEADRACE_GATEWAY needs HEADRACE_ROUTER beside it")
        with RouterClient(router) as client:
            yield Gateway(running, client)
        return
    smollm2 = next(folder for folder in fetch("smollm2", None, None) if folder.name == "smollm2-bfloat16")
    tiny = make("deepseek-v41-tiny", None, 0)
    images = {"encoder": 1, "prefill": 1, "decode": 1}
    with (
        LocalCluster(ClusterSpec(smollm2, model_name=TEXT)) as text,
        LocalCluster(ClusterSpec(tiny, images, model_name=IMAGES)) as pictures,
        LocalGateway([served(text, "template"), served(pictures, "v4.1", thinking=True)]) as front,
    ):
        yield Gateway(front.url, text.client)


def picture() -> str:
    """A small PNG as a data URL."""
    image = PIL.Image.new("RGB", (96, 72), (250, 246, 235))
    PIL.ImageDraw.Draw(image).ellipse((30, 20, 66, 56), fill=(200, 60, 40))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def check(holds: bool, what: str) -> None:
    """Say that something holds, or end the example."""
    if not holds:
        raise SystemExit(f"✗ {what}")
    print(f"✓ {what}")
