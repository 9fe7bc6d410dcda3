"""How results print: as text in a terminal, and in a notebook."""

from __future__ import annotations

import html
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Printed", "rich_text"]

_WIDTH = 100


class Printed:
    """A result whose text is also its form in a notebook."""

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def rich_text(shown: RenderableType) -> str:
    """The text of what rich prints, without colours."""
    from rich.console import Console

    file = io.StringIO()
    Console(file=file, width=_WIDTH, color_system=None).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())
