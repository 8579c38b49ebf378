"""PyPI jsonschema as the judge of an answer, formats asserted."""

from __future__ import annotations

import datetime
import json
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker

FORMATS = FormatChecker(("date", "email", "ipv4", "ipv6", "regex", "uuid"))
"""jsonschema's own, and the two below, which it has only with further packages."""


@FORMATS.checks("date-time", raises=ValueError)
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value).tzinfo is not None


@FORMATS.checks("uri", raises=ValueError)
def _uri(value: object) -> bool:
    return not isinstance(value, str) or bool(urlsplit(value).scheme)


def fault_of(text: str, schema: dict[str, Any]) -> str:
    """Why a text is no instance of a schema; empty for instances."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    found = next(iter(Draft202012Validator(schema, format_checker=FORMATS).iter_errors(value)), None)
    return "" if found is None else found.message
