"""A plan as a picture: load and memory of each rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recinfer.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from recinfer.distributed.planner import Plan

__all__ = ["plot_plan"]

_LABELLED_RANKS = 32  # beyond, matplotlib chooses the ticks


def plot_plan(plan: Plan, path: Path) -> None:
    """Write a picture of ``plan``: estimated milliseconds of each rank with the lower bound, and GiB of each memory.

    Args:
        path: the file; its suffix says the format (png, svg, pdf).

    Raises:
        ConfigError: a suffix that matplotlib does not write, or a plan without estimates.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path}: cannot write {path.suffix!r}; expected one of {', '.join(known)}")
    if "perf_ms_per_rank" not in plan.estimates:
        raise ConfigError("the plan holds no estimates to plot; plan with recinfer")
    figure = Figure(figsize=(max(8.0, min(24.0, plan.world_size / 4)), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    load, memory = figure.subplots(2, 1, sharex=True)
    _plot_load(load, plan)
    _plot_memory(memory, plan)
    if plan.world_size <= _LABELLED_RANKS:
        memory.set_xticks(range(plan.world_size))
    memory.set_xlabel("rank")
    figure.suptitle(
        f"{len(plan.tables)} tables on {plan.world_size} {plan.compute_device} ranks, plan {plan.hash[:12]}"
    )
    figure.savefig(path, dpi=120)


def _plot_load(axes: Axes, plan: Plan) -> None:
    perf = plan.estimates["perf_ms_per_rank"]
    axes.bar(range(plan.world_size), perf, color="#4878a8")
    bound = plan.estimates.get("lower_bound_ms")
    if bound:
        axes.axhline(bound, color="#b04030", linewidth=1, label=f"lower bound {bound:.4g} ms")
        axes.legend(loc="lower right")
    axes.set_ylabel(f"ms a batch of {plan.estimates.get('batch_size', '?')}")
    axes.set_title(f"estimated load, busiest rank {max(perf):.4g} ms", fontsize="medium")


def _plot_memory(axes: Axes, plan: Plan) -> None:
    used = {kind: plan.estimates.get(f"{kind}_bytes_per_rank", []) for kind in ("hbm", "ddr")}
    shown = {kind: [num_bytes / 2**30 for num_bytes in sizes] for kind, sizes in used.items() if any(sizes)}
    width = 0.8 / max(1, len(shown))
    for at, (kind, sizes) in enumerate(shown.items()):
        places = [rank - 0.4 + width * (at + 0.5) for rank in range(plan.world_size)]
        caps = [cap for cap in plan.estimates.get(f"{kind}_cap_per_rank", []) if cap]
        label = f"{kind.upper()} of {min(caps) / 2**30:.4g} GiB" if caps else kind.upper()
        axes.bar(places, sizes, width=width, label=label)
    if shown:
        axes.legend(loc="lower right")
    axes.set_ylabel("GiB")
    axes.set_title("memory", fontsize="medium")
