"""What one request did, where and how long: collected on the way, told at the end (L27)."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.router.topology import Candidate
from headrace.services.router.images import EncodedImages
from headrace.v1 import common_pb2, decode_pb2, inference_pb2

_ROLES = {"encoder": common_pb2.ROLE_ENCODER, "prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


def micros(seconds: float) -> int:
    """Whole microseconds, never negative."""
    return max(0, round(seconds * 1e6))


@dataclass
class RequestLog:
    """Times are on the router's monotonic clock, in seconds."""

    arrived: float
    prepared: float = 0.0
    """Length of validation and tokenising."""
    queued: float = 0.0
    """Length of the wait for admission."""
    encoded: float = 0.0
    reserved: float = 0.0
    first_token: float | None = None
    """Moment of the first token's leaving."""
    last_token: float | None = None
    transfer_us: int = 0
    """From the last chunk's end until decode had verified all rows."""
    attempts: int = 0
    tokens_of_first_choice: int = 0
    replicas: list[tuple[Candidate, int]] = field(default_factory=list)
    """Those that took part, and in which attempt."""

    def worked(self, candidate: Candidate, attempt: int) -> None:
        """A replica took part."""
        self.replicas.append((candidate, attempt))

    def delivered(self, tokens: common_pb2.TokensEvent, now: float) -> None:
        """Tokens are leaving for the client."""
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        if tokens.choice == 0:
            self.tokens_of_first_choice += len(tokens.token_ids)

    def report(
        self,
        request_id: str,
        seed: int,
        decode: decode_pb2.DecodeReport,
        usage: common_pb2.Usage,
        now: float,
    ) -> inference_pb2.RequestReport:
        """The whole account."""
        prefill = decode.prefill
        first = self.first_token if self.first_token is not None else now
        last = self.last_token if self.last_token is not None else now
        between = max(1, self.tokens_of_first_choice - 1)
        return inference_pb2.RequestReport(
            request_id=request_id,
            replicas=[_replica(candidate, attempt) for candidate, attempt in self.replicas],
            times=inference_pb2.RequestTimes(
                prepare_us=micros(self.prepared),
                queue_us=micros(self.queued),
                encode_us=micros(self.encoded) + prefill.encode_us,
                reserve_us=micros(self.reserved),
                prefill_queue_us=prefill.queue_us,
                prefill_us=prefill.compute_us,
                transfer_us=self.transfer_us,
                first_token_us=micros(first - self.arrived),
                total_us=micros(now - self.arrived),
                per_token_us=micros((last - first) / between),
            ),
            bytes=inference_pb2.BytesMoved(
                kv_bytes=prefill.kv_bytes,
                embedding_bytes=prefill.embedding_bytes,
                loaded_bytes=prefill.loaded_bytes,
                resent_bytes=prefill.resent_bytes,
            ),
            usage=usage,
            attempts=self.attempts,
            preemptions=decode.preemptions,
            transport=prefill.transport,
            seed=seed,
        )

    def encoder(self, images: EncodedImages) -> None:
        """The encoder's part, if any."""
        self.encoded = images.seconds
        if images.encoder is not None:
            self.worked(images.encoder, 1)


def _replica(candidate: Candidate, attempt: int) -> inference_pb2.ReplicaReport:
    return inference_pb2.ReplicaReport(
        role=_ROLES[candidate.role.value],
        peer=common_pb2.PeerId(replica_id=candidate.id.replica_id, incarnation=candidate.id.incarnation),
        host=candidate.host,
        rank=candidate.id.rank,
        attempt=attempt,
    )
