"""The figures of bench.retention as a picture: hit ratio by capacity and policy, disk use over simulated time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.retention_harness.replay import Outcome


def plot(path: Path, classes: Mapping[str, Outcome], capacities: Mapping[str, Sequence[Outcome]]) -> None:
    """Write a picture (the ending of `path` says which format). Needs matplotlib (extra `dev`)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    policies = [outcome.policy for outcome in next(iter(capacities.values()))]
    width = 0.8 / len(policies)
    for at, policy in enumerate(policies):
        ratios = [outcomes[at].hit_ratio for outcomes in capacities.values()]
        bars = left.bar([x + at * width for x in range(len(capacities))], ratios, width, label=policy)
        left.bar_label(bars, fmt="%.3f", fontsize=7)
    left.set_xticks([x + width * (len(policies) - 1) / 2 for x in range(len(capacities))], list(capacities))
    left.set(
        ylabel="hit ratio (leading blocks)", xlabel="quota as a share of the unique blocks", title="Under pressure"
    )
    left.legend(fontsize=8)
    for name, outcome in classes.items():
        days, shares = zip(*outcome.series, strict=True)
        right.plot(days, shares, label=f"{name}: hits {outcome.hit_ratio:.3f}", linewidth=1)
    right.axhline(1, color="grey", linestyle=":", linewidth=1)
    right.set(ylabel="share of the quota on disk", xlabel="simulated day", title="Expiry and refresh", ylim=(0, 1.05))
    right.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
