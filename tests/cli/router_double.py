"""The gateway tests' double of a router (tests/services/gateway/fakes.py) on a thread of its own, for commands that
block: it answers at once what its rules say."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc.aio

from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.services.gateway.fakes import TOKENIZER, Events, FakeRouter, finished_event, tokens_event

_LAST_USER = re.compile(r"\[user\](.*)\n\[assistant\]", re.DOTALL)


class RouterDouble:
    """Answers a prompt's last text with `answer` of it, and does what `faults` says of it first."""

    def __init__(self) -> None:
        self.answer: Callable[[str], str] = lambda text: f"echo {text}"
        self.faults: dict[str, list[HeadraceError]] = {}
        self.asked: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.most_running = 0
        self._running = 0
        self.router = FakeRouter(script=self._script, model="double")

    async def _script(self, request: inference_pb2.GenerateRequest) -> Events:
        text = last_text(request.prompt)
        self.asked.append(text)
        self._running += 1
        self.most_running = max(self.most_running, self._running)
        try:
            if self.faults.get(text):
                raise self.faults[text].pop(0)
            while text.startswith("held") and not self.held.is_set():  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.02)
            identity = common_pb2.ModelIdentity(name="double", model_fingerprint=bytes(32))
            started = inference_pb2.StartedEvent(request_id=f"r-{text}", model=identity, seed=request.sampling.seed)
            yield inference_pb2.GenerateResponse(started=started)
            top = request.sampling.logprobs if request.sampling.HasField("logprobs") else None
            said = tokens_event(self.answer(text), top=top)
            yield said
            yield finished_event()
            usage = common_pb2.Usage(prompt_tokens=5, cached_tokens=2, loaded_tokens=1)
            usage.completion_tokens = len(said.tokens.token_ids)
            yield inference_pb2.GenerateResponse(usage=usage)
        finally:
            self._running -= 1


def last_text(prompt: inference_pb2.Prompt) -> str:
    """What was said last: to the template of the double's folder, in messages, or as a text."""
    match prompt.WhichOneof("form"):
        case "chat":
            return prompt.chat.messages[-1].content[-1].text
        case "text":
            return prompt.text.text
    text = TOKENIZER.decode(prompt.tokens.token_ids, skip_special=False)
    found = _LAST_USER.search(text)
    return text if found is None else found[1].rpartition("[user]")[2]


@contextmanager
def serving(double: RouterDouble) -> Iterator[str]:
    """Its address."""
    address: list[str] = []
    listening, ending = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(double.router, server)
        address.append(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        loops.append(asyncio.get_running_loop())
        listening.set()
        await ending.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="router-double")
    thread.start()
    try:
        assert listening.wait(60)
        yield address[0]
    finally:
        double.held.set()
        loops[0].call_soon_threadsafe(ending.set)
        thread.join()
