"""The encoder balancer: image tokens equalised, embeddings found again, a hot picture bounded."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.balancers.base import EncodedImage, EncoderBalancer, ImageWork
from headrace.router.balancers.embeddings import EmbeddingView
from headrace.router.balancers.encoder import CachedImages, EncoderPolicy
from headrace.router.fleet import Fleet
from headrace.router.ranks import RankNumbers
from headrace.router.reports import Report
from headrace.router.topology import Candidate, RankId, Role


def encoder(name: str, incarnation: str = "1") -> Candidate:
    return Candidate(RankId(name, incarnation), Role.ENCODER, "dc", "host", 0, 0, 1, 0)


def fleet_of(count: int) -> Fleet:
    fleet = Fleet(RankNumbers())
    for index in range(count):
        fleet.put(f"e{index}", "1", [encoder(f"e{index}")])
    return fleet


class FakeEncoders:
    """Encoders with caches of so many embeddings, driven through a balancer, one request at a time."""

    def __init__(self, balancer: EncoderBalancer, room: int = 1000) -> None:
        self.balancer = balancer
        self.room = room
        self.caches: dict[RankId, OrderedDict[bytes, None]] = {}
        self.computed: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.hits = 0
        self._number = 0

    def send(self, *images: ImageWork, now: float = 0.0) -> tuple[RankId, str]:
        self._number += 1
        rank, name = next(self.balancer.order(images, now)).id, f"r{self._number}"
        self.balancer.sent(rank, name, images, now)
        return rank, name

    def serve(self, *images: ImageWork, now: float = 0.0, ends: bool = True) -> RankId:
        rank, name = self.send(*images, now=now)
        cache = self.caches.setdefault(rank, OrderedDict())
        answers = []
        for image in images:
            cached = image.key in cache
            cache[image.key] = None
            cache.move_to_end(image.key)
            self.hits += cached
            self.computed[rank.replica_id] += 0 if cached else image.tokens
            answers.append(EncodedImage(image.key, image.tokens, cached))
        while len(cache) > self.room:
            cache.popitem(last=False)
        self.requests[rank.replica_id] += 1
        self.balancer.answered(rank, name, answers, now)
        if ends:
            self.balancer.ended(rank, name, answers, now)
        return rank


def picture(number: int, tokens: int = 400) -> ImageWork:
    return ImageWork(number.to_bytes(32, "big"), tokens)


def test_the_same_picture_goes_where_its_embedding_is() -> None:
    encoders = FakeEncoders(CachedImages(fleet_of(8)))
    first = encoders.serve(picture(1))
    for other in range(2, 40):
        encoders.serve(picture(other))
    assert encoders.serve(picture(1)) == first
    assert encoders.hits == 1


def test_image_tokens_are_equalised() -> None:
    """Pictures of very different sizes, none twice: the replicas compute the same within a picture or two."""
    encoders = FakeEncoders(CachedImages(fleet_of(8)))
    sizes = random.Random(1)
    for number in range(800):
        encoders.serve(picture(number, sizes.choice([40, 200, 1000, 4000])))
    assert len(encoders.computed) == 8
    assert max(encoders.computed.values()) < 1.05 * sum(encoders.computed.values()) / 8


def test_identical_pictures_of_one_burst_meet_up_to_a_bound() -> None:
    """L22: all are sent before the first answer. In flight counts as there; but not without end (L21)."""
    balancer = CachedImages(fleet_of(8), EncoderPolicy(weight=0.05, hit_share=1 / 16))
    encoders = FakeEncoders(balancer)
    places = Counter(encoders.send(picture(1))[0] for _ in range(100))
    assert len(places) == 1
    places.update(encoders.send(picture(1))[0] for _ in range(2000))
    assert 2 <= len(places) <= 8
    # The second copy is made when the first encoder is 1/(λ · hit_share) = 320 sends ahead.
    assert max(places.values()) < 1000


def test_a_hot_picture_does_not_take_everything_with_it() -> None:
    """L21: half of all requests show one picture. It spreads, others keep their affinity, and nobody gets it all."""
    encoders = FakeEncoders(CachedImages(fleet_of(8)))
    chance = random.Random(2)
    for _ in range(4000):
        number = 0 if chance.random() < 0.5 else chance.randrange(1, 200)
        encoders.serve(picture(number))
    assert max(encoders.requests.values()) < 2 * 4000 / 8
    assert encoders.hits > 0.9 * (4000 - 200)


def test_all_encoders_are_named_once_in_order_of_cost() -> None:
    fleet = fleet_of(5)
    encoders = FakeEncoders(CachedImages(fleet))
    for number in range(13):
        encoders.serve(picture(number, 100 * number + 1))
    named = [candidate.id for candidate in encoders.balancer.order([picture(99)], 0.0)]
    assigned = dict(
        zip([one.id for one in fleet.candidates(Role.ENCODER)], fleet.loads(Role.ENCODER, 0.0).assigned, strict=True)
    )
    assert named == sorted(assigned, key=lambda rank: assigned[rank])


def test_a_missing_picture_waits_and_one_that_is_there_does_not() -> None:
    fleet = fleet_of(2)
    encoders = FakeEncoders(CachedImages(fleet))
    first = encoders.serve(picture(1))
    fleet.report(first, Report(queued_tokens=5_000, queued_requests=3), now=0.0)
    assert next(encoders.balancer.order([picture(1)], 0.0)).id == first
    assert next(encoders.balancer.order([picture(2)], 0.0)).id != first
    assert len(list(encoders.balancer.order([picture(2)], 0.0))) == 2


def test_the_larger_part_of_a_request_decides() -> None:
    encoders = FakeEncoders(CachedImages(fleet_of(4)))
    small, large = encoders.serve(picture(1, 100)), encoders.serve(picture(2, 4000))
    while large == small:
        encoders = FakeEncoders(CachedImages(fleet_of(4)))
        small, large = encoders.serve(picture(1, 100)), encoders.serve(picture(2, 4000))
    assert next(encoders.balancer.order([picture(1, 100), picture(2, 4000)], 0.0)).id == large


def test_a_picture_twice_in_one_request_counts_once() -> None:
    fleet = fleet_of(1)
    encoders = FakeEncoders(CachedImages(fleet))
    rank = encoders.serve(picture(1), picture(1), ends=False)
    assert fleet.own(rank).tokens == 400


def test_two_tenants_do_not_share() -> None:
    """L25: the key of an embedding is the tenant's; the same file of another tenant is another picture."""
    encoders = FakeEncoders(CachedImages(fleet_of(1)))
    encoders.serve(ImageWork(b"acme's key of the file", 400))
    encoders.serve(ImageWork(b"umbrella's key of the file", 400))
    assert encoders.hits == 0


