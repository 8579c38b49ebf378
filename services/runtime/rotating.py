"""A channel that survives the rotation of certificates: gRPC reads them once per channel, so channels are exchanged.

Each call goes out on a channel with the newest certificates. A former channel ends when its last call has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

Make = Callable[[], grpc.aio.Channel]


class _Life:
    """One channel from its first call to its last."""

    def __init__(self, channel: grpc.aio.Channel, generation: int) -> None:
        self.channel = channel
        self.generation = generation
        self.calls = 0


class RotatingChannel(grpc.aio.Channel):
    """Channels to one address, one after the other. Belongs to the event loop's thread."""

    def __init__(self, make: Make, generation: Callable[[], int]) -> None:
        """`make` opens a channel with the certificates in force, `generation` says which those are."""
        self._make = make
        self._generation = generation
        self._life = self._open(generation())
        self._former: set[_Life] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def life(self) -> _Life:
        """The channel for a new call."""
        generation = self._generation()
        if generation != self._life.generation:
            former, self._life = self._life, self._open(generation)
            self._former.add(former)
            self._close_if_quiet(former)
        return self._life

    def _open(self, generation: int) -> _Life:
        """`generation` was asked for before: certificates that are exchanged in between make the channel newer than it
        says, and the next call opens another one; the other way round an old one would pass for new."""
        return _Life(self._make(), generation)

    def began(self, life: _Life, call: Any) -> None:
        """A call went out on `life`; it stays open until the call has ended."""
        life.calls += 1

        def ended(_: object) -> None:
            life.calls -= 1
            self._close_if_quiet(life)

        call.add_done_callback(ended)

    def _close_if_quiet(self, life: _Life) -> None:
        if life not in self._former or life.calls:
            return
        self._former.discard(life)
        task = asyncio.ensure_future(life.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel: calls under way are cancelled after `grace` seconds."""
        lives = [self._life, *self._former]
        self._former.clear()
        await asyncio.gather(*(life.channel.close(grace) for life in lives), *self._closing)

    async def __aenter__(self) -> RotatingChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Of the channel for new calls."""
        return self.life().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Of the channel for new calls."""
        await self.life().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Of the channel for new calls."""
        await self.life().channel.channel_ready()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "stream_stream", args, kwargs)


class _Method:
    """A method of a stub: the multi-callable of whichever channel is in force."""

    def __init__(self, owner: RotatingChannel, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner = owner
        self._kind = kind
        self._args = args
        self._kwargs = kwargs
        self._life: _Life | None = None
        self._call: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        life = self._owner.life()
        if life is not self._life:
            self._life = life
            self._call = getattr(life.channel, self._kind)(*self._args, **self._kwargs)
        call = self._call(*args, **kwargs)
        self._owner.began(life, call)
        return call
