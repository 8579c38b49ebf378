"""Decode alone: hand prompts over without credit, then let all of them run at once while prefill is idle.

The bench is a second router here. A request whose credit is 0 is handed over and stands still after its first token, so
all can be started together, with the context that the question is about; through the front door the first would be
half done before the last arrives.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import grpc

from bench.overhead_harness.cpu import CpuTimes
from headrace.cli.client import open_channel, replica_status
from headrace.v1 import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc

PATIENCE_S = 120.0
RENEW_S = 1.0
ENOUGH = 1 << 20


@dataclass(frozen=True)
class HandedOver:
    """What decode alone showed."""

    sequences: int
    tokens_per_s: float
    """From the first step in which all run to the first end."""
    step_ms: float
    hand_over_ms: float
    """Mean time from prefill's last chunk to decode's answer, as prefill tells it."""
    engine_cpu_ms: float
    """CPU of decode's engine thread per step: less than `step_ms` when others use the core."""
    other_cpu_ms: float
    """CPU of decode's other threads (gRPC, asyncio, transfer) per step."""


class _Stream:
    """An Attach stream, read on a thread; leases are renewed on another."""

    def __init__(self, channel: grpc.Channel, router: common_pb2.PeerId) -> None:
        self._outgoing: queue.Queue[decode_pb2.AttachRequest | None] = queue.Queue()
        self.arrivals: list[tuple[float, list[decode_pb2.RequestEvents]]] = []
        self.ended: set[str] = set()
        self._changed = threading.Condition()
        self._live: dict[str, decode_pb2.AttachedRequest] = {}
        self._closing = threading.Event()
        self._outgoing.put(decode_pb2.AttachRequest(router=router))
        self._call = decode_pb2_grpc.DecodeServiceStub(channel).Attach(iter(self._outgoing.get, None))
        self._open = False
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._read, self._renew)]
        for thread in self._threads:
            thread.start()
        self.wait(lambda: self._open, "an open stream")

    def _read(self) -> None:
        try:
            for response in self._call:
                now = perf_counter()
                with self._changed:
                    self._open = True
                    if response.requests:
                        self.arrivals.append((now, list(response.requests)))
                    self.ended |= {one.id.request_id for one in response.requests if one.HasField("report")}
                    self._changed.notify_all()
        except grpc.RpcError:
            if not self._closing.is_set():
                raise

    def _renew(self) -> None:
        while not self._closing.wait(RENEW_S):
            live = [one for name, one in self._live.items() if name not in self.ended]
            self._outgoing.put(decode_pb2.AttachRequest(requests=live))

    def keep(self, ids: Sequence[common_pb2.AttemptId], credit: int) -> None:
        """Renew these from now on, with this credit."""
        requests = [decode_pb2.AttachedRequest(id=one, credit_tokens=credit) for one in ids]
        self._live |= {one.id.request_id: one for one in requests}
        self._outgoing.put(decode_pb2.AttachRequest(requests=requests))

    def wait(self, check: Callable[[], bool], what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(check, PATIENCE_S):
                raise RuntimeError(f"waited {PATIENCE_S:.0f} s for {what}")

    def close(self) -> None:
        self._closing.set()
        self._outgoing.put(None)
        self._call.cancel()
        for thread in self._threads:
            thread.join(PATIENCE_S)


def measure_handed_over(
    prefill_address: str,
    decode_address: str,
    decode_pid: int,
    model: inference_pb2.Model,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
) -> HandedOver:
    """Hand every prompt over, then run all of them together."""
    router = common_pb2.PeerId(replica_id="bench", incarnation=uuid.uuid4().hex)
    prefill, decode = (replica_status(address).replica.peer for address in (prefill_address, decode_address))
    with open_channel(prefill_address) as to_prefill, open_channel(decode_address) as to_decode:
        stream = _Stream(to_decode, router)
        try:
            reserve = decode_pb2_grpc.DecodeServiceStub(to_decode).Reserve
            run = prefill_pb2_grpc.PrefillServiceStub(to_prefill).Run
            ids, hand_over = [], []
            for prompt in prompts:
                spec = make_spec(model, prompt, max_tokens, router)
                reserved = reserve(decode_pb2.ReserveRequest(spec=spec, sender=prefill), timeout=PATIENCE_S)
                ids.append(spec.id)
                stream.keep([spec.id], 0)
                target = prefill_pb2.DecodeTarget(
                    peer=decode,
                    endpoint=decode_address,
                    agent=reserved.agent,
                    landing=reserved.landing,
                    held_blocks=reserved.held_blocks,
                )
                *_, last = run(prefill_pb2.RunRequest(spec=spec, target=target), timeout=PATIENCE_S)
                if not last.HasField("handed_over"):
                    raise RuntimeError(f"prefill did not hand over: {last}")
                hand_over.append(last.handed_over.transfer_us / 1e3)
            begun, before, start = len(stream.arrivals), CpuTimes.now({"decode": decode_pid}), perf_counter()
            stream.keep(ids, ENOUGH)
            stream.wait(lambda: len(stream.ended) == len(ids), "the answers' ends")
            seconds = perf_counter() - start
            busy = CpuTimes.now({"decode": decode_pid}).since(before, seconds)["decode"]
        finally:
            stream.close()
    tokens_per_s, steps = rate(stream.arrivals[begun:], len(ids))
    step_ms = 1e3 / steps
    return HandedOver(
        sequences=len(ids),
        tokens_per_s=tokens_per_s,
        step_ms=step_ms,
        hand_over_ms=sum(hand_over) / len(hand_over),
        engine_cpu_ms=busy["busiest_thread"] * step_ms,
        other_cpu_ms=busy["other_threads"] * step_ms,
    )


def rate(arrivals: Sequence[tuple[float, list[decode_pb2.RequestEvents]]], count: int) -> tuple[float, float]:
    """Tokens per second and messages per second between the first message in which all `count` sequences have tokens
    and the first that ends one, the last one's tokens counted."""
    full = [index for index, (_, events) in enumerate(arrivals) if sum(bool(one.tokens) for one in events) == count]
    ends = [index for index, (_, events) in enumerate(arrivals) if any(one.finished for one in events)]
    if not full or not ends or ends[0] <= full[0]:
        raise RuntimeError("the sequences never ran together; give longer answers")
    inside = arrivals[full[0] + 1 : ends[0] + 1]
    seconds = arrivals[ends[0]][0] - arrivals[full[0]][0]
    tokens = sum(len(part.token_ids) for _, events in inside for one in events for part in one.tokens)
    return tokens / seconds, len(inside) / seconds


def make_spec(
    model: inference_pb2.Model, prompt: Sequence[int], max_tokens: int, router: common_pb2.PeerId
) -> common_pb2.RequestSpec:
    """As the router fills it in, for a greedy answer that ignores EOS."""
    return common_pb2.RequestSpec(
        id=common_pb2.AttemptId(request_id=uuid.uuid4().hex, attempt=1),
        model=model.identity,
        token_ids=prompt,
        prompt_tokens=len(prompt),
        replay_mode=common_pb2.REPLAY_MODE_COMPACT,
        root_key=bytes(32),
        sampling=common_pb2.SamplingParams(temperature=0.0, top_p=1.0, seed=1, n=1),
        stop=common_pb2.StopParams(max_tokens=max_tokens, ignore_eos=True),
        choices=[common_pb2.ChoiceState(choice=0, seed=1)],
        time_left_ms=round(PATIENCE_S * 1000),
        router=router,
    )
