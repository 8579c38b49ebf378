"""Compiled languages of one worker: a cache with a budget of bytes, behind a process that tries each language first and
is killed if it takes long.

A language that was refused is remembered, too, so that its repetition costs nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.engine.errors import EngineError, ErrorCode, invalid, overloaded
from headrace.engine.isolated import CannotStart, Isolated, Refused, TimeUp
from headrace.engine.masks.named import named_tokens
from headrace.engine.settings import EngineSettings
from headrace.engine.text.constraint import MOST_AFTER, MOST_TEXT_BYTES, Constraint
from headrace.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import xgrammar

CHILD = "headrace.engine.masks.child"
MOST_REFUSALS = 1024
REFUSAL_S = 60.0
"""How long a language that took too long is refused unseen: the machine may have been busy."""
MOST_NAMED, MOST_COMPILERS = 16, 4
"""Special tokens that a language may name; vocabularies with some of them that are kept."""
MOST_WAITING = 32
"""Languages that may wait to be compiled (L12)."""


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled language, shared by all choices that are held to it."""

    compiled: xgrammar.CompiledGrammar
    after: tuple[int, ...]
    """As in Constraint."""
    stop: tuple[int, ...]
    """Tokens that end the output: allowed where the language may end, and nowhere else."""
    vocab_size: int
    size: int
    """Bytes, roughly."""


