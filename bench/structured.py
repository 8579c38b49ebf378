"""How much of JSON Schema is enforced: schemas with instances, each enforced exactly or refused with a reason.

    python -m bench.structured --suite ../shared/json_schema --json

The suite is a folder of files [{description, schema, tests: [{data, valid}]}], as the JSON Schema Test Suite has them.
A schema counts as enforced if every valid instance is accepted byte by byte and every invalid one rejected, as compact
JSON with its members in the schema's order; otherwise, unless it was refused up front, as wrong.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xgrammar

from bench._report import JsonValue, Report, arguments, emit
from headrace.engine.text.json_schema.compile import schema_grammar
from headrace.engine.text.json_schema.errors import SchemaRefused
from headrace.engine.text.json_schema.order import SchemaOrder


def cases(folder: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    """Name, schema and instances of every schema of a suite."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise SystemExit(f"{folder} holds no *.json files")
    for file in files:
        for case in json.loads(file.read_text()):
            yield f"{file.stem}: {case['description']}", case["schema"], case["tests"]


def mistakes(compiler: xgrammar.GrammarCompiler, grammar: str, schema: str, tests: list[dict[str, Any]]) -> list[str]:
    """Instances that the grammar judges otherwise than the suite."""
    compiled = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(grammar))
    order = SchemaOrder(schema)
    wrong = []
    for test in tests:
        text = json.dumps(order.of(test["data"]), ensure_ascii=False, separators=(",", ":"))
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        if (matcher.accept_string(text) and matcher.is_terminated()) != test["valid"]:
            wrong.append(f"{test['description']}: {text}")
    return wrong


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--suite", type=Path, required=True, help="folder of the suite")
    options = parser.parse_args()
    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    counts: Counter[str] = Counter(schemas=0, enforced=0, refused=0, wrong=0)
    refused: dict[str, JsonValue] = {}
    wrong: dict[str, JsonValue] = {}
    translating = 0.0
    for name, schema, tests in cases(options.suite):
        counts["schemas"] += 1
        text = json.dumps(schema)
        began = time.process_time()
        try:
            grammar = schema_grammar(text)
        except SchemaRefused as error:
            counts["refused"] += 1
            refused[name] = str(error)
            continue
        finally:
            translating += time.process_time() - began
        found = mistakes(compiler, grammar, text, tests)
        counts["wrong" if found else "enforced"] += 1
        if found:
            wrong[name] = found
    table: list[dict[str, str | int | float | bool | None]] = [
        {"schema": name, "refused because": str(reason)} for name, reason in refused.items()
    ]
    results: dict[str, JsonValue] = {
        **counts,
        "translation_ms_mean": round(1000 * translating / counts["schemas"], 2),
        "wrong_cases": wrong,
    }
    emit(Report("structured", results, table), as_json=options.json)


if __name__ == "__main__":
    main()
