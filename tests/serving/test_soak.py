"""The short form of ``python -m benchmarks.soak``: versions and deltas come and go under steady load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs onnx to export (the onnx extra)")

from benchmarks.soak import build_store, soak

pytestmark = pytest.mark.slow

ROWS = 500


def test_ten_seconds(tmp_path: Path):
    result = soak(
        build_store(tmp_path, ROWS), rows=ROWS, seconds=10.0, every=0.1, most=100.0
    )  # what a machine far slower can do too
    assert not result.errors, result
    assert result.wrong == 0, result
    assert result.changes >= 9, result  # every kind of change at least once
    assert len(result.answers) >= 3, result
    assert result.end_mib - result.start_mib < 48, result  # a version leaked at every change would be more
