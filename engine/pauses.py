"""Requests whose client reads slowly: paused for want of credit, then out of the pool, then ended.

A client that takes nothing stops only itself (spec/protocol.md): at the limit of its credit its request takes part in
no step. Its memory waits for it a while; then it is spilled, and others have it; then the request is ended, as what has
been made for it is held, too.
"""

from __future__ import annotations

from headrace.engine.live import LiveRequest
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import State
from headrace.engine.settings import EngineSettings


class Pauses:
    """Belongs to the engine thread. The pause itself is kept with the request, so that it ends with it."""

    def __init__(self, settings: EngineSettings, scheduler: Scheduler) -> None:
        self._settings = settings
        self._scheduler = scheduler

    def watch(self, live: LiveRequest, now: float) -> bool:
        """Follow one request at `now`, on the engine's clock; True when its pause has lasted too long and it is to end.
        Reservations wait for their prompt, not for a reader."""
        if live.has_credit or not any(sequence.started for sequence in live.sequences):
            live.paused_at = None
            return False
        if live.paused_at is None:
            live.paused_at = now
        if now >= live.paused_at + self._settings.pause_end_s:
            return True
        if now >= live.paused_at + self._settings.pause_spill_s:
            for sequence in tuple(live.sequences):
                if sequence.state is State.RUNNING:
                    self._scheduler.preempt(sequence)
        return False

    def next_change(self, live: LiveRequest) -> float | None:
        """When `watch` has something to do next, if nothing else happens."""
        if live.paused_at is None:
            return None
        running = any(sequence.state is State.RUNNING for sequence in live.sequences)
        return live.paused_at + (self._settings.pause_spill_s if running else self._settings.pause_end_s)
