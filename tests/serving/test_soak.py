"""The short form of ``python -m benchmarks.soak``: versions and deltas come and go under steady load."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="needs onnx to export (the onnx extra)")

from benchmarks.soak import build_store, soak

pytestmark = pytest.mark.slow

ROWS = 5000
ROUNDS = 5


def test_five_rounds_of_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(
        "MALLOC_ARENA_MAX", "1"
    )  # one malloc arena: memory of short-lived threads does not stay in other arenas
    store = build_store(tmp_path, ROWS)
    # A rate that a machine far slower can do too, and for as long as the rounds take there.
    result = soak(store, rows=ROWS, seconds=4.0, every=0.1, most=50.0, rounds=ROUNDS)
    assert not result.errors, result
    assert result.wrong == 0, result
    assert result.changes >= 9 * ROUNDS, result  # every kind of change
    assert len(result.answers) >= 3, result
    # A version with its delta takes 5 MiB here, and each round loads one. The first two rounds include one-time allocations.
    grown = (result.rounds_mib[-1] - result.rounds_mib[1]) / (len(result.rounds_mib) - 2)
    assert grown < 2.5, result
