"""The order of versions by their names."""

from __future__ import annotations

import re

__all__ = ["natural"]


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """A sort key that puts "10" after "9" and "v2" after "v1"; the name orders equal numbers ("01", "1"), alike on every
    host."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts], name
