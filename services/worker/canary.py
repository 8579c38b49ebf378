"""The prompt of the generation that makes a worker ready (L18)."""

from __future__ import annotations

from headrace.engine.model import Model
from headrace.engine.request import EngineRequest, RequestKey
from headrace.engine.sampling_params import SamplingParams

PROMPT_TOKENS = 8
TOKENS = 2
TIMEOUT_S = 300.0
"""Longest wait for the canary; a worker that cannot do this is not started (L6)."""


class CanaryFailed(Exception):
    """The generation did not end as it should; the message says how it did."""


def canary_request(model: Model, incarnation: str, deadline: float, *, attempt: int = 1) -> EngineRequest:
    """A short greedy request of plain tokens. Its key is this process's own, so that it meets no cached prefix."""
    special = {*model.eos_token_ids, model.image_token_id}
    plain = [token for token in range(min(model.vocab_size, PROMPT_TOKENS + len(special))) if token not in special]
    length = min(PROMPT_TOKENS, max(1, model.context_tokens - TOKENS - 1))
    return EngineRequest(
        key=RequestKey(f"canary-{incarnation}", attempt),
        prompt_ids=tuple(plain[:length]) or (0,),
        key_root=bytes.fromhex(incarnation) * 2,
        sampling=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=TOKENS,
        ignore_eos=True,
        deadline=deadline,
    )
