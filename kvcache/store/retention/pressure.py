"""What goes when a store, or one tenant in it, is over its quota (spec/kv_tier.md, Retention: 90 → 80 %).

Space comes back only by unlinking whole segments. A plan is a *horizon* (a rank, see heat.py) and the segments to
unlink: of these, entries at or above the horizon are re-appended and the others are lost. The segments are those with
the least bytes at or above the horizon, for their size: the least live hit-weight, hence the least to write again.

1. A tenant over 90 % of its quota gets a horizon of its own, under which it is at 80 %; its entries below leave the
   index at once, wherever they are. Nobody else loses anything.
2. While the store is over 90 % of its quota, the common horizon rises until the entries above fill at most `keep` of
   the quota (a little less than 80 %, so that dead bytes can be reclaimed without writing everything again), and
   segments go until 80 %.
3. Re-appends are paid from a budget that new writes fill (`rewrite`: 0.3 bytes for each new one), so that the write
   amplification stays under 1 + rewrite however unlucky the use; what the budget does not pay for, a higher horizon
   gives up instead. One exception: where every tenant has a quota and all that they hold fits, nobody is to lose
   anything to the others, and whatever frees more than it re-appends is done (write amplification under 2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.kvcache.entries import RetentionClass
from headrace.kvcache.keys import Key
from headrace.kvcache.store.retention.classes import NEVER, Lives
from headrace.kvcache.store.retention.heat import Heat, rank_at
from headrace.kvcache.store.retention.ledger import Ledger, Placed

_MIB = 1 << 20
_STEPS = 8
"""Halvings in the search for the horizon that the budget affords: to 0.3 % of the quota."""
_EVERYTHING = rank_at(1 << 38)

Places = Callable[[Collection[Key]], Iterable[Placed]]
"""Where entries lie now; those that are gone are left out."""


@dataclass(frozen=True)
class Quota:
    """Limits of one store, in bytes on disk."""

    disk_bytes: int
    tenant_bytes: int | None = None
    """For each tenant that `tenants` does not name; None: only the disk limits it."""
    tenants: Mapping[bytes, int] = field(default_factory=dict)
    """By tenant tag."""
    high: float = 0.90
    low: float = 0.80
    keep: float = 0.79
    rewrite: float = 0.30

    def __post_init__(self) -> None:
        if self.disk_bytes < 1:
            raise ValueError(f"a quota of {self.disk_bytes} bytes holds nothing")
        if not 0 < self.keep < self.low < self.high <= 1 or self.rewrite < 0:
            raise ValueError(
                f"keep {self.keep} < low {self.low} < high {self.high} must lie in (0, 1] and rewrite {self.rewrite} "
                "must not be negative"
            )

    def of(self, tenant: bytes) -> int | None:
        """Bytes that a tenant may hold, or None."""
        return self.tenants.get(tenant, self.tenant_bytes)

    def admits(self, ledger: Ledger, tenant: bytes, nbytes: int) -> bool:
        """Whether a new entry may be written now: never beyond the disk's quota nor the tenant's."""
        limit = self.of(tenant)
        return ledger.disk_bytes + nbytes <= self.disk_bytes and (
            limit is None or ledger.tenant_bytes[tenant] + nbytes <= limit
        )


@dataclass(frozen=True)
class Plan:
    """What to give up."""

    horizon: int
    tenant_horizons: Mapping[bytes, int]
    prune: tuple[str, ...]
    """Segments of which entries below their tenant's horizon leave the index; the files stay."""
    unlink: tuple[str, ...]
    """Segments to empty, one after the other: re-append what is kept, wait until that is durable, unlink."""
    rewritten_bytes: int
    """What `unlink` re-appends."""

    def keeps(self, tenant: bytes, rank: int) -> bool:
        """Whether an entry survives; asked again for each, with its rank of that moment."""
        return rank >= max(self.horizon, self.tenant_horizons.get(tenant, 0))


