"""From a prepared request and the sizes of its images to the RequestSpec that workers get: lengths, keys, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from headrace.engine.seeds import choice_seed
from headrace.kvcache.keys import ImageSpan, Key, KeyFieldError, block_keys, namespace, root_key
from headrace.router.index.snapshot_keys import SnapshotKeys
from headrace.router.request import RoutingRequest, usable_tokens
from headrace.services.router.model import ServedModel
from headrace.services.router.prepare import Prepared
from headrace.services.router.settings import RouterSettings
from headrace.services.router.tenants import TenantKeys
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.errors import InvalidArgument
from headrace.v1 import common_pb2, encoder_pb2

_MODES = {
    "compact": common_pb2.REPLAY_MODE_COMPACT,
    "mask": common_pb2.REPLAY_MODE_MASK,
    "off": common_pb2.REPLAY_MODE_OFF,
}


@dataclass(frozen=True)
class Placed:
    """A request ready to be sent: `spec` lacks only the attempt and the time left."""

    spec: common_pb2.RequestSpec
    routing: RoutingRequest
    image_tokens: int


def place(
    prepared: Prepared,
    images: Sequence[encoder_pb2.EncodedImage],
    model: ServedModel,
    group: ModelGroup,
    tenant: TenantKeys,
    settings: RouterSettings,
    router: common_pb2.PeerId,
    deadline: float,
) -> Placed:
    """Expand images, fix N₀ and K, compute the block keys. Raises InvalidArgument for what does not fit the model."""
    ids, spans = expand_images(prepared.token_ids, images, model.image_token_id)
    length = len(ids)
    context = min(model.context_tokens, group.context_tokens)
    if length >= context:
        raise InvalidArgument(f"{length} tokens with images; the model takes at most {context - 1}", field="prompt")
    stop = common_pb2.StopParams()
    stop.CopyFrom(prepared.stop)
    room = context - length
    if stop.HasField("max_tokens"):
        if stop.max_tokens > room:
            message = f"{stop.max_tokens} tokens after a prompt of {length} exceed the context of {context}"
            raise InvalidArgument(message, field="stop.max_tokens")
    else:
        stop.max_tokens = min(room, settings.requests.max_tokens)
    if stop.min_tokens > stop.max_tokens:
        raise InvalidArgument(f"{stop.min_tokens} exceeds max_tokens {stop.max_tokens}", field="stop.min_tokens")
    for position in prepared.snapshot_at:
        if position == 0 or position % group.block_tokens or position > length:
            message = f"{position} is no multiple of {group.block_tokens} inside the prompt of {length} tokens"
            raise InvalidArgument(message, field="snapshot_at")
    root, cache_namespace = _names(group.model_fp, group.row_fp, model.text_digest, tenant.salt)
    try:
        keys = block_keys(
            root, ids, group.block_tokens, [ImageSpan(span.start, span.length, span.content_digest) for span in spans]
        )
    except KeyFieldError as error:
        raise InvalidArgument(str(error), field="prompt") from error
    sampling = prepared.sampling
    spec = common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id=prepared.request_id),
        model=common_pb2.ModelIdentity(
            name=model.name, model_fingerprint=group.model_fp, layout_fingerprint=group.layout_fp
        ),
        token_ids=ids,
        image_spans=spans,
        prompt_tokens=length,
        keep_tokens=model.keep_tokens(settings.replay.keep_tokens, settings.replay.backtracking),
        replay_mode=_MODES[settings.replay.mode],
        root_key=root,
        block_keys=keys,
        sampling=sampling,
        stop=stop,
        constraint=prepared.constraint,
        choices=[
            common_pb2.ChoiceState(choice=index, seed=choice_seed(sampling.seed, index)) for index in range(sampling.n)
        ],
        snapshot_at=prepared.snapshot_at,
        traffic_class=prepared.traffic_class,
        priority=prepared.priority,
        tenant_tag=tenant.tag,
        router=router,
        report=prepared.report,
        cache_namespace=cache_namespace,
    )
    image_tokens = sum(span.length for span in spans)
    routing = RoutingRequest(
        request_id=prepared.request_id,
        prompt_tokens=length,
        max_tokens=stop.max_tokens,
        choices=sampling.n,
        image_tokens=image_tokens,
        affinity_key=keys[0] if keys else root,
        deadline=deadline,
        blocks=tuple(keys),
        snapshots=SnapshotKeys(keys, model.window + settings.replay.backtracking) if model.window else None,
        usable_tokens=usable_tokens(length, spec.keep_tokens, model.window, settings.replay.mode != "off"),
    )
    return Placed(spec, routing, image_tokens)


@lru_cache(maxsize=256)
def _names(model_fp: bytes, row_fp: bytes, text_digest: bytes, salt: bytes) -> tuple[Key, bytes]:
    """Root key and namespace: the same for all requests of a tenant."""
    return root_key(model_fp, row_fp, text_digest, salt), namespace(model_fp, row_fp, text_digest)


def expand_images(
    token_ids: Sequence[int], images: Sequence[encoder_pb2.EncodedImage], image_token_id: int | None
) -> tuple[list[int], list[common_pb2.ImageSpan]]:
    """Each placeholder becomes its image's span of placeholders."""
    if not images:
        return list(token_ids), []
    ids: list[int] = []
    spans: list[common_pb2.ImageSpan] = []
    for token in token_ids:
        if token != image_token_id:
            ids.append(token)
            continue
        image = images[len(spans)]
        spans.append(
            common_pb2.ImageSpan(
                start=len(ids),
                length=image.tokens,
                content_digest=image.content_digest,
                grid_height=image.grid_height,
                grid_width=image.grid_width,
            )
        )
        ids.extend([token] * image.tokens)
    return ids, spans


def fill_spec(spec: common_pb2.RequestSpec, placed: Placed, attempt: int, left_s: float) -> None:
    """The spec of one attempt, in the message that carries it: with its token ids it is large, and copied once. All but
    the number and the time is the same in all attempts (L16)."""
    spec.CopyFrom(placed.spec)
    spec.id.attempt = attempt
    spec.time_left_ms = max(1, round(left_s * 1000))
