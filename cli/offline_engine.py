"""A cluster's whole way of a request in this process: the router's preparation, the encoder's tower, a whole engine.

`headrace offline` and the demo take it, so that what is compared with a cluster goes through the same validation,
templates, image digests and defaults (L5). Imports torch; everything else of the CLI does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from headrace.engine.errors import EngineError
from headrace.engine.messages import Finished, Tokens
from headrace.engine.offline import Completion, OfflineEngine, Progress
from headrace.engine.request import EngineRequest
from headrace.engine.vision.config import VisionError
from headrace.engine.vision.loading import load_vision_tower
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.engine.vision.tower import VisionTower
from headrace.services.router.constraint import constrained
from headrace.services.router.model import load_served_model
from headrace.services.router.place import place
from headrace.services.router.prepare import prepare
from headrace.services.router.settings import ReplaySection, RequestSection, RouterSettings
from headrace.services.router.tenants import TENANT, TenantKeys
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.engine_errors import translate
from headrace.services.runtime.errors import HeadraceError, InvalidArgument
from headrace.services.runtime.ids import new_request_id
from headrace.services.runtime.images import content_digest, resized_config
from headrace.services.runtime.registry.base import Role
from headrace.services.worker.engine_host import load
from headrace.services.worker.events_wire import TokenBytes, finished_to_wire, tokens_to_wire
from headrace.services.worker.settings import WorkerSettings
from headrace.services.worker.spec_wire import engine_request
from headrace.v1 import common_pb2, encoder_pb2, inference_pb2


class OfflineSettings(WorkerSettings):
    """Settings of `headrace offline`: of a worker's, those of `load` and `engine` count."""

    ROLE: ClassVar[Role] = Role.WHOLE

    requests: RequestSection = RequestSection()
    """Limits and defaults of requests, the same as a router's."""


@dataclass(frozen=True)
class Result:
    """What became of one request: a completion, or the error with which it was refused."""

    completion: Completion | None = None
    error: HeadraceError | None = None


OnResult = Callable[[int, Result], None]
"""Called with (index, result) as soon as it is known."""


