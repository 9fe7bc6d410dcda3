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
from recinfer.serving.shards.rank_structs import PACKED_ANSWER, RankAnswer

__all__ = ["RankSpans", "is_packed", "spans_of"]


def is_packed(values: NDArray[Any]) -> bool:
    """Whether an answer's array is packed."""
    return values.dtype == np.uint8


@dataclass(frozen=True, eq=False)
class RankSpans:
    """The spans of one rank for ``join``, see RankAnswer.

    Attributes:
        columns: number of columns of the rank's answer.
        runs: int64 ``[R, 4]``, of a float32 answer: first column of the rank, first column of the joined vectors, number of
            columns, whether other ranks add to them; neighbouring columns are one run.
        pairs: int64 ``[P, 4]``, of a packed answer: number of columns, code of the row format, first column of the joined
            vectors (-1: they lack it), whether other ranks add to them.
    """

    columns: int
    runs: NDArray[np.int64]
    pairs: NDArray[np.int64]

    def answer(self, values: NDArray[Any]) -> RankAnswer:
        """The rank's answer for ``join``."""
        if is_packed(values):
            return RankAnswer(values, PACKED_ANSWER, self.pairs)
        return RankAnswer(values.astype(np.float32, copy=False), self.columns, self.runs)


def spans_of(mine: RankModule, configs: Sequence[BaseEmbeddingConfig], firsts: Mapping[int, int]) -> RankSpans:
    """The spans of a rank's part of a module.

    Args:
        configs: configurations of the module's tables.
        firsts: number of a feature in the module -> first column of the joined vectors, for the features that they hold.
    """
    codes = {config.name: row_format(config.data_type).code for config in configs}
    runs: list[tuple[int, int, int, int]] = []
    pairs: list[tuple[int, int, int, int]] = []
    column = 0
    for pair in mine.pairs:
        rect, adds = pair.rect, int(not mine.streams[pair.stream].whole)
        to = firsts[pair.number] + rect.col_start if pair.number in firsts else -1
        pairs.append((rect.cols, codes[rect.table], to, adds))
        if to >= 0:
            at, before, columns, added = runs[-1] if runs else (0, 0, 0, -1)
            if (at + columns, before + columns, added) == (column, to, adds):
                runs[-1] = (at, before, columns + rect.cols, adds)
            else:
                runs.append((column, to, rect.cols, adds))
        column += rect.cols
    return RankSpans(column, np.array(runs, np.int64).reshape(-1, 4), np.array(pairs, np.int64).reshape(-1, 4))
