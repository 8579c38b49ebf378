"""How many tokens of a rendered chat belong to its leading system messages: what other chats share with it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from headrace.engine.text.chat import ChatMessage, ChatProtocol
from headrace.engine.text.errors import TextError

_PROBE: Final = ChatMessage("user", (".",))


class SystemPrefix:
    """Compares a chat with one of the same system messages and another question: any template, no guess at its form.

    The result may include the words with which a template opens the next turn, since those are shared too. Remembers
    the probes of recent system messages. Thread-safe.
    """

    def __init__(self, protocol: ChatProtocol, remembered: int = 64) -> None:
        self._protocol = protocol
        self._remembered = remembered
        self._probes: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, messages: Sequence[ChatMessage], token_ids: Sequence[int], *, thinking: bool) -> int:
        """Leading ids that follow from the system messages alone; 0 without any, or where the template refuses them
        alone."""
        system = []
        for message in messages:
            if message.role != "system":
                break
            system.append(message)
        if not system or len(system) == len(messages):
            return 0
        probe = self._probe(system, thinking)
        low, high = 0, min(len(probe), len(token_ids))
        ids = tuple(token_ids[:high])
        while low < high:
            middle = (low + high + 1) // 2
            if ids[low:middle] == probe[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def _probe(self, system: Sequence[ChatMessage], thinking: bool) -> tuple[int, ...]:
        digest = hashlib.sha256(repr((system, thinking)).encode()).digest()
        with self._lock:
            known = self._probes.get(digest)
            if known is not None:
                self._probes.move_to_end(digest)
                return known
        try:
            probe = self._protocol.encode([*system, _PROBE], thinking=thinking).token_ids
        except TextError:
            # The chat itself was rendered; a template that wants more of it tells us nothing.
            probe = ()
        with self._lock:
            self._probes[digest] = probe
            if len(self._probes) > self._remembered:
                self._probes.popitem(last=False)
        return probe
