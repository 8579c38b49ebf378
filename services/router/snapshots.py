"""Which positions of a prompt get a snapshot besides its end: forks that this router saw, and the system message's end.

Only for models with a sliding window; others can be entered at every block (spec/kv_tier.md, Two kinds of object).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.forks import Forks
from headrace.services.router.model import ServedModel
from headrace.services.router.place import Placed
from headrace.services.router.prepare import Prepared
from headrace.services.router.settings import RouterSettings
from headrace.v1 import common_pb2


class SnapshotPlanner:
    """One router's memory of prompts. Used on the event loop."""

    def __init__(self, settings: RouterSettings, model: ServedModel) -> None:
        self._settings = settings
        self._active = bool(model.window) and settings.replay.mode != "off"
        self._forks: Forks | None = None
        self.found = 0
        """Forks seen since start."""

    @property
    def remembered(self) -> int:
        """Blocks of recent prompts in memory."""
        return 0 if self._forks is None else len(self._forks)

    def plan(self, placed: Placed, prepared: Prepared, block_tokens: int) -> None:
        """Add to the request's `snapshot_at`. Called once per request, whatever its attempts."""
        if not self._active:
            return
        section = self._settings.router
        if self._forks is None:
            self._forks = Forks(section.fork_blocks, max(1, -(-section.fork_min_tokens // block_tokens)))
        spec = placed.spec
        positions = set(spec.snapshot_at)
        fork = self._forks.visit(spec.block_keys) * block_tokens
        if fork:
            self.found += 1
            positions.add(fork)
        system = expanded(prepared.system_tokens, spec.image_spans) // block_tokens * block_tokens
        if system >= section.fork_min_tokens:
            positions.add(system)
        spec.snapshot_at[:] = sorted(positions)


def expanded(tokens: int, spans: Sequence[common_pb2.ImageSpan]) -> int:
    """Position in the prompt with images expanded, of a count of tokens with one placeholder per image."""
    position = tokens
    for span in spans:
        if span.start >= position:
            break
        position += span.length - 1
    return position
