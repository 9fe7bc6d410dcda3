"""The plots of the benchmark page, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from benchmarks import report_page as figures

__all__ = ["PLOT_OF"]

OURS, PEER, FLOOR = "#2f6db5", "#c05a2c", "#8a8a8a"
Bars = dict[str, list[figures.Spread | None]]


@contextmanager
def _plot(path: Path, label: str) -> Iterator[Any]:
    """One pair of axes, saved without a date, so that the same data gives the same file."""
    with plt.rc_context({"svg.hashsalt": "recinfer", "svg.fonttype": "path", "font.size": 11}):
        figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
        yield axes
        axes.set_ylabel(label)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_yscale() == "log":  # 2 and 5, not 10 to some power
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        columns = len(axes.get_legend_handles_labels()[1])
        figure.legend(loc="outside upper center", ncols=min(3, columns), frameon=False, fontsize=9)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _bars(axes: Any, labels: list[str], bars: Bars, colors: list[str]) -> None:
    """Groups of bars, each with a line from the least to the largest run."""
    shown = {name: values for name, values in bars.items() if any(value is not None for value in values)}
    width = 0.8 / max(1, len(shown))
    for number, ((name, values), color) in enumerate(zip(shown.items(), colors)):
        at = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(values))]
        have = [(x, value) for x, value in zip(at, values) if value is not None]
        errors = [[value.error()[side] for _, value in have] for side in (0, 1)]
        axes.bar([x for x, _ in have], [v.median for _, v in have], width * 0.92, color=color, label=name)
        axes.errorbar(
            [x for x, _ in have], [v.median for _, v in have], errors, fmt="none", ecolor="#222", lw=1, capsize=2
        )
    axes.set_xticks(range(len(labels)), labels)


def _lookup(runs: list[Any], path: Path) -> None:
    batches = [row["batch"] for row in runs[0]]
    names = {
        "recinfer, table-wise": "table-wise",
        "recinfer, row-wise": "row-wise",
        "TorchRec scripted, table-wise": "torchrec table-wise scripted",
        "TorchRec scripted, row-wise": "torchrec row-wise scripted",
    }
    bars = {title: [figures.lookup_ratio(runs, b, name) for b in batches] for title, name in names.items()}
    with _plot(path, "time / bare FBGEMM operator's") as axes:
        _bars(axes, [f"batch {b}" for b in batches], bars, [OURS, "#8fb4de", PEER, "#e3aa8c"])
        axes.axhline(1, color=FLOOR, lw=1, ls="--", label="bare FBGEMM operator")
        axes.set_yscale("log")


def _serving(runs: list[Any], path: Path) -> None:
    lines = [row for row in runs[0] if row["call"] == "Predict"]

    def rates(who: str) -> list[figures.Spread | None]:
        return [
            figures.over(
                runs,
                lambda run, row=row: (
                    figures.serving_line(run, "Predict", row["batch"], row["concurrency"]).get(who, {}).get("rps")
                ),
            )
            for row in lines
        ]

    bars = {"recinfer": rates("ours"), "TorchServe": rates("torchserve"), "bare gRPC echo": rates("echo")}
    labels = [f"{_some(row['batch'], 'sample')}\n{_some(row['concurrency'], 'caller')}" for row in lines]
    with _plot(path, "requests per second") as axes:
        _bars(axes, labels, bars, [OURS, PEER, FLOOR])
        axes.set_yscale("log")


def _some(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _planner(runs: list[Any], path: Path) -> None:
    cases = [case for case in runs[0] if not case.endswith(" torchrec")]
    bars = {
        "recinfer": [figures.planner_figure(runs, case, "seconds") for case in cases],
        "TorchRec": [figures.planner_figure(runs, f"{case} torchrec", "seconds") for case in cases],
    }
    labels = [case.removesuffix(" train").replace(" x ", " tables\n") + " ranks" for case in cases]
    with _plot(path, "seconds of a plan") as axes:
        _bars(axes, labels, bars, [OURS, PEER])
        axes.set_yscale("log")


def _training(runs: list[Any], path: Path) -> None:
    kinds = list(runs[0])
    bars = {
        "better variant of each": [figures.training_ratio(runs, kind) for kind in kinds],
        "both pipelined": [figures.training_ratio(runs, kind, " pipelined") for kind in kinds],
    }
    with _plot(path, "samples per second / TorchRec's") as axes:
        _bars(axes, [kind.replace("_", "-") for kind in kinds], bars, [OURS, "#8fb4de"])
        axes.axhline(1, color=PEER, lw=1, ls="--", label="TorchRec")
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.3)


def _scaleout(runs: list[Any], path: Path) -> None:
    calls = list(runs[0]["p50_ms"])
    bars = {
        "two shard servers": [figures.added_ms(runs, call, "two shards", "single") for call in calls],
        "bare gRPC, two servers": [figures.added_ms(runs, call, "bare fan-out", "bare") for call in calls],
    }
    with _plot(path, "added to the median call, ms") as axes:
        _bars(axes, calls, bars, [OURS, FLOOR])


def _context(runs: list[Any], path: Path) -> None:
    counts = [row["candidates"] for row in runs[0]]
    bars: Bars = {
        "user as the context": [figures.context_figure(runs, count, "context_ms") for count in counts],
        "user repeated": [figures.context_figure(runs, count, "repeated_ms") for count in counts],
    }
    with _plot(path, "ms per prediction") as axes:
        axes.set_yscale("log")
        _bars(axes, [f"{count:,} candidates" for count in counts], bars, [OURS, FLOOR])


def _vocabulary(runs: list[Any], path: Path) -> None:
    queries = list(runs[0]["ns"])
    bars = {method: [figures.remap_ns(runs, each, method) for each in queries] for method in runs[0]["ns"][queries[0]]}
    with _plot(path, "ns per id") as axes:
        axes.set_yscale("log")
        _bars(axes, queries, bars, [OURS, FLOOR, PEER, "#e3aa8c"])


PLOT_OF: dict[str, Callable[[list[Any], Path], None]] = {
    "lookup": _lookup,
    "serving": _serving,
    "planner": _planner,
    "training": _training,
    "scaleout": _scaleout,
    "context": _context,
    "vocabulary": _vocabulary,
}
"""Section -> function that plots its runs as SVG."""