def test_a_failure_gives_everything_back() -> None:
    """L10, L11: the load, and the belief that the embedding is there."""
    fleet = fleet_of(3)
    balancer = CachedImages(fleet)
    encoders = FakeEncoders(balancer)
    rank, name = encoders.send(picture(1))
    assert fleet.own(rank).tokens == 400
    assert balancer.remembered == 1
    balancer.failed(rank, name, [picture(1)], 0.0)
    assert fleet.idle
    assert balancer.remembered == 0
    assert fleet.loads(Role.ENCODER, 0.0).assigned.sum() == 0


def test_what_was_told_of_an_encoder_goes_with_it() -> None:
    """L14: a restarted encoder is another one, with an empty cache."""
    fleet = fleet_of(2)
    balancer = CachedImages(fleet)
    encoders = FakeEncoders(balancer)
    rank = encoders.serve(picture(1))
    fleet.put(rank.replica_id, "2", [encoder(rank.replica_id, "2")])
    assert {candidate.id.incarnation for candidate in balancer.order([picture(1)], 0.0)} == {"1", "2"}
    assert balancer.remembered == 0
    balancer.answered(rank, "late", [EncodedImage(picture(1).key, 400, True)], 0.0)
    assert balancer.remembered == 0


def test_without_encoders_nobody_is_named() -> None:
    assert list(CachedImages(Fleet(RankNumbers())).order([picture(1)], 0.0)) == []


@pytest.mark.parametrize("policy", [{"weight": -0.1}, {"weight": 2.0}, {"hit_share": -1.0}])
def test_senseless_parameters_are_refused(policy: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be in"):
        EncoderPolicy(**policy)  # type: ignore[arg-type]


def test_a_wrong_belief_takes_what_is_older_with_it() -> None:
    """The encoder's cache is smaller than the view: it dropped the picture, so also what was used before it."""
    rank, view = RankId("e", "1"), EmbeddingView(100)
    for key in (b"old", b"gone", b"young"):
        view.sent(rank, key)
        view.answered(rank, key, cached=False)
    view.sent(rank, b"gone")
    view.answered(rank, b"gone", cached=False)
    assert not view.holders(b"old")
    assert rank in view.holders(b"gone")
    assert rank in view.holders(b"young")


def test_a_view_learns_the_room_of_an_encoder() -> None:
    """Caches of 20 embeddings behind a view of 4,096: what is believed stays near what is there."""
    balancer = CachedImages(fleet_of(2))
    encoders = FakeEncoders(balancer, room=20)
    chance = random.Random(3)
    for _ in range(3000):
        encoders.serve(picture(int(chance.paretovariate(0.7))))
    believed = balancer.remembered
    held = sum(len(cache) for cache in encoders.caches.values())
    assert believed < 60 * held


events = st.lists(
    st.tuples(
        st.sampled_from(["sent", "answered", "missed", "failed", "forget"]),
        st.integers(0, 2),
        st.sampled_from([b"a", b"b", b"c", b"d"]),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(events, st.integers(1, 4))
def test_the_view_keeps_its_books(script: list[tuple[str, int, bytes]], entries: int) -> None:
    """L11, L24: at most `entries` per encoder; holders are the views turned round; nothing is left at the end."""
    view = EmbeddingView(entries)
    ranks = [RankId(f"e{index}", "1") for index in range(3)]
    for action, index, key in script:
        rank = ranks[index]
        if action == "sent":
            view.sent(rank, key)
            assert rank in view.holders(key)
        elif action in ("answered", "missed"):
            view.answered(rank, key, cached=action == "answered")
        elif action == "failed":
            view.failed(rank, key)
        else:
            view.forget(rank)
            assert rank not in tuple(view)
        pairs = {(rank, key) for key in (b"a", b"b", b"c", b"d") for rank in view.holders(key)}
        assert len(pairs) == len(view)
        assert all(sum(holder == rank for holder, _ in pairs) <= entries for rank in ranks)
    for rank in ranks:
        view.forget(rank)
    assert len(view) == 0
    assert not any(view.holders(key) for key in (b"a", b"b", b"c", b"d"))
