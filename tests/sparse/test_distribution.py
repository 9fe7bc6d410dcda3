"""What ranks send each other: every rank's KeyedJaggedTensor is cut, exchanged in memory, and put together again."""

from __future__ import annotations

import pytest
import torch

from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

KEYS = ["a", "b", "c"]


def sent_by(rank: int, batch: int, weighted: bool, variable: bool) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    strides = [batch, batch + 1, 1] if variable else [batch] * 3
    lengths = torch.randint(0, 3, (sum(strides),), generator=generator)
    values = torch.randint(0, 99, (int(lengths.sum()),), generator=generator) + 100 * rank
    return KeyedJaggedTensor(
        KEYS,
        values,
        values / 2 if weighted else None,
        lengths=lengths,
        stride_per_key_per_rank=[[s] for s in strides] if variable else None,
    )


def exchange(inputs: list[KeyedJaggedTensor], key_splits: list[int], rank: int) -> list[torch.Tensor]:
    """What ``rank`` gets when every input is cut as it says: an all-to-all in memory."""
    received = [[] for _ in inputs[0].dist_tensors()]
    for kjt in inputs:
        for at, (tensor, split) in enumerate(zip(kjt.dist_tensors(), kjt.dist_splits(key_splits), strict=True)):
            received[at].append(tensor.split(split)[rank])
    return [torch.cat(parts) for parts in received]


def recat(num_keys: int, num_ranks: int, strides: list[int] | None = None) -> torch.Tensor:
    """(rank, key) pieces in key-major order; with ``strides`` one entry a length."""
    pieces = [(key, rank) for key in range(num_keys) for rank in range(num_ranks)]
    if strides is None:
        return torch.tensor([rank * num_keys + key for key, rank in pieces], dtype=torch.int32)
    starts = [sum(strides[:rank]) * num_keys for rank in range(num_ranks)]
    return torch.tensor(
        [starts[rank] + key * strides[rank] + i for key, rank in pieces for i in range(strides[rank])],
        dtype=torch.int32,
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("batches", [[2, 2], [1, 3], [2, 0, 1]])
@pytest.mark.parametrize("variable", [False, True])
def test_each_rank_gets_its_keys_of_the_whole_batch(weighted: bool, batches: list[int], variable: bool) -> None:
    ranks = len(batches)
    inputs = [sent_by(rank, batch, weighted, variable) for rank, batch in enumerate(batches)]
    key_splits = [2, 1] + [0] * (ranks - 2)
    labels = ["lengths", "values"] + ["strides"] * variable + ["weights"] * weighted
    assert inputs[0].dist_labels() == labels
    for rank, keys in enumerate((["a", "b"], ["c"])):
        uneven = not variable and len(set(batches)) > 1
        result = KeyedJaggedTensor.dist_init(
            keys,
            exchange(inputs, key_splits, rank),
            variable,
            ranks,
            recat(len(keys), ranks, batches if uneven else None),
            None if variable else batches,
        )
        assert result.keys() == keys
        for key in keys:
            rows = [row.tolist() for kjt in inputs for row in kjt[key].to_dense()]
            assert [row.tolist() for row in result[key].to_dense()] == rows
            if weighted:
                assert torch.equal(result[key].weights(), result[key].values() / 2)
        if variable:
            strides = [dict(zip(KEYS, kjt.stride_per_key())) for kjt in inputs]
            assert result.stride_per_key_per_rank() == [[s[key] for s in strides] for key in keys]
        else:
            assert result.stride() == sum(batches)


def test_staggered_ranks_order_the_strides() -> None:
    # Four ranks on two hosts, interleaved: 0, 2, 1, 3.
    strides = torch.tensor([1, 2, 1, 1, 2, 2, 2, 1])
    order = torch.tensor([0, 4, 2, 6, 1, 5, 3, 7], dtype=torch.int32)
    lengths = torch.ones(12, dtype=torch.int64)
    kjt = KeyedJaggedTensor.dist_init(["a", "b"], [lengths, torch.arange(12), strides], True, 4, order, None, 2)
    assert kjt.stride_per_key_per_rank() == [[1, 2, 1, 2], [2, 2, 1, 1]]
    assert kjt["a"].values().tolist() == [0, 5, 6, 3, 9, 10]


def test_without_keys_only_the_batch_is_left() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    kjt = KeyedJaggedTensor.dist_init([], [empty, empty], False, 2, None, [2, 3])
    assert (kjt.keys(), kjt.stride()) == ([], 5)


def test_refuses_missing_parts() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(InputError, match="got 2 tensors; expected 3, or 4 with weights"):
        KeyedJaggedTensor.dist_init(["a"], [empty, empty], True, 1, None, None)
    with pytest.raises(InputError, match="stride_per_rank is None"):
        KeyedJaggedTensor.dist_init(["a"], [empty, empty], False, 1, None, None)
