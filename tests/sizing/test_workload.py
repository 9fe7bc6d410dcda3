"""Bytes that a model's messages are said to have."""

from __future__ import annotations

import pytest

from recinfer.sizing.workload import shards_of
from tests.sizing.models import manifest_of, model_of


def test_rows_travel_as_they_are_stored_while_bags_hold_one_id() -> None:
    model = model_of(manifest_of(tables=8, dim=32))
    model.ids.update({"f0": 3.0, "f1": 0.25})
    (rank,) = shards_of(model, 1).ranks
    stored = 4 + 32
    assert rank.vector_bytes == pytest.approx(6 * stored + 4 * 32 + 0.25 * stored)
    two = shards_of(model, 2).ranks
    assert sum(each.vector_bytes for each in two) == pytest.approx(rank.vector_bytes)


def test_a_row_that_is_longer_stored_travels_as_floats() -> None:
    (rank,) = shards_of(model_of(manifest_of(tables=2, dim=4, precision="fp32")), 1).ranks
    assert rank.vector_bytes == pytest.approx(2 * 16)
