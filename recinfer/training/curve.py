"""The learning curve of a training run: losses and metrics by step, as CSV and as a plot."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recinfer.errors import UnavailableError
from recinfer.files import naming

__all__ = ["COLUMNS", "Curve"]

COLUMNS = (
    "step",
    "epoch",
    "samples",
    "seconds",
    "samples_per_second",
    "train_loss",
    "auc",
    "log_loss",
    "normalized_entropy",
    "ids_admitted",
    "ids_evicted",
)


class Curve:
    """The points of a run; each is written to ``path`` when it is added.

    Args:
        path: a CSV file to write, replaced if it is there; None keeps the points in memory only.

    Attributes:
        rows: the points, by :data:`COLUMNS`; held-out metrics are missing between evaluations, and counts of raw ids
            in a model whose tables take rows.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.rows: list[dict[str, float]] = []
        self._started = time.perf_counter()
        self._before = 0.0
        self._last = (0.0, 0)  # seconds and samples of the last point of training
        if self.path is not None:
            self._write_all()

    def add_step(self, step: int, epoch: int, samples: int, train_loss: float) -> None:
        """Add the mean training loss of the steps since the last point."""
        now = self._seconds()
        seconds, before = now - self._last[0], self._last[1]
        self._last = (now, samples)
        rate = (samples - before) / seconds if seconds > 0 else math.nan
        self._add(step=step, epoch=epoch, samples=samples, seconds=now, samples_per_second=rate, train_loss=train_loss)

    def add_evaluation(self, step: int, epoch: int, samples: int, metrics: Mapping[str, float]) -> None:
        """Add metrics on the held-out rows."""
        self._add(step=step, epoch=epoch, samples=samples, seconds=self._seconds(), **metrics)
        self._last = (self._seconds(), samples)

    def restore(self, rows: Sequence[Mapping[str, float]]) -> None:
        """Start with the points of an earlier run, up to the step where this one continues."""
        self.rows = [dict(row) for row in rows]
        if self.rows:
            self._before = self.rows[-1]["seconds"]
            self._last = (self._seconds(), int(self.rows[-1]["samples"]))
        if self.path is not None:
            self._write_all()

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw training loss and held-out metrics over samples; the suffix of ``path`` gives the format.

        Raises:
            UnavailableError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise UnavailableError(f"plotting needs matplotlib; pip install 'recinfer[plot]' ({error})") from error
        figure = Figure(figsize=(8, 5), layout="constrained")
        losses, ranks = figure.subplots(2, 1, sharex=True)
        trained = [row for row in self.rows if "train_loss" in row]
        evaluated = [row for row in self.rows if "log_loss" in row]
        losses.plot([r["samples"] for r in trained], [r["train_loss"] for r in trained], label="training")
        losses.plot([r["samples"] for r in evaluated], [r["log_loss"] for r in evaluated], "o-", label="held out")
        losses.set_ylabel("log-loss")
        losses.legend()
        ranks.plot([r["samples"] for r in evaluated], [r["auc"] for r in evaluated], "o-", label="AUC")
        ranks.plot(
            [r["samples"] for r in evaluated],
            [r["normalized_entropy"] for r in evaluated],
            "o-",
            label="normalized entropy",
        )
        ranks.set_ylabel("held out")
        ranks.set_xlabel("samples")
        ranks.legend()
        for axes in (losses, ranks):
            axes.grid(alpha=0.3)
        with naming(path):
            figure.savefig(path)
        return Path(path)

    def _seconds(self) -> float:
        return self._before + time.perf_counter() - self._started

    def _add(self, **values: Any) -> None:
        self.rows.append(values)
        if self.path is not None:
            with naming(self.path), open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.writer(file).writerow(_texts(values))

    def _write_all(self) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with naming(self.path), open(self.path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(map(_texts, self.rows))


def _texts(row: Mapping[str, float]) -> list[str]:
    return [f"{row[name]:.6g}" if isinstance(row.get(name), float) else str(row.get(name, "")) for name in COLUMNS]
