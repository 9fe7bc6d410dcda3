"""The order of versions by their names."""

from __future__ import annotations

import re

__all__ = ["natural"]


def natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """Orders "10" behind "9" and "v2" behind "v1"; of equal numbers ("01" and "1") the name decides, on every host alike."""
    parts = re.findall(r"\d+|\D+", name)
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts], name
