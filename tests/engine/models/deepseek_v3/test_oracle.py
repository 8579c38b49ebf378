"""Shows 4: engine/models/deepseek_v3 agrees with transformers' DeepseekV3ForCausalLM on random tiny configs.

max|Δlogit| ≤ 1e-5 · max|logit| in float32: absorbed, naive, chunked and batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "groups": {},
    "no_q_lora": {"q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "yarn_one_mscale": {"rope_parameters": {k: v for k, v in YARN.items() if k != "mscale"}, "q_lora_rank": None},
    "half_split": {"rope_interleave": False},
    "bias": {"attention_bias": True},
    "tied_all_experts": {
        "tie_word_embeddings": True,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
    },
    "unnormalised_two_shared": {"norm_topk_prob": False, "n_shared_experts": 2, "routed_scaling_factor": 1.0},
    "all_dense": {"first_k_dense_replace": 3},
    "all_moe": {"first_k_dense_replace": 0, "n_group": 2, "topk_group": 1},
}
FORMS: dict[str, dict[str, Any]] = {
    "absorbed": {"attention": "absorbed", "native_kernels": False},
    "naive": {"attention": "naive", "native_kernels": False},
    "invariant": {"batch_invariant": True, "native_kernels": False},
    "native": {"native_kernels": True},
}


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_transformers(
    name: str, form: str, make_tiny: Callable[..., Any], driver: Callable[..., Any]
) -> None:
    """Whole, chunked by 7, and batched beside two other sequences with decode steps at the end."""
    tiny = make_tiny(**CONFIGS[name])
    model = tiny.load(**FORMS[form])
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, 97, (length,), generator=generator).tolist() for length in (61, 33, 5)]
    expected = [tiny.oracle_logits(ids) for ids in prompts]

    run = driver(model)
    assert close(run.run(0, prompts[0], 61), expected[0])
    assert close(run.run(1, prompts[0], 7), expected[0])

    mixed = driver(model)
    got: list[list[torch.Tensor]] = [[], [], []]
    fed = [0, 0, 0]
    for sizes in ((40, 0, 0), (17, 20, 1), (1, 9, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 1, 0)):
        chunks = [(key, prompts[key][fed[key] : fed[key] + size]) for key, size in enumerate(sizes) if size]
        for (key, ids), logits in zip(chunks, mixed.step(chunks), strict=True):
            got[key].append(logits)
            fed[key] += len(ids)
    assert fed == [61, 33, 5]
    for parts, want in zip(got, expected, strict=True):
        assert close(torch.cat(parts), want)
