"""Collectives on embeddings on real ranks: forward and backward equal what one process computes from all ranks' tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from recinfer.distributed import comm_ops
from recinfer.distributed.comm import transport as comm_transport
from recinfer.distributed.comm_ops import (
    All2All_Pooled_Req,
    All2All_Pooled_Wait,
    All2All_Seq_Req,
    All2All_Seq_Req_Wait,
    All2AllDenseInfo,
    All2AllPooledInfo,
    All2AllSequenceInfo,
    All2Allv_Req,
    All2Allv_Wait,
    All2AllVInfo,
    AllGatherBase_Req,
    AllGatherBase_Wait,
    AllGatherBaseInfo,
    ReduceScatter_Req,
    ReduceScatter_Wait,
    ReduceScatterBase_Req,
    ReduceScatterBase_Wait,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterV_Req,
    ReduceScatterV_Wait,
    ReduceScatterVInfo,
    Request,
    Variable_Batch_All2All_Pooled_Req,
    Variable_Batch_All2All_Pooled_Wait,
    VariableBatchAll2AllPooledInfo,
    all_gather_base_pooled,
    alltoall_pooled,
    alltoall_sequence,
    alltoallv,
    reduce_scatter_base_pooled,
    reduce_scatter_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    set_gradient_division,
    variable_batch_alltoall_pooled,
)
from recinfer.distributed.types import NoOpQuantizedCommCodec
from recinfer.errors import InputError
from tests.distributed.spawn import run_ranks


def leaf(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def check(rank: int, world: int, started: Callable, inputs: list[list[Tensor]], outputs: list[Tensor]) -> None:
    """Run a collective on ``inputs[rank]`` and compare with ``outputs``, computed here from all ranks' inputs.

    The loss of rank r weighs its output by 1, 2, 3, ... plus r; the reference's loss is the sum of all ranks' losses,
    divided by their number when gradients are.
    """
    weights = [(torch.arange(out.numel()) + 1.0 + r).view_as(out) for r, out in enumerate(outputs)]
    loss = sum((out * weight).sum() for out, weight in zip(outputs, weights))
    expected = torch.autograd.grad(loss, inputs[rank], retain_graph=True)
    for division in (True, False):
        set_gradient_division(division)
        mine = [tensor.detach().clone().requires_grad_() for tensor in inputs[rank]]
        out = started(mine).wait()
        out = torch.cat([part.reshape(part.shape[0], -1) for part in out], dim=1) if isinstance(out, list) else out
        torch.testing.assert_close(out, outputs[rank])
        (out * weights[rank]).sum().backward()
        for got, want in zip(mine, expected):
            torch.testing.assert_close(got.grad, want / world if division and world > 1 else want)
    set_gradient_division(True)
    with torch.no_grad():  # and without a graph
        out = started([t.detach() for t in inputs[rank]]).wait()
        assert not (out[0] if isinstance(out, list) else out).requires_grad


def pooled(rank: int, world: int, batches: list[int], dims: list[int]) -> None:
    tables = [leaf(r, sum(batches), dims[r]) for r in range(world)]
    rows = [torch.cat([t.split(batches)[r] for t in tables], dim=1) for r in range(world)]
    check(rank, world, lambda x: alltoall_pooled(x[0], batches, dims), [[t] for t in tables], rows)


@pytest.mark.parametrize(
    "batches,dims",
    [([3], [4]), ([2, 2], [4, 4]), ([2, 1], [3, 5]), ([0, 2], [2, 2]), ([2, 2, 2], [4, 0, 2]), ([1, 2, 3, 4], [1] * 4)],
)
def test_pooled(batches: list[int], dims: list[int]) -> None:
    run_ranks(len(batches), pooled, batches, dims)


def tables_list(rank: int, world: int, total: int, dims: list[list[int]], by_tables: bool) -> None:
    tables = [[leaf(10 * r + t, total, dim) for t, dim in enumerate(dims[r])] for r in range(world)]
    base, more = divmod(total, world)
    batches = [base + (r < more) for r in range(world)]
    rows = [torch.cat([t.split(batches)[r] for of_rank in tables for t in of_rank], dim=1) for r in range(world)]
    split: dict = {"per_rank_split_lengths": [len(d) for d in dims]} if by_tables else {"out_split": [*map(sum, dims)]}
    check(rank, world, lambda x: alltoallv(x, **split), tables, rows)


@pytest.mark.parametrize("by_tables", [False, True])
@pytest.mark.parametrize("total,dims", [(4, [[2, 2], [2]]), (5, [[3], [3], [3, 3]])])
def test_list_of_tables(total: int, dims: list[list[int]], by_tables: bool) -> None:
    run_ranks(len(dims), tables_list, total, dims, by_tables)


def variable_batch(rank: int, world: int, rows: list[list[int]], dims: list[list[int]]) -> None:
    """``rows[r][f]`` rows of rank r in feature f, over all features, features of rank 0 first."""
    starts = [sum(len(d) for d in dims[:r]) for r in range(world)]
    mine = [[rows[r][starts[q] : starts[q] + len(dims[q])] for r in range(world)] for q in range(world)]
    blocks = [[sum(n * d for n, d in zip(mine[q][r], dims[q])) for r in range(world)] for q in range(world)]
    flats = [leaf(q, sum(blocks[q])) for q in range(world)]
    outs = [torch.cat([flats[q].split(blocks[q])[r] for q in range(world)]) for r in range(world)]
    check(
        rank,
        world,
        lambda x: variable_batch_alltoall_pooled(x[0], mine[rank], rows[rank], dims),
        [[f] for f in flats],
        outs,
    )


def test_pooled_with_a_batch_size_a_feature() -> None:
    run_ranks(2, variable_batch, [[2, 1, 3], [1, 2, 2]], [[2], [3, 3]])
    run_ranks(3, variable_batch, [[2, 1, 3], [1, 0, 2], [0, 0, 0]], [[2, 4], [], [3]])


def sequence(rank: int, world: int, features: list[int], batches: list[int], dim: int) -> None:
    """Every rank holds a row for each id of (feature, rank, example); rank r gets those of its own ids."""
    recats, lengths, rows, pieces = [], [], [], []
    for q in range(world):
        generator = torch.Generator().manual_seed(q)
        shape = [(f, r) for f in range(features[q]) for r in range(world)]
        per = [torch.randint(0, 4, (batches[r],), generator=generator) for _, r in shape]
        lengths.append(torch.cat([*per, torch.zeros(0, dtype=torch.int64)]))
        rows.append(leaf(q, int(lengths[q].sum()), dim))
        cut = rows[q].split([int(p.sum()) for p in per])
        pieces.append({key: (piece, int(p.sum())) for key, piece, p in zip(shape, cut, per)})
        recats.append([f * world + r for r in range(world) for f in range(features[q])])
    counts = [[sum(pieces[q][f, r][1] for f in range(features[q])) for r in range(world)] for q in range(world)]
    outs = [
        torch.cat([pieces[q][f, r][0] for q in range(world) for f in range(features[q])] + [torch.zeros(0, dim)])
        for r in range(world)
    ]
    unequal = len(set(batches)) > 1
    forward = torch.tensor(recats[rank], dtype=torch.int32)
    if unequal:
        starts = torch.tensor([batches[r] for _ in range(features[rank]) for r in range(world)]).cumsum(0)
        forward = torch.cat([torch.arange(starts[i] - batches[i % world], starts[i]) for i in recats[rank]]).int()
    check(
        rank,
        world,
        lambda x: alltoall_sequence(
            x[0],
            forward,
            forward.argsort().int(),
            lengths[rank],
            [counts[q][rank] for q in range(world)],
            counts[rank],
            variable_batch_size=unequal,
        ),
        [[r] for r in rows],
        outs,
    )


@pytest.mark.parametrize(
    "features,batches",
    [([2], [3]), ([2, 1], [3, 3]), ([2, 3], [3, 1]), ([1, 2, 2], [2, 2, 2]), ([3, 1, 2, 2], [2] * 4)],
)
def test_sequence(features: list[int], batches: list[int]) -> None:
    run_ranks(len(features), sequence, features, batches, 4)


def reduce(rank: int, world: int, rows: list[int], kind: str) -> None:
    whole = [leaf(r, sum(rows), 3) for r in range(world)]
    sums = sum(whole[1:], whole[0]).split(rows)
    if kind == "list":
        parts = [list(w.detach().split(rows)) for w in whole]
        parts = [[p.clone().requires_grad_() for p in of_rank] for of_rank in parts]
        outs = [sum(of_rank[r] for of_rank in parts) for r in range(world)]
        check(rank, world, reduce_scatter_pooled, parts, outs)
    elif kind == "base":
        check(rank, world, lambda x: reduce_scatter_base_pooled(x[0]), [[w] for w in whole], list(sums))
    else:
        check(rank, world, lambda x: reduce_scatter_v_pooled(x[0], rows), [[w] for w in whole], list(sums))


@pytest.mark.parametrize("kind", ["base", "list", "v"])
@pytest.mark.parametrize("rows", [[2], [2, 2], [3, 3, 3], [2, 2, 2, 2]])
def test_reduce_scatter(rows: list[int], kind: str) -> None:
    run_ranks(len(rows), reduce, rows, kind)


@pytest.mark.parametrize("kind", ["list", "v"])
@pytest.mark.parametrize("rows", [[2, 1], [0, 3], [1, 0, 4]])
def test_reduce_scatter_of_unequal_parts(rows: list[int], kind: str) -> None:
    run_ranks(len(rows), reduce, rows, kind)


def reduce_by_feature(rank: int, world: int) -> None:
    batches, dims = [[1, 2], [3, 1]], [2, 1]
    numbers = [sum(b * d for b, d in zip(of_rank, dims)) for of_rank in batches]
    whole = [leaf(r, sum(numbers)) for r in range(world)]
    outs = list(sum(whole[1:], whole[0]).split(numbers))
    check(rank, world, lambda x: reduce_scatter_v_per_feature_pooled(x[0], batches, dims), [[w] for w in whole], outs)


def test_reduce_scatter_with_a_batch_size_a_feature() -> None:
    run_ranks(2, reduce_by_feature)


def gather(rank: int, world: int) -> None:
    rows = [leaf(r, 2, 3) for r in range(world)]
    check(rank, world, lambda x: all_gather_base_pooled(x[0]), [[r] for r in rows], [torch.cat(rows)] * world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather(world: int) -> None:
    run_ranks(world, gather)


def half_precision(rank: int, world: int) -> None:
    rows = torch.full((2 * world, 2), 0.1, dtype=torch.float16, requires_grad=True)
    out = reduce_scatter_base_pooled(rows).wait()
    assert out.dtype == torch.float16 and out[0, 0].item() == pytest.approx(0.1 * world, rel=2e-3)
    out.sum().backward()
    assert rows.grad is not None and rows.grad.dtype == torch.float16


def test_half_precision_stays_half() -> None:
    run_ranks(2, half_precision)


def by_hand(req: type[Function], wait: type[Function], pg: dist.ProcessGroup, info: object, *inputs: Tensor) -> list:
    """The documented functions as they are: output and gradients of the inputs, each output's gradient all ones."""
    request: Request = Request(pg, inputs[0].device)
    dummy = req.apply(pg, request, info, *inputs)
    out = wait.apply(pg, request, dummy)
    parts = out if isinstance(out, tuple) else (out,)
    return [parts[0], *torch.autograd.grad(parts, inputs, [torch.ones_like(part) for part in parts])]


