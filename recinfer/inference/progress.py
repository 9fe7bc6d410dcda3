"""The progress of export, reshard and delta on a terminal: a bar with bytes done, bytes per second and time left, or a spinner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["byte_bar", "spinner"]


@contextmanager
def byte_bar(what: str, total: int, show: bool) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done; draws on stderr when ``show``.

    Args:
        what: the text before the bar.
        total: bytes of the whole job.
    """
    console = _terminal(show)
    if console is None:
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def spinner(what: str, show: bool) -> Iterator[None]:
    """Draws ``what`` and the time on stderr when ``show``, for work whose length is not known."""
    console = _terminal(show)
    if console is None:
        yield
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


def _terminal(show: bool) -> Console | None:
    """stderr, where progress is to be drawn; None elsewhere, where drawing would only leave an empty line."""
    if not show:
        return None
    from rich.console import Console

    console = Console(stderr=True)
    return console if console.is_terminal else None
