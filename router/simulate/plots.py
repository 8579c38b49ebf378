"""Pictures of results. matplotlib is imported here alone, and only when pictures are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class PlotsUnavailable(RuntimeError):
    """matplotlib is not installed."""


def require() -> None:
    """Raises PlotsUnavailable early, before anything long has run."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotsUnavailable("plots need matplotlib: pip install matplotlib, or leave --plots away") from error
    matplotlib.use("Agg")


def scores(values: Mapping[str, Mapping[str, float]], bars: Mapping[str, float], path: Path) -> Path:
    """Grouped bars: mode → policy → score; `bars`: the aim of each mode as a line."""
    modes, policies = list(values), list(dict.fromkeys(name for row in values.values() for name in row))

    def draw(axes: Axes) -> None:
        width = 0.8 / max(1, len(policies))
        for place, policy in enumerate(policies):
            at = [mode + place * width for mode, name in enumerate(modes) if policy in values[name]]
            axes.bar(at, [values[name][policy] for name in modes if policy in values[name]], width, label=policy)
        for mode, name in enumerate(modes):
            if name in bars:
                axes.hlines(bars[name], mode - width, mode + 0.8, colors="black", linestyles="dashed", linewidth=1)
        axes.set_xticks([mode + 0.4 - width / 2 for mode in range(len(modes))], modes)
        axes.set_ylim(0.5, 1.05)
        axes.set_ylabel("throughput ÷ balanced offline")
        axes.legend(fontsize=8, ncols=3)

    return _save(draw, path)


def lines(series: Mapping[str, Sequence[float]], x_label: str, y_label: str, path: Path) -> Path:
    """One line per name, a point a second."""

    def draw(axes: Axes) -> None:
        for name, points in series.items():
            axes.plot(range(len(points)), points, label=name, linewidth=1)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(fontsize=8)

    return _save(draw, path)


def shares(values: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Work of every rank ÷ mean, sorted, by name."""

    def draw(axes: Axes) -> None:
        for name, ranks in values.items():
            axes.plot(sorted(ranks, reverse=True), label=name, linewidth=1)
        axes.set_xlabel("rank, most loaded first")
        axes.set_ylabel("work ÷ mean")
        axes.legend(fontsize=8)

    return _save(draw, path)


def _save(draw: Any, path: Path) -> Path:
    require()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    draw(figure.subplots())
    figure.savefig(path, dpi=130)
    return path
