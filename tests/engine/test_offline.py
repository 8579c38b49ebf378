"""The offline loop."""

from __future__ import annotations

from typing import Any

from headrace.engine.messages import FinishReason
from headrace.engine.offline import OfflineEngine
from headrace.engine.settings import EngineSettings


def test_more_requests_than_the_queue_holds(kit: Any, model: Any) -> None:
    """Requests are fed as the queue empties; completions stand in the order of the requests; bad ones say why (L13)."""
    requests = [kit.request(f"r{index}", 3 + index, max_tokens=5) for index in range(9)]
    requests.insert(4, kit.request("bad", [-1]))
    settings = EngineSettings(kv_bytes=4 << 20, max_sequences=2, max_batched_tokens=16, max_waiting=2)
    engine = OfflineEngine(model, settings, tokenizer=kit.tokenizer)
    seen: list[tuple[int, int]] = []
    completions = engine.generate(requests, lambda done, tokens: seen.append((done, tokens)))
    assert [completion.request for completion in completions] == requests
    for completion in completions:
        choice = completion.choices[0]
        if completion.request.key.request_id == "bad":
            assert choice.reason is FinishReason.ERROR
            assert choice.error is not None
        else:
            assert (choice.reason, len(choice.token_ids), len(choice.text)) == (FinishReason.LENGTH, 5, 5)
            assert completion.completion_tokens == 5
            assert completion.first_token_s is not None
    assert seen[-1] == (10, 45)
    assert engine.engine.integrity(idle=True) == ()


def test_a_batch_of_refused_requests_ends(kit: Any, model: Any) -> None:
    """L13: nothing lives, so nothing is waited for."""
    engine = OfflineEngine(model, EngineSettings(kv_bytes=4 << 20, max_sequences=2, max_batched_tokens=16))
    (completion,) = engine.generate([kit.request("bad", [-1])])
    assert completion.choices[0].reason is FinishReason.ERROR
