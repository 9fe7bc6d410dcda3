"""How results print: as text in a terminal, and in a notebook."""

from __future__ import annotations

import html
import io
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["Printed", "rich_text", "short_names", "slim_table"]

_WIDTH = 100


class Printed:
    """A result whose text is also its form in a notebook."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def slim_table(*headings: str, numbers: Collection[str] = (), title: str | None = None) -> Table:
    """A table of rich without lines between its columns, so that many columns fit a terminal of 80.

    The columns of ``numbers`` are aligned to the right and never folded; the others are folded where the table is too wide.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for heading in headings:
        number = heading in numbers
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    return table


def short_names(names: Sequence[str]) -> list[str]:
    """The last part of each name with dots, or the whole name where several end alike.

    The path before a table's name is long and mostly the same.

    >>> short_names(["arch.bags.user", "arch.bags.item", "arch.steps.item"])
    ['user', 'arch.bags.item', 'arch.steps.item']
    """
    last = [name.rpartition(".")[2] for name in names]
    number = Counter(last)
    return [short if number[short] == 1 else name for short, name in zip(last, names)]


def rich_text(shown: RenderableType) -> str:
    """The text of what rich prints, without colours."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
