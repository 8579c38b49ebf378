"""Valid messages of prefill's and decode's calls: specs, reservations, grants; and what gives them back."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final

from google.protobuf.message import Message

from headrace.engine.seeds import choice_seed
from headrace.v1 import common_pb2, decode_pb2, encoder_pb2, prefill_pb2, transfer_pb2
from tests.fuzz.world import World

After = Callable[[], Awaitable[None]]
ROOT: Final = bytes(range(32))


class DecodeSeeds:
    """As a router, and as a prefill that has computed nothing."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self._world = world
        self._rng = rng

    def spec(
        self, *, n: int = 1, seed: int = 11, tokens: int = 3, image: encoder_pb2.EncodedImage | None = None
    ) -> common_pb2.RequestSpec:
        """A request of the fuzzer's router."""
        rng, model = self._rng, self._world.model
        ids = [3 + rng.randrange(240) for _ in range(rng.choice((5, 33, 70)))]
        spans = []
        if image is not None:
            spans = [
                common_pb2.ImageSpan(
                    start=2,
                    length=image.tokens,
                    content_digest=image.content_digest,
                    grid_height=image.grid_height,
                    grid_width=image.grid_width,
                )
            ]
            ids[2:2] = [model.image_token_id] * image.tokens
        return common_pb2.RequestSpec(
            id=common_pb2.AttemptId(request_id=self._world.name(), attempt=1),
            model=model.identity,
            token_ids=ids,
            image_spans=spans,
            prompt_tokens=len(ids),
            replay_mode=common_pb2.REPLAY_MODE_COMPACT,
            root_key=ROOT,
            sampling=common_pb2.SamplingParams(temperature=0.0, seed=seed, n=n, logprobs=1),
            stop=common_pb2.StopParams(max_tokens=tokens, ignore_eos=True, stop=["zq"]),
            choices=[common_pb2.ChoiceState(choice=index, seed=choice_seed(seed, index)) for index in range(n)],
            traffic_class=common_pb2.TRAFFIC_CLASS_CHAT,
            time_left_ms=20_000,
            tenant_tag=bytes(16),
            router=self._world.router,
            cache_namespace=bytes(range(32)),
            report=True,
        )

    async def make(
        self, short: str, image: encoder_pb2.EncodedImage | None = None
    ) -> tuple[list[Message], After | None]:
        """A seed of a method of PrefillService or DecodeService. `image`: a part of its prompt."""
        rng = self._rng
        spec = self.spec(n=rng.choice((1, 1, 2)), image=image)
        identifier = spec.id
        match short:
            case "DecodeService/Reserve":
                here = rng.random() < 0.3
                request = decode_pb2.ReserveRequest(spec=spec, compute_here=here)
                if not here:
                    request.sender.CopyFrom(self._world.peer("prefill-0"))
                return [request], None  # campaign.py gives back what the answer grants
            case "DecodeService/Adopt":
                return [decode_pb2.AdoptRequest(spec=spec)], None
            case "DecodeService/Release":
                reason = common_pb2.FINISH_REASON_CANCELLED
                return [decode_pb2.DecodeServiceReleaseRequest(id=identifier, reason=reason)], None
            case "PrefillService/Cancel":
                return [prefill_pb2.PrefillServiceCancelRequest(id=identifier)], None
        reserved, give_back = await self.reserve(spec)
        match short:
            case "PrefillService/Run":
                run = self.run(spec, reserved)
                if image is not None:
                    run.embeddings.append(image.handle)
                return [run], give_back
            case "DecodeService/Commit":
                return [self.commit(spec, reserved)], give_back
            case "TransferService/Write":
                return self.write(reserved.landing, "prefill-0"), give_back
            case "DecodeService/EndTransfer":
                return [
                    decode_pb2.EndTransferRequest(
                        landing=reserved.landing,
                        sender=self._world.peer("prefill-0"),
                        outcome=decode_pb2.TRANSFER_OUTCOME_QUIET,
                    )
                ], give_back
            case "DecodeService/Attach":
                return self._attach(identifier), give_back
        raise KeyError(short)

    def _attach(self, identifier: common_pb2.AttemptId) -> list[Message]:
        attached = decode_pb2.AttachedRequest(id=identifier, credit_tokens=16, received_tokens=[0])
        cancel = decode_pb2.AttachCancel(id=identifier, reason=common_pb2.FINISH_REASON_CANCELLED)
        router = self._world.router
        later = [decode_pb2.AttachRequest(requests=[attached]), decode_pb2.AttachRequest(cancels=[cancel])]
        return [decode_pb2.AttachRequest(router=router, requests=[attached]), *later[: self._rng.randrange(3)]]

    # --- what others make --------------------------------------------------------------------------------------

    async def reserve(self, spec: common_pb2.RequestSpec) -> tuple[decode_pb2.ReserveResponse, After]:
        """A reservation, and what ends it: released, and its transfer said to be over, as prefill never began."""
        request = decode_pb2.ReserveRequest(spec=spec, sender=self._world.peer("prefill-0"))
        answer = await self._world.ask("decode-0", "DecodeService/Reserve", request)
        reserved = decode_pb2.ReserveResponse.FromString(answer)

        async def give_back() -> None:
            await self.release(spec.id, reserved.landing)

        return reserved, give_back

    async def release(
        self, identifier: common_pb2.AttemptId, landing: common_pb2.TransferHandle, *, cancel: bool = True
    ) -> None:
        """End a request at both ends, and say the last word of its transfer. `cancel`: tell prefill, too."""
        if cancel:
            told = prefill_pb2.PrefillServiceCancelRequest(id=identifier)
            await self._world.ask("prefill-0", "PrefillService/Cancel", told)
        reason = common_pb2.FINISH_REASON_CANCELLED
        release = decode_pb2.DecodeServiceReleaseRequest(id=identifier, reason=reason)
        await self._world.ask("decode-0", "DecodeService/Release", release)
        end = decode_pb2.EndTransferRequest(
            landing=landing, sender=self._world.peer("prefill-0"), outcome=decode_pb2.TRANSFER_OUTCOME_QUIET
        )
        await self._world.ask("decode-0", "DecodeService/EndTransfer", end)

    def run(self, spec: common_pb2.RequestSpec, reserved: decode_pb2.ReserveResponse) -> prefill_pb2.RunRequest:
        """As the router sends it to prefill."""
        return prefill_pb2.RunRequest(
            spec=spec,
            target=prefill_pb2.DecodeTarget(
                peer=self._world.peer("decode-0"),
                endpoint=self._world.addresses["decode-0"],
                agent=reserved.agent,
                landing=reserved.landing,
                held_blocks=reserved.held_blocks,
            ),
            prefix_hint_tokens=16,
            sources=[prefill_pb2.PrefixSource(peer=self._world.peer("decode-0"), first_block=0, blocks=1)],
        )

    def commit(self, spec: common_pb2.RequestSpec, reserved: decode_pb2.ReserveResponse) -> decode_pb2.CommitRequest:
        """As prefill sends it, with checksums of rows that were never sent: decode asks for them again."""
        rng = self._rng
        part = reserved.landing.parts[0]
        sums = common_pb2.PartChecksums(rows=[rng.getrandbits(64) for _ in part.rows])
        if part.HasField("slot"):
            sums.slot = rng.getrandbits(64)
        first = [decode_pb2.FirstToken(choice=state.choice, token_id=65) for state in spec.choices]
        report = prefill_pb2.PrefillReport(computed_tokens=spec.prompt_tokens, kv_bytes=16_384, transport="shm")
        return decode_pb2.CommitRequest(
            landing=reserved.landing,
            sender=self._world.peer("prefill-0"),
            checksums=[sums],
            draft_rings_valid=True,
            first_tokens=first,
            report=report,
        )

    def write(self, landing: common_pb2.TransferHandle, sender: str) -> list[Message]:
        """A stream of one row, as `sender` begins it."""
        part = landing.parts[0]
        data = self._rng.randbytes(min(landing.row_bytes, 4096))
        pieces = [transfer_pb2.RowPiece(item=part.rows[0], offset=0, data=data)]
        begin = transfer_pb2.WriteBegin(landing=landing, sender=self._world.peer(sender))
        return [
            transfer_pb2.WriteRequest(begin=begin),
            transfer_pb2.WriteRequest(rows=transfer_pb2.WriteRows(pieces=pieces)),
            transfer_pb2.WriteRequest(end=transfer_pb2.WriteEnd(complete=False, bytes=len(data))),
        ]

    def embedding_landing(
        self, handle: encoder_pb2.EmbeddingHandle
    ) -> tuple[common_pb2.TransferHandle, common_pb2.TransferAgent]:
        """A landing for embeddings at prefill, as prefill signs it, at the end of its region: real requests take rows
        from the beginning."""
        prefill = self._world.replicas["prefill-0"]
        agent = prefill.ranks[0].agent
        region = next(one for one in agent.regions if one.payload == common_pb2.PAYLOAD_KIND_EMBEDDING)
        first = region.items - handle.rows
        landing = common_pb2.TransferHandle(
            transfer_id=self._rng.randbytes(16).hex(),
            receiver=prefill.peer,
            id=handle.id,
            generation=1,
            model_fingerprint=self._world.model.identity.model_fingerprint,
            payload=common_pb2.PAYLOAD_KIND_EMBEDDING,
            parts=[common_pb2.LandingPart(blocks=range(handle.rows), rows=range(first, region.items))],
            row_bytes=region.item_bytes,
            checksum=common_pb2.CHECKSUM_KIND_XXH3_64,
            metadata_version=agent.metadata_version,
            time_left_ms=5000,
        )
        return self._world.signer.handle(landing), agent
