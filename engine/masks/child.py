"""The process that compiles languages for one vocabulary (engine/isolated.py): xgrammar cannot be interrupted.

Set-up: JSON {vocabulary: base64 per token, stop: ids, size}. Work: JSON {language, text}. The answer is empty: it says
that the language can be compiled, within its time and memory. The caller then compiles it itself, which costs less than
xgrammar's JSON of what was compiled: 0.16 s against 4 s and 66 MB for a pattern of a host's name.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

from headrace.engine.isolated import Refused, serve
from headrace.engine.masks.library import xgrammar
from headrace.engine.masks.named import MARK
from headrace.engine.text.constraint import Language

_WHERE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
MOST_THREADS, MOST_COMPILERS = 4, 4


def begin(set_up: bytes) -> Callable[[bytes], bytes]:
    """A compiler for the vocabulary."""
    facts = json.loads(set_up)
    vocabulary = [base64.b64decode(token) for token in facts["vocabulary"]]
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))

    @lru_cache(maxsize=MOST_COMPILERS)
    def compiler_of(named: tuple[int, ...]) -> tuple[xgrammar.GrammarCompiler, int]:
        info = token_info(vocabulary, facts["size"], facts["stop"], named)
        return xgrammar.GrammarCompiler(info, max_threads=threads, cache_enabled=False), info.vocab_size

    def work(frame: bytes) -> bytes:
        asked = json.loads(frame)
        compiler, size = compiler_of(tuple(asked["named"]))
        try:
            compiled = compile_text(compiler, Language(asked["language"]), asked["text"])
        except (RuntimeError, ValueError) as error:
            raise Refused(_WHERE.sub("", str(error)).strip() or type(error).__name__) from None
        # What would bring a matcher down, brings this process down and not the server.
        bits = xgrammar.allocate_token_bitmask(1, size)
        matcher = xgrammar.GrammarMatcher(compiled)
        matcher.fill_next_token_bitmask(bits, 0)
        if not bits.any():
            raise Refused("no text of this model's tokens is in it")
        return b""

    return work


def compile_text(compiler: xgrammar.GrammarCompiler, language: Language, text: str) -> xgrammar.CompiledGrammar:
    """Raises RuntimeError or ValueError with what is wrong with the text."""
    match language:
        case Language.GRAMMAR:
            return compiler.compile_grammar(text)
        case Language.REGEX:
            return compiler.compile_regex(text)
        case Language.STRUCTURAL_TAG:
            return compiler.compile_structural_tag(text)


def token_info(
    vocabulary: list[bytes], size: int, stop: list[int], named: Sequence[int] = ()
) -> xgrammar.TokenizerInfo:
    """`vocabulary`: bytes by id, empty for tokens that are no text and never allowed inside a language, unless they are
    `named` in it."""
    vocabulary = vocabulary.copy()
    for token in named:
        vocabulary[token] = MARK
    return xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=stop, add_prefix_space=False
    )


if __name__ == "__main__":
    serve(begin)
