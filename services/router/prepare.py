"""A client's request, validated in full before anything is reserved (L10), with every default filled in.

A field that is not implemented is refused, never ignored. Nothing here waits or knows workers.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.engine.errors import EngineError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.chat import ROLES, ChatMessage, ImagePart
from headrace.engine.text.errors import TextError
from headrace.services.router.model import ServedModel
from headrace.services.router.settings import RequestSection
from headrace.services.runtime.errors import InvalidArgument, NotFound, Unimplemented
from headrace.services.runtime.ids import new_request_id
from headrace.v1 import common_pb2, inference_pb2

MAX_PRIORITY = 100
"""Tiers are few: every one that is used is a queue of its own."""
QUICK_TOKENS, QUICK_CHARACTERS, QUICK_PARTS = 16_384, 1024, 16
"""Longest prompts that are read at once, on the event loop."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_DEFAULT = SamplingParams()
_CHAT_ROLES = {
    inference_pb2.CHAT_ROLE_SYSTEM: ROLES[0],
    inference_pb2.CHAT_ROLE_USER: ROLES[1],
    inference_pb2.CHAT_ROLE_ASSISTANT: ROLES[2],
    inference_pb2.CHAT_ROLE_TOOL: ROLES[3],
}
IMPLEMENTED_FIELDS = (
    "prompt.text", "prompt.chat.messages", "prompt.chat.thinking", "prompt.tokens",
    "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.min_p", "sampling.presence_penalty",
    "sampling.frequency_penalty", "sampling.repetition_penalty", "sampling.logit_bias", "sampling.seed", "sampling.n",
    "sampling.logprobs", "stop.max_tokens", "stop.min_tokens", "stop.ignore_eos", "stop.stop", "stop.stop_token_ids",
    "constraint.json_schema", "constraint.json_object", "constraint.regex", "constraint.grammar", "constraint.choices",
    "constraint.structural_tag", "constraint.after_token_ids", "constraint.after_reasoning",
    "traffic_class", "priority", "timeout_ms", "request_id", "resume", "snapshot_at", "report",
)  # fmt: skip
"""What ListModels tells."""


@dataclass(frozen=True)
class Prepared:
    """A request whose every field has been checked, except what needs the images' sizes."""

    request_id: str
    """Of this router alone; at first the same as `name`."""
    name: str
    """As the client knows the request, given or drawn."""
    token_ids: tuple[int, ...]
    """One placeholder per image."""
    images: tuple[inference_pb2.Image, ...]
    sampling: common_pb2.SamplingParams
    """Every implemented field set, seed and n included."""
    stop: common_pb2.StopParams
    """max_tokens still absent where the client gave none."""
    traffic_class: common_pb2.TrafficClass.ValueType
    priority: int
    timeout_s: float
    snapshot_at: tuple[int, ...]
    report: bool
    system_tokens: int = 0
    """Of `token_ids`, those of a chat's system messages, where the model has snapshots (0 elsewhere)."""
    resume: tuple[tuple[int, int], ...] = ()
    """Choices of a stream that the client has lost, each with the tokens that it has."""
    named: bool = False
    """The client has chosen the id, perhaps not for the first time."""
    constraint: common_pb2.Constraint | None = None
    """As workers take it (constraint.py)."""


