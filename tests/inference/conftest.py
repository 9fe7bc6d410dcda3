"""The archives that predictor and verify tests share."""

from __future__ import annotations

from tests.archive.conftest import everything, small

__all__ = ["everything", "small"]
