"""The process in which a router turns what clients have written into grammars (engine/isolated.py): some schemas take
minutes. Work: JSON {form, text}; the answer is the text of the Constraint.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from headrace.engine.isolated import Refused, serve
from headrace.engine.text.constraint_forms import from_schema
from headrace.engine.text.errors import TextError
from headrace.engine.text.structural_tags import from_structural_tag

FORMS = {"json_schema": from_schema, "structural_tag": from_structural_tag}


def begin(set_up: bytes) -> Callable[[bytes], bytes]:
    """Needs no set-up."""

    def work(frame: bytes) -> bytes:
        asked = json.loads(frame)
        try:
            return FORMS[asked["form"]](asked["text"]).text.encode()
        except TextError as error:
            raise Refused(str(error)) from None

    return work


if __name__ == "__main__":
    serve(begin)