def moved_bucket(lives: Lives, retention: RetentionClass, bucket: int, last_use: float, now: float) -> int:
    """Expiry bucket of an entry that is re-appended to free its segment: by its last use, never earlier than before.

    Being moved is no use: what nobody asks for ends when it would have ended. Only what would outlive less than an
    eighth of its life by this goes into the bucket of now, so that moved entries do not fill a segment for each bucket.
    """
    by_use = lives.bucket(retention, last_use)
    if NEVER in (bucket, by_use):
        return NEVER
    end, fresh = max(bucket, by_use), lives.bucket(retention, now)
    return fresh if end <= fresh <= by_use + lives.of[retention].life_s // 8 else end


def segment_bytes(quota_bytes: int) -> int:
    """Segment size that suits a quota: whole segments are given up, so they are at most 1/128 of it; 4 to 256 MiB."""
    return max(4 * _MIB, min(256 * _MIB, quota_bytes // 128 // _MIB * _MIB))


class Pressure:
    """The policy with its budget and horizons. One per store, in the process that sweeps."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._budget = quota.rewrite * quota.disk_bytes * (quota.high - quota.low)
        self._tenant_horizons: dict[bytes, int] = {}

    def written(self, nbytes: int) -> None:
        """New entries were written (not re-appended ones)."""
        limit = self.quota.rewrite * self.quota.disk_bytes
        self._budget = min(self._budget + self.quota.rewrite * nbytes, limit)

    def rewritten(self, nbytes: int) -> None:
        """Entries were re-appended to free their segment."""
        self._budget -= nbytes

    def plan(self, ledger: Ledger, heat: Heat, places: Places) -> Plan | None:
        """What to give up now, or None. The horizon of `heat` has risen when this returns."""
        quota = self.quota
        over = [
            tenant
            for tenant, held in ledger.tenant_bytes.items()
            if (limit := quota.of(tenant)) is not None and held > quota.high * limit
        ]
        full = ledger.disk_bytes > quota.high * quota.disk_bytes
        if not over and not full:
            return None
        view = _View(ledger, heat, places(heat.remembered()))
        for tenant in over:
            self._tenant_horizons[tenant] = view.tenant_horizon(
                tenant, int(quota.low * (quota.of(tenant) or 0)) - view.pinned_of[tenant]
            )
        view.drop_below(self._tenant_horizons)
        prune = view.holding(over)
        unlink: Sequence[int] = ()
        cost = 0
        if full:
            heat.horizon, unlink, cost = self._raise(view, ledger, heat.horizon)
        names = tuple(view.segments[at].name for at in unlink)
        gone = set(names)
        return Plan(
            heat.horizon,
            dict(self._tenant_horizons),
            tuple(name for name in prune if name not in gone),
            names,
            cost,
        )

    def _raise(self, view: _View, ledger: Ledger, floor: int) -> tuple[int, Sequence[int], int]:
        """The lowest horizon whose re-appends the budget pays for."""
        quota = self.quota
        room = int(quota.keep * quota.disk_bytes) - view.pinned_bytes
        excess = ledger.disk_bytes - int(quota.low * quota.disk_bytes)
        budget = max(self._budget, 0.0)
        guaranteed = view.horizon_for(max(room, 0)) <= floor and view.all_tenants(
            lambda tenant: quota.of(tenant) is not None
        )
        best = (_EVERYTHING, *view.victims(_EVERYTHING, excess))
        low, high = 0, max(room, 0)
        for step in range(_STEPS):
            kept = high if step == 0 else (low + high) // 2
            horizon = max(floor, view.horizon_for(kept))
            victims, cost, freed = view.victims(horizon, excess)
            affordable = cost <= (max(budget, freed) if guaranteed and step == 0 else budget)
            if affordable and freed >= excess:
                best, low = (horizon, victims, cost, freed), kept
                if step == 0:
                    break
            else:
                high = kept
        horizon, victims, cost, _ = best
        return max(floor, min(horizon, view.highest + 1)), victims, cost


class _View:
    """The ledger as arrays: one row per used entry and one per (segment, tenant) for the rest."""

    def __init__(self, ledger: Ledger, heat: Heat, used: Iterable[Placed]) -> None:
        self.pinned_bytes = sum(segment.disk_bytes for segment in ledger.segments.values() if segment.pinned)
        self.pinned_of: Counter[bytes] = Counter()
        for segment in ledger.segments.values():
            if segment.pinned:
                self.pinned_of.update(segment.live)
        self.segments = [segment for segment in ledger.segments.values() if not segment.pinned]
        rest = [Counter(segment.live) for segment in self.segments]
        at_of = {segment.name: at for at, segment in enumerate(self.segments)}
        ranks: list[int] = []
        sizes: list[int] = []
        places: list[int] = []
        tenants: list[bytes] = []
        for entry in used:
            at = at_of.get(entry.segment, -1)
            if at < 0:
                continue
            ranks.append(heat.rank(entry.key, self.segments[at].written))
            sizes.append(entry.nbytes)
            places.append(at)
            tenants.append(entry.tenant)
            rest[at][entry.tenant] -= entry.nbytes
        for at, segment in enumerate(self.segments):
            for tenant, nbytes in rest[at].items():
                if nbytes > 0:
                    ranks.append(rank_at(segment.written))
                    sizes.append(nbytes)
                    places.append(at)
                    tenants.append(tenant)
        number = {tenant: n for n, tenant in enumerate(dict.fromkeys(tenants))}
        self._number = number
        self._tenant = np.fromiter((number[tenant] for tenant in tenants), np.int64, len(tenants))
        self._rank = np.array(ranks, np.int64)
        self._size = np.array(sizes, np.int64)
        self._place = np.array(places, np.int64)
        self._disk = np.array([segment.disk_bytes for segment in self.segments], np.int64)
        self._written = np.array([segment.written for segment in self.segments], np.int64)
        self._closed = np.array([not segment.open for segment in self.segments], np.bool_)
        self.highest = int(self._rank.max()) if ranks else 0

    def tenant_horizon(self, tenant: bytes, room: int) -> int:
        """Lowest rank above which this tenant's entries take at most `room` bytes."""
        own = self._tenant == self._number.get(tenant, -1)
        return _horizon(self._rank[own], self._size[own], room)

    def all_tenants(self, condition: Callable[[bytes], bool]) -> bool:
        """Whether it holds for every tenant that has anything."""
        return all(condition(tenant) for tenant in self._number)

    def horizon_for(self, room: int) -> int:
        return _horizon(self._rank, self._size, room)

    def drop_below(self, horizons: Mapping[bytes, int]) -> None:
        """Forget what tenants lose, so that its bytes count as dead."""
        limits = np.zeros(len(self._number), np.int64)
        for tenant, horizon in horizons.items():
            if tenant in self._number:
                limits[self._number[tenant]] = horizon
        if len(self._rank):
            self._size = np.where(self._rank < limits[self._tenant], 0, self._size)

    def holding(self, tenants: Sequence[bytes]) -> tuple[str, ...]:
        """Segments in which one of these tenants has something."""
        wanted = np.isin(self._tenant, [self._number[tenant] for tenant in tenants if tenant in self._number])
        return tuple(self.segments[at].name for at in np.unique(self._place[wanted]))

    def victims(self, horizon: int, excess: int) -> tuple[Sequence[int], int, int]:
        """Closed segments to unlink so that `excess` bytes come back; bytes to re-append for it; bytes that come
        back. Least weight for its size first, of equals the oldest."""
        kept = np.where(self._rank >= horizon, self._size, 0)
        weight = np.bincount(self._place, kept, len(self.segments)).astype(np.int64)
        order = np.lexsort((self._written, weight / np.maximum(self._disk, 1)))
        order = order[self._closed[order] & (weight[order] < self._disk[order])]
        freed = np.cumsum(self._disk[order] - weight[order])
        count = min(int(np.searchsorted(freed, excess)) + 1, len(order))
        chosen = order[:count]
        return chosen.tolist(), int(weight[chosen].sum()), int(freed[count - 1]) if count else 0


def _horizon(ranks: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], room: int) -> int:
    """Lowest rank r such that entries of rank ≥ r take at most `room` bytes; 0 if all fit."""
    order = np.argsort(ranks)[::-1]
    fits = int(np.searchsorted(np.cumsum(sizes[order]), room, side="right"))
    if fits == len(order):
        return 0
    return int(ranks[order[fits]]) + 1
