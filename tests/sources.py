"""Syntax trees of the package's modules, for the tests that read its source: parsed once in a process."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

__all__ = ["tree_of"]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Must not be changed."""
    return ast.parse(path.read_text())
