"""Formats that can be asserted, as patterns over the whole string. By the specification `format` is an annotation; it
is asserted where the caller asks for it (strict output), and then an unknown one is refused."""

from __future__ import annotations

from typing import Final

from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.patterns import automaton

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-{_MONTH_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_BYTE}(?:\\.{_BYTE}){{3}}"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL}){{0,8}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~\\-]+"
_H16 = "[0-9A-Fa-f]{1,4}"
_GROUPS = [f"(?:(?:{_H16}:){{0,{n}}}{_H16})?::(?:(?:{_H16}:){{0,{5 - n}}}{_H16})?" for n in range(6)]
_IPV6 = f"(?:(?:{_H16}:){{7}}{_H16}|{'|'.join(_GROUPS)})"

_CLOCK = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DAYS = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"

FORMATS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt]{_TIME}",
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})",
    "email": f"{_ATOM}(?:\\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
    "uri": "[A-Za-z][A-Za-z0-9+.\\-]*:[A-Za-z0-9\\-._~:/?#@!$&'()*+,;=%]+",
}
"""RFC 3339 without leap seconds, RFC 5321 without quoted names, RFC 4291 without embedded IPv4, RFC 4122; `uri` is the
set of characters of RFC 3986 after a scheme."""


def pattern_of(name: str) -> str:
    """Raises SchemaRefused for a format that cannot be asserted."""
    known = FORMATS.get(name)
    if known is None:
        raise SchemaRefused(f"{name!r} cannot be enforced; known are {', '.join(FORMATS)}", "format")
    return known


def has_format(name: str, value: str) -> bool:
    """The whole string is of the format."""
    return bool(automaton(pattern_of(name), anchored=True).accepts(value))
