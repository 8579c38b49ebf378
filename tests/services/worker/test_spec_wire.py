"""A RequestSpec is taken in full or refused by name (L10)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.engine.errors import EngineError
from headrace.engine.request import EngineRequest, ImageInput, RequestKey, TrafficClass
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.seeds import choice_seed
from headrace.services.runtime.errors import (
    DeadlineExceeded,
    HeadraceError,
    Incompatible,
    InvalidArgument,
    Unimplemented,
)
from headrace.services.worker.spec_wire import ModelFacts, engine_request
from headrace.v1 import common_pb2

FACTS = ModelFacts("m", b"M" * 32, b"L" * 32, b"R" * 32, replay="compact", bounded_replay=True)


def spec() -> common_pb2.RequestSpec:
    """Every field that is served is set, to something that is no default."""
    return common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id="r", attempt=3),
        model=common_pb2.ModelIdentity(name="m", model_fingerprint=b"M" * 32, layout_fingerprint=b"L" * 32),
        token_ids=[5, 6, 9, 9, 7],
        image_spans=[common_pb2.ImageSpan(start=2, length=2, content_digest=b"D" * 32)],
        prompt_tokens=5,
        keep_tokens=22,
        replay_mode=common_pb2.REPLAY_MODE_COMPACT,
        root_key=b"K" * 32,
        sampling=common_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=4,
            min_p=0.125,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            repetition_penalty=1.5,
            logit_bias=[common_pb2.LogitBias(token_id=8, bias=-2)],
            seed=77,
            n=2,
            logprobs=1,
        ),
        stop=common_pb2.StopParams(max_tokens=9, min_tokens=2, ignore_eos=True, stop=["x"], stop_token_ids=[4]),
        choices=[
            common_pb2.ChoiceState(choice=0, seed=choice_seed(77, 0), delivered_token_ids=[1]),
            common_pb2.ChoiceState(choice=1, seed=choice_seed(77, 1)),
        ],
        snapshot_at=[16],
        traffic_class=common_pb2.TRAFFIC_CLASS_AGENT,
        priority=-3,
        time_left_ms=2500,
    )


def test_every_field_arrives() -> None:
    """Nothing is dropped on the way to the engine."""
    picture = torch.zeros(2, 4)
    got = engine_request(spec(), FACTS, 100.0, credit=0, embeddings=[picture])
    assert got.images[0].embeddings is picture
    assert got == EngineRequest(
        key=RequestKey("r", 3),
        prompt_ids=(5, 6, 9, 9, 7),
        key_root=b"K" * 32,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.75,
            top_k=4,
            min_p=0.125,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            repetition_penalty=1.5,
            logit_bias=((8, -2.0),),
            logprobs=1,
        ),
        seed=77,
        max_tokens=9,
        n=2,
        images=(ImageInput(2, 2, b"D" * 32, picture),),
        keep_tokens=22,
        stop=("x",),
        stop_token_ids=(4,),
        ignore_eos=True,
        min_tokens=2,
        snapshot_at=(16,),
        delivered=((1,), ()),
        traffic=TrafficClass.AGENT,
        priority=-3,
        credit=0,
    )
    assert got.deadline == 102.5


def test_absent_fields_are_neutral() -> None:
    """Not zero: an absent top_p is 1, an absent temperature 1, an absent n one choice."""
    wire = spec()
    wire.sampling.CopyFrom(common_pb2.SamplingParams(seed=77))
    wire.choices.pop()
    wire.choices[0].ClearField("delivered_token_ids")
    got = engine_request(wire, FACTS, 0.0)
    assert (got.sampling, got.n, got.delivered, got.credit) == (SamplingParams(), 1, (), None)


def _seed(wire: common_pb2.RequestSpec) -> None:
    wire.choices[1].seed = 1


def _finished(wire: common_pb2.RequestSpec) -> None:
    wire.choices[1].finished = True


def _drop_choice(wire: common_pb2.RequestSpec) -> None:
    wire.choices.pop()


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        (lambda w: setattr(w.model, "model_fingerprint", b"X" * 32), Incompatible, "spec.model.model_fingerprint"),
        (lambda w: setattr(w.model, "layout_fingerprint", b""), Incompatible, "spec.model.layout_fingerprint"),
        (lambda w: setattr(w.constraint, "json_schema", "{}"), InvalidArgument, "spec.constraint"),
        (lambda w: setattr(w, "prompt_tokens", 4), InvalidArgument, "spec.prompt_tokens"),
        (lambda w: setattr(w, "replay_mode", common_pb2.REPLAY_MODE_OFF), InvalidArgument, "spec.replay_mode"),
        (lambda w: setattr(w, "time_left_ms", 0), DeadlineExceeded, ""),
        (lambda w: w.sampling.ClearField("seed"), InvalidArgument, "spec.sampling"),
        (lambda w: w.stop.ClearField("max_tokens"), InvalidArgument, "spec.sampling"),
        (lambda w: setattr(w.id, "attempt", 0), InvalidArgument, "spec.id"),
        (_seed, InvalidArgument, "spec.choices[1].seed"),
        (_finished, Unimplemented, "spec.choices[1].finished"),
        (_drop_choice, InvalidArgument, "spec.choices"),
        # Neither takes memory, nor leaves the range of clocks, before it is refused.
        (lambda w: setattr(w.sampling, "n", 2**32 - 1), InvalidArgument, "spec.choices"),
        (lambda w: setattr(w, "time_left_ms", 2**64 - 1), InvalidArgument, "spec.time_left_ms"),
    ],
)
def test_what_cannot_be_served_is_named(
    change: Callable[[common_pb2.RequestSpec], None], kind: type[HeadraceError], field: str
) -> None:
    """L10, L14: typed, with the field, before anything is held."""
    wire = spec()
    change(wire)
    with pytest.raises(kind) as caught:
        engine_request(wire, FACTS, 0.0)
    assert caught.value.field == field


def test_values_out_of_range_are_the_engines_to_refuse() -> None:
    """One check of ranges, in the engine's words."""
    wire = spec()
    wire.sampling.top_p = 1.5
    with pytest.raises(EngineError):
        engine_request(wire, FACTS, 0.0)
