"""IdCheck: the ids of a batch are checked once, before they are sent to the ranks of their rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from recinfer.distributed.exchange.features import with_values
from recinfer.distributed.fused_params import bounds_check_mode
from recinfer.distributed.types import BoundsCheckMode
from recinfer.distributed.types.shardings import EmbeddingShardingInfo
from recinfer.errors import InputError
from recinfer.sparse.checks import check_id_dtype, ids_are_below, is_plain
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["IdCheck"]

logger = logging.getLogger(__name__)

_ANY = np.iinfo(np.uint64).max  # limit of a feature without a check


class IdCheck:
    """Checks ids on the CPU against the tables that read them; the check is the same for all sharding types and
    kernels. Ids on a GPU are checked by its kernels, because a check on the host would wait for the device.

    Args:
        infos: the tables. ``bounds_check_mode`` in the fused params of a table says what happens to an id outside of it:
            FATAL, the default, is an error; WARNING and IGNORE read and train row 0, with and without a warning; NONE
            leaves the id to the kernel.
    """

    def __init__(self, infos: Sequence[EmbeddingShardingInfo]) -> None:
        self._rows: dict[str, tuple[int, str, BoundsCheckMode]] = {}  # feature -> its smallest table
        for info in infos:
            config = info.embedding_config
            mode = bounds_check_mode(info.fused_params or {})
            for feature in config.feature_names if mode is not BoundsCheckMode.NONE else ():
                known = self._rows.get(feature)
                if known is None or config.num_embeddings < known[0]:
                    self._rows[feature] = config.num_embeddings, config.name, mode
        self._limits: dict[tuple[str, ...], np.ndarray] = {}
        self._warned: set[str] = set()

    def __call__(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features``, with row 0 in place of ids outside their table where the mode says so.

        Raises:
            InputError: ids that are not int32 or int64; an id outside its table, naming feature, id and rows.
        """
        values = features.values()
        check_id_dtype(values)
        if values.device.type != "cpu" or not values.numel() or not is_plain(values):
            return features
        keys = tuple(features.keys())
        limits = self._limits.get(keys)
        if limits is None:
            rows = [self._rows[key][0] if key in self._rows else _ANY for key in keys]
            limits = self._limits[keys] = np.array(rows, dtype=np.uint64)
        if ids_are_below(values, np.array(features.offset_per_key()), limits):
            return features
        return self._corrected(features)

    def _corrected(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        starts = features.offset_per_key()
        values: Tensor | None = None
        for at, key in enumerate(features.keys()):
            if key not in self._rows:
                continue
            rows, table, mode = self._rows[key]
            ids = features.values()[starts[at] : starts[at + 1]]
            outside = (ids < 0) | (ids >= rows)
            if not bool(outside.any()):
                continue
            text = f"feature {key!r}: id {int(ids[outside][0])} is not in its table {table!r}; expected 0 to {rows - 1}"
            if mode is BoundsCheckMode.FATAL:
                raise InputError(f"{text}. bounds_check_mode=WARNING in fused_params reads and trains row 0 instead")
            if mode is BoundsCheckMode.WARNING and key not in self._warned:
                self._warned.add(key)
                logger.warning("%s; such ids read and train row 0 (bounds_check_mode=WARNING)", text)
            if values is None:
                values = features.values().clone()
            values[starts[at] : starts[at + 1]].masked_fill_(outside, 0)
        return features if values is None else with_values(features, values)
