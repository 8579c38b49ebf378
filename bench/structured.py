"""Structured output: how much of JSON Schema is enforced, and what a model generates under real schemas.

    python -m bench.structured --suite ../shared/json_schema --json
    python -m bench.structured --model FOLDER --json

The suite is a folder of files [{description, schema, tests: [{data, valid}]}], as the JSON Schema Test Suite has them.
A schema counts as enforced if every valid instance is accepted byte by byte and every invalid one rejected, as compact
JSON with its members in the schema's order; otherwise, unless it was refused up front, as wrong.

The model writes one answer to each of fifty schemas of applications (bench/structured_harness/schemas.json), all in one
batch, `format` asserted. Those that end with `stop` are checked by PyPI jsonschema, and their masks are made once more
by xgrammar and by llguidance. Times of masks are a thread's own, so they hardly depend on what else the machine does.

The exit status is 1 when a schema is enforced wrongly, an answer that ended is invalid, or fewer than half ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xgrammar

from bench._progress import Phases
from bench._report import JsonValue, Report, Scalar, arguments, emit, positive
from bench.structured_harness.beside import ours, theirs
from bench.structured_harness.generate import generate, load_cases, prepare
from headrace.engine.loading import ModelSettings
from headrace.engine.messages import FinishReason
from headrace.engine.offline import OfflineEngine
from headrace.engine.settings import EngineSettings
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


def enforced(folder: Path) -> tuple[dict[str, JsonValue], list[dict[str, Scalar]]]:
    """Results and table of a suite."""
    vocabulary = [bytes([byte]) for byte in range(256)]
    info = xgrammar.TokenizerInfo(vocabulary, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[0])
    compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
    counts: Counter[str] = Counter(schemas=0, enforced=0, refused=0, wrong=0)
    refused: dict[str, JsonValue] = {}
    wrong: dict[str, JsonValue] = {}
    translating = 0.0
    for name, schema, tests in cases(folder):
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
    table: list[dict[str, Scalar]] = [
        {"schema": name, "refused because": str(reason)} for name, reason in refused.items()
    ]
    results: dict[str, JsonValue] = {
        **counts,
        "translation_ms_mean": round(1000 * translating / counts["schemas"], 2),
        "wrong_cases": wrong,
    }
    return results, table


def generated(
    folder: Path, most: int | None, max_tokens: int, load: ModelSettings, sequences: int, threads: int = 1
) -> tuple[dict[str, JsonValue], list[dict[str, Scalar]]]:
    """Results and table of a model's answers. `threads`: of the engine, beside the one that makes masks."""
    cases = load_cases(most)
    began = time.monotonic()
    with Phases() as phases:
        with phases.phase("load the model") as advance:
            settings = EngineSettings(
                threads=threads,
                max_sequences=sequences,
                max_batched_tokens=sequences + 256,
                grammar_compile_s=120.0,
                grammar_cache_bytes=1 << 30,
            )
            engine = OfflineEngine.load(folder, settings, load)
            advance()
        with phases.phase("compile the schemas", len(cases)) as advance:
            asked = prepare(engine, folder, cases, max_tokens, advance)
        with phases.phase("answers", len(cases)) as advance:
            outputs, cost = generate(engine, cases, asked, advance)
        with phases.phase("masks once more", 2) as advance:
            ended = [output for output in outputs if output.reason is FinishReason.STOP]
            xgrammars = ours(engine, ended)
            advance()
            model = engine.engine.model
            guidances = theirs(folder, model.vocab_size, model.eos_token_ids, ended)
            advance()
    engine.close()
    faulty = {output.case.name: output.fault for output in ended if output.fault}
    results: dict[str, JsonValue] = {
        "cases": len(outputs),
        "finished": len(ended),
        "length": len(outputs) - len(ended),
        "valid": len(ended) - len(faulty),
        "invalid": len(faulty),
        "invalid_cases": dict(faulty),
        "tokens": sum(len(output.token_ids) for output in outputs),
        "cost": {name: round(value, 4) for name, value in asdict(cost).items()},
        "xgrammar": xgrammars.json(),
        "llguidance": guidances.json(),
        "seconds": round(time.monotonic() - began, 1),
        "load_average": round(os.getloadavg()[0], 1),
    }
    table: list[dict[str, Scalar]] = [
        {"case": output.case.name, "end": output.reason.value, "fault": output.fault, "text": output.text[:60]}
        for output in outputs
    ]
    return results, table


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--suite", type=Path, help="folder of the suite")
    parser.add_argument("--model", type=Path, help="folder of a model that answers")
    parser.add_argument("--cases", type=positive, help="only the first of the fifty")
    parser.add_argument("--max-tokens", type=positive, default=500, help="longest answer")
    parser.add_argument("--batch", type=positive, default=50, help="answers at once")
    parser.add_argument("--threads", type=positive, default=1, help="of the engine; a busy machine is faster with one")
    options = parser.parse_args()
    if options.suite is None and options.model is None:
        parser.error("give --suite, --model or both")
    results: dict[str, JsonValue] = {}
    table: list[dict[str, Scalar]] = []
    good = True
    if options.suite is not None:
        results, table = enforced(options.suite)
        good = results["wrong"] == 0
    if options.model is not None:
        answers, table = generated(
            options.model, options.cases, options.max_tokens, ModelSettings(), options.batch, options.threads
        )
        results["generated"] = answers
        good = good and shown(answers)
    emit(Report("structured", results, table), as_json=options.json)
    sys.exit(0 if good else 1)


def shown(answers: dict[str, JsonValue]) -> bool:
    """Whether answers ended, at least every second one, and all that did are valid."""
    cases, finished, invalid = (int(str(answers[name])) for name in ("cases", "finished", "invalid"))
    return invalid == 0 and 2 * finished >= cases


if __name__ == "__main__":
    main()
