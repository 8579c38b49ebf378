"""One service process for tests: `python serve_process.py ROLE section.field=value …`."""

from __future__ import annotations

import sys
from importlib import import_module

from headrace.services.runtime.settings_load import load
from headrace.services.worker.lives import Sources

SETTINGS = {
    "router": "RouterSettings",
    "encoder": "EncoderSettings",
    "prefill": "PrefillSettings",
    "decode": "DecodeSettings",
}


def main() -> int:
    role, *sets = sys.argv[1:]
    settings = getattr(import_module(f"headrace.services.{role}.settings"), SETTINGS[role])
    arguments: list[object] = [load(settings, sets=sets, environ={})]
    if role in ("prefill", "decode"):
        arguments.append(Sources(sets=sets, environ={}))
    status: int = import_module(f"headrace.services.{role}.main").run(*arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
