"""Reports of capacity and deployments: tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recinfer.files import naming
from recinfer.sizing.capacity import Measured
from recinfer.sizing.deployment import Deployment

__all__ = ["COLUMNS", "as_data", "draw_curve", "rows"]

COLUMNS = (
    "", "host", "shards", "replicas", "rankers", "hosts", "load /\nknee", "one host\ndown", "p99\nms", "per\nhour", "met",
)  # fmt: skip
"""Headings of :func:`rows`."""


def rows(found: Sequence[Deployment], most: int = 12) -> list[tuple[str, ...]]:
    """One row per deployment, at most ``most``; the first one is marked if it meets the objective."""
    return [
        (
            "->" if not at and each.meets else "",
            each.host.name,
            str(each.shards),
            str(each.replicas or "-"),
            str(each.rankers or "-"),
            str(each.hosts or "-"),
            _percent(each.share),
            _percent(each.share_one_lost),
            "-" if each.p99_s is None else f"{each.p99_s * 1e3:.2f}",
            f"{each.cost:,.2f}" if each.hosts else "-",
            "yes" if each.meets else "no",
        )
        for at, each in enumerate(found[:most])
    ]


def as_data(each: Deployment) -> dict[str, Any]:
    """A deployment for JSON; times in milliseconds."""
    return {
        "host": each.host.name,
        "shards": each.shards,
        "replicas": each.replicas,
        "rankers": each.rankers,
        "hosts": each.hosts,
        "host_knee_qps": each.host_qps,
        "share_of_knee": each.share,
        "share_of_knee_one_host_lost": each.share_one_lost,
        "p99_ms": None if each.p99_s is None else each.p99_s * 1e3,
        "cost_per_hour": each.cost,
        "meets": each.meets,
        "why_not": each.why_not,
    }


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else "overload" if math.isinf(share) else f"{share:.0%}"


def draw_curve(measured: Measured, path: Path) -> None:
    """Draw p50 and p99 against the rate, with the objective and the knee."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    points = [point for point in measured.points if math.isfinite(point.p99_s)]
    rates = [point.qps for point in points]
    spread = [[(p.p99_s - p.spread_s[0]) * 1e3 for p in points], [_beyond(p.p99_s, p.spread_s[1]) for p in points]]
    axes.errorbar(rates, [p.p99_s * 1e3 for p in points], yerr=spread, marker="o", capsize=3, label="p99")
    axes.plot(rates, [p.p50_s * 1e3 for p in points], marker="o", label="p50")
    objective = f"objective: p99 {measured.p99_s * 1e3:g} ms"
    axes.axhline(measured.p99_s * 1e3, color="tab:red", linestyle="--", label=objective)
    if measured.knee_qps:
        knee = f"knee: {measured.knee_qps:,.0f} requests/s"
        axes.axvline(measured.knee_qps, color="tab:grey", linestyle=":", label=knee)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # more labels would overlap
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(left=0)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("ms")
    where = measured.machine
    axes.set_title(
        f"{measured.what} of {measured.model} {measured.version}, {measured.call}, batch {measured.batch:g}\n"
        f"measured on {where['cores']} cores of {where['processor']}, {where['date']}",
        fontsize="medium",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    with naming(path):
        figure.savefig(path, dpi=120)


def _beyond(p99_s: float, most_s: float) -> float:
    return (most_s - p99_s) * 1e3 if math.isfinite(most_s) else 0.0
