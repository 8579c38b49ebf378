"""`./build.sh demo`: two real clusters on this machine, asked and checked. Exits non-zero if anything is not as told.

1. SmolLM2 through 1 router, 2 prefill and 2 decode processes: a question, and a follow-up that finds its prefix cached.
2. A tiny DeepSeek-V4.1 (random weights, every mechanism) with an encoder: an answer about an image, token for token
   what `headrace offline` says in one process.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
from rich.console import Console

from headrace.cli.ask import Answer, Message, chat_prompt, gather
from headrace.cli.cluster_spec import ClusterSpec
from headrace.cli.exits import CliError
from headrace.cli.leftovers import left_behind, shared_memory
from headrace.cli.local_cluster import LocalCluster
from headrace.cli.model import fetch, make
from headrace.cli.tables import request_row, request_table
from headrace.services.runtime.errors import HeadraceError
from headrace.v1 import common_pb2, inference_pb2

SYSTEM = """\
You are a helpful assistant for people who are planning a journey through Europe. You answer questions about \
countries, cities, languages, food, money, trains and museums. Your answers are short, friendly and correct.

When somebody asks for a fact, such as the capital of a country, the currency that is used there, or the \
language that is spoken, say the fact first, in one plain sentence. After that you may add one more sentence \
with something worth seeing. Do not invent prices, opening hours or train numbers, because they change often and \
a wrong one spoils a day. If you do not know something, say so, and name the place where the traveller can find \
out, such as the tourist office, the railway company or the museum itself.

When somebody asks for a plan, propose at most three stops for a day, in an order that makes sense on a map, and \
leave time to eat and to rest. Travellers with children need shorter walks and more breaks. Travellers in a \
wheelchair need stations with lifts and museums without stairs, so mention it when you are not sure about a \
place. People who travel with little money are glad about free museums, parks, markets and view points, and most \
large cities have many of them.

When somebody asks about food, name two or three typical dishes of the region and say what is in them, so that \
people who do not eat meat, fish, nuts or milk can decide by themselves. Never say that a dish is safe for \
somebody with an allergy; say that they should ask in the restaurant.

When somebody asks about trains, say which large stations a journey starts and ends at, roughly how long it \
takes, and whether a seat has to be reserved. Night trains are a good way to save time and a hotel, and they \
should be booked early. In many countries tickets are cheaper for the young, for the old and for families, and \
there are passes for a whole month that are valid in almost every country.

