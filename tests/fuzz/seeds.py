"""A valid message of each method, made for this moment: what is mutated afterwards.

Messages that name something that must exist (a reservation, an embedding, a cached block) get one that does, made by
calls of the harness and given back by `Seed.after`.
"""

from __future__ import annotations

import io
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import PIL.Image
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from headrace.v1 import (
    cache_pb2,
    common_pb2,
    control_pb2,
    encoder_pb2,
    events_pb2,
    inference_pb2,
    registry_pb2,
)
from tests.fuzz.methods import WORKER, Method
from tests.fuzz.seeds_decode import DecodeSeeds
from tests.fuzz.world import World

IMAGE_KEY: Final = bytes(range(32))
PROMPTS: Final = ("What is a headrace? " * 6, "A tailrace leads the water away. " * 3, "Penstock")
_SERVICES: Final = ("", "ready", "headrace.v1.InferenceService", "headrace.v1.ControlService")


@dataclass
class Seed:
    messages: list[Message]
    """One, or a sequence for a method that streams."""
    after: Callable[[], Awaitable[None]] | None = None
    """Gives back what was made for it, whatever became of the messages."""
    others: Sequence[Message] = field(default=())
    """Whose parts may be crossed in."""


def picture(seed: int = 0) -> bytes:
    """A small PNG; of each seed another one."""
    file = io.BytesIO()
    PIL.Image.new("RGB", (90, 60), (200, seed % 256, (seed * 7) % 256)).save(file, format="PNG")
    return file.getvalue()


