"""KJTAllToAll on real ranks: every rank gets its keys' examples of all ranks, whatever the batch sizes and dtypes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from recinfer.distributed.dist_data import (
    KJTAllToAll,
    KJTAllToAllSplitsAwaitable,
    KJTAllToAllTensorsAwaitable,
    SplitsAllToAllAwaitable,
)
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks


def batch_of(rank: int, strides: list[int], dtype: torch.dtype, weighted: bool, variable: bool) -> KeyedJaggedTensor:
    """A batch that every process can make: key ``k`` has ``strides[k]`` examples."""
    generator = torch.Generator().manual_seed(1000 + rank)
    lengths = torch.randint(0, 4, (sum(strides),), generator=generator, dtype=dtype)
    total = int(lengths.sum())
    return KeyedJaggedTensor(
        [f"f{k}" for k in range(len(strides))],
        torch.randint(0, 10**6, (total,), generator=generator, dtype=dtype),
        torch.rand(total, generator=generator) if weighted else None,
        lengths=lengths,
        stride=None if variable else strides[0],
        stride_per_key_per_rank=[[s] for s in strides] if variable else None,
    )


def rows_of(kjt: KeyedJaggedTensor, key: str) -> list[tuple[list[int], list[float]]]:
    """Every example of a key as (ids, weights)."""
    part = kjt[key]
    ids = [x.tolist() for x in part.to_dense()]
    weights = [x.tolist() for x in part.to_dense_weights()] if part.weights_or_none() is not None else [[] for _ in ids]
    return list(zip(ids, weights))


def exchange(
    rank: int, world: int, splits: list[int], batches: list[list[int]], dtype: torch.dtype, weighted: bool, stagger: int
) -> None:
    variable = any(len(set(strides)) > 1 for strides in batches)
    everyone = [batch_of(r, batches[r], dtype, weighted, variable) for r in range(world)]
    pg = dist.group.WORLD
    assert pg is not None
    first = KJTAllToAll(pg, splits, stagger)(everyone[rank])
    assert isinstance(first, KJTAllToAllSplitsAwaitable)
    second = first.wait()
    assert isinstance(second, KJTAllToAllTensorsAwaitable)
    got = second.wait()
    start = sum(splits[:rank])
    mine = everyone[0].keys()[start : start + splits[rank]]
    assert got.keys() == mine
    assert got.values().dtype == dtype and got.lengths().dtype == dtype
    assert (got.weights_or_none() is not None) == weighted
    step = world // stagger
    order = [x + step * y for x in range(step) for y in range(stagger)]
    for key in mine:
        assert rows_of(got, key) == [row for r in order for row in rows_of(everyone[r], key)]
    if variable:
        position = [everyone[0].keys().index(key) for key in mine]
        assert got.stride_per_key_per_rank() == [[batches[r][k] for r in order] for k in position]
    else:
        assert got.stride() == sum(strides[0] for strides in batches)
        assert second.stride_per_rank == [strides[0] for strides in batches]
    check_device_path(second, got, everyone, mine)
    # What an all-to-all back needs: ids sent to and got from each rank.
    per_rank = everyone[rank].length_per_key()
    ends = [sum(splits[:r]) for r in range(world + 1)]
    assert second.input_splits["values"] == [sum(per_rank[a:b]) for a, b in pairwise(ends)]
    assert second.output_splits["values"] == [sum(e.length_per_key()[start : start + splits[rank]]) for e in everyone]


def check_device_path(
    awaitable: KJTAllToAllTensorsAwaitable, got: KeyedJaggedTensor, everyone: list[KeyedJaggedTensor], mine: list[str]
) -> None:
    """FBGEMM's kernels, which run on CUDA, arrange the same pieces the same way."""
    if awaitable.recat is None or not got.lengths().numel():
        return
    sent = [kjt.permute([kjt.keys().index(key) for key in mine]) for kjt in everyone]
    moved = ["values"] if got.weights_or_none() is None else ["values", "weights"]
    sections = {name: [getattr(kjt, name)().view(torch.uint8) for kjt in sent] for name in moved}
    lengths, tensors = awaitable._permuted_on_device(torch.cat([kjt.lengths() for kjt in sent]), sections, moved)
    assert torch.equal(lengths, got.lengths())
    assert all(torch.equal(tensors[name], getattr(got, name)()) for name in moved)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "splits,batches,stagger",
    [
        ([3], [[2] * 3], 1),
        ([2, 1], [[3] * 3, [3] * 3], 1),
        ([0, 3], [[3] * 3, [3] * 3], 1),  # a rank with no keys
        ([2, 2], [[3] * 4, [1] * 4], 1),  # a last batch that is smaller
        ([2, 1], [[3] * 3, [0] * 3], 1),  # an empty batch
        ([2, 1], [[0] * 3, [0] * 3], 1),
        ([1, 2, 2], [[2] * 5, [2] * 5, [2] * 5], 1),
        ([2, 1, 2, 1], [[2] * 6] * 4, 2),  # two hosts, interleaved
        ([2, 1, 2, 1], [[2] * 6, [1] * 6, [3] * 6, [0] * 6], 2),
        ([2, 1], [[3, 1, 2], [2, 2, 5]], 1),  # a batch size a key
        ([2, 1, 1, 1], [[3, 1, 2, 4, 1], [2, 2, 5, 1, 1], [1, 0, 2, 3, 1], [2, 1, 1, 1, 0]], 2),
    ],
)
def test_every_rank_gets_its_keys(
    splits: list[int], batches: list[list[int]], stagger: int, weighted: bool, dtype: torch.dtype
) -> None:
    run_ranks(len(splits), exchange, splits, batches, dtype, weighted, stagger)


def exchange_splits(rank: int, world: int) -> None:
    pg = dist.group.WORLD
    assert pg is not None
    tensors = [torch.tensor([100 * t + 10 * rank + r for r in range(world)]) for t in range(2)]
    assert SplitsAllToAllAwaitable(tensors, pg).wait() == [
        [100 * t + 10 * r + rank for r in range(world)] for t in range(2)
    ]


def test_each_rank_gets_its_splits() -> None:
    run_ranks(3, exchange_splits)


def refuse(rank: int, world: int) -> None:
    pg = dist.group.WORLD
    assert pg is not None
    with pytest.raises(InputError, match="got 1 splits; expected one for each of 2 ranks"):
        KJTAllToAll(pg, [3])
    with pytest.raises(InputError, match=r"got 2 keys \['f0', 'f1'\]; splits \[2, 1\] are for 3"):
        KJTAllToAll(pg, [2, 1])(batch_of(0, [1, 1], torch.int64, False, False))


def test_keys_that_do_not_fit_are_refused() -> None:
    run_ranks(2, refuse)
