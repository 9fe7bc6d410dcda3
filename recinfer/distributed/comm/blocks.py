"""Packs tensors of collectives into flat blocks by rank and unpacks them, forward and backward: one function for each
collective.

Shapes: ``W`` ranks, ``B`` examples of this rank, ``B_global`` of all ranks, ``D`` columns of this rank's tables,
``D_sum`` of all ranks' tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer import fbgemm  # noqa: F401  registers the ops
from recinfer.distributed.comm.shapes import (
    All2AllPooledInfo,
    All2AllSequenceInfo,
    All2AllVInfo,
    AllGatherBaseInfo,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterVInfo,
    VariableBatchAll2AllPooledInfo,
)
from recinfer.distributed.comm.transport import Pending, start_all_gather, start_all_to_all, start_reduce_scatter
from recinfer.distributed.types import QuantizedCommCodec

__all__ = ["Exchange", "exchange_of"]

Transport = Callable[[Tensor, QuantizedCommCodec | None], Pending]
"""Starts a collective with a flat tensor of blocks by rank."""


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)  # gradients may be expanded or transposed


def _only(tensors: Sequence[Tensor]) -> Tensor:
    return _flat(tensors[0])


def _concatenated(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@dataclass(frozen=True, eq=False)
class Exchange:
    """A collective, the inverse collective of its backward, and the shapes on both sides.

    Attributes:
        transports: start the collective, and its inverse.
        unpack: the received numbers to the output, or a tuple of outputs.
        unpack_grads: the numbers that the inverse received to the gradients of the inputs. May be views.
        pack: the inputs to blocks by rank; default: a single input, whose rows are in this order.
        pack_grads: the gradients of the outputs to blocks by rank.
    """

    transports: tuple[Transport, Transport]
    unpack: Callable[[Tensor], Tensor | tuple[Tensor, ...]]
    unpack_grads: Callable[[Tensor], tuple[Tensor, ...]]
    pack: Callable[[Sequence[Tensor]], Tensor] = _only
    pack_grads: Callable[[Sequence[Tensor]], Tensor] = _only


def exchange_of(pg: dist.ProcessGroup, info: Any) -> Exchange:
    """The exchange of a collective.

    Args:
        pg: the process group.
        info: the sizes, a class of :mod:`recinfer.distributed.comm.shapes`, which decides the collective.
    """
    return _EXCHANGES[type(info)](pg, info)


def _all_to_all(pg: dist.ProcessGroup, send: Sequence[int], receive: Sequence[int]) -> tuple[Transport, Transport]:
    """An all-to-all and its inverse; numbers of elements to and from each rank."""
    return (
        lambda flat, codec: start_all_to_all(pg, flat, send, receive, codec),
        lambda flat, codec: start_all_to_all(pg, flat, receive, send, codec),
    )


def _reduce_scatter(pg: dist.ProcessGroup, blocks: Sequence[int]) -> tuple[Transport, Transport]:
    """A reduce-scatter and its inverse: every rank's part of a sum has the gradient of the sum."""
    return (
        lambda flat, codec: start_reduce_scatter(pg, flat, blocks, codec),
        lambda flat, codec: start_all_gather(pg, flat, blocks, codec),
    )


def _columns_to_blocks(tensor_BD: Tensor, dims: Sequence[int]) -> Tensor:
    """``[B, sum(dims)]`` to 1-D, concatenated blocks ``[B, dims[r]]``."""
    batch = tensor_BD.shape[0]
    if len(set(dims)) == 1:
        return _flat(tensor_BD.reshape(batch, len(dims), dims[0]).transpose(0, 1))
    flat = torch.empty(tensor_BD.numel(), dtype=tensor_BD.dtype, device=tensor_BD.device)
    blocks = flat.split([batch * dim for dim in dims])
    for block, columns in zip(blocks, tensor_BD.split(list(dims), dim=1)):
        block.view(columns.shape).copy_(columns)
    return flat


