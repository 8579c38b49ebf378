"""Random identities. None of them ever enters a sampling key (L16)."""

from __future__ import annotations

import re
import secrets

_INCARNATION = re.compile(r"[0-9a-f]{32}")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


def new_incarnation() -> str:
    """128 random bits in lower-case hex, drawn once per process start: a restarted process is a new peer (L14)."""
    return secrets.token_hex(16)


def valid_incarnation(text: str) -> bool:
    """Whether `text` has the form of `new_incarnation`."""
    return _INCARNATION.fullmatch(text) is not None


def new_request_id() -> str:
    """32 hexadecimal digits."""
    return secrets.token_hex(16)


def valid_request_id(text: str) -> bool:
    """Whether `text` may be taken from a caller: 1 to 128 of A-Z a-z 0-9 . _ : - (it goes into logs and headers)."""
    return _REQUEST_ID.fullmatch(text) is not None


def short(incarnation: str) -> str:
    """The first eight hexadecimal digits, for logs and tables."""
    return incarnation[:8]
