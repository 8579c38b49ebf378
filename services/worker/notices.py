"""Terminal notices from the transfer thread to the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from headrace.kvcache.transfer.base import TransferEngine
from headrace.kvcache.transfer.pushes import TerminalNotice


def deliver_notices(transfer: TransferEngine, take: Callable[[Sequence[TerminalNotice]], None]) -> None:
    """Call `take` on the running loop with notices as they arrive."""
    loop = asyncio.get_running_loop()

    def on_loop() -> None:
        notices = transfer.take_notices()
        if notices:
            take(notices)

    transfer.on_notice(lambda: _tell(loop, on_loop))


def _tell(loop: asyncio.AbstractEventLoop, on_loop: Callable[[], None]) -> None:
    """On the transfer thread, which outlives the loop by a moment at the end of the process."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(on_loop)