def _blocks_to_columns(flat: Tensor, batch: int, dims: Sequence[int]) -> Tensor:
    """The inverse: 1-D to ``[batch, sum(dims)]``."""
    if len(set(dims)) == 1:
        return flat.view(len(dims), batch, dims[0]).transpose(0, 1).reshape(batch, len(dims) * dims[0])
    blocks = flat.split([batch * dim for dim in dims])
    return torch.cat([block.view(batch, dim) for block, dim in zip(blocks, dims)], dim=1)


def _pooled(pg: dist.ProcessGroup, info: All2AllPooledInfo) -> Exchange:
    """``[B_global, D]`` of one rank's tables to ``[B, D_sum]`` of one rank's examples."""
    batches, dims = info.batch_size_per_rank, info.dim_sum_per_rank
    batch, dim = batches[pg.rank()], dims[pg.rank()]
    return Exchange(
        _all_to_all(pg, [rows * dim for rows in batches], [batch * columns for columns in dims]),
        unpack=lambda flat: _blocks_to_columns(flat, batch, dims),
        pack_grads=lambda grads: _columns_to_blocks(grads[0], dims),
        unpack_grads=lambda flat: (flat.view(sum(batches), dim),),
    )


def _tables(pg: dist.ProcessGroup, info: All2AllVInfo) -> Exchange:
    """A list of tables ``[B_global, D_t]`` of one rank to ``[B, D_r]`` of each rank ``r``."""
    batches, dims = info.B_local_list, info.dims_sum_per_rank
    batch, dim = batches[pg.rank()], dims[pg.rank()]
    send, receive = [rows * dim for rows in batches], [batch * columns for columns in dims]
    info.input_split_sizes, info.output_split_sizes = send, receive
    return Exchange(
        _all_to_all(pg, send, receive),
        pack=lambda tables: _flat(torch.cat(list(tables), dim=1)),
        unpack=lambda flat: tuple(block.view(batch, columns) for block, columns in zip(flat.split(receive), dims)),
        pack_grads=_concatenated,
        unpack_grads=lambda flat: flat.view(sum(batches), dim).split(info.D_local_list, dim=1),
    )


def _variable_batch(pg: dist.ProcessGroup, info: VariableBatchAll2AllPooledInfo) -> Exchange:
    """1-D ``(rank, feature, row, column)`` of one rank's tables to 1-D ``(feature, row, column)`` of one rank's rows."""
    if info.input_splits is None:
        dims = info.emb_dim_per_rank_per_feature[pg.rank()]
        info.input_splits = [
            sum(rows * dim for rows, dim in zip(batches, dims)) for batches in info.batch_size_per_rank_per_feature
        ]
    if info.output_splits is None:
        rows = iter(info.batch_size_per_feature_pre_a2a)
        info.output_splits = [sum(next(rows) * dim for dim in dims) for dims in info.emb_dim_per_rank_per_feature]
    return Exchange(
        _all_to_all(pg, info.input_splits, info.output_splits),
        unpack=lambda flat: flat,
        unpack_grads=lambda flat: (flat,),
    )


def _sequence(pg: dist.ProcessGroup, info: All2AllSequenceInfo) -> Exchange:
    """``[N, D]``, a row per id of (feature, rank, example), to the rows of the ids that this rank sent, by rank."""
    dim = info.embedding_dim

    def pack(inputs: Sequence[Tensor]) -> Tensor:
        rows_ND = inputs[0]
        if info.forward_recat_tensor is not None:
            lengths = info.lengths_after_sparse_data_all2all
            permuted, rows_ND = _permute_rows(rows_ND, lengths, info.forward_recat_tensor, info.variable_batch_size)
            info.permuted_lengths_after_sparse_data_all2all = permuted
        return _flat(rows_ND)

    def unpack_grads(flat: Tensor) -> tuple[Tensor, ...]:
        rows_ND, lengths = flat.view(-1, dim), info.permuted_lengths_after_sparse_data_all2all
        if lengths is None or info.backward_recat_tensor is None:
            return (rows_ND,)
        return (_permute_rows(rows_ND, lengths, info.backward_recat_tensor, info.variable_batch_size)[1],)

    # Rows go back to the ranks that sent the ids.
    sent, received = [rows * dim for rows in info.output_splits], [rows * dim for rows in info.input_splits]
    return Exchange(_all_to_all(pg, sent, received), lambda flat: flat.view(-1, dim), unpack_grads, pack)