def prepare(
    request: inference_pb2.GenerateRequest,
    model: ServedModel,
    limits: RequestSection,
    traffic_class: common_pb2.TrafficClass.ValueType = common_pb2.TRAFFIC_CLASS_CHAT,
) -> Prepared:
    """Check and complete a request; `traffic_class` is that of one which names none.

    Raises InvalidArgument, Unimplemented or NotFound naming the field.
    """
    if request.model and request.model != model.name:
        raise NotFound(f"no model {request.model!r}; this cluster serves {model.name!r}", field="model")
    if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidArgument("must be 1 to 64 of A-Z a-z 0-9 _ . -", field="request_id")
    if request.HasField("timeout_ms") and request.timeout_ms == 0:
        raise InvalidArgument("must be above 0", field="timeout_ms")
    if abs(request.priority) > MAX_PRIORITY:
        raise InvalidArgument(f"must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}", field="priority")
    if request.traffic_class not in common_pb2.TrafficClass.values():
        raise InvalidArgument(f"{request.traffic_class} is no traffic class", field="traffic_class")
    if len(request.snapshot_at) > limits.max_snapshots:
        message = f"{len(request.snapshot_at)} positions; at most {limits.max_snapshots} are taken"
        raise InvalidArgument(message, field="snapshot_at")
    resume = _resume(request, limits)
    prompt = tokenize(request.prompt, model, limits)
    wanted_ms = request.timeout_ms if request.HasField("timeout_ms") else limits.timeout_seconds * 1000
    name = request.request_id or new_request_id()
    return Prepared(
        request_id=name,
        name=name,
        token_ids=prompt.token_ids,
        images=prompt.images,
        sampling=_sampling(request.sampling, model, limits),
        stop=_stop(request.stop, model, limits),
        traffic_class=request.traffic_class or traffic_class,
        priority=request.priority,
        timeout_s=min(wanted_ms / 1000, limits.timeout_seconds),
        snapshot_at=tuple(sorted(set(request.snapshot_at))),
        report=request.report,
        system_tokens=prompt.system_tokens,
        resume=resume,
        named=bool(request.request_id),
    )


def is_quick(prompt: inference_pb2.Prompt) -> bool:
    """Whether reading it takes less than handing it to another thread and back would: at most a millisecond."""
    form = prompt.WhichOneof("form")
    if form == "tokens":
        return len(prompt.tokens.token_ids) <= QUICK_TOKENS
    if form == "text":
        return len(prompt.text.text) <= QUICK_CHARACTERS
    if form == "chat":
        parts = (part for message in prompt.chat.messages for part in message.content)
        return sum(len(part.text) for part in islice(parts, QUICK_PARTS + 1)) <= QUICK_CHARACTERS and (
            sum(len(message.content) for message in prompt.chat.messages) <= QUICK_PARTS
        )
    return True


def _resume(request: inference_pb2.GenerateRequest, limits: RequestSection) -> tuple[tuple[int, int], ...]:
    """Where a client that lost its stream stands. What named the stream must be there: nothing may be drawn anew."""
    if not request.resume:
        return ()
    if not request.request_id:
        raise InvalidArgument("is needed to resume; the lost stream's first event told it", field="request_id")
    if not request.sampling.HasField("seed"):
        raise InvalidArgument("is needed to resume; the lost stream's first event told it", field="sampling.seed")
    choices = request.sampling.n if request.sampling.HasField("n") else 1
    seen: dict[int, int] = {}
    for index, point in enumerate(request.resume):
        if point.choice >= choices or point.choice in seen:
            raise InvalidArgument(f"must name choices 0 to {choices - 1}, each once", field=f"resume[{index}].choice")
        most = request.stop.max_tokens if request.stop.HasField("max_tokens") else limits.max_tokens
        if point.resume_offset > most:
            raise InvalidArgument(f"exceeds max_tokens {most}", field=f"resume[{index}].resume_offset")
        seen[point.choice] = point.resume_offset
    return tuple(sorted(seen.items()))


@dataclass(frozen=True)
class Tokenized:
    """A prompt as the model gets it, images not yet expanded."""

    token_ids: tuple[int, ...]
    images: tuple[inference_pb2.Image, ...] = ()
    system_tokens: int = 0


def tokenize(prompt: inference_pb2.Prompt, model: ServedModel, limits: RequestSection) -> Tokenized:
    """Prompt ids with one placeholder per image, and the images. The same for Generate and CountTokens."""
    form = prompt.WhichOneof("form")
    system_tokens = 0
    if form is None:
        raise InvalidArgument("give text, chat or tokens", field="prompt")
    if form == "tokens":
        ids, images, field = tuple(prompt.tokens.token_ids), tuple(prompt.tokens.images), "prompt.tokens"
    elif model.text is None:
        raise InvalidArgument("this model has no tokenizer; send prompt.tokens", field=f"prompt.{form}")
    elif form == "text":
        _check_text([prompt.text.text], model, limits, "prompt.text.text")
        ids, images = tuple(model.text.tokenizer.encode_trusted(prompt.text.text)), tuple(prompt.text.images)
        field = "prompt.text"
    else:
        rendered = _chat(prompt.chat, model, limits)
        ids, images, system_tokens = rendered.token_ids, rendered.images, rendered.system_tokens
        field = "prompt.chat"
    if not ids:
        raise InvalidArgument("the prompt has no tokens; send at least one", field=field)
    if len(ids) >= model.context_tokens:
        raise InvalidArgument(f"{len(ids)} tokens; the model takes at most {model.context_tokens - 1}", field=field)
    if limits.max_prompt_tokens is not None and len(ids) > limits.max_prompt_tokens:
        raise InvalidArgument(f"{len(ids)} tokens; at most {limits.max_prompt_tokens} are taken", field=field)
    if max(ids) >= model.vocab_size:
        bad = next(token for token in ids if token >= model.vocab_size)
        raise InvalidArgument(
            f"token {bad} is outside the vocabulary of {model.vocab_size}", field=f"{field}.token_ids"
        )
    _check_images(ids, images, model, limits, field)
    return Tokenized(ids, images, system_tokens)


