"""Images to entries of the cache: digest, decode, place, run the tower. One thread does the heavy work, in order."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from headrace.engine.vision.config import VisionConfig, VisionError
from headrace.engine.vision.geometry import ImagePlan
from headrace.engine.vision.preprocess import ImageLimits, preprocess
from headrace.engine.vision.tower import VisionTower
from headrace.services.encoder.cache import EmbeddingCache, Entry
from headrace.services.runtime import logs
from headrace.services.runtime.errors import HeadraceError, Internal, InvalidArgument, Unavailable, Unimplemented
from headrace.services.runtime.images import cache_key, content_digest, resized_config
from headrace.v1 import inference_pb2

_log = logs.get(__name__)


class ImageEncoder:
    """Computes entries that `EmbeddingCache.find_or_begin` made."""

    def __init__(self, tower: VisionTower, cache: EmbeddingCache, limits: ImageLimits) -> None:
        self._tower = tower
        self._cache = cache
        self._limits = limits
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="vision")
        self._tasks: set[asyncio.Task[None]] = set()
        self.encoded = 0
        """Runs of the tower since start."""

    def request(self, image: inference_pb2.Image, image_key: bytes, field: str) -> tuple[Entry, bytes, bool]:
        """The entry of an image, its content digest, and whether it was there; a new one starts being computed.

        Raises InvalidArgument, Unimplemented, ResourceExhausted; nothing is begun then.
        """
        source = image.WhichOneof("source")
        if source == "url":
            raise Unimplemented(f"{field}.url", "images by address are not fetched here; send the file's bytes as data")
        if source is None or not image.data:
            raise InvalidArgument("the image has no data", field=f"{field}.data")
        resize = image.resize if image.HasField("resize") else None
        config = resized_config(self._tower.config, resize, f"{field}.resize")
        if len(image.data) > self._limits.max_bytes:
            message = f"the image has {len(image.data)} bytes; at most {self._limits.max_bytes} are taken"
            raise InvalidArgument(message, field=f"{field}.data")
        digest = content_digest(image.data, resize)
        entry, cached = self._cache.find_or_begin(cache_key(image_key, digest))
        if not cached:
            task = asyncio.create_task(self._compute(entry, image.data, config))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return entry, digest, cached

    async def _compute(self, entry: Entry, data: bytes, config: VisionConfig) -> None:
        loop = asyncio.get_running_loop()
        try:
            patches, plan = await loop.run_in_executor(self._thread, preprocess, data, config, self._limits)
            self._cache.place(entry, plan.num_tokens)
            entry.planned.set_result(plan)
            work = partial(self._encode_rows, patches, plan, torch.tensor(entry.rows))
            seconds = await loop.run_in_executor(self._thread, work)
            self.encoded += 1
            entry.ready.set_result(seconds)
        except VisionError as error:
            self._cache.fail(entry, InvalidArgument(str(error), field="images.data"))
        except HeadraceError as error:
            self._cache.fail(entry, error)
        except asyncio.CancelledError:
            self._cache.fail(entry, Unavailable("this encoder stops; send the image to another one"))
            raise
        except Exception as error:  # noqa: BLE001 - L13: whatever one image does, the encoder lives on
            _log.error("encoding failed", exc_info=error)
            self._cache.fail(entry, Internal("encoding the image failed; report the request to the operator"))

    def _encode_rows(self, patches: torch.Tensor, plan: ImagePlan, rows: torch.Tensor) -> float:
        started = time.monotonic()
        with torch.inference_mode():
            span = self._tower.encode(patches, plan).contiguous().cpu()
            self._cache.memory[rows] = span.view(torch.uint8).reshape(span.shape[0], -1)
        return time.monotonic() - started

    async def close(self) -> None:
        """Cancel what has not begun and wait for what runs."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)
