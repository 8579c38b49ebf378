"""Everything about text that a model folder says: tokenizer, chat protocol, special ids, digest."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from headrace.engine.text.chat import ChatProtocol, DeepseekV41Protocol, JinjaProtocol
from headrace.engine.text.errors import TextError
from headrace.engine.text.tokenizer import Tokenizer

ProtocolName = Literal["auto", "template", "v4.1"]


@dataclass(frozen=True)
class TextAssets:
    """What router, decode and the CLI need of a model folder; holds no weights."""

    tokenizer: Tokenizer
    chat: ChatProtocol | None
    """None: the folder has no chat template; chat requests are refused, text and ids are not."""
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    digest: bytes
    """SHA-256 over tokenizer and chat protocol; part of the cache namespace (L2)."""


def load_text_assets(folder: Path, protocol: ProtocolName = "auto") -> TextAssets:
    """Read tokenizer.json, config.json, generation_config.json, tokenizer_config.json and the chat template.

    `auto` takes v4.1 when config.json names the DeepSeek-V4.1 architecture, else the folder's template. Raises
    TextError for a folder that cannot serve text.
    """
    config = _read_json(folder / "config.json")
    generation = _read_json(folder / "generation_config.json", optional=True)
    tokenizer_config = _read_json(folder / "tokenizer_config.json", optional=True)
    tokenizer = Tokenizer.from_folder(folder)
    image_token_id = config.get("image_token_id")
    if protocol == "auto":
        protocol = "v4.1" if config.get("model_type") == "deepseek_v41" else "template"
    chat: ChatProtocol | None = None
    if protocol == "v4.1":
        chat = DeepseekV41Protocol(tokenizer, image_token_id=image_token_id)
    else:
        template = _chat_template(folder, tokenizer_config)
        if template is not None:
            chat = JinjaProtocol(
                template,
                tokenizer,
                bos_token=_spelling(tokenizer_config.get("bos_token")),
                eos_token=_spelling(tokenizer_config.get("eos_token")),
                image_token_id=image_token_id,
            )
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    digest = hashlib.sha256(tokenizer.digest + (chat.digest_input if chat else b"none")).digest()
    return TextAssets(tokenizer, chat, eos_token_ids, image_token_id, digest)


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise TextError(f"{folder}: several chat templates; keep one in chat_template.jinja")
    return template


def _spelling(token: Any) -> str:
    """A special token of tokenizer_config.json: a string, or an object with its content."""
    if isinstance(token, dict):
        return str(token["content"])
    return str(token) if token is not None else ""


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if optional:
            return {}
        raise TextError(f"no {path.name} in {path.parent}; is this a model folder?")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TextError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise TextError(f"{path} must hold an object")
    return document
