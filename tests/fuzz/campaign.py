"""All mutated messages: which, in which order, one after the other or together; and what is put right between them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

from headrace.services.worker.signing import Signer
from headrace.v1 import (
    cache_pb2,
    common_pb2,
    control_pb2,
    decode_pb2,
    encoder_pb2,
    registry_pb2,
)
from tests.fuzz.methods import FENCED, FRONT, Method
from tests.fuzz.mutate import Mutator, sites
from tests.fuzz.seeds import Seed, Seeds
from tests.fuzz.send import Outcome
from tests.fuzz.verdict import Tally
from tests.fuzz.watch import Watch
from tests.fuzz.wire_bytes import mutate_bytes
from tests.fuzz.world import WORKERS, World

CHUNK: Final = 12
"""Messages of one method at one port that follow each other."""
AT_ONCE: Final = 24
"""Messages in flight."""
RESIGNED: Final = 0.5
"""Of the messages with handles, those whose handles are signed anew after the mutation, as if a worker of the cluster
had made them: else nothing behind the signature's check is tried. Agents are not: who can sign another's memory may
write it (SECURITY.md)."""
ROLE_S: Final = 60.0
"""Longest change of a role."""
WEIGHTS: Final = {
    "InferenceService/Generate": 12, "InferenceService/CountTokens": 5, "PrefillService/Run": 14,
    "DecodeService/Reserve": 12, "DecodeService/Commit": 10, "DecodeService/EndTransfer": 6,
    "TransferService/Write": 8,
    "DecodeService/Attach": 8, "DecodeService/Adopt": 5, "EncoderService/Encode": 8, "EncoderService/Push": 8,
    "CachePeerService/Send": 6, "CachePeerService/Lease": 5, "RegistryService/Register": 8,
    "RegistryService/Renew": 5, "ControlService/Drain": 0.6, "ControlService/ChangeRole": 0.2,
    "ControlService/VerifyCache": 0.7, "ControlService/CollectCache": 0.7, "ControlService/ClearCache": 0.6,
}  # fmt: skip
"""How often, against 2 for the others: by what a message of theirs can do."""


async def served(world: World) -> dict[str, list[Method]]:
    """Port → the methods that it serves, as its reflection says. At the front door only what is for clients."""
    found = {}
    for port in ("router-0", *WORKERS):
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answer = await world.ask(port, "ServerReflection/ServerReflectionInfo", request)
        listed = reflection_pb2.ServerReflectionResponse.FromString(answer).list_services_response.service
        names = {service.name for service in listed}
        found[port] = [method for method in world.methods.values() if method.service in names]
    clients = ("InferenceService", "Health")
    found[FRONT] = [method for method in found["router-0"] if method.service_name in clients]
    return found


def plan(rng: random.Random, count: int, ports: dict[str, list[Method]]) -> list[tuple[str, Method, int]]:
    """Lots (port, method, messages) of `count` messages in all, in random order; each method at each port has one."""
    pairs = [(port, method) for port, methods in sorted(ports.items()) for method in methods]
    weights = [WEIGHTS.get(method.short, 2.0) for _, method in pairs]
    total = sum(weights)
    numbers = [max(1, int(count * weight / total)) for weight in weights]
    numbers[max(range(len(pairs)), key=lambda index: weights[index])] += max(0, count - sum(numbers))
    lots = [
        (port, method, min(CHUNK, number - start))
        for (port, method), number in zip(pairs, numbers, strict=True)
        for start in range(0, number, CHUNK)
    ]
    rng.shuffle(lots)
    return lots


@dataclass
class Campaign:
    world: World
    seeds: Seeds
    watch: Watch
    rng: random.Random
    tally: Tally = field(default_factory=Tally)
    changed_roles: int = 0
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self, lots: Sequence[tuple[str, Method, int]]) -> None:
        """Send lots: fenced ones alone, the others AT_ONCE at a time."""
        async with asyncio.TaskGroup() as group:
            for port, method, number in lots:
                if method.short not in FENCED:
                    for _ in range(number):
                        await self._slots.acquire()
                        group.create_task(self._slotted(port, method))
        await self.settle()
        for port, method, number in lots:
            if method.short in FENCED:
                for _ in range(number):
                    await self._fenced(port, method)
        await self.settle()

    async def settle(self) -> None:
        """Take back what the messages have left: the phantom worker leaves, and so ends each of its lives that showed
        another endpoint than the one that answers."""
        for one in ("decode-0", "prefill-0"):
            phantom = self.seeds.phantom(one)
            register = registry_pb2.RegisterRequest(replica=phantom, lease_ms=1000)
            lease = registry_pb2.RegisterResponse.FromString(
                await self.world.ask("router-0", "RegistryService/Register", register)
            )
            leave = registry_pb2.DeregisterRequest(peer=phantom.peer, lease_id=lease.lease_id)
            await self.world.ask("router-0", "RegistryService/Deregister", leave)

    async def _slotted(self, port: str, method: Method) -> None:
        try:
            await self._one(port, method)
        finally:
            self._slots.release()

    async def _one(self, port: str, method: Method) -> None:
        seed = await self.seeds.make(method, port)
        datas, what = self.mutated(seed)
        try:
            outcome = await self.world.send(port, method, datas, what=what)
            self.tally.add(outcome)
            await self._give_back(port, method, datas, outcome)
        finally:
            if seed.after is not None:
                await seed.after()

    # --- mutation ----------------------------------------------------------------------------------------------

    def mutated(self, seed: Seed) -> tuple[list[bytes], str]:
        """The bytes to send for a seed, and how they were made."""
        rng = self.rng
        mutator = Mutator(rng, seed.messages)
        messages = list(seed.messages)
        if len(messages) > 1:
            messages = self._resequenced(messages)
        chosen = rng.randrange(len(messages))
        kind = rng.random()
        if kind < 0.05:
            blank = type(messages[chosen])()
            mutator.fill(blank)
            messages[chosen], what = blank, "filled"
        else:
            times = 1 if kind < 0.6 else rng.choice((2, 3)) if kind < 0.9 else 8
            messages[chosen], done = mutator.mutate(messages[chosen], times)
            what = "; ".join(done)
        if rng.random() < RESIGNED and (signed := resign(self.world.signer, messages[chosen])):
            what = f"{what}; signed anew: {signed}"
        datas = [message.SerializeToString() for message in messages]
        if rng.random() < 0.15:
            datas[chosen], how = mutate_bytes(datas[chosen], rng)
            what = f"{what}; bytes: {how}"
        return datas, what

    def _resequenced(self, messages: list[Message]) -> list[Message]:
        """Another order, one twice, or one less."""
        rng = self.rng
        match rng.choice(("keep", "keep", "shuffle", "twice", "less")):
            case "shuffle":
                rng.shuffle(messages)
            case "twice":
                messages.append(rng.choice(messages))
            case "less":
                messages.pop(rng.randrange(len(messages)))
        return messages

    # --- putting right -----------------------------------------------------------------------------------------

    async def _give_back(self, port: str, method: Method, datas: Sequence[bytes], outcome: Outcome) -> None:
        """What an answer has granted."""
        if outcome.status != "OK" or not outcome.responses:
            return
        answer = outcome.responses[0]
        match method.short:
            case "DecodeService/Reserve":
                request = decode_pb2.ReserveRequest.FromString(datas[0])
                landing = decode_pb2.ReserveResponse.FromString(answer).landing
                if landing.transfer_id:
                    await self.seeds.decode.release(request.spec.id, landing)
                else:
                    release = decode_pb2.DecodeServiceReleaseRequest(
                        id=request.spec.id, reason=common_pb2.FINISH_REASON_CANCELLED
                    )
                    await self.world.ask(port, "DecodeService/Release", release)
            case "EncoderService/Encode":
                images = encoder_pb2.EncodeResponse.FromString(answer).images
                leases = [image.handle.lease_id for image in images]
                release_all = encoder_pb2.EncoderServiceReleaseRequest(lease_ids=leases)
                await self.world.ask(port, "EncoderService/Release", release_all)
            case "DecodeService/Commit":
                again = decode_pb2.CommitResponse.FromString(answer)
                if again.HasField("resend"):
                    await self.seeds.decode.release(again.resend.landing.id, again.resend.landing)
            case "CachePeerService/Lease":
                reader = cache_pb2.LeaseRequest.FromString(datas[0]).reader
                lease_id = cache_pb2.LeaseResponse.FromString(answer).lease_id
                if lease_id:
                    release_lease = cache_pb2.ReleaseRequest(reader=reader, lease_id=lease_id)
                    await self.world.ask(port, "CachePeerService/Release", release_lease)

    async def _fenced(self, port: str, method: Method) -> None:
        """A message to a fenced method; afterwards the replica takes work in its old role."""
        changes = method.short == "ControlService/ChangeRole" and port in ("prefill-0", "decode-0")
        counted = await self.watch.before_a_new_life(port) if changes else None
        await self._one(port, method)
        if method.short == "ControlService/Drain":
            await self.resume(port)
        elif counted is not None:
            await self.restore_role(port, counted)

    async def resume(self, port: str) -> None:
        """End a drain."""
        await self.world.ask(port, "ControlService/Drain", control_pb2.DrainRequest(resume=True))

    async def new_life(self, port: str) -> None:
        """Change a worker's role, and change it back."""
        counted = await self.watch.before_a_new_life(port)
        other = common_pb2.ROLE_DECODE if port == "prefill-0" else common_pb2.ROLE_PREFILL
        request = control_pb2.ChangeRoleRequest(role=other, wait_ms=100)
        await self.world.ask(port, "ControlService/ChangeRole", request)
        await self.restore_role(port, counted)

    async def restore_role(self, port: str, counted: Counter[str]) -> None:
        """Wait until a change of role is over, and take the old role again if it has changed. `counted`: before it."""
        wanted = common_pb2.ROLE_PREFILL if port == "prefill-0" else common_pb2.ROLE_DECODE
        status = await self._until_whole(port)
        if status.replica.peer.incarnation == self.world.peer(port).incarnation:
            return
        self.watch.began_a_new_life(port, counted)
        self.changed_roles += 1
        if status.replica.role != wanted:
            request = control_pb2.ChangeRoleRequest(role=wanted, wait_ms=100)
            await self.world.ask(port, "ControlService/ChangeRole", request)
            await self._until_whole(port, wanted)
        await asyncio.to_thread(self.world.cluster.settle, ROLE_S)
        await self.world.look()

    async def _until_whole(
        self, port: str, role: common_pb2.Role.ValueType | None = None
    ) -> control_pb2.StatusResponse:
        """The state of a process that is in no change of role, and ready. Between two lives its port is closed. Raises
        AssertionError when it never comes back."""
        going = (control_pb2.ROLE_CHANGE_STATE_DRAINING, control_pb2.ROLE_CHANGE_STATE_STARTING)
        method, data = self.world.methods["ControlService/Status"], [b""]
        seen = ""
        for _ in range(int(ROLE_S / 0.1)):
            outcome = await self.world.send(port, method, data)
            if outcome.status == "OK":
                status = control_pb2.StatusResponse.FromString(outcome.responses[0])
                whole = status.ready and status.role_change.state not in going
                if whole and role in (None, status.replica.role):
                    return status
                seen = f"{status.unready_reason} {status.role_change}"
            await asyncio.sleep(0.1)
        raise AssertionError(f"{port} is not ready: {seen}")


def resign(signer: Signer, message: Message) -> int:
    """Sign every handle in a message; how many there are."""
    count = 0
    for site in sites(message):
        if site.field.type != site.field.TYPE_MESSAGE or not site.present:
            continue
        value = getattr(site.owner, site.field.name)
        for part in value if site.field.is_repeated else (value,):
            if isinstance(part, common_pb2.TransferHandle) and part.time_left_ms < 2**62:  # else no signer could
                signer.handle(part)
                count += 1
            elif isinstance(part, encoder_pb2.EmbeddingHandle):
                signer.embedding(part)
                count += 1
    return count
