"""One choice of a request as a request of its own, as routers continue it and decode finds it again."""

from __future__ import annotations

from headrace.services.runtime.ids import part_id
from headrace.v1 import common_pb2


def single_choice(spec: common_pb2.RequestSpec, choice: int) -> common_pb2.RequestSpec:
    """n = 1 with the seed of that choice, which makes its tokens those of the choice among the n (spec/protocol.md,
    Exactness), and an id that still names the whole. N₀ and K stay (L15)."""
    single = common_pb2.RequestSpec()
    single.CopyFrom(spec)
    del single.choices[:]
    state = single.choices.add()
    state.CopyFrom(spec.choices[choice])
    state.choice = 0
    single.id.request_id = part_id(spec.id.request_id, choice)
    single.sampling.n, single.sampling.seed = 1, state.seed
    return single
