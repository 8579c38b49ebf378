"""One request as the engine sees it: token ids, images, sampling, limits. Frozen; checked once at the border.

N₀ is `prompt_length` and K is `keep_tokens`; both are fixed at the first admission and travel with every attempt
(spec/protocol.md, "Length and replay").
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.engine.errors import invalid
from headrace.kvcache.keys import ImageSpan
from headrace.kvcache.tier.types import CacheScope

if TYPE_CHECKING:
    import torch

    from headrace.engine.masks.grammars import Grammar
    from headrace.engine.sampling_params import SamplingParams
    from headrace.engine.text.constraint import Constraint


class TrafficClass(enum.Enum):
    """What kind of client asks; decides retention in the tier and order under pressure."""

    AGENT = "agent"
    CHAT = "chat"
    BATCH = "batch"


@dataclass(frozen=True)
class RequestKey:
    """A request's identity inside the system: L16, the highest attempt wins."""

    request_id: str
    attempt: int

    def __str__(self) -> str:
        return f"{self.request_id}#{self.attempt}"


@dataclass(frozen=True)
class ImageInput:
    """One image's span of placeholder positions in the prompt, delimiters included."""

    start: int
    length: int
    digest: bytes
    """Content digest, 32 bytes; enters block keys (L2), since the ids do not identify the picture."""
    embeddings: torch.Tensor | None = field(default=None, compare=False)
    """[length, hidden_size] rows for every position of the span; None where the worker never computes them (decode)."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def span(self) -> ImageSpan:
        """As block keys name it."""
        return ImageSpan(self.start, self.length, self.digest)


@dataclass(frozen=True)
class EngineRequest:
    """Everything a worker needs to serve a request in any role."""

    key: RequestKey
    prompt_ids: tuple[int, ...]
    """Images already expanded: every position of a span is present."""
    key_root: bytes
    """Parent of the first block's key (spec/protocol.md, "Identity"); 32 bytes, given by the router."""
    sampling: SamplingParams
    seed: int
    """Of choice 0; always present, drawn by the router when the client gave none."""
    max_tokens: int
    """Per choice, ≥ 1; the first token counts, EOS counts."""
    n: int = 1
    images: tuple[ImageInput, ...] = ()
    keep_tokens: int | None = None
    """K of bounded replay; None takes the worker's setting. Ignored by layouts without snapshots."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """EOS and stop ids are not drawn before this many tokens; stop strings end the choice all the same."""
    snapshot_at: tuple[int, ...] = ()
    """Further positions (multiples of the block) at which prefill ends a chunk and takes a snapshot."""
    delivered: tuple[tuple[int, ...], ...] = ()
    """Per choice, tokens an earlier attempt already delivered; they are computed, never emitted again, and count
    towards `max_tokens` and in stop strings. Empty on a first attempt."""
    traffic: TrafficClass = TrafficClass.CHAT
    cache: CacheScope | None = None
    """None: nothing of the request is kept in the tier or loaded from it (canaries, offline runs)."""
    priority: int = 0
    """Larger goes first among waiting requests."""
    deadline: float | None = field(default=None, compare=False)
    """On the worker's injected monotonic clock, seconds. A repeat of the same request arrives a little later."""
    credit: int | None = None
    """Tokens, over all choices, that may be emitted before Credit allows more; None is no limit."""
    arrival: float = field(default=0.0, compare=False)
    constraint: Constraint | None = None
    """Language of every choice's output."""
    grammar: Grammar | None = field(default=None, compare=False, repr=False)
    """The constraint, compiled for this worker's vocabulary before the engine gets the request."""

    @property
    def prompt_length(self) -> int:
        """N₀."""
        return len(self.prompt_ids)

    def delivered_to(self, choice: int) -> tuple[int, ...]:
        return self.delivered[choice] if self.delivered else ()


@dataclass(frozen=True)
class RequestLimits:
    """What a worker can serve; a request beyond it is refused before anything is reserved (L10)."""

    vocab_size: int
    context_tokens: int
    hidden_size: int
    block_tokens: int
    has_snapshots: bool
    min_keep_tokens: int
    image_token_id: int | None
    has_tokenizer: bool
    max_choices: int
    max_stop_strings: int = 16
    max_stop_characters: int = 1024


