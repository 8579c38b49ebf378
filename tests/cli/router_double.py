"""A double of a router: a real gRPC server that answers at once what its rules say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from headrace.services.runtime.errors import TABLE, HeadraceError, trailing_metadata
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class RouterDouble(inference_pb2_grpc.InferenceServiceServicer):
    """Answers a prompt's last text with `answer` of it, and does what `faults` says of it first."""

    def __init__(self) -> None:
        self.answer: Callable[[str], str] = lambda text: f"echo {text}"
        self.faults: dict[str, list[HeadraceError]] = {}
        self.asked: list[str] = []
        self.held = threading.Event()
        self.held.set()
        self.most_running = 0
        self._running = 0
        self._lock = threading.Lock()

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateResponse]:
        chat = request.prompt.WhichOneof("form") == "chat"
        text = request.prompt.chat.messages[-1].content[0].text if chat else request.prompt.text.text
        with self._lock:
            self.asked.append(text)
            self._running += 1
            self.most_running = max(self.most_running, self._running)
            fault = self.faults[text].pop(0) if self.faults.get(text) else None
        try:
            if fault is not None:
                context.set_trailing_metadata(trailing_metadata(fault))
                context.abort(TABLE[fault.code].status, str(fault))
            if text.startswith("held"):
                while not self.held.wait(0.02) and context.is_active():
                    pass
            identity = common_pb2.ModelIdentity(name="double", model_fingerprint=bytes(32))
            yield inference_pb2.GenerateResponse(
                started=inference_pb2.StartedEvent(request_id=f"r-{text}", model=identity, seed=request.sampling.seed)
            )
            yield inference_pb2.GenerateResponse(
                tokens=common_pb2.TokensEvent(token_ids=[1, 2], text=self.answer(text))
            )
            finished = common_pb2.FinishedEvent(reason=common_pb2.FINISH_REASON_STOP)
            yield inference_pb2.GenerateResponse(finished=finished)
            yield inference_pb2.GenerateResponse(
                usage=common_pb2.Usage(prompt_tokens=5, cached_tokens=2, loaded_tokens=1, completion_tokens=2)
            )
        finally:
            with self._lock:
                self._running -= 1

    def ListModels(self, request: inference_pb2.ListModelsRequest, context: Any) -> inference_pb2.ListModelsResponse:
        identity = common_pb2.ModelIdentity(name="double", model_fingerprint=bytes(32))
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(identity=identity)])


@contextmanager
def serving(double: RouterDouble) -> Iterator[str]:
    """Its address."""
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(double, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            double.held.set()
            server.stop(None).wait()