class OfflineRunner:
    """A model loaded once, for any number of batches."""

    def __init__(self, settings: OfflineSettings, folder: Path) -> None:
        """Load everything. Raises ModelError, TooLittleMemory, TextError for a folder or settings that do not do."""
        self._settings = settings
        self._folder = folder
        self._loaded = load(settings, folder)
        self._served = load_served_model(settings.model.name, folder, "auto")
        self._engine = OfflineEngine(
            self._loaded.model,
            settings.engine,
            tokenizer=self._loaded.tokenizer,
            pool=self._loaded.pool,
        )
        facts = self._loaded.facts
        self._group = ModelGroup(
            facts.model_fp,
            facts.layout_fp,
            facts.row_fp,
            self._loaded.pool.layout.block_tokens,
            self._loaded.model.context_tokens,
        )
        self._router_settings = RouterSettings(
            requests=settings.requests,
            replay=ReplaySection(
                mode=settings.engine.replay,
                keep_tokens=settings.engine.keep_tokens,
                backtracking=settings.load.backtracking,
            ),
        )
        self._tenant = TenantKeys(bytes(32), TENANT)

    def run(
        self,
        requests: Sequence[inference_pb2.GenerateRequest],
        on_result: OnResult = lambda _index, _result: None,
        progress: Progress | None = None,
    ) -> list[Result]:
        """Serve all requests together; results in their order. A request that is refused spoils no other (L13)."""
        results: list[Result | None] = [None] * len(requests)
        placed: list[EngineRequest] = []
        indices: dict[str, int] = {}

        def settle(index: int, result: Result) -> None:
            results[index] = result
            on_result(index, result)

        for index, request in enumerate(requests):
            try:
                placed.append(self._place(request, f"offline-{index}"))
                indices[placed[-1].key.request_id] = index
            except HeadraceError as error:
                settle(index, Result(error=error))
            except EngineError as error:
                settle(index, Result(error=translate(error)))
        self._engine.generate(
            placed,
            progress,
            on_done=lambda done: settle(indices[done.request.key.request_id], _result(done)),
        )
        return [result for result in results if result is not None]

    @property
    def model(self) -> inference_pb2.Model:
        """As a cluster describes it."""
        facts, limits = self._loaded.facts, self._settings.requests
        return inference_pb2.Model(
            identity=common_pb2.ModelIdentity(
                name=facts.name,
                model_fingerprint=facts.model_fp,
                layout_fingerprint=facts.layout_fp,
                row_fingerprint=facts.row_fp,
            ),
            limits=inference_pb2.ModelLimits(max_tokens=limits.max_tokens),
            eos_token_ids=() if self._served.text is None else self._served.text.eos_token_ids,
            block_tokens=self._group.block_tokens,
        )

    def events(self, result: Result) -> tuple[inference_pb2.GenerateResponse, ...]:
        """A completion as a cluster's stream would have brought it, but all of a choice at once."""
        done = result.completion
        assert done is not None
        tokenizer = self._loaded.tokenizer
        token_bytes: TokenBytes = (lambda _: b"") if tokenizer is None else tokenizer.token_bytes
        prompt = done.request.prompt_length
        started = inference_pb2.StartedEvent(
            request_id=new_request_id(), model=self.model.identity, seed=done.request.seed, prompt_tokens=prompt
        )
        events = [inference_pb2.GenerateResponse(started=started)]
        for index, choice in enumerate(done.choices):
            assert choice.reason is not None
            tokens = Tokens(done.request.key, index, 0, tuple(choice.token_ids), choice.text, tuple(choice.logprobs))
            end = Finished(done.request.key, index, choice.reason, len(choice.token_ids), choice.stop_match)
            events.append(inference_pb2.GenerateResponse(tokens=tokens_to_wire(tokens, token_bytes)))
            events.append(inference_pb2.GenerateResponse(finished=finished_to_wire(end, "")))
        usage = common_pb2.Usage(
            prompt_tokens=prompt,
            cached_tokens=done.counts.cached,
            loaded_tokens=done.counts.loaded,
            computed_tokens=done.counts.computed,
            recomputed_tokens=done.counts.recomputed,
            completion_tokens=done.completion_tokens,
        )
        return (*events, inference_pb2.GenerateResponse(usage=usage))

    def integrity(self) -> tuple[str, ...]:
        """Contradictions in the engine and its pool; empty is good."""
        return tuple(self._engine.engine.integrity())

    def _place(self, request: inference_pb2.GenerateRequest, identifier: str) -> EngineRequest:
        limits = self._settings.requests
        prepared = constrained(prepare(request, self._served, limits), request, self._served, limits)
        prepared = dataclasses.replace(prepared, request_id=identifier)
        encoded, embeddings = self._encode(prepared.images)
        spec = place(
            prepared,
            encoded,
            self._served,
            self._group,
            self._tenant,
            self._router_settings,
            common_pb2.PeerId(),
            0.0,
        ).spec
        spec.id.attempt = 1
        spec.time_left_ms = 1
        converted = engine_request(spec, self._loaded.facts, 0.0, embeddings=embeddings)
        # A file of requests has no client that waits: the default deadline is for those.
        return dataclasses.replace(converted, deadline=None)

    def _encode(
        self, images: Sequence[inference_pb2.Image]
    ) -> tuple[list[encoder_pb2.EncodedImage], list[torch.Tensor | None]]:
        encoded: list[encoder_pb2.EncodedImage] = []
        embeddings: list[torch.Tensor | None] = []
        for index, image in enumerate(images):
            field = f"images[{index}]"
            resize = image.resize if image.HasField("resize") else None
            config = resized_config(self._tower.config, resize, f"{field}.resize")
            try:
                patches, plan = preprocess(image.data, config, ImageLimits())
            except VisionError as error:
                raise InvalidArgument(str(error), field=f"{field}.data") from error
            with torch.inference_mode():
                embeddings.append(self._tower.encode(patches, plan))
            encoded.append(
                encoder_pb2.EncodedImage(
                    content_digest=content_digest(image.data, resize),
                    tokens=plan.num_tokens,
                    grid_height=plan.rows,
                    grid_width=plan.columns,
                )
            )
        return encoded, embeddings

    @cached_property
    def _tower(self) -> VisionTower:
        dtype = torch.bfloat16 if self._settings.load.numeric_mode == "full" else torch.float32
        return load_vision_tower(self._folder, dtype=dtype, device=torch.device(self._settings.load.device))


def _result(done: Completion) -> Result:
    """A completion that was refused as a whole carries its error in each choice."""
    error = next((choice.error for choice in done.choices if choice.error is not None), None)
    return Result(done) if error is None else Result(error=translate(error))