class Grammars:
    """All languages that a worker's requests ask for. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        stop: Sequence[int],
        settings: EngineSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        process: Isolated | None = None,
    ) -> None:
        """`stop`: the model's end-of-sequence tokens. Starts nothing before the first language is asked for. `process`:
        one that is shared with others of the same vocabulary."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop = tuple(stop)
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()
        """Why, and until when."""
        self._bytes = 0
        self._waiting: dict[bytes, Future[Grammar]] = {}
        self._process = process or Isolated(CHILD, memory_bytes=settings.grammar_memory_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compilers: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}
        """By the special tokens that languages name, the newest last."""
        self._digest = hashlib.sha256(
            json.dumps([self._vocab_size, self._stop]).encode() + (b"" if tokenizer is None else tokenizer.digest)
        ).digest()
        self.compiled = 0
        """Languages that were compiled, refused ones included."""

    @property
    def held_bytes(self) -> int:
        """Of the cache."""
        return self._bytes

    def ask(self, constraint: Constraint) -> Future[Grammar]:
        """The compiled language, at once if it is known. The future fails with EngineError: INVALID_ARGUMENT with the
        reason, UNAVAILABLE without a compiler; RESOURCE_EXHAUSTED is raised when too many wait."""
        self._check(constraint)
        key = self._key(constraint)
        with self._lock:
            found = self._find(key)
            if found is None:
                found = self._waiting.get(key)
            if found is None:
                if len(self._waiting) >= MOST_WAITING:
                    raise overloaded(f"{MOST_WAITING} languages wait to be compiled", self._settings.retry_after_s)
                found = self._waiting[key] = self._thread.submit(self._make, key, constraint)
        return found

    def get(self, constraint: Constraint) -> Grammar:
        """`ask`, waiting for the answer."""
        return self.ask(constraint).result()

    def close(self) -> None:
        """End the process and what waits for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._process.close, name="grammars-close", daemon=True).start()

    # --- inside ------------------------------------------------------------------------------------------------

    def _check(self, constraint: Constraint) -> None:
        if self._tokenizer is None:
            raise invalid("constraint needs a tokenizer, and this model folder has none")
        if not self._stop:
            raise invalid("constraint needs an end-of-sequence token, and this model names none")
        if len(constraint.text.encode()) > MOST_TEXT_BYTES:
            raise invalid(f"constraint has more than {MOST_TEXT_BYTES} bytes")
        if len(constraint.after) > MOST_AFTER or any(not 0 <= token < self._vocab_size for token in constraint.after):
            raise invalid(f"constraint.after_token_ids must be at most {MOST_AFTER} tokens of the vocabulary")

    def _key(self, constraint: Constraint) -> bytes:
        fields = [constraint.language.value, constraint.text, constraint.after]
        return hashlib.sha256(self._digest + json.dumps(fields).encode()).digest()

    def _find(self, key: bytes) -> Future[Grammar] | None:
        known, refused = self._known.get(key), self._refused.get(key)
        if known is None and (refused is None or refused[1] <= self._clock()):
            return None
        found: Future[Grammar] = Future()
        if known is not None:
            self._known.move_to_end(key)
            found.set_result(known)
        else:
            assert refused is not None
            found.set_exception(invalid(f"constraint: {refused[0]}"))
        return found

    def _make(self, key: bytes, constraint: Constraint) -> Grammar:
        """On the thread."""
        try:
            made = self._compile(constraint)
        except Refused as refused:
            until = self._clock() + REFUSAL_S if isinstance(refused, TimeUp) else float("inf")
            with self._lock:
                del self._waiting[key]
                self._refused[key] = (str(refused), until)
                while len(self._refused) > MOST_REFUSALS:
                    self._refused.popitem(last=False)
            raise invalid(f"constraint: {refused}") from None
        except BaseException as error:
            with self._lock:
                del self._waiting[key]
            if isinstance(error, CannotStart | ImportError):
                message = f"constrained output is not possible here now ({error}); see that xgrammar is installed"
                raise EngineError(ErrorCode.UNAVAILABLE, message) from error
            raise
        with self._lock:
            del self._waiting[key]
            self._known[key] = made
            self._bytes += made.size
            # The newest stays, whatever its size: the request that asked for it holds it anyhow.
            while self._bytes > self._settings.grammar_cache_bytes and len(self._known) > 1:
                self._bytes -= self._known.popitem(last=False)[1].size
        return made

    def _compile(self, constraint: Constraint) -> Grammar:
        # Not at the top: xgrammar takes seconds to be imported, and few workers are ever asked.
        from headrace.engine.masks.child import compile_text

        named = self._named(constraint)
        compiler = self._compiler(named)
        self.compiled += 1
        self._process.call(
            json.dumps({"language": constraint.language.value, "text": constraint.text, "named": named}).encode(),
            limit_s=self._settings.grammar_compile_s,
            set_up=self._facts,
        )
        # The process has shown that this ends, and how much memory it takes at most.
        compiled = compile_text(compiler, constraint.language, constraint.text)
        return Grammar(compiled, constraint.after, self._stop, self._vocab_size, compiled.memory_size_bytes)

    def _named(self, constraint: Constraint) -> list[int]:
        """Special tokens that the language may hold."""
        assert self._tokenizer is not None
        special = self._tokenizer.is_special
        asked = sorted(token for token in named_tokens(constraint) if special(token) and token not in self._stop)
        if len(asked) > MOST_NAMED:
            raise Refused(f"it names {len(asked)} special tokens; at most {MOST_NAMED} are taken")
        return asked

    def _compiler(self, named: list[int]) -> xgrammar.GrammarCompiler:
        """For the vocabulary as the process has it for such a language. On the thread."""
        from headrace.engine.masks.child import token_info
        from headrace.engine.masks.library import xgrammar

        made = self._compilers.pop(tuple(named), None)
        if made is None:
            info = token_info(self._vocabulary(), self._vocab_size, list(self._stop), named)
            made = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._compilers[tuple(named)] = made
        while len(self._compilers) > MOST_COMPILERS:
            self._compilers.pop(next(iter(self._compilers)))
        return made

    def _facts(self) -> bytes:
        """The set-up of the process."""
        facts = {
            "vocabulary": [base64.b64encode(token).decode() for token in self._vocabulary()],
            "size": self._vocab_size,
            "stop": self._stop,
        }
        return json.dumps(facts).encode()

    def _vocabulary(self) -> list[bytes]:
        """Bytes by id. Special tokens are no text: `<|im_end|>` inside a JSON string would not be what it spells."""
        assert self._tokenizer is not None
        tokenizer = self._tokenizer
        ids = range(min(self._vocab_size, tokenizer.size))
        known = [b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in ids]
        return known + [b""] * (self._vocab_size - len(known))