def functions_by_hand(rank: int, world: int) -> None:
    """All of them on two ranks, in a group that is not the default one."""
    pg = dist.new_group(list(range(world)))
    x = torch.full((4, 2), rank + 1.0, requires_grad=True)
    rows, sums = torch.tensor([[1.0] * 2 + [2.0] * 2] * 2), torch.full((2, 2), 3.0)
    halves, ones = torch.full((4, 2), 0.5), torch.ones(4, 2)
    every = {
        "pooled": (All2All_Pooled_Req, All2All_Pooled_Wait, All2AllPooledInfo([2, 2], [2, 2]), rows, halves),
        "tables": (All2Allv_Req, All2Allv_Wait, All2AllVInfo([2, 2], 4, 2, [2, 2], [2]), ones[:2], halves),
        "base": (
            ReduceScatterBase_Req,
            ReduceScatterBase_Wait,
            ReduceScatterBaseInfo(x.shape),
            sums,
            halves,
        ),
        "v": (
            ReduceScatterV_Req,
            ReduceScatterV_Wait,
            ReduceScatterVInfo([torch.Size([2, 2])] * 2, [2, 2], True, [4, 2], None),
            sums,
            halves,
        ),
        "gather": (
            AllGatherBase_Req,
            AllGatherBase_Wait,
            AllGatherBaseInfo(x.shape),
            torch.cat([ones, 2 * ones]),
            ones,
        ),
        "sequence": (
            All2All_Seq_Req,
            All2All_Seq_Req_Wait,
            All2AllSequenceInfo(2, torch.ones(4), None, None, [2, 2], [2, 2]),
            torch.cat([ones[:2], 2 * ones[:2]]),
            halves,
        ),
    }
    for name, (req, wait, info, expected, grad) in every.items():
        got, got_grad = by_hand(req, wait, pg, info, x)
        torch.testing.assert_close(got, expected, msg=name)
        torch.testing.assert_close(got_grad, grad, msg=name)
    parts = [x.detach()[:2].requires_grad_(), x.detach()[2:].requires_grad_()]
    info = ReduceScatterInfo([part.shape for part in parts])
    got, *grads = by_hand(ReduceScatter_Req, ReduceScatter_Wait, pg, info, *parts)
    torch.testing.assert_close([got, *grads], [sums, halves[:2], halves[:2]])
    flat = torch.full((6,), rank + 1.0, requires_grad=True)
    variable = VariableBatchAll2AllPooledInfo([[1], [2]], [rank + 1] * 2, [[2], [2]])
    got, grad = by_hand(Variable_Batch_All2All_Pooled_Req, Variable_Batch_All2All_Pooled_Wait, pg, variable, flat)
    assert (variable.input_splits, variable.output_splits) == ([2, 4], [2 * rank + 2] * 2)
    n = 2 * rank + 2
    torch.testing.assert_close([got, grad], [torch.tensor([1.0] * n + [2.0] * n), torch.full((6,), 0.5)])