Be polite in every answer. Do not talk about politics, and do not judge how other people live. Use simple words, \
because many travellers read English as a second or third language, and write numbers with digits."""
QUESTION = "What is the capital of France?"
FOLLOW_UP = "And what is the capital of Germany?"

console = Console(highlight=False)


class DemoFailed(Exception):
    """What was promised did not happen."""


def check(holds: bool, what: str) -> None:
    """Say that something holds, or end the demo."""
    if not holds:
        raise DemoFailed(what)
    console.print(f"[green]✓[/green] {what}")


def ask(cluster: LocalCluster, messages: Sequence[Message], *, show: bool = True, **sampling: float) -> Answer:
    """One request with a report; its text is printed as it comes."""
    request = inference_pb2.GenerateRequest(
        prompt=chat_prompt(messages),
        sampling=common_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        stop=common_pb2.StopParams(max_tokens=64),
        report=True,
    )
    if show:
        console.print(f"[bold]{messages[-1].text}[/bold]", markup=True)
    answer = gather(
        cluster.client.generate(request, 300.0),
        (lambda _choice, text: console.print(text, end="", markup=False, soft_wrap=True)) if show else lambda *_: None,
    )
    if show:
        console.print()
    if answer.usage is None or answer.report is None:
        raise DemoFailed("a request ended without usage or report")
    return answer


def chat(folder: Path, rows: list[tuple[str, ...]]) -> list[int]:
    """SmolLM2 answers; the pids of its cluster."""
    console.rule("SmolLM2 through 1 router, 2 prefill and 2 decode processes")
    with LocalCluster(ClusterSpec(folder, {"prefill": 2, "decode": 2})) as cluster:
        pids = show_processes(cluster)
        messages = [Message("system", SYSTEM)]
        length = cluster.client.count_tokens(inference_pb2.CountTokensRequest(prompt=chat_prompt(messages)))
        check(length.prompt_tokens >= 400, f"the system prompt has {length.prompt_tokens} tokens")
        messages.append(Message("user", QUESTION))
        first = ask(cluster, messages, temperature=0)
        rows.append(request_row("capital of France", first))
        check("Paris" in first.text, "the answer says Paris")
        messages += [Message("assistant", first.text), Message("user", FOLLOW_UP)]
        second = ask(cluster, messages, temperature=0)
        rows.append(request_row("follow-up", second))
        cached = second.usage.cached_tokens if second.usage else 0
        check(cached > 0, f"{cached} tokens of the follow-up's prompt were cached")
    return pids


def picture() -> bytes:
    """A small PNG, drawn here."""
    image = PIL.Image.new("RGB", (96, 72), (250, 246, 235))
    draw = PIL.ImageDraw.Draw(image)
    draw.rectangle((0, 48, 96, 72), fill=(70, 140, 60))
    draw.ellipse((66, 6, 86, 26), fill=(250, 200, 40))
    draw.polygon([(20, 30), (40, 12), (60, 30)], fill=(180, 50, 40))
    draw.rectangle((24, 30, 56, 52), fill=(230, 220, 200))
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def look(folder: Path, rows: list[tuple[str, ...]]) -> list[int]:
    """V4.1-tiny on an image, by the cluster and by `offline`; the pids of its cluster."""
    console.rule("DeepSeek-V4.1-tiny with an encoder: an answer about an image")
    image = picture()
    cases: dict[str, dict[str, float]] = {
        "image, greedy": {"temperature": 0, "seed": 7},
        "image, sampled": {"temperature": 1.0, "top_p": 0.95, "seed": 7},
    }
    answers: dict[str, Answer] = {}
    with LocalCluster(ClusterSpec(folder, {"encoder": 1, "prefill": 1, "decode": 1})) as cluster:
        pids = show_processes(cluster)
        for name, sampling in cases.items():
            messages = [Message("user", "What is in this picture?", (image,))]
            answers[name] = ask(cluster, messages, show=False, **sampling)
            rows.append(request_row(name, answers[name]))
    expected = offline(folder, image, cases)
    for name, answer in answers.items():
        same = answer.token_ids == expected[name]
        if not same:
            console.print(f"cluster: {answer.token_ids}\noffline: {expected[name]}")
        check(same, f"{name}: the {len(answer.token_ids)} tokens of the cluster are those of `headrace offline`")
    return pids


def offline(folder: Path, image: bytes, cases: dict[str, dict[str, float]]) -> dict[str, list[int]]:
    """Token ids by case, from one process without a cluster."""
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "picture.png").write_bytes(image)
        content = [{"image": "picture.png"}, {"text": "What is in this picture?"}]
        lines = [
            {"id": name, "chat": [{"role": "user", "content": content}], "max_tokens": 64, **sampling}
            for name, sampling in cases.items()
        ]
        file = Path(scratch, "requests.jsonl")
        file.write_text("\n".join(json.dumps(line) for line in lines))
        command = [sys.executable, "-m", "headrace.cli.main", "offline", "--model", str(folder), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    check(done.returncode == 0, "`headrace offline` answered" + (f": {done.stderr}" if done.returncode else ""))
    results = [json.loads(line) for line in done.stdout.splitlines()]
    return {result["id"]: result["choices"][0]["token_ids"] for result in results}


def show_processes(cluster: LocalCluster) -> list[int]:
    """Say who runs; their pids."""
    console.print(", ".join(f"{child.name} (pid {child.pid})" for child in cluster.children))
    return [child.pid for child in cluster.children]


def run() -> None:
    """The whole demo. Raises DemoFailed, CliError or HeadraceError."""
    before = shared_memory()
    folders = {folder.name: folder for folder in fetch("smollm2", None, None)}
    tiny = make("deepseek-v41-tiny", None, 0)
    rows: list[tuple[str, ...]] = []
    pids = chat(folders["smollm2-bfloat16"], rows) + look(tiny, rows)
    console.rule("what happened")
    console.print(request_table(rows))
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    check(not left, f"no process is left{f': {left}' if left else ''}")
    files = left_behind(before)
    check(not files, f"no shared memory is left{f': {files}' if files else ''}")


if __name__ == "__main__":
    try:
        run()
    except (DemoFailed, CliError, HeadraceError) as failure:
        console.print(f"the demo failed: {failure}", style="bold red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
