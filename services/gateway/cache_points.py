"""`cache_control` of Messages: checked, and the ends of marked prefixes as positions of the prompt.

A marked request is of traffic class AGENT, whose prefixes outlive both times that a mark may ask for. Nothing is
pinned: pins are an operator's and have no end (docs/retention.md). A model with a sliding window can be entered only
where a snapshot stands; one is asked for at the end of each marked prefix (`snapshot_at`).

DeepSeek's encoding writes the tools behind the system's text, so a mark in either means the end of both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from headrace.services.gateway.prompts import Rendered
from headrace.services.runtime.errors import InvalidArgument

MOST: Final = 4
"""Marks that a request may have."""
_TTLS: Final = ("5m", "1h")
Body = Mapping[str, Any]


def marks(body: Body) -> list[str]:
    """Where marks are, in the API's words. Raises InvalidArgument for one that says something else, and for too
    many."""
    found = []
    for path, block in (("", body), *_blocks(body)):
        mark = block.get("cache_control")
        if mark is None:
            continue
        field = f"{path}.cache_control".lstrip(".")
        if not isinstance(mark, Mapping) or mark.get("type") != "ephemeral":
            raise InvalidArgument("must be an object of type ephemeral", field=field)
        for name in mark.keys() - {"type", "ttl"}:
            raise InvalidArgument("is no field of a mark", field=f"{field}.{name}")
        if mark.get("ttl", _TTLS[0]) not in _TTLS:
            raise InvalidArgument(f"choose from {', '.join(_TTLS)}", field=f"{field}.ttl")
        found.append(field)
    if len(found) > MOST:
        raise InvalidArgument(f"at most {MOST} marks are taken, {len(found)} are given", field=found[MOST])
    return found


def with_points(messages: list[Any], point: str) -> list[Any]:
    """The messages with `point`, a character that they do not have, behind each marked text and tool result."""
    return [
        {**message, "content": [_pointed(block, point) for block in message["content"]]}
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _pointed(block: Any, point: str) -> Any:
    if not isinstance(block, Mapping) or not block.get("cache_control"):
        return block
    for name in ("text", "content"):  # of a text, of a tool's result
        if isinstance(block.get(name), str) and block[name]:
            return {**block, name: block[name] + point}
        if name == "content" and isinstance(block.get(name), list) and block[name]:
            *before, last = block[name]
            if isinstance(last, Mapping) and isinstance(last.get("text"), str):
                return {**block, name: [*before, {**last, "text": last["text"] + point}]}
    return block


def snapshot_positions(found: list[str], rendered: Rendered, block_tokens: int) -> list[int]:
    """`snapshot_at`: the ends of marked prefixes, cut down to whole blocks."""
    if not block_tokens:
        return []
    ends = list(rendered.points)
    if any(path.startswith(("system", "tools")) for path in found):
        ends.append(rendered.system_end)
    return sorted({end // block_tokens * block_tokens for end in ends} - {0})


def _blocks(body: Body) -> Iterator[tuple[str, Body]]:
    lists = [("system", body.get("system")), ("tools", body.get("tools"))]
    for index, message in enumerate(body.get("messages") or ()):
        if isinstance(message, Mapping):
            lists.append((f"messages[{index}].content", message.get("content")))
    for path, blocks in lists:
        for index, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if isinstance(block, Mapping):
                yield f"{path}[{index}]", block