def check_request(request: EngineRequest, limits: RequestLimits) -> None:
    """Refuse what can never be served (L10, L13). Raises EngineError INVALID_ARGUMENT naming the field."""
    length = request.prompt_length
    if length < 1:
        raise invalid("prompt_ids is empty; send at least one token")
    if length >= limits.context_tokens:
        raise invalid(f"the prompt has {length} tokens; this model takes at most {limits.context_tokens - 1}")
    bad = next((token for token in request.prompt_ids if not 0 <= token < limits.vocab_size), None)
    if bad is not None:
        raise invalid(f"token id {bad} is outside the vocabulary of {limits.vocab_size}")
    if request.max_tokens < 1:
        raise invalid(f"max_tokens is {request.max_tokens}; it must be at least 1")
    if not 1 <= request.n <= limits.max_choices:
        raise invalid(f"n is {request.n}; this worker allows 1 to {limits.max_choices}")
    if request.min_tokens < 0 or request.min_tokens > request.max_tokens:
        raise invalid(f"min_tokens is {request.min_tokens}; it must lie between 0 and max_tokens {request.max_tokens}")
    if len(request.key_root) != 32:
        raise invalid(f"key_root has {len(request.key_root)} bytes; it must have 32")
    if not 0 <= request.seed < 1 << 64:
        raise invalid("seed must be an unsigned 64-bit number")
    if request.credit is not None and request.credit < 0:
        raise invalid(f"credit is {request.credit}; it must not be negative")
    _check_stops(request, limits)
    _check_constraint(request)
    _check_images(request, limits)
    _check_replay(request, limits)
    _check_delivered(request, limits)
    request.sampling.check_vocabulary(limits.vocab_size)


def _check_stops(request: EngineRequest, limits: RequestLimits) -> None:
    if request.stop and not limits.has_tokenizer:
        raise invalid("stop strings need a tokenizer, and this model folder has none; use stop_token_ids")
    if len(request.stop) > limits.max_stop_strings:
        raise invalid(f"{len(request.stop)} stop strings; at most {limits.max_stop_strings} are allowed")
    for stop in request.stop:
        if not 1 <= len(stop) <= limits.max_stop_characters:
            raise invalid(f"a stop string must have 1 to {limits.max_stop_characters} characters, not {len(stop)}")
    for token in request.stop_token_ids:
        if not 0 <= token < limits.vocab_size:
            raise invalid(f"stop token id {token} is outside the vocabulary of {limits.vocab_size}")


def _check_constraint(request: EngineRequest) -> None:
    if (request.constraint is None) != (request.grammar is None):
        raise invalid("constraint is not compiled; give the request the grammar that engine.masks makes of it")
    if request.constraint is not None and request.ignore_eos:
        raise invalid("ignore_eos with a constraint: its language ends with the end-of-sequence token and nowhere else")


def _check_images(request: EngineRequest, limits: RequestLimits) -> None:
    if request.images and limits.image_token_id is None:
        raise invalid("this model takes no images")
    previous = 0
    for image in request.images:
        if image.start < previous or image.length < 1 or image.end > request.prompt_length:
            raise invalid(f"image span [{image.start}, {image.end}) overlaps another or leaves the prompt")
        if len(image.digest) != 32:
            raise invalid(f"an image digest has {len(image.digest)} bytes; it must have 32")
        shape = None if image.embeddings is None else tuple(image.embeddings.shape)
        if shape is not None and shape != (image.length, limits.hidden_size):
            raise invalid(f"image embeddings have shape {shape}; expected {(image.length, limits.hidden_size)}")
        previous = image.end
    covered = sum(image.length for image in request.images)
    placeholders = sum(1 for token in request.prompt_ids if token == limits.image_token_id)
    inside = all(
        token == limits.image_token_id
        for image in request.images
        for token in request.prompt_ids[image.start : image.end]
    )
    if limits.image_token_id is not None and (placeholders != covered or not inside):
        raise invalid(f"the prompt has {placeholders} image placeholders, its images cover {covered}; they must match")


def _check_replay(request: EngineRequest, limits: RequestLimits) -> None:
    if request.keep_tokens is not None and limits.has_snapshots and request.keep_tokens < limits.min_keep_tokens:
        raise invalid(f"keep_tokens is {request.keep_tokens}; this layout needs at least {limits.min_keep_tokens}")
    for position in request.snapshot_at:
        if position <= 0 or position % limits.block_tokens or position > request.prompt_length:
            raise invalid(
                f"snapshot_at {position} must be a multiple of {limits.block_tokens} inside the prompt of "
                f"{request.prompt_length} tokens"
            )


def _check_delivered(request: EngineRequest, limits: RequestLimits) -> None:
    if request.delivered and len(request.delivered) != request.n:
        raise invalid(f"delivered names {len(request.delivered)} choices; n is {request.n}")
    for choice, tokens in enumerate(request.delivered):
        if len(tokens) >= request.max_tokens or request.prompt_length + len(tokens) >= limits.context_tokens:
            raise invalid(f"choice {choice} already has {len(tokens)} tokens; nothing is left to generate")
        if any(not 0 <= token < limits.vocab_size for token in tokens):
            raise invalid(f"a delivered token of choice {choice} is outside the vocabulary of {limits.vocab_size}")
