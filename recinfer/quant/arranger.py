"""Prepares a KeyedJaggedTensor for lookup: puts features in order and checks ids.

On the CPU the operator itself rejects ids beyond a table's rows, if it has the number of rows
(``TableBatch.knows_rows``). It skips only -1, so one minimum over the ids completes the check. Elsewhere the largest id
of each feature is compared.

Shape suffixes: F features, B batch, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.errors import InputError
from recinfer.lru import LruCache
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.sparse.checks import check_id_dtype, ids_are_below
from recinfer.sparse.full_batch import full_batch
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["FeatureArranger"]

_SMALL_BAGS = 16384  # bags above which slicing beats FBGEMM's permute (measured at 26 features)
_MAX_ORDERS = 64  # stored orders; clients send few different orders


class FeatureArranger:
    """Puts a KeyedJaggedTensor's features in a fixed order (repeats allowed) and checks ids.

    The permutation for each order of keys is computed once.

    Args:
        features: names in the required order; a repeated name reads its ids again.
        rows: of each feature's table.
    """

    def __init__(self, features: Sequence[str], rows: Sequence[int]) -> None:
        self.features = list(features)
        self.rows = list(rows)
        self._orders: LruCache[tuple[str, ...], tuple[list[int], Tensor]] = LruCache(_MAX_ORDERS)
        self._limits = np.array(self.rows, dtype=np.uint64)

    @classmethod
    def of_tables(cls, configs: Sequence[BaseEmbeddingConfig]) -> FeatureArranger:
        """An arranger in module order with every feature once, for lookups rank by rank."""
        features = [f for c in configs for f in c.feature_names]
        return cls(features, [c.num_embeddings for c in configs for _ in c.feature_names])

    def arrange(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` in this order.

        Raises:
            InputError: ids are not int32 or int64, a feature is missing, or batch sizes differ between features without inverse indices.
        """
        check_id_dtype(features.values())
        if features.variable_stride_per_key():
            if features.inverse_indices_or_none() is not None:
                features = full_batch(features, list(dict.fromkeys(self.features)))
            elif set(features.stride_per_key()) != {features.stride()}:
                raise InputError(
                    f"features have batch sizes {features.stride_per_key()} and no inverse indices; give inverse_indices, "
                    "which map every example to its row"
                )
        keys = features.keys()
        if keys == self.features:
            return features
        known = self._orders[tuple(keys)]
        if known is None:
            known = self._orders[tuple(keys)] = self._new_order(keys)
        order, order_F = known
        if features.values().device.type == "meta" and features.length_per_key_or_none() is None:
            return self._shapes_of(features)
        few = (
            fbgemm.INSTALLED
            and features.values().device.type == "cpu"
            and 0 < features.stride() * len(order) <= _SMALL_BAGS
        )
        if few and not torch.compiler.is_compiling():
            return self._permuted(features, order_F)
        return features.permute(order)

    def _new_order(self, keys: list[str]) -> tuple[list[int], Tensor]:
        place = {key: i for i, key in enumerate(keys)}
        missing = [name for name in self.features if name not in place]
        if missing:
            raise InputError(f"features {', '.join(sorted(set(missing)))} are missing; got {', '.join(keys)}")
        order = [place[name] for name in self.features]
        return order, torch.tensor(order, dtype=torch.int32)

    def _shapes_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Shapes for meta tensors, whose number of ids per feature is unknown; only repeated or dropped features change
        their sum."""
        lengths = features.lengths()
        return KeyedJaggedTensor.from_parts_unchecked(
            self.features,
            features.values(),
            lengths.new_empty(len(self.features) * features.stride()),
            weights=features.weights_or_none(),
            stride=features.stride(),
        )

    def _permuted(self, features: KeyedJaggedTensor, order_F: Tensor) -> KeyedJaggedTensor:
        """``permute`` by FBGEMM's operator: a third of the time of slicing tensors, unless there are many bags (it
        copies each)."""
        lengths_FB = features.lengths().view(-1, features.stride())
        lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data.default(
            order_F, lengths_FB, features.values(), features.weights_or_none()
        )
        return KeyedJaggedTensor.from_parts_unchecked(
            self.features, values, lengths.view(-1), weights=weights, stride=features.stride()
        )

    def check(self, arranged: KeyedJaggedTensor) -> None:
        """Raise InputError for out-of-range ids, naming the first; ``arranged`` must be in this order. Meta tensors are
        not checked.

        Raises:
            InputError: an id is out of range.
        """
        values = arranged.values()
        if values.numel() == 0 or values.device.type == "meta":
            return
        on_host = values.device.type == "cpu"
        in_range = self._in_range_on_host if on_host else self._in_range_on_device
        if not in_range(values, arranged.offsets(), arranged.stride()):
            self._refuse(arranged)

    def _in_range_on_device(self, values_N: Tensor, offsets: Tensor, batch: int) -> bool:
        lengths_F = offsets[batch::batch] - offsets[:-1:batch]
        limits_F = torch.tensor(self.rows, device=values_N.device)
        limits_N = torch.repeat_interleave(limits_F, lengths_F, output_size=values_N.numel())
        return bool(((values_N >= 0) & (values_N < limits_N)).all())

    def _in_range_on_host(self, values_N: Tensor, offsets: Tensor, batch: int) -> bool:
        # FBGEMM's own checker takes 3 ns an id, one vectorised pass 0.2. After a lookup of some megabytes the code is out
        # of the cache, so the number of calls matters more than that of ids.
        return ids_are_below(values_N, offsets.numpy()[::batch], self._limits)

    def _refuse(self, arranged: KeyedJaggedTensor) -> None:
        batch = arranged.stride()
        offsets = arranged.offsets().tolist()
        for i, (name, rows) in enumerate(zip(self.features, self.rows)):
            start, stop = offsets[i * batch], offsets[(i + 1) * batch]
            ids = arranged.values()[start:stop]
            bad = ((ids < 0) | (ids >= rows)).nonzero()
            if len(bad):
                position = int(bad[0])
                bags = arranged.offsets()[i * batch : (i + 1) * batch + 1]
                sample = int(torch.searchsorted(bags, start + position, right=True)) - 1
                raise InputError(
                    f"feature {name!r}, sample {sample}: id {int(ids[position])} is out of range; "
                    f"its table has rows 0 to {rows - 1}"
                )
        raise AssertionError("the id check failed, but all ids are in range")
