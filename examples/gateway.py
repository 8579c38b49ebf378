"""What the three examples of the HTTP APIs share: a gateway in front of two clusters, SmolLM2 and DeepSeek-V4.1-tiny.

HEADRACE_GATEWAY=http://host:port uses one that runs already, with models of these names.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import PIL.Image
import PIL.ImageDraw

from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import fetch, make

TEXT, IMAGES = "smollm2", "v4.1-tiny"
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
T = TypeVar("T")


@contextmanager
def gateway() -> Iterator[str]:
    """Its address, without /v1."""
    if running := os.environ.get("HEADRACE_GATEWAY"):
        yield running
        return
    smollm2 = next(folder for folder in fetch("smollm2", None, None) if folder.name == "smollm2-bfloat16")
    tiny = make("deepseek-v41-tiny", None, 0)
    images = {"encoder": 1, "prefill": 1, "decode": 1}
    with (
        LocalCluster(ClusterSpec(smollm2, model_name=TEXT)) as text,
        LocalCluster(ClusterSpec(tiny, images, model_name=IMAGES)) as pictures,
        LocalGateway([served(text, "template"), served(pictures, "v4.1", thinking=True)]) as front,
    ):
        yield front.url


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


def if_served(what: str, ask: Callable[[], T], refused: type[Exception]) -> T | None:
    """An answer, or None and the reason where the router refuses the field: engines without constrained output do."""
    try:
        return ask()
    except refused as error:
        if "not implemented" not in str(error):
            raise
        print(f"– {what}: not served here ({error})")
        return None
