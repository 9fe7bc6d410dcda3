"""The progress bar of training, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Report", "training_progress"]

Report = Callable[[int, float], None]
"""Callback after each step, with the epoch (from 1) and the loss of the batch."""

_KEEP = 0.98  # share of the loss's running mean that each step keeps


@contextmanager
def training_progress(num_steps: int | None, *, show: bool, done: int = 0, rows: int = 0) -> Iterator[Report]:
    """A bar over ``num_steps`` steps with the running loss; only with ``show``.

    Args:
        num_steps: number of steps; None while unknown, when the bar pulses.
        show: on stderr, or not at all.
        done: steps made before.
        rows: rows of all ranks in a step, for samples per second.
    """
    if not show:
        yield lambda epoch, loss: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("training, epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TextColumn("{task.fields[rate]:,.0f} samples/s"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    mean = weight = 0.0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=num_steps, completed=done, epoch=1, loss=float("nan"), rate=0.0)

        def report(epoch: int, loss: float) -> None:
            nonlocal mean, weight
            mean, weight = _KEEP * mean + (1 - _KEEP) * loss, _KEEP * weight + (1 - _KEEP)
            speed = (bar.tasks[task].speed or 0.0) * rows
            bar.update(task, advance=1, epoch=epoch, loss=mean / weight, rate=speed)

        yield report