def _check_images(
    ids: Sequence[int],
    images: Sequence[inference_pb2.Image],
    model: ServedModel,
    limits: RequestSection,
    field: str,
) -> None:
    if images and model.image_token_id is None:
        raise InvalidArgument("this model takes no images", field=f"{field}.images")
    if len(images) > limits.max_images:
        raise InvalidArgument(f"{len(images)} images; at most {limits.max_images} are taken", field=f"{field}.images")
    places = 0 if model.image_token_id is None else sum(token == model.image_token_id for token in ids)
    if places != len(images):
        raise InvalidArgument(f"{places} image placeholders but {len(images)} images", field=f"{field}.images")
    for index, image in enumerate(images):
        if image.WhichOneof("source") == "url":
            raise Unimplemented(f"{field}.images[{index}].url", "images by address are not fetched; send their data")
        if not image.data:
            raise InvalidArgument("the image has no data", field=f"{field}.images[{index}].data")
        if len(image.data) > limits.max_image_bytes:
            message = f"{len(image.data)} bytes; at most {int(limits.max_image_bytes)} are taken"
            raise InvalidArgument(message, field=f"{field}.images[{index}].data")


def _check_text(texts: Sequence[str], model: ServedModel, limits: RequestSection, field: str) -> None:
    """Refuse what cannot fit before the tokenizer spends seconds on it."""
    assert model.text is not None
    size = sum(len(text.encode()) for text in texts)
    if size > limits.max_text_bytes:
        raise InvalidArgument(f"{size} bytes of text; at most {limits.max_text_bytes} are taken", field=field)
    least = size // model.text.tokenizer.longest_token
    if least >= model.context_tokens:
        raise InvalidArgument(
            f"{size} bytes are at least {least} tokens; the model takes at most {model.context_tokens - 1}", field=field
        )


def _chat(chat: inference_pb2.ChatPrompt, model: ServedModel, limits: RequestSection) -> Tokenized:
    assert model.text is not None
    if model.text.chat is None:
        raise InvalidArgument("this model has no chat template; send prompt.text or prompt.tokens", field="prompt.chat")
    for name in ("tools", "reasoning_effort", "continue_final_message"):
        if getattr(chat, name):
            raise Unimplemented(f"prompt.chat.{name}")
    if not chat.messages:
        raise InvalidArgument("a chat needs at least one message", field="prompt.chat.messages")
    messages: list[ChatMessage] = []
    images: list[inference_pb2.Image] = []
    for index, message in enumerate(chat.messages):
        field = f"prompt.chat.messages[{index}]"
        for name in ("name", "tool_calls", "tool_call_id", "reasoning"):
            if getattr(message, name):
                raise Unimplemented(f"{field}.{name}")
        if message.role == inference_pb2.CHAT_ROLE_DEVELOPER:
            raise Unimplemented(f"{field}.role", "the developer role is not implemented; use system")
        if message.role not in _CHAT_ROLES:
            raise InvalidArgument(f"role {message.role} is unknown", field=f"{field}.role")
        parts: list[str | ImagePart] = []
        for place, part in enumerate(message.content):
            kind = part.WhichOneof("part")
            if kind is None:
                raise InvalidArgument("a part holds text or an image", field=f"{field}.content[{place}]")
            if kind == "image":
                images.append(part.image)
            parts.append(part.text if kind == "text" else ImagePart())
        messages.append(ChatMessage(_CHAT_ROLES[message.role], tuple(parts)))
    texts = [part for message in messages for part in message.parts if isinstance(part, str)]
    _check_text(texts, model, limits, "prompt.chat.messages")
    thinking = thinks(chat, limits)
    try:
        encoded = model.text.chat.encode(messages, thinking=thinking)
    except TextError as error:
        raise InvalidArgument(str(error), field="prompt.chat") from error
    prefix = model.system_prefix
    system = 0 if prefix is None else prefix.tokens(messages, encoded.token_ids, thinking=thinking)
    return Tokenized(encoded.token_ids, tuple(images), system)