class Seeds:
    """Makes them. Block keys and leases that were seen go into later messages."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng
        self.decode = DecodeSeeds(world, rng)
        self._keys: list[bytes] = []
        """Of cached blocks."""

    async def learn(self) -> None:
        """Keys of what the caches hold now."""
        request = control_pb2.FindCacheRequest(prompt=self._prompt_text(PROMPTS[0]), tenant="acme")
        found = control_pb2.FindCacheResponse.FromString(
            await self._world.ask("router-0", "ControlService/FindCache", request)
        )
        self._keys = [block.key for block in found.blocks]

    async def make(self, method: Method, port: str) -> Seed:
        """A seed of a method on a port."""
        kind, _, name = method.short.partition("/")
        match kind:
            case "InferenceService":
                return Seed([self._inference(name)])
            case "ControlService":
                return Seed([self._control(name)])
            case "RegistryService":
                return Seed([self._registry(name)])
            case "EventService":
                return Seed([self._event(name, port)])
            case "EncoderService":
                return await self._encoder(name)
            case "CachePeerService":
                return await self._cache_peer(name, method, port)
            case "Health":
                service = self._rng.choice(_SERVICES)
                return Seed([method.request(service=service) if name != "List" else health_pb2.HealthListRequest()])
            case "ServerReflection":
                return Seed(
                    [
                        reflection_pb2.ServerReflectionRequest(list_services=""),
                        reflection_pb2.ServerReflectionRequest(file_containing_symbol="headrace.v1.RequestSpec"),
                    ][: self._rng.choice((1, 2))]
                )
        if kind == "TransferService" and port == "prefill-0":
            handle = (await self.encoded()).images[0].handle  # its lease ends by itself
            landing, _ = self.decode.embedding_landing(handle)
            return Seed(self.decode.write(landing, "encoder-0"))
        image = None
        if method.short == "PrefillService/Run" and self._rng.random() < 0.2:
            image = (await self.encoded()).images[0]  # its lease ends by itself
        messages, after = await self.decode.make(method.short, image)
        return Seed(messages, after)

    # --- clients -----------------------------------------------------------------------------------------------

    def _prompt_text(self, text: str) -> inference_pb2.Prompt:
        return inference_pb2.Prompt(text=inference_pb2.TextPrompt(text=text))

    def _prompt(self) -> inference_pb2.Prompt:
        rng = self._rng
        text = rng.choice(PROMPTS)
        match rng.choice(("text", "chat", "tokens", "image")):
            case "text":
                return self._prompt_text(text)
            case "tokens":
                ids = [3 + rng.randrange(240) for _ in range(rng.choice((5, 40, 90)))]
                return inference_pb2.Prompt(tokens=inference_pb2.TokenPrompt(token_ids=ids))
            case kind:
                parts = [inference_pb2.ContentPart(text=text)]
                if kind == "image":
                    data = picture(rng.randrange(4))
                    parts.append(inference_pb2.ContentPart(image=inference_pb2.Image(data=data)))
                messages = [
                    inference_pb2.ChatMessage(
                        role=inference_pb2.CHAT_ROLE_SYSTEM, content=[inference_pb2.ContentPart(text="Be short.")]
                    ),
                    inference_pb2.ChatMessage(role=inference_pb2.CHAT_ROLE_USER, content=parts),
                ]
                return inference_pb2.Prompt(chat=inference_pb2.ChatPrompt(messages=messages, thinking=False))

    def _inference(self, name: str) -> Message:
        rng = self._rng
        if name == "ListModels":
            return inference_pb2.ListModelsRequest()
        if name == "CountTokens":
            return inference_pb2.CountTokensRequest(
                model=rng.choice(("", "deepseek-v41-tiny")), prompt=self._prompt(), include_token_ids=True
            )
        request = inference_pb2.GenerateRequest(
            prompt=self._prompt(),
            sampling=common_pb2.SamplingParams(
                temperature=rng.choice((0.0, 0.8)),
                top_p=0.9,
                top_k=20,
                min_p=0.01,
                presence_penalty=0.1,
                frequency_penalty=0.1,
                repetition_penalty=1.05,
                seed=rng.randrange(2**64),
                n=rng.choice((1, 1, 2)),
                logprobs=rng.choice((0, 3)),
                logit_bias=[common_pb2.LogitBias(token_id=30, bias=-1.0)],
            ),
            stop=common_pb2.StopParams(max_tokens=3, min_tokens=1, ignore_eos=True, stop=["zq"], stop_token_ids=[7]),
            traffic_class=common_pb2.TRAFFIC_CLASS_CHAT,
            priority=0,
            timeout_ms=20_000,
            snapshot_at=[16],
            report=True,
        )
        if rng.random() < 0.3:
            request.request_id = self._world.name()
            request.resume.add(choice=0, resume_offset=1)
        return request

    # --- operators ---------------------------------------------------------------------------------------------

    def _control(self, name: str) -> Message:
        rng = self._rng
        keys = control_pb2.CacheKeys(blocks=self._keys or [bytes(32)])
        match name:
            case "Status":
                return control_pb2.StatusRequest(check_integrity=True)
            case "Drain":
                wait = {"resume": True} if rng.random() < 0.4 else {"wait_ms": 20, "hand_over": rng.random() < 0.5}
                return control_pb2.DrainRequest(**wait)
            case "ChangeRole":
                return control_pb2.ChangeRoleRequest(role=rng.choice(common_pb2.Role.values()), wait_ms=100)
            case "ClearCache":
                scopes = ({"everything": True}, {"namespace": bytes(32)}, {"tenant_tag": bytes(16)}, {"tenant": "acme"})
                return control_pb2.ClearCacheRequest(**rng.choice(scopes), tiers=[control_pb2.CACHE_TIER_HOST])  # type: ignore[arg-type]
            case "FindCache":
                if rng.random() < 0.5:
                    return control_pb2.FindCacheRequest(prompt=self._prompt(), tenant="acme")
                return control_pb2.FindCacheRequest(keys=keys)
            case "PinCache":
                if rng.random() < 0.5:
                    return control_pb2.PinCacheRequest(prompt=self._prompt_text(PROMPTS[0]), tenant="acme")
                return control_pb2.PinCacheRequest(keys=keys)
            case "RotateKey":
                return control_pb2.RotateKeyRequest(kind=control_pb2.KEY_KIND_HANDLE, overlap_ms=1000)
        empty: dict[str, Message] = {
            "CacheStats": control_pb2.CacheStatsRequest(),
            "VerifyCache": control_pb2.VerifyCacheRequest(),
            "CollectCache": control_pb2.CollectCacheRequest(),
            "ListKeys": control_pb2.ListKeysRequest(),
        }
        return empty[name]

    # --- workers -----------------------------------------------------------------------------------------------

    def phantom(self, of: str = "") -> registry_pb2.Replica:
        """A worker that is not there, as a life `of` a real one: what joins under the fuzzer's own certificate."""
        replica = registry_pb2.Replica()
        replica.CopyFrom(self._world.replicas[of or self._rng.choice(("prefill-0", "decode-0"))])
        replica.peer.replica_id = WORKER
        replica.peer.incarnation = self._rng.randbytes(16).hex()
        replica.endpoint = self._world.phantom_address
        return replica

    def _registry(self, name: str) -> Message:
        roles = [common_pb2.ROLE_PREFILL, common_pb2.ROLE_DECODE]
        phantom = self.phantom()
        match name:
            case "Register":
                return registry_pb2.RegisterRequest(replica=phantom, lease_ms=1000)
            case "Renew":
                return registry_pb2.RegistryServiceRenewRequest(
                    peer=phantom.peer,
                    lease_id=self._rng.randbytes(16).hex(),
                    state=registry_pb2.REPLICA_STATE_READY,
                    loads=[common_pb2.LoadReport(rows_total=7)],
                    ranks=phantom.ranks,
                )
            case "Deregister":
                return registry_pb2.DeregisterRequest(peer=phantom.peer, lease_id="x")
            case "Watch":
                return registry_pb2.RegistryServiceWatchRequest(roles=roles)
        return registry_pb2.ListRequest(roles=roles)

    def _event(self, name: str, port: str) -> Message:
        source = self._rng.choice((events_pb2.EVENT_SOURCE_WORKER, events_pb2.EVENT_SOURCE_STORE))
        if name == "Watch":
            incarnation = self._world.peer(port).incarnation
            return events_pb2.EventServiceWatchRequest(incarnation=incarnation, from_sequence=1, event_source=source)
        tiers = [control_pb2.CACHE_TIER_DEVICE, control_pb2.CACHE_TIER_HOST]
        return events_pb2.SnapshotRequest(tiers=tiers, event_source=source)

    async def encoded(self) -> encoder_pb2.EncodeResponse:
        """An image that the encoder holds for the fuzzer's router."""
        request = self._encode()
        return encoder_pb2.EncodeResponse.FromString(
            await self._world.ask("encoder-0", "EncoderService/Encode", request)
        )

    def _encode(self) -> encoder_pb2.EncodeRequest:
        return encoder_pb2.EncodeRequest(
            id=common_pb2.AttemptId(request_id=self._world.name(), attempt=1),
            model=self._world.model.identity,
            images=[inference_pb2.Image(data=picture(self._rng.randrange(8)))],
            image_key=IMAGE_KEY,
            time_left_ms=10_000,
            router=self._world.router,
        )

    async def _encoder(self, name: str) -> Seed:
        if name == "Encode":
            return Seed([self._encode()])
        encoded = await self.encoded()
        handle = encoded.images[0].handle

        async def release() -> None:
            request = encoder_pb2.EncoderServiceReleaseRequest(lease_ids=[handle.lease_id])
            await self._world.ask("encoder-0", "EncoderService/Release", request)

        if name == "Renew":
            return Seed([encoder_pb2.EncoderServiceRenewRequest(lease_ids=[handle.lease_id])], release)
        if name == "Release":
            return Seed([encoder_pb2.EncoderServiceReleaseRequest(lease_ids=[handle.lease_id])], release)
        landing, agent = self.decode.embedding_landing(handle)
        if name == "Recall":
            return Seed([encoder_pb2.RecallRequest(owner=handle.owner, landing=landing)], release)
        return Seed([encoder_pb2.PushRequest(handle=handle, landing=landing, receiver=agent)], release)

    async def _cache_peer(self, name: str, method: Method, port: str) -> Seed:
        reader = method.caller(port)
        keys = self._keys or [bytes(32)]
        lease = cache_pb2.LeaseRequest(reader=self._world.peer(reader), keys=keys, lease_ms=2000)
        if name == "Lookup":
            return Seed([cache_pb2.LookupRequest(keys=keys)])
        if name == "Lease":
            return Seed([lease])
        granted = cache_pb2.LeaseResponse.FromString(await self._world.ask(port, "CachePeerService/Lease", lease))
        release = cache_pb2.ReleaseRequest(reader=lease.reader, lease_id=granted.lease_id or "none")

        async def end() -> None:
            await self._world.ask(port, "CachePeerService/Release", release)

        if name == "Release":
            return Seed([release], end)
        targets = [cache_pb2.SendTarget(key=entry.key, offset=0) for entry in granted.entries[:1]]
        agent = self._world.replicas[reader].ranks[0].agent
        send = cache_pb2.SendRequest(lease_id=release.lease_id, reader=agent, targets=targets, time_left_ms=2000)
        return Seed([send], end)