def test_requests_and_waits_by_hand() -> None:
    run_ranks(2, functions_by_hand)


def overlap(rank: int, world: int) -> None:
    """Several are under way at once, and waited for in another order."""
    xs = [leaf(10 * i + rank, 2 * world, 1 + rank) for i in range(4)]
    started = [alltoall_pooled(x, [2] * world, [1 + r for r in range(world)]) for x in xs]
    outs = [request.wait() for request in reversed(started)][::-1]
    torch.stack([(i + 1) * out.sum() for i, out in enumerate(outs)]).sum().backward()
    for i, x in enumerate(xs):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, torch.full_like(x, (i + 1) / world))
        rows = torch.cat([leaf(10 * i + r, 2 * world, 1 + r)[2 * rank : 2 * rank + 2] for r in range(world)], dim=1)
        torch.testing.assert_close(outs[i], rows)


def test_several_under_way_at_once() -> None:
    run_ranks(3, overlap)


def refuse(rank: int, world: int) -> None:
    x = torch.zeros(3, 2)
    with pytest.raises(InputError, match=r"alltoall_pooled: got \(3, 2\) on rank \d; expected \(4, 2\) from"):
        alltoall_pooled(x, [2, 2], [2, 2])
    with pytest.raises(InputError, match="3 rows do not divide by 2 ranks"):
        reduce_scatter_base_pooled(x)
    with pytest.raises(InputError, match="expected one number of rows for each rank"):
        reduce_scatter_v_pooled(x, [1, 1])
    with pytest.raises(InputError, match="got 1 tensors; expected one for each of 2 ranks"):
        reduce_scatter_pooled([x])
    with pytest.raises(InputError, match="neither out_split nor per_rank_split_lengths"):
        alltoallv([x])
    with pytest.raises(InputError, match="got an empty list"):
        alltoallv([])
    with pytest.raises(InputError, match=r"expected 2 rows from output_splits \[1, 1\]"):
        alltoall_sequence(x, None, None, torch.ones(3), [1, 1], [1, 1])
    with pytest.raises(InputError, match="got 6 numbers on rank"):
        variable_batch_alltoall_pooled(x, [[1], [1]], [1, 1], [[1], [1]])


