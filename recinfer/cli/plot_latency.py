"""Plots the latency distribution for each number of concurrent callers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recinfer.files import naming

if TYPE_CHECKING:
    from recinfer.serving.bench import LoadResult

__all__ = ["plot_latency"]


def plot_latency(results: Sequence[LoadResult], path: Path) -> None:
    """Write one curve per result: latency by percentile, with a stretched axis for the tail."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for result in results:
        count = result.latencies.size
        if not count:
            continue
        beyond = 1 - np.arange(count) / count  # share of requests at least this slow, from 1 down to 1 / count
        label = f"{result.concurrency} callers, {result.rate:,.0f} requests/s"
        axes.plot(1 / beyond, result.latencies * 1e3, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([1, 2, 10, 100, 1000, 10000], ["0", "50 %", "90 %", "99 %", "99.9 %", "99.99 %"])
    axes.set_xlabel("share of requests with at most this latency")
    axes.set_ylabel("ms")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    with naming(path):
        figure.savefig(path, dpi=120)
