"""RowwiseAdagrad: steps the rows of a table group on CPU by ``recinfer/optim/_adagrad.c``, where that is faster than
FBGEMM's kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from recinfer.distributed.tables.replicas import LookupGradient
from recinfer.distributed.tables.spans import POOLING, TableShape
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.optim._adagrad import step_table

__all__ = ["RowwiseAdagrad"]

_MOST_ROWS = 1 << 32  # a sort key has 32 bits for the row
_THREADS = 2  # most threads of torch: FBGEMM's kernel divides the rows among threads, this class does not


class RowwiseAdagrad:
    """Steps rows with the arithmetic of FBGEMM's kernel, in one thread.

    Args:
        shapes: the tables.
        starts, row_starts: for each table, its first number in ``weights`` and first row in ``momentum``; the last is
            the end of all.
        pooling: pooling of the lookups.
    """

    def __init__(
        self, shapes: Sequence[TableShape], starts: Sequence[int], row_starts: Sequence[int], pooling: PoolingType
    ) -> None:
        self._pooling = pooling
        dims = [s.dim if pooling is not PoolingType.NONE else 0 for s in shapes for _ in range(s.num_features)]
        columns = [0, *accumulate(dims)]
        first = [0, *accumulate(s.num_features for s in shapes)]
        self._stride = columns[-1] or max((s.dim for s in shapes), default=0)
        self._num_features = first[-1]
        self._fits = all(end - row <= _MOST_ROWS for row, end in pairwise(row_starts))
        self._tables = [
            (
                shape.name,
                start,
                row,
                end - row,
                shape.dim,
                feature,
                tuple(columns[feature : feature + shape.num_features]),
            )
            for shape, start, row, end, feature in zip(shapes, starts, row_starts, row_starts[1:], first)
        ]

    def takes(self, weights: Tensor, grad_output: Tensor) -> bool:
        """Whether this class can step the tensors, and faster than FBGEMM's kernel."""
        return (
            self._fits and weights.dtype == grad_output.dtype == torch.float32 and torch.get_num_threads() <= _THREADS
        )

    def step(self, weights: Tensor, momentum: Tensor, call: LookupGradient, rate: float, eps: float) -> None:
        """Step the rows in place.

        Args:
            weights: float32, the rows of all tables.
            momentum: float32, one number per row.
            call: the lookup and the gradient of its output.

        Raises:
            InputError: an id outside its table, offsets that fall or end outside of the ids, or not one weight an id.
                Rows of this table are unchanged.
        """
        ids, grad_output = call.indices.contiguous(), call.grad_output.contiguous()
        offsets = call.offsets.to(ids.dtype).contiguous()
        scales = None if call.per_sample_weights is None else call.per_sample_weights.float().contiguous()
        if scales is not None and scales.numel() != ids.numel():
            raise InputError(f"got {scales.numel()} weights for {ids.numel()} ids; expected one for each")
        bags = (offsets.numel() - 1) // self._num_features
        for name, start, row, rows, dim, feature, columns in self._tables:
            try:
                step_table(
                    weights.data_ptr() + weights.itemsize * start,
                    momentum.data_ptr() + momentum.itemsize * row,
                    rows,
                    dim,
                    grad_output.data_ptr(),
                    self._stride,
                    columns,
                    ids.data_ptr(),
                    ids.numel(),
                    offsets.data_ptr() + offsets.itemsize * feature * bags,
                    ids.dtype == torch.int64,
                    bags,
                    POOLING[self._pooling],
                    0 if scales is None else scales.data_ptr(),
                    rate,
                    eps,
                )
            except IndexError as error:
                raise InputError(
                    f"table {name!r}: {error}; expected ids of its rows, and offsets that rise within the ids"
                ) from None