def test_sizes_that_do_not_fit_are_refused() -> None:
    run_ranks(2, refuse)


def test_infos_are_plain_data() -> None:
    info = All2AllVInfo([2, 1], 4, 2, [2, 2], [2])
    assert info.dim_sum_per_rank == info.dims_sum_per_rank == [2, 1]
    assert info.input_split_sizes == info.output_split_sizes == [] and info.codecs is None
    dense = All2AllDenseInfo(output_splits=[1], batch_size=2, input_shape=[2, 3], input_splits=[1])
    assert (dense.output_splits, dense.batch_size, dense.input_shape, dense.input_splits) == ([1], 2, [2, 3], [1])
    assert comm_ops.get_gradient_division() is True


def no_codec_in_two_ways(rank: int, world: int) -> None:
    """Where NCCL would move the tensor, its own operator runs also with the codec that sends numbers as they are."""
    sizes = [2, 3]
    flat = torch.arange(5.0) + rank
    comm_transport._is_nccl, before = (lambda pg, tensor: True), comm_transport._is_nccl
    try:
        for codec in (None, NoOpQuantizedCommCodec()):
            pending = comm_transport.start_reduce_scatter(dist.group.WORLD, flat, sizes, codec)
            assert pending._buffer.numel() == sizes[rank]  # an all-to-all would bring this from every rank
            got = pending.wait()
            assert got.tolist() == [[1.0, 3.0], [5.0, 7.0, 9.0]][rank]
    finally:
        comm_transport._is_nccl = before


def test_a_codec_that_changes_nothing_is_no_codec() -> None:
    run_ranks(2, no_codec_in_two_ways)
