"""The progress bar of a training, on stderr, so that stdout stays free for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Report", "training_progress"]

Report = Callable[[int, float], None]
"""Called after each step with the epoch (from 1) and the loss of the batch."""

_KEEP = 0.98  # of the running mean of the loss, each step


@contextmanager
def training_progress(num_steps: int, *, show: bool) -> Iterator[Report]:
    """A bar over ``num_steps`` steps with the running loss; nothing is shown without ``show``."""
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
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    mean = weight = 0.0
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=num_steps, epoch=1, loss=float("nan"))

        def report(epoch: int, loss: float) -> None:
            nonlocal mean, weight
            mean, weight = _KEEP * mean + (1 - _KEEP) * loss, _KEEP * weight + (1 - _KEEP)
            bar.update(task, advance=1, epoch=epoch, loss=mean / weight)

        yield report
