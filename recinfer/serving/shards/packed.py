"""Where a rank's columns go in the joined vectors, for float32 answers and packed ones: stored rows of bags of at most one id.

An INT8 row of 16 columns crosses the wire in 20 bytes instead of 64; the ranker turns the row into the floats that the shard
server would have sent, by the same compiled loop. Shard servers decide feature by feature whether to pack rows: see ``pack`` of
recinfer.quant._tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.quant.formats.registry import row_format
from recinfer.serving.shards.rank_modules import RankModule
from recinfer.serving.shards.rank_structs import RankAnswer

__all__ = ["RankSpans", "is_packed", "spans_of"]


def is_packed(values: NDArray[Any]) -> bool:
    """Whether an answer's array is packed."""
    return values.dtype == np.uint8


@dataclass(frozen=True, eq=False)
class RankSpans:
    """The columns of one rank for ``join``.

    Attributes:
        columns: number of columns of the rank's answer.
        pairs: see RankAnswer.
    """

    columns: int
    pairs: NDArray[np.int64]

    def answer(self, values: NDArray[Any]) -> RankAnswer:
        """The rank's answer for ``join``."""
        if is_packed(values):
            return RankAnswer(values, True, self.pairs)
        return RankAnswer(values.astype(np.float32, copy=False), False, self.pairs)


def spans_of(mine: RankModule, configs: Sequence[BaseEmbeddingConfig], firsts: Mapping[int, int]) -> RankSpans:
    """The spans of a rank's part of a module.

    Args:
        configs: configurations of the module's tables.
        firsts: number of a feature in the module -> first column of the joined vectors, for the features that they hold.
    """
    codes = {config.name: row_format(config.data_type).code for config in configs}
    pairs: list[tuple[int, int, int, int]] = []
    for pair in mine.pairs:
        rect, adds = pair.rect, int(not mine.streams[pair.stream].whole)
        to = firsts[pair.number] + rect.col_start if pair.number in firsts else -1
        pairs.append((rect.cols, codes[rect.table], to, adds))
    return RankSpans(sum(pair.rect.cols for pair in mine.pairs), np.array(pairs, np.int64).reshape(-1, 4))
