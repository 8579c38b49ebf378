"""What is left of a tenant's rates as the headers that clients of each API read. Without rates there are none."""

from __future__ import annotations

from datetime import UTC, datetime

from headrace.services.gateway.errors import Shape
from headrace.v1 import inference_pb2


def rate_headers(shape: Shape, caller: inference_pb2.Caller | None, now: float) -> dict[str, str]:
    """`now` in seconds since 1970. Tokens are prompts and outputs together, so Anthropic's names for each of them are
    left out."""
    if caller is None:
        return {}
    headers: dict[str, str] = {}
    for what in ("requests", "tokens"):
        if not caller.HasField(what):
            continue
        level: inference_pb2.RateLevel = getattr(caller, what)
        if shape == "anthropic":
            prefix, reset = f"anthropic-ratelimit-{what}-", _moment(now + level.reset_ms / 1000)
            headers |= {f"{prefix}limit": str(level.limit), f"{prefix}remaining": str(level.remaining)}
            headers[f"{prefix}reset"] = reset
        else:
            headers[f"x-ratelimit-limit-{what}"] = str(level.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(level.remaining)
            headers[f"x-ratelimit-reset-{what}"] = _duration(level.reset_ms)
    return headers


def _moment(seconds: float) -> str:
    """RFC 3339, rounded up to seconds: who waits for it has waited long enough."""
    whole = int(-(-seconds // 1))
    return datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _duration(milliseconds: int) -> str:
    """As OpenAI writes it: `120ms`, `1.5s`, `6m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
