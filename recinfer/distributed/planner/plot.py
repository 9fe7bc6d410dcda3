"""Draws load and memory of each rank of a plan."""

from __future__ import annotations

import itertools
from pathlib import Path

from recinfer.distributed.planner.plan.plan import Plan
from recinfer.distributed.planner.units import bytes_to_gb
from recinfer.distributed.types.tiers import TIER_NAMES
from recinfer.errors import ConfigError, UnavailableError
from recinfer.files import naming

__all__ = ["plot_plan"]

_COLORS = ("#3b6ea5", "#8fb8de", "#b0b7bf")  # a colour per tier


def plot_plan(plan: Plan, path: str | Path) -> None:
    """Write a picture of ``plan`` (PNG, SVG ... by the suffix): load by rank with the lower bound, memory by rank.

    Raises:
        UnavailableError: matplotlib is not installed.
        ConfigError: a plan without estimates (one written by hand).
        ValueError: matplotlib does not write files of this suffix.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UnavailableError("drawing a plan needs matplotlib: pip install matplotlib") from None
    e = plan.estimates
    if "perf_ms_per_rank" not in e:
        raise ConfigError("the plan has no estimates to draw; plan the model with the planner")
    ranks = range(plan.world_size)
    figure = Figure(figsize=(min(6 + plan.world_size / 8, 16), 6), layout="constrained")
    FigureCanvasAgg(figure)
    load, memory = figure.subplots(2, 1, sharex=True)
    load.bar(ranks, e["perf_ms_per_rank"], color="#3b6ea5")
    load.axhline(
        e["lower_bound_ms"], color="#c0392b", linestyle="--", label=f"lower bound {e['lower_bound_ms']:.4g} ms"
    )
    load.set_ylabel("ms per batch")
    load.set_title(f"{len(plan.tables)} tables on {plan.world_size} ranks, gap {e['gap']:.3f}, plan {plan.hash[:12]}")
    load.legend(loc="lower right")
    below = [0.0] * plan.world_size
    for name, color in zip(TIER_NAMES, itertools.cycle(_COLORS)):
        used = [bytes_to_gb(x) for x in e.get(f"{name}_bytes_per_rank", [])]
        if any(used):
            memory.bar(ranks, used, bottom=below, color=color, label=name.upper())
            below = [a + b for a, b in zip(below, used)]
    memory.set_ylabel("GiB")
    memory.set_xlabel("rank")
    memory.set_xticks(ranks[:: max(plan.world_size // 16, 1)])
    memory.legend(loc="lower right")
    with naming(path):
        figure.savefig(path)
