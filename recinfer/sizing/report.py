"""What a search found, for people: a table of candidates, and a picture of the chosen one's latency."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError
from recinfer.sizing.search import Candidate, Goal

__all__ = ["as_data", "check_picture", "check_place", "picture", "rows"]


COLUMNS = ("", "host", "precision", "shards", "replicas", "rankers", "hosts", "tables", "p50", "p99 ms", "busy", "per hour", "")  # fmt: skip
"""Headings of :func:`rows`. Busy are the cores of servers, or of shards / rankers."""


def rows(candidates: Sequence[Candidate], most: int = 12) -> list[tuple[str, ...]]:
    """One line a candidate, the chosen one marked; ``most`` of them."""
    found: list[tuple[str, ...]] = []
    for at, c in enumerate(candidates[:most]):
        d = c.deployment
        counts = (str(d.shards), str(d.replicas), str(d.rankers or "-"), str(d.hosts)) if d else ("-",) * 4
        found.append(
            (
                "->" if not at and c.meets else "",
                c.host.name,
                c.precision,
                *counts,
                _size(c.table_bytes),
                _ms(c.p50_s),
                _ms(c.p99_s),
                " / ".join(f"{share:.0%}" for share in c.busy.values()) or "-",
                _money(c),
                c.why or "keeps it",
            )
        )
    return found


def _money(c: Candidate) -> str:
    if not math.isfinite(c.cost):
        return "-"
    return f"{'' if math.isfinite(c.p99_s) else 'from '}{c.cost:,.2f}"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else "never" if math.isinf(seconds) else f"{seconds * 1e3:.2f}"


def _size(num_bytes: int) -> str:
    return "-" if not num_bytes else f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"  # fmt: skip


def as_data(c: Candidate) -> dict[str, Any]:
    """A candidate as JSON has it; milliseconds."""
    d = c.deployment
    return {
        "host": c.host.name,
        "precision": c.precision,
        "shards": d.shards if d else None,
        "replicas": d.replicas if d else None,
        "rankers": d.rankers if d else None,
        "hosts": d.hosts if d else None,
        "workers_per_host": d.workers if d else None,
        "table_bytes": c.table_bytes,
        "p50_ms": c.p50_s * 1e3,
        "p99_ms": c.p99_s * 1e3,
        "busy": c.busy,
        "hedged": c.hedged,
        "cost_per_hour": c.cost,
        "meets": c.meets,
        "why": c.why,
    }


def check_picture(path: Path) -> None:
    """Raise ConfigError for a suffix that matplotlib does not write, or no folder; before anything long is done."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path}: cannot write {path.suffix!r}; expected one of {', '.join(known)}")
    check_place("--plot", path)


def check_place(option: str, path: Path) -> None:
    """Raise ConfigError where ``option`` names a file that cannot be written; before anything long is done."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; make it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; name a file in a folder of yours")


def picture(curve: Sequence[tuple[float, float, float]], goal: Goal, title: str, path: Path) -> None:
    """Draw p50 and p99 against the rate, with the goal."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, at in (("p99", 2), ("p50", 1)):
        points = [(line[0], line[at] * 1e3) for line in curve if math.isfinite(line[at])]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.axhline(goal.p99_s * 1e3, color="tab:red", linestyle="--", label=f"goal: p99 {goal.p99_s * 1e3:g} ms")
    axes.axvline(goal.qps, color="tab:grey", linestyle=":", label=f"{goal.qps:,.0f} requests/s")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlim(left=0)
    axes.set_xlabel("requests a second")
    axes.set_ylabel("ms")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
