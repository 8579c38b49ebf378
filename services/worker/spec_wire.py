"""A RequestSpec from the wire becomes the engine's request: every field is taken, checked or refused by name (L10)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from headrace.engine.request import EngineRequest, ImageInput, RequestKey, TrafficClass
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.seeds import choice_seed
from headrace.engine.text.constraint import Constraint, Language
from headrace.kvcache.entries import EntryFieldError
from headrace.kvcache.tier.types import CacheScope
from headrace.services.runtime.durations import seconds
from headrace.services.runtime.errors import DeadlineExceeded, Incompatible, InvalidArgument, Unimplemented
from headrace.v1 import common_pb2

_TRAFFIC: Final[dict[int, TrafficClass]] = {
    common_pb2.TRAFFIC_CLASS_UNSPECIFIED: TrafficClass.CHAT,
    common_pb2.TRAFFIC_CLASS_AGENT: TrafficClass.AGENT,
    common_pb2.TRAFFIC_CLASS_CHAT: TrafficClass.CHAT,
    common_pb2.TRAFFIC_CLASS_BATCH: TrafficClass.BATCH,
}
_REPLAY: Final[dict[int, str]] = {
    common_pb2.REPLAY_MODE_UNSPECIFIED: "compact",
    common_pb2.REPLAY_MODE_COMPACT: "compact",
    common_pb2.REPLAY_MODE_MASK: "mask",
    common_pb2.REPLAY_MODE_OFF: "off",
}


@dataclass(frozen=True)
class ModelFacts:
    """What a worker serves, as its peers have to agree on it."""

    name: str
    model_fp: bytes
    layout_fp: bytes
    row_fp: bytes
    replay: str
    """compact, mask or off: the engine's setting, which a request may only repeat."""
    bounded_replay: bool
    """The layout has snapshots, so that replay means something."""

    def wire(self) -> common_pb2.ModelIdentity:
        return common_pb2.ModelIdentity(
            name=self.name,
            model_fingerprint=self.model_fp,
            layout_fingerprint=self.layout_fp,
            row_fingerprint=self.row_fp,
        )


def request_key(wire: common_pb2.AttemptId, field: str = "id") -> RequestKey:
    """Raises InvalidArgument for an id that names no attempt."""
    if not wire.request_id or wire.attempt < 1:
        raise InvalidArgument("needs a request id and an attempt of at least 1", field=field)
    return RequestKey(wire.request_id, wire.attempt)


def attempt_id(key: RequestKey) -> common_pb2.AttemptId:
    """The wire form of a key."""
    return common_pb2.AttemptId(request_id=key.request_id, attempt=key.attempt)


def content_digest(spec: common_pb2.RequestSpec) -> bytes:
    """SHA-256 of what is asked for and by whom: equal for all attempts of a request, whichever router makes them. A
    request of another tenant, prompt, seed or limit differs."""
    asked = common_pb2.RequestSpec(
        model=spec.model,
        token_ids=spec.token_ids,
        image_spans=spec.image_spans,
        keep_tokens=spec.keep_tokens,
        replay_mode=spec.replay_mode,
        root_key=spec.root_key,
        sampling=spec.sampling,
        stop=spec.stop,
        constraint=spec.constraint if spec.HasField("constraint") else None,
        tenant_tag=spec.tenant_tag,
    )
    return hashlib.sha256(asked.SerializeToString(deterministic=True)).digest()


