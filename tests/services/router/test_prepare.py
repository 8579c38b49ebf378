"""services.router.prepare and place: everything about a request is checked before anything is reserved (L10)."""

from __future__ import annotations

import hashlib

import pytest

from headrace.engine.seeds import choice_seed
from headrace.engine.text.assets import TextAssets
from headrace.engine.text.byte_tokenizer import make_byte_tokenizer
from headrace.engine.text.chat import DeepseekV41Protocol
from headrace.engine.text.tokenizer import Tokenizer
from headrace.services.router.model import ServedModel
from headrace.services.router.place import expand_images, place
from headrace.services.router.prepare import prepare
from headrace.services.router.settings import RequestSection, RouterSettings
from headrace.services.router.tenants import TenantKeys
from headrace.services.router.workers import ModelGroup
from headrace.services.runtime.errors import HeadraceError, InvalidArgument, NotFound, Unimplemented
from headrace.v1 import common_pb2, encoder_pb2, inference_pb2

FILE = make_byte_tokenizer()
TOKENIZER = Tokenizer(FILE.serialized)
MODEL = ServedModel(
    name="tiny",
    family="deepseek_v41",
    vocab_size=FILE.vocab_size,
    context_tokens=512,
    image_token_id=FILE.image_token_id,
    window=16,
    text=TextAssets(
        TOKENIZER,
        DeepseekV41Protocol(TOKENIZER, image_token_id=FILE.image_token_id),
        (1,),
        FILE.image_token_id,
        hashlib.sha256(b"x").digest(),
    ),
)
LIMITS = RequestSection(max_tokens=64, max_n=4, max_images=2)
GROUP = ModelGroup(b"m" * 32, b"l" * 32, b"r" * 32, 32, 512)
SECRET = b"0123456789abcdef"


def text(value: str = "hello", **fields: object) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        prompt=inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=value)),
        **fields,  # type: ignore[arg-type]
    )


def resuming(*points: inference_pb2.ResumePoint) -> inference_pb2.GenerateRequest:
    return text(request_id="r", sampling=common_pb2.SamplingParams(seed=1, n=2), resume=points)


def chat(*parts: inference_pb2.ContentPart) -> inference_pb2.GenerateRequest:
    message = inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=parts)
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=[message])))


PICTURE = inference_pb2.ContentPart(image=inference_pb2.Image(data=b"png"))


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """L10, L12: megabytes of text cost nothing."""

    def never(self: Tokenizer, text: str) -> list[int]:
        raise AssertionError("tokenised")

    monkeypatch.setattr(Tokenizer, "encode_trusted", never)
    too_long = "x" * (TOKENIZER.longest_token * MODEL.context_tokens)
    with pytest.raises(InvalidArgument, match="at most 511"):
        prepare(text(too_long), MODEL, LIMITS)


def test_defaults_are_filled_in() -> None:
    prepared = prepare(text(), MODEL, LIMITS)
    assert prepared.sampling.temperature == 1.0
    assert prepared.sampling.n == 1
    assert prepared.sampling.HasField("seed")
    assert len(prepared.request_id) == 32
    assert prepare(text(), MODEL, LIMITS).sampling.seed != prepared.sampling.seed
    given = text(sampling=common_pb2.SamplingParams(seed=0, temperature=0.0), request_id="mine")
    assert (prepare(given, MODEL, LIMITS).sampling.seed, prepare(given, MODEL, LIMITS).request_id) == (0, "mine")


