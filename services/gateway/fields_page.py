"""The tables of fields as docs/gateway.md has them: `python -m headrace.services.gateway.fields_page docs/gateway.md`
writes them between its two marks; a test compares."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from headrace.services.gateway.fields import TABLES

BEGIN: Final = "<!-- fields: generated -->\n"
END: Final = "<!-- end of fields -->\n"
_TITLES: Final = {
    "chat": "Chat Completions: `POST /v1/chat/completions`",
    "completions": "Completions: `POST /v1/completions`",
    "responses": "Responses: `POST /v1/responses`",
    "messages": "Messages: `POST /v1/messages`",
}


def render() -> str:
    """One table for each API: supported fields in order, then those that are refused."""
    lines: list[str] = []
    for api, title in _TITLES.items():
        lines += [f"### {title}", "", "| field | |", "|---|---|"]
        lines += [f"| `{name}` | {field.note} |" for name, field in TABLES[api].items() if field.supported]
        refused = [f"`{name}` ({field.note})" for name, field in TABLES[api].items() if not field.supported]
        lines += ["", f"Refused: {', '.join(refused)}.", ""]
    return "\n".join(lines)


def put(page: str) -> str:
    """The page with the tables of now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + render() + END + after


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(put(path.read_text(encoding="utf-8")), encoding="utf-8")
