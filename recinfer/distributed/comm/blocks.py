"""Packs tensors of collectives into flat blocks by rank and unpacks them, forward and backward: one class for each
collective.

Shapes: ``W`` ranks, ``B`` examples of this rank, ``B_global`` of all ranks, ``D`` columns of this rank's tables,
``D_sum`` of all ranks' tables.

Each class has four steps. ``send(inputs)`` starts the forward collective and ``receive(flat)`` shapes its result;
``send_grad(grads)`` starts the collective of the backward, which is the inverse, and ``receive_grad(flat)`` shapes the
gradients of the inputs. Gradients are divided by ``W`` where :func:`get_gradient_division` says so.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from math import prod

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
from recinfer.distributed.types import QuantizedCommCodec, QuantizedCommCodecs

__all__ = [
    "Exchange",
    "GatherExchange",
    "PooledExchange",
    "ReduceExchange",
    "ReduceListExchange",
    "ReduceRowsExchange",
    "SequenceExchange",
    "TablesExchange",
    "VariableBatchExchange",
    "get_gradient_division",
    "set_gradient_division",
]

_gradient_division = True


def get_gradient_division() -> bool:
    """Whether the backward of a collective divides gradients by the number of ranks (default True)."""
    return _gradient_division


def set_gradient_division(val: bool) -> None:
    """Choose whether the backward of a collective divides gradients by the number of ranks.

    With division, a table has the gradient of the mean of the ranks' losses, as in DistributedDataParallel; without
    division, of their sum.
    """
    global _gradient_division
    _gradient_division = val


class Exchange(abc.ABC):
    """A collective with its sizes, and the inverse collective of its backward.

    Args:
        pg: the process group.
        codecs: compress the data that is sent, in the forward and the backward.
    """

    def __init__(self, pg: dist.ProcessGroup, codecs: QuantizedCommCodecs | None) -> None:
        self.pg = pg
        self.world_size = pg.size()
        self.rank = pg.rank()
        self.forward_codec: QuantizedCommCodec | None = codecs.forward if codecs is not None else None
        self.backward_codec: QuantizedCommCodec | None = codecs.backward if codecs is not None else None

    @abc.abstractmethod
    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """Start the collective."""

    @abc.abstractmethod
    def receive(self, flat: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The output."""

    @abc.abstractmethod
    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """Start the inverse collective with the gradients of the outputs."""

    @abc.abstractmethod
    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the inputs, not yet divided. May be views of ``flat``."""

    def divide(self, flat: Tensor) -> Tensor:
        """Divide ``flat`` in place by the number of ranks if :func:`get_gradient_division` is set."""
        if not _gradient_division:
            return flat
        if self.world_size & (self.world_size - 1):
            return flat.div_(self.world_size)
        return flat.mul_(1.0 / self.world_size)  # exact for a power of two, in half the time


def _flat(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1)  # gradients may be expanded or transposed


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


class PooledExchange(Exchange):
    """``[B_global, D]`` of one rank's tables to ``[B, D_sum]`` of one rank's examples."""

    def __init__(self, pg: dist.ProcessGroup, info: All2AllPooledInfo) -> None:
        super().__init__(pg, info.codecs)
        self.batches = info.batch_size_per_rank
        self.dims = info.dim_sum_per_rank
        self.batch = self.batches[self.rank]
        self.dim = self.dims[self.rank]
        self.out_blocks = [batch * self.dim for batch in self.batches]
        self.in_blocks = [self.batch * dim for dim in self.dims]

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """Rows of rank ``r``'s examples go to rank ``r``; these rows are one block."""
        return start_all_to_all(self.pg, _flat(inputs[0]), self.out_blocks, self.in_blocks, self.forward_codec)

    def receive(self, flat: Tensor) -> Tensor:
        """``[B, D_sum]``."""
        return _blocks_to_columns(flat, self.batch, self.dims)

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """Columns of rank ``r``'s tables go to rank ``r``."""
        flat = _columns_to_blocks(grads[0], self.dims)
        return start_all_to_all(self.pg, flat, self.in_blocks, self.out_blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """``[B_global, D]``."""
        return (flat.view(sum(self.batches), self.dim),)


class TablesExchange(PooledExchange):
    """A pooled exchange of a list of tables ``[B_global, D_t]``; its result is ``[B, D_r]`` of each rank ``r``."""

    def __init__(self, pg: dist.ProcessGroup, info: All2AllVInfo) -> None:
        super().__init__(pg, All2AllPooledInfo(info.B_local_list, info.dims_sum_per_rank, codecs=info.codecs))
        self.table_dims = info.D_local_list
        info.input_split_sizes, info.output_split_sizes = self.out_blocks, self.in_blocks

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """All tables side by side."""
        return super().send([torch.cat(list(inputs), dim=1)])

    def receive(self, flat: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        """A tensor ``[B, D_r]`` for each rank ``r``."""
        return tuple(block.view(self.batch, dim) for block, dim in zip(flat.split(self.in_blocks), self.dims))

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """Each rank's gradients as one block."""
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        return start_all_to_all(self.pg, flat, self.in_blocks, self.out_blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A tensor ``[B_global, D_t]`` for each table ``t``."""
        return super().receive_grad(flat)[0].split(self.table_dims, dim=1)


class VariableBatchExchange(Exchange):
    """1-D ``(rank, feature, row, column)`` of one rank's tables to 1-D ``(feature, row, column)`` of one rank's rows."""

    def __init__(self, pg: dist.ProcessGroup, info: VariableBatchAll2AllPooledInfo) -> None:
        super().__init__(pg, info.codecs)
        if info.input_splits is None:
            dims = info.emb_dim_per_rank_per_feature[self.rank]
            info.input_splits = [
                sum(rows * dim for rows, dim in zip(batches, dims)) for batches in info.batch_size_per_rank_per_feature
            ]
        if info.output_splits is None:
            rows = iter(info.batch_size_per_feature_pre_a2a)
            info.output_splits = [sum(next(rows) * dim for dim in dims) for dims in info.emb_dim_per_rank_per_feature]
        self.out_blocks = info.input_splits
        self.in_blocks = info.output_splits

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """The input's blocks, which are already by rank."""
        return start_all_to_all(self.pg, _flat(inputs[0]), self.out_blocks, self.in_blocks, self.forward_codec)

    def receive(self, flat: Tensor) -> Tensor:
        """1-D: features of rank 0 first."""
        return flat

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """The inverse exchange."""
        return start_all_to_all(self.pg, _flat(grads[0]), self.in_blocks, self.out_blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A 1-D gradient of the input's shape."""
        return (flat,)


class SequenceExchange(Exchange):
    """``[N, D]``, a row per id of (feature, rank, example), to the rows of the ids that this rank sent, by rank."""

    def __init__(self, pg: dist.ProcessGroup, info: All2AllSequenceInfo) -> None:
        super().__init__(pg, info.codecs)
        self.dim = info.embedding_dim
        self.info = info
        # Rows go back to the ranks that sent the ids.
        self.out_blocks = [rows * self.dim for rows in info.output_splits]
        self.in_blocks = [rows * self.dim for rows in info.input_splits]

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """Rows by rank."""
        info, rows_ND = self.info, inputs[0]
        if info.forward_recat_tensor is not None:
            lengths = info.lengths_after_sparse_data_all2all
            permuted, rows_ND = _permute_rows(rows_ND, lengths, info.forward_recat_tensor, info.variable_batch_size)
            info.permuted_lengths_after_sparse_data_all2all = permuted
        return start_all_to_all(self.pg, _flat(rows_ND), self.out_blocks, self.in_blocks, self.forward_codec)

    def receive(self, flat: Tensor) -> Tensor:
        """``[ids sent, D]``, in the order of the ids sent."""
        return flat.view(-1, self.dim)

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """The inverse exchange."""
        return start_all_to_all(self.pg, _flat(grads[0]), self.in_blocks, self.out_blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """``[N, D]``, by feature again."""
        info, rows_ND = self.info, flat.view(-1, self.dim)
        lengths = info.permuted_lengths_after_sparse_data_all2all
        if lengths is None or info.backward_recat_tensor is None:
            return (rows_ND,)
        return (_permute_rows(rows_ND, lengths, info.backward_recat_tensor, info.variable_batch_size)[1],)


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


class ReduceExchange(Exchange):
    """``[W * B, ...]`` of partial sums to the sum over ranks of this rank's ``[B, ...]``."""

    def __init__(self, pg: dist.ProcessGroup, info: ReduceScatterBaseInfo) -> None:
        super().__init__(pg, info.codecs)
        rows = info.input_sizes[0] // self.world_size
        self.shape = (rows, *info.input_sizes[1:])
        self.input_shape = tuple(info.input_sizes)
        self.blocks = [prod(self.shape)] * self.world_size

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """Reduce and scatter."""
        return start_reduce_scatter(self.pg, _flat(inputs[0]), self.blocks, self.forward_codec)

    def receive(self, flat: Tensor) -> Tensor:
        """This rank's rows."""
        return flat.view(self.shape)

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """Gather: every rank's part of the sum has the gradient of the sum."""
        return start_all_gather(self.pg, _flat(grads[0]), self.blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A gradient of the input's shape."""
        return (flat.view(self.input_shape),)


class ReduceRowsExchange(ReduceExchange):
    """A reduce-scatter with a separate number of rows for each rank."""

    def __init__(self, pg: dist.ProcessGroup, info: ReduceScatterVInfo) -> None:
        Exchange.__init__(self, pg, info.codecs)
        self.shape = tuple(info.input_sizes[self.rank])
        self.input_shape = tuple(info.total_input_size)
        self.blocks = [prod(size) for size in info.input_sizes]


class ReduceListExchange(ReduceExchange):
    """A reduce-scatter of a list with one tensor for each rank."""

    def __init__(self, pg: dist.ProcessGroup, info: ReduceScatterInfo) -> None:
        Exchange.__init__(self, pg, info.codecs)
        self.shapes = [tuple(size) for size in info.input_sizes]
        self.shape = self.shapes[self.rank]
        self.blocks = [prod(size) for size in info.input_sizes]

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """The concatenated tensors."""
        flat = torch.cat([part.reshape(-1) for part in inputs])
        return start_reduce_scatter(self.pg, flat, self.blocks, self.forward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A gradient for each rank's tensor."""
        return tuple(part.view(shape) for part, shape in zip(flat.split(self.blocks), self.shapes))


class GatherExchange(Exchange):
    """``[B, ...]`` of every rank, the same size everywhere, to ``[W * B, ...]``."""

    def __init__(self, pg: dist.ProcessGroup, info: AllGatherBaseInfo) -> None:
        super().__init__(pg, info.codecs)
        self.input_shape = tuple(info.input_size)
        self.blocks = [prod(self.input_shape)] * self.world_size

    def send(self, inputs: Sequence[Tensor]) -> Pending:
        """Gather."""
        return start_all_gather(self.pg, _flat(inputs[0]), self.blocks, self.forward_codec)

    def receive(self, flat: Tensor) -> Tensor:
        """Rows of rank 0 first."""
        return flat.view(self.world_size * self.input_shape[0], *self.input_shape[1:])

    def send_grad(self, grads: Sequence[Tensor]) -> Pending:
        """Sum the ranks' gradients of this rank's rows."""
        return start_reduce_scatter(self.pg, _flat(grads[0]), self.blocks, self.backward_codec)

    def receive_grad(self, flat: Tensor) -> tuple[Tensor, ...]:
        """A gradient of the input's shape."""
        return (flat.view(self.input_shape),)
