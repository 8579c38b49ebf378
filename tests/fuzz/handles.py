"""Transfer parameters that are not what they seem: forged, changed, replayed, stale, crossed, out of time and place.

Every attack takes parameters that the cluster really made, does something to them that no honest peer does, and
shows them to whoever would act on them: prefill (Run), decode (Commit, EndTransfer, Write), the encoder (Push) and the
holders of cached entries (Send). The neighbour's requests, whose rows land in the same memory, must bring their known
tokens (canary.py).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import Message

from headrace.v1 import common_pb2, decode_pb2, encoder_pb2, prefill_pb2
from tests.fuzz.seeds import Seeds
from tests.fuzz.seeds_decode import After
from tests.fuzz.send import Outcome
from tests.fuzz.tamper import TAMPERINGS, Old, Tampering
from tests.fuzz.verdict import violation_of
from tests.fuzz.world import World

AT_ONCE: Final = 16
OLD: Final = 24
"""Reservations that are kept to be replayed: finished, given back, or of an earlier life."""


@dataclass
class Attacks:
    """All of them, on one cluster."""

    world: World
    seeds: Seeds
    rng: random.Random
    sent: int = 0
    kinds: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Place and kind of attack → what became of it."""
    violations: list[dict[str, object]] = field(default_factory=list)
    _old: list[Old] = field(default_factory=list)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self, count: int, *, fresh_old: bool = True) -> None:
        """`count` attacks. `fresh_old`: collect what is replayed first."""
        if fresh_old:
            await self._collect_old()
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                await self._slots.acquire()
                group.create_task(self._attack())

    async def _collect_old(self) -> None:
        """Parameters of requests that have ended, some of them after they were used."""
        for index in range(OLD):
            spec = self.seeds.decode.spec()
            reserved, give_back = await self.seeds.decode.reserve(spec)
            run = self.seeds.decode.run(spec, reserved)
            if index % 2:
                # Used to its end, and prefill has not been told to forget it: a replay is computed and pushed again.
                await self._send_to("prefill-0", "PrefillService/Run", run)
                await self.seeds.decode.release(spec.id, reserved.landing, cancel=False)
            else:
                await give_back()
            agent = self.world.replicas[self.rng.choice(("encoder-0", "prefill-0"))].ranks[0].agent
            self._old.append(Old(spec, reserved, agent))
        del self._old[: -2 * OLD]

    # --- one attack --------------------------------------------------------------------------------------------

    async def _attack(self) -> None:
        try:
            tampering = self.rng.choice(TAMPERINGS)
            shown = {
                "Run": self._run,
                "Commit": self._commit,
                "EndTransfer": self._end,
                "Write": self._write,
                "Push": self._push,
                "Send": self._send,
            }
            place = self.rng.choice(tuple(shown))
            await shown[place](place, tampering)
        finally:
            self._slots.release()

    def _note(self, place: str, tampering: Tampering, outcome: Outcome, *, gained: str = "") -> None:
        """`gained`: what the attacker got; empty for nothing."""
        self.sent += 1
        self.kinds[f"{place}: {tampering.name}"][outcome.code.removeprefix("ERROR_CODE_") or outcome.status] += 1
        why = violation_of(outcome)
        if not why and gained and not tampering.harmless(place):
            why = f"the attacker got {gained}"
        if why:
            self.violations.append({"why": why, "attack": f"{place}: {tampering.name}", **outcome.row()})

    async def _fresh(self) -> tuple[common_pb2.RequestSpec, decode_pb2.ReserveResponse, After]:
        spec = self.seeds.decode.spec()
        reserved, give_back = await self.seeds.decode.reserve(spec)
        return spec, reserved, give_back

    def _tamper(self, tampering: Tampering, handle: Message) -> None:
        """Change a handle or an agent in place."""
        tampering.apply(handle, self.rng.choice(self._old), self.rng, self.world.signer)

    async def _run(self, place: str, tampering: Tampering) -> None:
        spec, reserved, give_back = await self._fresh()
        try:
            run = self.seeds.decode.run(spec, reserved)
            self._tamper(tampering, run.target.landing if self.rng.random() < 0.7 else run.target.agent)
            if tampering.replays:
                old = self.rng.choice(self._old)
                run = self.seeds.decode.run(old.spec, old.reserved)
                run.target.peer.CopyFrom(old.reserved.landing.receiver)  # its life may be over
            outcome = await self._send_to("prefill-0", "PrefillService/Run", run)
            events = [prefill_pb2.RunResponse.FromString(data) for data in outcome.responses]
            handed = any(event.HasField("handed_over") for event in events)
            self._note(place, tampering, outcome, gained="a hand-over" if handed else "")
        finally:
            await give_back()

    async def _commit(self, place: str, tampering: Tampering) -> None:
        spec, reserved, give_back = await self._fresh()
        try:
            commit = self.seeds.decode.commit(spec, reserved)
            self._tamper(tampering, commit.landing)
            if tampering.replays:
                old = self.rng.choice(self._old)
                commit = self.seeds.decode.commit(old.spec, old.reserved)
            outcome = await self._send_to("decode-0", "DecodeService/Commit", commit)
            answer = decode_pb2.CommitResponse()
            if outcome.status == "OK":
                answer.ParseFromString(outcome.responses[0])
            self._note(place, tampering, outcome, gained="admittance" if answer.HasField("admitted") else "")
            if answer.HasField("resend"):
                await self.seeds.decode.release(answer.resend.landing.id, answer.resend.landing)
        finally:
            await give_back()

    async def _end(self, place: str, tampering: Tampering) -> None:
        _, reserved, give_back = await self._fresh()
        try:
            end = decode_pb2.EndTransferRequest(
                landing=reserved.landing,
                sender=self.world.peer("prefill-0"),
                outcome=decode_pb2.TRANSFER_OUTCOME_QUIET,
            )
            self._tamper(tampering, end.landing)
            if tampering.replays:
                end.landing.CopyFrom(self.rng.choice(self._old).reserved.landing)
            outcome = await self._send_to("decode-0", "DecodeService/EndTransfer", end)
            done = outcome.status == "OK"
            self._note(place, tampering, outcome, gained="another's transfer ended" if done else "")
        finally:
            await give_back()

    async def _write(self, place: str, tampering: Tampering) -> None:
        """Rows by stream, into what the handle names."""
        _, reserved, give_back = await self._fresh()
        try:
            landing = common_pb2.TransferHandle()
            landing.CopyFrom(reserved.landing)
            self._tamper(tampering, landing)
            if tampering.replays:
                landing = self.rng.choice(self._old).reserved.landing
            begin, rows, _ = self.seeds.decode.write(landing, "prefill-0")
            method = self.world.methods["TransferService/Write"]
            outcome = await self.world.send("decode-0", method, [one.SerializeToString() for one in (begin, rows)])
            self._note(place, tampering, outcome, gained="rows written" if outcome.status == "OK" else "")
        finally:
            await give_back()

    async def _push(self, place: str, tampering: Tampering) -> None:
        handle = (await self.seeds.encoded()).images[0].handle
        landing, agent = self.seeds.decode.embedding_landing(handle)
        push = encoder_pb2.PushRequest(handle=handle, landing=landing, receiver=agent)
        part = self.rng.choice((push.handle, push.landing, push.receiver))
        if tampering.replays:
            # The encoder's own way to end a right is its lease.
            release = encoder_pb2.EncoderServiceReleaseRequest(lease_ids=[handle.lease_id])
            await self.world.ask("encoder-0", "EncoderService/Release", release)
        else:
            self._tamper(tampering, part)
        outcome = await self._send_to("encoder-0", "EncoderService/Push", push)
        self._note(place, tampering, outcome, gained="an embedding pushed" if outcome.status == "OK" else "")
        release = encoder_pb2.EncoderServiceReleaseRequest(lease_ids=[handle.lease_id])
        await self.world.ask("encoder-0", "EncoderService/Release", release)

    async def _send(self, place: str, tampering: Tampering) -> None:
        method = self.world.methods["CachePeerService/Send"]
        seed = await self.seeds.make(method, "prefill-0")
        send: Any = seed.messages[0]
        try:
            if tampering.replays and seed.after is not None:
                await seed.after()  # the lease is over
            else:
                self._tamper(tampering, send.reader)
            outcome = await self._send_to("prefill-0", "CachePeerService/Send", send)
            self._note(place, tampering, outcome, gained="entries sent" if outcome.status == "OK" else "")
        finally:
            if seed.after is not None:
                await seed.after()

    async def _send_to(self, port: str, short: str, message: Message) -> Outcome:
        return await self.world.send(port, self.world.methods[short], [message.SerializeToString()])

    def rows(self) -> dict[str, dict[str, int]]:
        """Place and kind → outcome → number."""
        return {kind: dict(counts.most_common()) for kind, counts in sorted(self.kinds.items())}
