"""The archives that hostile tests copy and damage."""

from __future__ import annotations

from tests.archive.conftest import everything, named, small

__all__ = ["everything", "named", "small"]