def _permute_rows(rows_ND: Tensor, lengths: Tensor, recat: Tensor, single_lengths: bool) -> tuple[Tensor, Tensor]:
    """Bring pieces of rows into the order of ``recat``; a piece is one length, or one row of ``lengths`` as [pieces, B]."""
    dim = rows_ND.shape[1]
    pieces = lengths.view(-1, 1) if single_lengths else lengths.view(recat.numel(), -1)
    recat = recat.to(device=lengths.device, dtype=torch.int32)
    # The op moves runs of single numbers: a run of rows is dim times as long.
    permuted, values, _ = torch.ops.fbgemm.permute_2D_sparse_data(
        recat, pieces * dim, rows_ND.reshape(-1), None, rows_ND.numel()
    )
    return torch.div(permuted, dim, rounding_mode="floor").view(-1), values.view(-1, dim)


def _reduce(pg: dist.ProcessGroup, info: ReduceScatterBaseInfo) -> Exchange:
    """``[W * B, ...]`` of partial sums to the sum over ranks of this rank's ``[B, ...]``."""
    shape = (info.input_sizes[0] // pg.size(), *info.input_sizes[1:])
    return Exchange(
        _reduce_scatter(pg, [prod(shape)] * pg.size()),
        unpack=lambda flat: flat.view(shape),
        unpack_grads=lambda flat: (flat.view(info.input_sizes),),
    )


def _reduce_rows(pg: dist.ProcessGroup, info: ReduceScatterVInfo) -> Exchange:
    """A reduce-scatter with a separate number of rows for each rank."""
    return Exchange(
        _reduce_scatter(pg, [prod(size) for size in info.input_sizes]),
        unpack=lambda flat: flat.view(info.input_sizes[pg.rank()]),
        unpack_grads=lambda flat: (flat.view(info.total_input_size),),
    )


def _reduce_list(pg: dist.ProcessGroup, info: ReduceScatterInfo) -> Exchange:
    """A reduce-scatter of a list with one tensor for each rank."""
    sizes, blocks = info.input_sizes, [prod(size) for size in info.input_sizes]
    return Exchange(
        _reduce_scatter(pg, blocks),
        pack=_concatenated,
        unpack=lambda flat: flat.view(sizes[pg.rank()]),
        unpack_grads=lambda flat: tuple(part.view(size) for part, size in zip(flat.split(blocks), sizes)),
    )


def _gather(pg: dist.ProcessGroup, info: AllGatherBaseInfo) -> Exchange:
    """``[B, ...]`` of every rank, the same size everywhere, to ``[W * B, ...]``, rows of rank 0 first."""
    rows, *rest = info.input_size
    sum_parts, gather = _reduce_scatter(pg, [prod(info.input_size)] * pg.size())
    return Exchange(
        (gather, sum_parts),
        unpack=lambda flat: flat.view(pg.size() * rows, *rest),
        unpack_grads=lambda flat: (flat.view(info.input_size),),
    )


_EXCHANGES: dict[type, Callable[[dist.ProcessGroup, Any], Exchange]] = {
    All2AllPooledInfo: _pooled,
    All2AllSequenceInfo: _sequence,
    All2AllVInfo: _tables,
    AllGatherBaseInfo: _gather,
    ReduceScatterBaseInfo: _reduce,
    ReduceScatterInfo: _reduce_list,
    ReduceScatterVInfo: _reduce_rows,
    VariableBatchAll2AllPooledInfo: _variable_batch,
}
