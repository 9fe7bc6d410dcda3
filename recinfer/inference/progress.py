"""The progress bar of export, reshard and delta: bytes done, bytes per second, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["byte_bar"]


@contextmanager
def byte_bar(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done; draws on stderr when ``show``.

    Args:
        what: the text before the bar.
        total: bytes of the whole job.
    """
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
