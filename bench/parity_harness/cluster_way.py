"""The third way: router, prefill, decode and encoder as real processes, asked over gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from bench.parity_harness.answers import GREEDY_LOGPROBS, Answer, ChoiceAnswer
from bench.parity_harness.cases import Case
from bench.parity_harness.offline_way import SAMPLED, SAMPLED_CHOICES
from headrace.cli.client import RouterClient
from headrace.v1 import common_pb2, inference_pb2

_REASONS = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_DEADLINE: "deadline",
    common_pb2.FINISH_REASON_ERROR: "error",
}
TIMEOUT_S = 900.0


class ClusterWay:
    """Clients of one router."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client
        self.pairs: dict[tuple[str, str], int] = {}
        """Requests by (prefill, decode) replica."""

    def answers(
        self, names: Sequence[str], cases: dict[str, Case], batch: int, on_done: Callable[[], None]
    ) -> dict[str, Answer]:
        """Answers to the named requests, `batch` in flight."""

        def one(name: str) -> Answer:
            found = self._ask(name, cases[name.partition(":")[2]])
            on_done()
            return found

        with ThreadPoolExecutor(batch) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))

    def _ask(self, name: str, case: Case) -> Answer:
        greedy = name.startswith("greedy:")
        sampling = common_pb2.SamplingParams(
            temperature=0.0 if greedy else SAMPLED.temperature,
            seed=case.seed,
            n=1 if greedy else SAMPLED_CHOICES,
        )
        if greedy:
            sampling.logprobs = GREEDY_LOGPROBS
        else:
            sampling.top_p = SAMPLED.top_p
        request = inference_pb2.GenerateRequest(
            prompt=case.wire,
            sampling=sampling,
            stop=common_pb2.StopParams(max_tokens=case.max_tokens, stop=case.stop),
            report=True,
        )
        return self._collect(name, sampling.n, self._client.generate(request, TIMEOUT_S))

    def _collect(self, name: str, n: int, events: object) -> Answer:
        ids: list[list[int]] = [[] for _ in range(n)]
        texts = [""] * n
        logprobs: list[list[float]] = [[] for _ in range(n)]
        margins: list[list[float]] = [[] for _ in range(n)]
        reasons = ["nothing"] * n
        cached = 0
        for event in events:  # type: ignore[attr-defined]
            kind = event.WhichOneof("event")
            if kind == "tokens":
                tokens = event.tokens
                if tokens.offset != len(ids[tokens.choice]):
                    raise RuntimeError(f"{name}: offset {tokens.offset} after {len(ids[tokens.choice])} tokens")
                ids[tokens.choice] += tokens.token_ids
                texts[tokens.choice] += tokens.text
                for one in tokens.logprobs:
                    logprobs[tokens.choice].append(one.chosen.logprob)
                    margins[tokens.choice].append(one.top[0].logprob - one.top[1].logprob)
            elif kind == "finished":
                finished = event.finished
                if finished.HasField("error"):
                    raise RuntimeError(f"{name}: choice {finished.choice} failed: {finished.error.message}")
                reasons[finished.choice] = _REASONS[finished.reason]
            elif kind == "usage":
                cached = event.usage.cached_tokens
            elif kind == "report":
                self._note(event.report)
        choices = zip(ids, texts, reasons, logprobs, margins, strict=True)
        return Answer(
            tuple(
                ChoiceAnswer(tuple(tokens), text, reason, tuple(chosen), tuple(gaps))
                for tokens, text, reason, chosen, gaps in choices
            ),
            cached,
        )

    def _note(self, report: inference_pb2.RequestReport) -> None:
        by_role = {replica.role: replica.peer.replica_id for replica in report.replicas}
        pair = by_role.get(common_pb2.ROLE_PREFILL, "?"), by_role.get(common_pb2.ROLE_DECODE, "?")
        self.pairs[pair] = self.pairs.get(pair, 0) + 1
