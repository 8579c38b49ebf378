"""The gateway before a real cluster of processes, as the official clients see it (V4.1-tiny, random weights)."""

from __future__ import annotations

import base64
import io
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import PIL.Image
import pytest

from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.local_gateway import LocalGateway, served
from headrace.cli.model import make
from tests.services.gateway.fakes import TEMPLATE

HI: Any = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 120.0


@dataclass
class Served:
    cluster: LocalCluster
    url: str

    def until_idle(self) -> None:
        """L10, L11: what clients left is over at the router."""
        deadline = time.monotonic() + PATIENCE_S
        while self.cluster.status().requests.live and time.monotonic() < deadline:
            time.sleep(0.05)
        requests = self.cluster.status().requests
        assert requests.live == 0
        ended = requests.finished + requests.cancelled + requests.deadline + requests.failed
        assert requests.accepted == ended


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One cluster, served twice: in DeepSeek's encoding, and with a template of our own."""
    scratch = tmp_path_factory.mktemp("gateway")
    tiny = make("deepseek-v41-tiny", scratch, 0)
    plain = scratch / "plain"
    plain.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        shutil.copy(tiny / name, plain)
    (plain / "chat_template.jinja").write_text(TEMPLATE)
    spec = ClusterSpec(
        tiny, {"encoder": 1, "prefill": 1, "decode": 1}, model_name="tiny", sets=("load.native_kernels=false",)
    )
    with LocalCluster(spec) as cluster:
        template = served(cluster, "template", name="plain", folder=str(plain), router_model="tiny")
        with LocalGateway([served(cluster, "v4.1", thinking=True), template]) as gateway:
            yield Served(cluster, gateway.url)


@pytest.fixture
def client(world: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE_S) as made:
        yield made
    world.until_idle()


def picture() -> str:
    file = io.BytesIO()
    PIL.Image.new("RGB", (64, 48), (200, 60, 40)).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


def test_a_seed_fixes_the_answer_of_every_api(world: Served, client: openai.OpenAI) -> None:
    """L5: whole, streamed, as one of two choices, over each API: the same text for the same seed."""
    asked: Any = {"model": "plain", "messages": HI, "seed": 7, "max_tokens": 6}
    whole = client.chat.completions.create(**asked)
    text = whole.choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    two = client.chat.completions.create(**asked, n=2, logprobs=True, top_logprobs=1)
    assert two.choices[0].message.content == text
    assert two.choices[1].logprobs is not None
    response = client.responses.create(model="plain", input="Hi", max_output_tokens=6, extra_body={"seed": 7})
    assert response.output_text == text
    assert whole.usage is not None
    assert response.usage is not None
    assert response.usage.input_tokens == whole.usage.prompt_tokens


def test_an_image_in_every_api(world: Served, client: openai.OpenAI) -> None:
    """L27: its tokens are counted alike."""
    url = f"data:image/png;base64,{picture()}"
    chat: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    first = client.chat.completions.create(model="tiny", messages=chat, max_tokens=2, reasoning_effort="none")
    items: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}]
    second = client.responses.create(model="tiny", input=items, max_output_tokens=2, reasoning={"effort": "none"})
    source = {"type": "base64", "media_type": "image/png", "data": picture()}
    message: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    with anthropic.Anthropic(base_url=world.url, api_key="any", max_retries=0, timeout=PATIENCE_S) as other:
        off: Any = {"type": "disabled"}
        third = other.messages.create(model="tiny", messages=message, max_tokens=2, thinking=off)
    assert first.usage is not None
    assert second.usage is not None
    read = third.usage.input_tokens + (third.usage.cache_read_input_tokens or 0)
    assert first.usage.prompt_tokens == second.usage.input_tokens == read > 10


def test_a_client_that_leaves(world: Served, client: openai.OpenAI) -> None:
    """L10: `client` waits until the router has nothing left."""
    stream = client.chat.completions.create(model="plain", messages=HI, stream=True, max_tokens=2000, seed=1)
    next(iter(stream))
    stream.close()


def test_what_the_router_limits(client: openai.OpenAI) -> None:
    """L13, in the API's own words."""
    with pytest.raises(openai.BadRequestError) as told:
        client.chat.completions.create(model="plain", messages=HI, n=100)
    assert told.value.param == "n"
    assert {model.id for model in client.models.list()} == {"tiny", "plain"}