def engine_request(
    spec: common_pb2.RequestSpec,
    facts: ModelFacts,
    now: float,
    *,
    credit: int | None = None,
    embeddings: Sequence[torch.Tensor | None] | None = None,
) -> EngineRequest:
    """The engine's request of a spec; the engine checks ranges and sizes itself.

    `now` is the engine's clock; `embeddings` one tensor [span length, hidden] per image span, where they are at hand.

    Raises:
        Incompatible: another model or layout (L14). Unimplemented: a field that this worker does not serve.
        InvalidArgument, DeadlineExceeded; EngineError INVALID_ARGUMENT for sampling values out of range.
    """
    _check_model(spec.model, facts)
    if spec.prompt_tokens != len(spec.token_ids):
        raise InvalidArgument(
            f"is {spec.prompt_tokens}, but there are {len(spec.token_ids)} token ids", field="spec.prompt_tokens"
        )
    if facts.bounded_replay and _REPLAY.get(spec.replay_mode) != facts.replay:
        raise InvalidArgument(
            f"this worker runs replay {facts.replay}; workers and router have one replay mode", field="spec.replay_mode"
        )
    if spec.time_left_ms == 0:
        raise DeadlineExceeded("no time is left for the request")
    if not spec.sampling.HasField("seed") or not spec.stop.HasField("max_tokens"):
        raise InvalidArgument("seed and max_tokens are filled in by the router", field="spec.sampling")
    if spec.traffic_class not in _TRAFFIC:
        raise InvalidArgument(f"{spec.traffic_class} is no traffic class", field="spec.traffic_class")
    images = tuple(
        ImageInput(span.start, span.length, span.content_digest, None if embeddings is None else embeddings[index])
        for index, span in enumerate(spec.image_spans)
    )
    choices = spec.sampling.n if spec.sampling.HasField("n") else 1
    return EngineRequest(
        key=request_key(spec.id, "spec.id"),
        prompt_ids=tuple(spec.token_ids),
        key_root=spec.root_key,
        sampling=_sampling(spec.sampling),
        seed=spec.sampling.seed,
        max_tokens=spec.stop.max_tokens,
        n=choices,
        images=images,
        keep_tokens=spec.keep_tokens or None,
        stop=tuple(spec.stop.stop),
        stop_token_ids=tuple(spec.stop.stop_token_ids),
        ignore_eos=spec.stop.ignore_eos,
        min_tokens=spec.stop.min_tokens,
        snapshot_at=tuple(spec.snapshot_at),
        delivered=_delivered(spec, choices),
        traffic=_TRAFFIC[spec.traffic_class],
        cache=_cache_scope(spec),
        priority=spec.priority,
        deadline=now + seconds(spec.time_left_ms, "spec.time_left_ms"),
        credit=credit,
        arrival=now,
        constraint=_constraint(spec.constraint) if spec.HasField("constraint") else None,
    )


def _constraint(wire: common_pb2.Constraint) -> Constraint:
    """As the router has made it: a schema, an object or choices are grammars by now."""
    language, after = wire.WhichOneof("language"), tuple(wire.after_token_ids)
    match language:
        case "grammar" | "regex" | "structural_tag":
            return Constraint(Language(language), getattr(wire, language), after)
        case _:
            raise InvalidArgument(
                f"{language or 'nothing'} is not what a worker compiles; the router makes a grammar of it",
                field="spec.constraint",
            )


def _cache_scope(spec: common_pb2.RequestSpec) -> CacheScope | None:
    """Nothing is kept of a request that names no namespace."""
    if not spec.cache_namespace:
        return None
    try:
        return CacheScope(spec.cache_namespace, spec.tenant_tag)
    except EntryFieldError as error:
        raise InvalidArgument(str(error), field="spec.cache_namespace") from error


def _check_model(model: common_pb2.ModelIdentity, facts: ModelFacts) -> None:
    for name, theirs, ours in (
        ("model_fingerprint", model.model_fingerprint, facts.model_fp),
        ("layout_fingerprint", model.layout_fingerprint, facts.layout_fp),
    ):
        if theirs != ours:
            raise Incompatible(
                f"the request is for {theirs.hex()[:16] or 'none'}, this worker serves {ours.hex()[:16]}",
                field=f"spec.model.{name}",
            )


def _sampling(wire: common_pb2.SamplingParams) -> SamplingParams:
    """Fields that are absent take the engine's neutral values; the router has filled in the model's own."""
    neutral = SamplingParams()

    def given(name: str, default: float) -> float:
        return float(getattr(wire, name)) if wire.HasField(name) else default  # type: ignore[arg-type]

    return SamplingParams(
        temperature=given("temperature", neutral.temperature),
        top_p=given("top_p", neutral.top_p),
        top_k=int(given("top_k", neutral.top_k)),
        min_p=given("min_p", neutral.min_p),
        presence_penalty=given("presence_penalty", neutral.presence_penalty),
        frequency_penalty=given("frequency_penalty", neutral.frequency_penalty),
        repetition_penalty=given("repetition_penalty", neutral.repetition_penalty),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in wire.logit_bias),
        logprobs=wire.logprobs if wire.HasField("logprobs") else None,
    )


def _delivered(spec: common_pb2.RequestSpec, choices: int) -> tuple[tuple[int, ...], ...]:
    """What earlier attempts delivered, by choice; empty on a first attempt. Seeds are derived, and must agree."""
    if len(spec.choices) != choices or any(state.choice != index for index, state in enumerate(spec.choices)):
        raise InvalidArgument(f"must name choices 0 to {choices - 1}, each once, in order", field="spec.choices")
    for state in spec.choices:
        if state.seed != choice_seed(spec.sampling.seed, state.choice):
            raise InvalidArgument(
                "is not the one derived from sampling.seed", field=f"spec.choices[{state.choice}].seed"
            )
        if state.finished:
            raise Unimplemented(
                f"spec.choices[{state.choice}].finished", "a continuation names the unfinished choices only"
            )
    if not any(state.delivered_token_ids for state in spec.choices):
        return ()
    return tuple(tuple(state.delivered_token_ids) for state in spec.choices)
