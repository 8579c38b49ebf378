"""Tokens by origin in each API's words (L27): what decode held and what came from the tier was cached."""

from __future__ import annotations

from typing import Any

from headrace.v1 import common_pb2


def cached(usage: common_pb2.Usage) -> int:
    return usage.cached_tokens + usage.loaded_tokens


def of_chat(usage: common_pb2.Usage, reasoning: int) -> dict[str, Any]:
    """Chat Completions, with DeepSeek's two counts."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached(usage)},
        "completion_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion_tokens)},
        "prompt_cache_hit_tokens": cached(usage),
        "prompt_cache_miss_tokens": usage.prompt_tokens - cached(usage),
    }


def of_responses(usage: common_pb2.Usage, reasoning: int) -> dict[str, Any]:
    """Responses."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached(usage)},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": min(reasoning, usage.completion_tokens)},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def of_messages(usage: common_pb2.Usage) -> dict[str, Any]:
    """Messages, whose input tokens are those that were not cached. Nothing is charged for what the cache takes up."""
    return {
        "input_tokens": usage.prompt_tokens - cached(usage),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached(usage),
        "output_tokens": usage.completion_tokens,
        "service_tier": "standard",
    }
