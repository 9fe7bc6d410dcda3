"""Batches gathered out of all examples, against the same rows taken one by one from nested lists."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.training.batches import Examples

KEYS = ["a", "b", "c"]
NUM = 23


@pytest.fixture(scope="module")
def bags() -> dict[str, list[list[int]]]:
    """Ids by feature and example; "b" is always empty."""
    rng = np.random.default_rng(0)
    of = {key: [rng.integers(0, 99, rng.integers(0, 4)).tolist() for _ in range(NUM)] for key in KEYS}
    return {**of, "b": [[] for _ in range(NUM)]}


@pytest.fixture(scope="module")
def examples(bags) -> Examples:
    flat = [bag for key in KEYS for bag in bags[key]]
    sparse = KeyedJaggedTensor(
        KEYS,
        torch.tensor([i for bag in flat for i in bag]),
        lengths=torch.tensor([len(bag) for bag in flat], dtype=torch.int32),
    )
    dense = torch.arange(NUM * 2, dtype=torch.float32).reshape(NUM, 2)
    return Examples(dense, sparse, torch.arange(NUM) % 2)


@pytest.mark.parametrize("rows", [[0], [5, 1, 5, 22], list(range(NUM)), []])
def test_a_batch_holds_its_rows_in_order(examples: Examples, bags, rows: list[int]) -> None:
    batch = examples.batch(torch.tensor(rows, dtype=torch.int64))
    assert batch.sparse_features.stride() == len(rows)
    for key in KEYS:
        found = [ids.tolist() for ids in batch.sparse_features[key].to_dense()]
        assert found == [bags[key][row] for row in rows]
    assert batch.dense_features[:, 0].tolist() == [2 * row for row in rows]
    assert batch.labels.tolist() == [row % 2 for row in rows]
    assert batch.labels.dtype == torch.float32


def test_batches_cover_every_row_once(examples: Examples) -> None:
    sizes = [len(batch.labels) for batch in examples.batches(10)]
    assert sizes == [10, 10, 3]
    in_order = torch.cat([b.dense_features for b in examples.batches(10)])
    assert torch.equal(in_order, examples.dense)
    shuffled = torch.cat([b.dense_features for b in examples.batches(10, torch.Generator().manual_seed(0))])
    assert not torch.equal(shuffled, in_order)
    assert torch.equal(shuffled[shuffled[:, 0].argsort()], in_order)


def test_parts_of_different_sizes_are_refused(examples: Examples) -> None:
    sparse = examples.batch(torch.arange(4)).sparse_features
    with pytest.raises(InputError, match="4 rows of dense features, 4 of sparse ones, 3 labels"):
        Examples(torch.zeros(4, 2), sparse, torch.zeros(3))
