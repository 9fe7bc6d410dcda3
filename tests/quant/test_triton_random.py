"""The Triton kernel against the reference on mixed tables. In its own file, since a GPU machine may lack hypothesis."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.quant.rows import PACKED_TYPES

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
from recinfer.quant.triton_lookup import Launch
from tests.quant.test_triton import MEAN, NONE, SUM, check


@given(
    tables=st.lists(st.tuples(st.sampled_from(PACKED_TYPES), st.integers(1, 40)), min_size=1, max_size=5),
    means=st.lists(st.booleans(), min_size=5, max_size=5),
    pooled=st.booleans(),
    weighted=st.booleans(),
    batch=st.integers(1, 9),
    alignment=st.sampled_from([1, 4, 16, 32]),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    output_dtype=st.sampled_from([torch.float32, torch.float16]),
    elements=st.sampled_from([1, 64, 2048]),
)
@settings(max_examples=40)
def test_tables_of_all_kinds_in_one_launch(tables, means, pooled, weighted, batch, alignment, seed, dtype, output_dtype, elements) -> None:  # type: ignore[no-untyped-def]  # fmt: skip
    poolings = [(MEAN if mean else SUM) if pooled else NONE for mean, _ in zip(means, tables)]
    check(
        tables, poolings, batch=batch, weighted=weighted and pooled, alignment=alignment, seed=seed, dtype=dtype,
        output_dtype=output_dtype, launch=Launch(elements, 4),
    )  # fmt: skip