def thinks(chat: inference_pb2.ChatPrompt, limits: RequestSection) -> bool:
    """Whether a chat asks the model to reason first."""
    return chat.thinking if chat.HasField("thinking") else limits.thinking


def sampling_params(wire: common_pb2.SamplingParams) -> SamplingParams:
    """The engine's form, absent fields at their defaults. Raises InvalidArgument for a value out of range."""

    def given(name: str) -> float:
        return float(getattr(wire, name)) if wire.HasField(name) else float(getattr(_DEFAULT, name))  # type: ignore[arg-type]

    try:
        return SamplingParams(
            temperature=given("temperature"),
            top_p=given("top_p"),
            top_k=int(given("top_k")),
            min_p=given("min_p"),
            presence_penalty=given("presence_penalty"),
            frequency_penalty=given("frequency_penalty"),
            repetition_penalty=given("repetition_penalty"),
            logit_bias=tuple((bias.token_id, bias.bias) for bias in wire.logit_bias),
            logprobs=wire.logprobs if wire.HasField("logprobs") else None,
        )
    except EngineError as error:
        raise _named(error) from error


def _named(error: EngineError) -> InvalidArgument:
    """The engine's refusal, whose text begins with the field's path."""
    return InvalidArgument(error.message, field=error.message.partition(" ")[0])


def _sampling(wire: common_pb2.SamplingParams, model: ServedModel, limits: RequestSection) -> common_pb2.SamplingParams:
    n = wire.n if wire.HasField("n") else 1
    if not 1 <= n <= limits.max_n:
        raise InvalidArgument(f"{n} choices; 1 to {limits.max_n} are allowed", field="sampling.n")
    params = sampling_params(wire)
    try:
        params.check_vocabulary(model.vocab_size)
    except EngineError as error:
        raise _named(error) from error
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=wire.logit_bias,
        seed=wire.seed if wire.HasField("seed") else secrets.randbits(64),
        n=n,
        logprobs=params.logprobs,
    )


def _stop(wire: common_pb2.StopParams, model: ServedModel, limits: RequestSection) -> common_pb2.StopParams:
    if wire.HasField("max_tokens") and not 1 <= wire.max_tokens <= limits.max_tokens:
        raise InvalidArgument(f"{wire.max_tokens}; 1 to {limits.max_tokens} are allowed", field="stop.max_tokens")
    most = wire.max_tokens if wire.HasField("max_tokens") else limits.max_tokens
    if wire.min_tokens > most:
        raise InvalidArgument(f"{wire.min_tokens} exceeds max_tokens {most}", field="stop.min_tokens")
    for field, given in (("stop.stop", len(wire.stop)), ("stop.stop_token_ids", len(wire.stop_token_ids))):
        if given > limits.max_stops:
            raise InvalidArgument(f"{given} given; at most {limits.max_stops} are taken", field=field)
    if wire.stop and model.text is None:
        raise InvalidArgument("stop strings need a tokenizer; use stop_token_ids", field="stop.stop")
    for index, stop in enumerate(wire.stop):
        if not 1 <= len(stop) <= limits.max_stop_characters:
            message = f"{len(stop)} characters; 1 to {limits.max_stop_characters} are taken"
            raise InvalidArgument(message, field=f"stop.stop[{index}]")
    for index, token in enumerate(wire.stop_token_ids):
        if token >= model.vocab_size:
            message = f"token {token} is outside the vocabulary of {model.vocab_size}"
            raise InvalidArgument(message, field=f"stop.stop_token_ids[{index}]")
    checked = common_pb2.StopParams()
    checked.CopyFrom(wire)
    return checked
