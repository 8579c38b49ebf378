"""`headrace evals run`: questions of a data set to a cluster or to a model in this process, answers into a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace.cli.askers import Asker, Identity, Reply
from headrace.cli.exits import CliError, Exit
from headrace.cli.progress import progress_bar
from headrace.cli.sources import Source, open_asker
from headrace.evals.datasets import Dataset, load_dataset
from headrace.evals.errors import EvalError
from headrace.evals.items import Turn
from headrace.evals.run_folder import Manifest, RunFolder, Sampling, Task, key_of, tasks_of
from headrace.services.gateway import usage as usages
from headrace.services.gateway.prompts import image_of
from headrace.services.runtime.errors import HeadraceError, InvalidArgument
from headrace.services.runtime.line_log import Entry, LineLog
from headrace.v1 import common_pb2, inference_pb2

GREEDY = Sampling()
_ROLES = {"system": inference_pb2.CHAT_ROLE_SYSTEM, "user": inference_pb2.CHAT_ROLE_USER}


@dataclass(frozen=True)
class RunOptions:
    """The command's own flags."""

    dataset: str
    out: Path
    data: Path | None = None
    limit: int | None = None
    repeats: int = 1
    seed: int = 0
    sampling: Sampling = GREEDY


def run(source: Source, options: RunOptions) -> int:
    """Ask what is not answered yet; the exit status: FAILED when an answer is missing at the end. Raises CliError."""
    if options.repeats > 1 and options.sampling.temperature == 0:
        raise CliError("greedy answers are all the same: --repeats needs a --temperature above 0")
    with eval_errors():
        dataset = load_dataset(options.dataset, options.data, options.limit)
        with open_asker(source) as asker:
            identity = asker.identity
            manifest = _manifest(options, dataset, identity)
            folder = RunFolder(options.out)
            folder.begin(manifest, dataset)
            with folder.open_answers() as log:
                failed = _ask(tasks_of(dataset.items, manifest), manifest, identity, asker, log)
    if failed:
        print(f"headrace: {failed} answers failed; answers.jsonl says why, a repeated run asks again", file=sys.stderr)
        return Exit.FAILED
    return Exit.DONE


@contextmanager
def eval_errors() -> Iterator[None]:
    """Turn EvalError into CliError, and Ctrl-C into its exit status."""
    try:
        yield
    except EvalError as error:
        raise CliError(str(error)) from error
    except KeyboardInterrupt:
        raise CliError("interrupted; what is there is kept: repeat the command to go on", Exit.INTERRUPTED) from None


def _manifest(options: RunOptions, dataset: Dataset, identity: Identity) -> Manifest:
    return Manifest(
        dataset=dataset.name,
        digest=dataset.digest,
        items=len(dataset.items),
        model=identity.name,
        fingerprint=identity.fingerprint,
        sampling=options.sampling,
        seed=options.seed,
        repeats=options.repeats,
    )


def _ask(tasks: Sequence[Task], manifest: Manifest, identity: Identity, asker: Asker, log: LineLog) -> int:
    done = {key_of(entry) for entry in log.entries}
    left = [task for task in tasks if task.key not in done]
    failed = 0
    todo: list[tuple[Task, inference_pb2.GenerateRequest]] = []
    for task in left:
        try:
            todo.append((task, request_of(task, manifest.sampling, identity)))
        except InvalidArgument as error:  # a picture that is none
            failed += 1
            log.append(entry_of(task, manifest, error))
    with progress_bar() as bar:
        shown = bar.add_task("answers", total=len(tasks), completed=len(tasks) - len(todo))

        def settle(index: int, outcome: Reply | HeadraceError) -> None:
            nonlocal failed
            failed += isinstance(outcome, HeadraceError)
            log.append(entry_of(todo[index][0], manifest, outcome))
            bar.advance(shown)

        if todo:
            asker.ask([request for _, request in todo], settle)
    return failed


def request_of(task: Task, sampling: Sampling, identity: Identity) -> inference_pb2.GenerateRequest:
    """The request for one answer. Raises InvalidArgument for a picture that cannot be read."""
    turns = [_message(turn) for turn in task.item.turns]
    return inference_pb2.GenerateRequest(
        model=identity.name,
        prompt=inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=turns, thinking=sampling.thinking)),
        sampling=common_pb2.SamplingParams(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=task.seed
        ),
        stop=common_pb2.StopParams(max_tokens=sampling.max_tokens),
        traffic_class=common_pb2.TRAFFIC_CLASS_BATCH,
    )


def _message(turn: Turn) -> inference_pb2.ChatMessage:
    parts = [inference_pb2.ContentPart(image=image_of(address, "image")) for address in turn.images]
    parts.append(inference_pb2.ContentPart(text=turn.text))
    return inference_pb2.ChatMessage(role=_ROLES[turn.role], content=parts)


def entry_of(task: Task, manifest: Manifest, outcome: Reply | HeadraceError) -> Entry:
    """One line of answers.jsonl."""
    entry: Entry = {
        "item": task.item.identifier,
        "repeat": task.repeat,
        "seed": task.seed,
        "sampling": asdict(manifest.sampling),
        "prompt": [{"role": turn.role, "text": turn.text, "images": len(turn.images)} for turn in task.item.turns],
    }
    if isinstance(outcome, HeadraceError):
        code = common_pb2.ErrorCode.Name(outcome.code).removeprefix("ERROR_CODE_")
        error = {"code": code, "message": outcome.message, "field": outcome.field or None}
        return {**entry, "answer": None, "error": error}
    choice = outcome.choices[0]
    return {
        **entry,
        "model": outcome.model.name,
        "fingerprint": outcome.model.fingerprint,
        "answer": choice.text,
        "finish_reason": choice.reason,
        "usage": {
            "prompt_tokens": outcome.usage.prompt_tokens,
            "cached_tokens": usages.cached(outcome.usage),
            "completion_tokens": outcome.usage.completion_tokens,
        },
        "error": None,
    }