def sampling(**fields: object) -> inference_pb2.GenerateRequest:
    return text(sampling=common_pb2.SamplingParams(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> inference_pb2.GenerateRequest:
    return text(stop=common_pb2.StopParams(**fields))  # type: ignore[arg-type]


def tokens(*ids: int, **fields: object) -> inference_pb2.GenerateRequest:
    prompt = inference_pb2.TokenPrompt(token_ids=ids, **fields)  # type: ignore[arg-type]
    return inference_pb2.GenerateRequest(prompt=inference_pb2.Prompt(tokens=prompt))


@pytest.mark.parametrize(
    ("request_", "error", "names"),
    [
        (inference_pb2.GenerateRequest(), InvalidArgument, "prompt"),
        (text(""), InvalidArgument, "prompt.text"),
        (text("x" * 600), InvalidArgument, "prompt.text"),
        (text(model="other"), NotFound, "model"),
        (text(request_id="a b"), InvalidArgument, "request_id"),
        (text(timeout_ms=0), InvalidArgument, "timeout_ms"),
        (text(resume=[inference_pb2.ResumePoint()]), InvalidArgument, "request_id"),
        (text(resume=[inference_pb2.ResumePoint()], request_id="r"), InvalidArgument, "sampling.seed"),
        (resuming(inference_pb2.ResumePoint(choice=2)), InvalidArgument, "resume[0].choice"),
        (resuming(*[inference_pb2.ResumePoint()] * 2), InvalidArgument, "resume[1].choice"),
        (resuming(inference_pb2.ResumePoint(resume_offset=65)), InvalidArgument, "resume[0].resume_offset"),
        (sampling(temperature=3.0), InvalidArgument, "temperature"),
        (sampling(temperature=float("nan")), InvalidArgument, "temperature"),
        (sampling(top_p=0.0), InvalidArgument, "top_p"),
        (sampling(n=0), InvalidArgument, "sampling.n"),
        (sampling(n=5), InvalidArgument, "sampling.n"),
        (sampling(logprobs=99), InvalidArgument, "logprobs"),
        (sampling(logit_bias=[common_pb2.LogitBias(token_id=9999)]), InvalidArgument, "logit_bias"),
        (stop(max_tokens=0), InvalidArgument, "stop.max_tokens"),
        (stop(max_tokens=65), InvalidArgument, "stop.max_tokens"),
        (stop(max_tokens=4, min_tokens=5), InvalidArgument, "stop.min_tokens"),
        (stop(stop=[""]), InvalidArgument, "stop.stop[0]"),
        (stop(stop=["a"] * 17), InvalidArgument, "stop.stop"),
        (stop(stop_token_ids=[5] * 17), InvalidArgument, "stop.stop_token_ids"),
        (text(traffic_class=99), InvalidArgument, "traffic_class"),
        (text(snapshot_at=range(32, 32 * 70, 32)), InvalidArgument, "snapshot_at"),
        (stop(stop_token_ids=[9999]), InvalidArgument, "stop.stop_token_ids[0]"),
        (tokens(1, 9999), InvalidArgument, "prompt.tokens.token_ids"),
        (tokens(1, FILE.image_token_id), InvalidArgument, "prompt.tokens.images"),
        (tokens(1, images=[inference_pb2.Image(data=b"x")]), InvalidArgument, "prompt.tokens.images"),
        (chat(PICTURE, PICTURE, PICTURE), InvalidArgument, "prompt.chat.images"),
        (
            chat(inference_pb2.ContentPart(image=inference_pb2.Image(url="http://x"))),
            Unimplemented,
            "prompt.chat.images[0].url",
        ),
        (chat(inference_pb2.ContentPart()), InvalidArgument, "content[0]"),
    ],
)
def test_bad_requests_name_their_field(
    request_: inference_pb2.GenerateRequest, error: type[HeadraceError], names: str
) -> None:
    """L10, L13: refused at the border; a field that is not implemented is never ignored."""
    with pytest.raises(error) as refused:
        prepare(request_, MODEL, LIMITS)
    assert names in str(refused.value)
    assert refused.value.field


@pytest.mark.parametrize("name", ["tools", "reasoning_effort", "continue_final_message"])
def test_unimplemented_chat_fields_are_refused(name: str) -> None:
    request = chat(inference_pb2.ContentPart(text="hi"))
    if name == "tools":
        request.prompt.chat.tools.add(name="t")
    elif name == "reasoning_effort":
        request.prompt.chat.reasoning_effort = "high"
    else:
        request.prompt.chat.continue_final_message = True
    with pytest.raises(Unimplemented, match=name):
        prepare(request, MODEL, LIMITS)


def image(tokens: int, digest: bytes) -> encoder_pb2.EncodedImage:
    return encoder_pb2.EncodedImage(content_digest=digest, grid_height=1, grid_width=tokens - 3, tokens=tokens)


def placed(request: inference_pb2.GenerateRequest, *images: encoder_pb2.EncodedImage, secret: bytes = SECRET):  # type: ignore[no-untyped-def]
    prepared = prepare(request, MODEL, LIMITS)
    settings = RouterSettings(requests=LIMITS)
    return place(prepared, images, MODEL, GROUP, TenantKeys(secret, "default"), settings, common_pb2.PeerId(), 10.0)


def test_images_are_expanded_and_enter_the_keys() -> None:
    """L2: differing media give differing keys although the ids are equal."""
    request = chat(PICTURE, inference_pb2.ContentPart(text="what is it? " * 5))
    one = placed(request, image(9, b"a" * 32))
    other = placed(request, image(9, b"b" * 32))
    span = one.spec.image_spans[0]
    assert set(one.spec.token_ids[span.start : span.start + 9]) == {FILE.image_token_id}
    assert one.spec.prompt_tokens == len(one.spec.token_ids)
    assert one.spec.token_ids == other.spec.token_ids
    assert one.spec.block_keys[0] != other.spec.block_keys[0]
    assert one.image_tokens == 9
    assert one.spec.keep_tokens == 16 + 12


def test_tenants_salt_separates_keys() -> None:
    """L25: another secret, another name for everything."""
    one, other = placed(text("x" * 40)), placed(text("x" * 40), secret=b"another secret!!")
    assert one.spec.root_key != other.spec.root_key
    assert one.spec.block_keys[0] != other.spec.block_keys[0]


def test_lengths_are_fixed_at_admission() -> None:
    spec = placed(text("x" * 40)).spec
    assert spec.stop.max_tokens == 64
    assert spec.prompt_tokens == 40
    near = placed(text("x" * 500)).spec
    assert near.stop.max_tokens == 12
    with pytest.raises(InvalidArgument, match=r"stop\.max_tokens"):
        placed(text("x" * 500, stop=common_pb2.StopParams(max_tokens=13)))
    with pytest.raises(InvalidArgument, match="with images"):
        placed(chat(PICTURE, inference_pb2.ContentPart(text="x" * 450)), image(100, b"a" * 32))
    with pytest.raises(InvalidArgument, match="snapshot_at"):
        placed(text("x" * 40, snapshot_at=[33]))


def test_choices_have_the_seeds_of_the_sampling_rule() -> None:
    """L16: seeds depend on the request's seed and the choice alone."""
    spec = placed(text(sampling=common_pb2.SamplingParams(seed=5, n=3))).spec
    assert [choice.seed for choice in spec.choices] == [choice_seed(5, index) for index in range(3)]
    assert spec.choices[0].seed == 5


def test_expansion_keeps_order() -> None:
    ids, spans = expand_images([7, 3, 7], [image(4, b"a" * 32), image(5, b"b" * 32)], 7)
    assert ids == [7] * 4 + [3] + [7] * 5
    assert [(span.start, span.length) for span in spans] == [(0, 4), (5, 5)]
