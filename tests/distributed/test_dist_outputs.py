"""The modules that move embeddings, on real ranks: forward, callbacks, backward, and the way back of a KJTAllToAll."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from recinfer.distributed.dist_data import (
    KJTAllToAll,
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    SequenceEmbeddingsAllToAll,
    SequenceEmbeddingsAwaitable,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from recinfer.distributed.types import NoWait
from recinfer.errors import InputError
from tests.distributed.spawn import run_ranks
from tests.distributed.test_dist_kjt import batch_of


def group() -> dist.ProcessGroup:
    pg = dist.group.WORLD
    assert pg is not None
    return pg


def pooled(rank: int, world: int) -> None:
    dims = [2, 1, 3][:world]
    module = PooledEmbeddingsAllToAll(group(), dims, torch.device("cpu"), callbacks=[lambda t: t * 10])
    module.callbacks.append(lambda t: t + 1)
    x = torch.full((2 * world, dims[rank]), float(rank), requires_grad=True)
    for batches in (None, [2] * world):
        awaitable = module(x, batches)
        assert isinstance(awaitable, PooledEmbeddingsAwaitable) and len(awaitable.callbacks) == 2
        expected = torch.cat([torch.full((2, dim), 10.0 * r + 1) for r, dim in enumerate(dims)], dim=1)
        torch.testing.assert_close(awaitable.wait(), expected)
    awaitable.wait if world == 1 else module(x).wait().sum().backward()
    if world > 1:
        torch.testing.assert_close(x.grad, torch.full_like(x, 10.0 / world))
        with pytest.raises(InputError, match="rows do not divide by"):
            module(x[:-1])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_pooled_all_to_all(world: int) -> None:
    run_ranks(world, pooled)


def pooled_variable(rank: int, world: int) -> None:
    module = VariableBatchPooledEmbeddingsAllToAll(group(), [[2], [3, 3]], callbacks=[lambda t: -t])
    module.callbacks.append(lambda t: t * 2)
    x = torch.arange(6.0) if rank == 0 else torch.arange(24.0) + 100
    here = [[[2], [1]], [[1, 3], [2, 2]]][rank]
    awaitable = module(x, here, [[2, 1, 3], [1, 2, 2]][rank])
    start, stop = [(0, 12), (12, 24)][rank]
    mine = torch.cat(
        [torch.arange(6.0)[:4] if rank == 0 else torch.arange(6.0)[4:], torch.arange(24.0)[start:stop] + 100]
    )
    torch.testing.assert_close(awaitable.wait(), -2 * mine)


def test_pooled_all_to_all_with_a_batch_size_a_feature() -> None:
    run_ranks(2, pooled_variable)


def reduce_and_gather(rank: int, world: int) -> None:
    x = torch.full((2 * world, 3), rank + 1.0, requires_grad=True)
    total = sum(range(1, world + 1))
    out = PooledEmbeddingsReduceScatter(group())(x).wait()
    torch.testing.assert_close(out, torch.full((2, 3), float(total)))
    splits = [2 * world - 1, 1, 0, 0][: max(world, 2)] if world > 1 else [2]
    out = PooledEmbeddingsReduceScatter(group())(x, input_splits=splits).wait()
    torch.testing.assert_close(out, torch.full((splits[rank], 3), float(total)))
    out.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.0 / world))
    batches = [[1, 2]] * world
    flat = torch.arange(4.0 * world)
    out = VariableBatchPooledEmbeddingsReduceScatter(group())(flat, batches, [2, 1]).wait()
    torch.testing.assert_close(out, flat[4 * rank : 4 * rank + 4] * world)
    rows = torch.full((2, 3), float(rank), requires_grad=True)
    out = PooledEmbeddingsAllGather(group())(rows).wait()
    torch.testing.assert_close(out, torch.arange(float(world)).repeat_interleave(2)[:, None].expand(-1, 3))
    out.sum().backward()
    torch.testing.assert_close(rows.grad, torch.ones(2, 3))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_reduce_scatter_and_all_gather(world: int) -> None:
    run_ranks(world, reduce_and_gather)


def sequence(rank: int, world: int, splits: list[int], batches: list[int], stagger: int) -> None:
    everyone = [batch_of(r, [batches[r]] * sum(splits), torch.int64, False, False) for r in range(world)]
    sent = everyone[rank]
    tensors = KJTAllToAll(group(), splits, stagger)(sent).wait()
    got = tensors.wait()
    rows = (got.values().float()[:, None] * torch.tensor([1.0, 2.0])).requires_grad_()
    module = SequenceEmbeddingsAllToAll(group(), splits, torch.device("cpu"))
    shuffle = torch.randperm(sent.values().numel(), generator=torch.Generator().manual_seed(rank))
    unequal = len(set(batches)) > 1
    for permute in (None, shuffle):
        rows.grad = None
        awaitable = module(
            rows,
            lengths=got.lengths(),
            input_splits=tensors.input_splits["values"],
            output_splits=tensors.output_splits["values"],
            unbucketize_permute_tensor=permute,
            batch_size_per_rank=batches,
            sparse_features_recat=tensors.recat if unequal else None,
        )
        assert isinstance(awaitable, SequenceEmbeddingsAwaitable)
        back = awaitable.wait()
        expected = sent.values() if permute is None else sent.values()[permute]
        torch.testing.assert_close(back, expected.float()[:, None] * torch.tensor([1.0, 2.0]))
        # The gradient of an id's row is 1 / world times what the id's sender says: here the id itself.
        (back * expected[:, None]).sum().backward()
        torch.testing.assert_close(rows.grad, got.values()[:, None].expand(-1, 2).float() / world)


@pytest.mark.parametrize(
    "splits,batches", [([2], [3]), ([2, 1], [3, 3]), ([0, 3], [3, 3]), ([2, 2], [3, 1]), ([1, 2, 2], [2, 2, 0])]
)
def test_rows_go_back_to_where_ids_came_from(splits: list[int], batches: list[int]) -> None:
    run_ranks(len(splits), sequence, splits, batches, 1)


def without_recat(rank: int, world: int) -> None:
    module = SequenceEmbeddingsAllToAll(group(), [2, 2])
    with pytest.raises(InputError, match=r"batch sizes \[2, 1\] differ; pass sparse_features_recat"):
        module(torch.zeros(2, 2), torch.ones(6), [1, 1], [1, 1], batch_size_per_rank=[2, 1])


def test_unequal_batches_need_the_recat_of_the_ids() -> None:
    run_ranks(2, without_recat)


def test_awaitables_pass_the_tensor_on() -> None:
    assert PooledEmbeddingsAwaitable(NoWait(torch.ones(2))).wait().tolist() == [1, 1]
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert SequenceEmbeddingsAwaitable(NoWait(rows), torch.tensor([1, 0]), 2).wait().tolist() == [[3, 4], [1, 2]]
