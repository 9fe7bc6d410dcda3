"""The places of a rank's columns in the answer, and packed answers: stored rows of bags of at most one id.

An INT8 row of 16 columns crosses the wire in 20 bytes instead of 64; the ranker turns the row into the floats that the shard
server would have sent, by the same compiled loop. Shard servers decide feature by feature whether to pack rows: see ``pack`` of
recinfer.quant._tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import RecinferError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.quant.bags import BagPlaces
from recinfer.quant.formats.registry import row_format
from recinfer.serving.shards._ranks import join
from recinfer.serving.shards.rank_modules import RankModule
from recinfer.serving.shards.rank_structs import PACKED_ANSWER, RankAnswer

__all__ = ["is_packed", "pairs_of", "runs_of", "unpacked"]


def is_packed(values: NDArray[Any]) -> bool:
    """Whether an answer's array is packed."""
    return values.dtype == np.uint8


def pairs_of(
    mine: RankModule, configs: Sequence[BaseEmbeddingConfig], firsts: Mapping[int, int] | None = None
) -> NDArray[np.int64]:
    """The spans of a rank's packed answer for ``join``, see RankAnswer.

    Args:
        configs: configurations of the module's tables.
        firsts: number of a feature in the module -> first column of the answer; None: the answer has the rank's columns.

    Returns:
        int64 ``[pairs, 4]``: columns, code of the row format, first column of the answer (-1: it has none), whether other
        ranks' are added.
    """
    codes = {config.name: row_format(config.data_type).code for config in configs}
    pairs = []
    column = 0
    for pair in mine.pairs:
        number, rect = pair.number, pair.rect
        if firsts is None:
            to = column
        else:
            to = firsts[number] + rect.col_start if number in firsts else -1
        adds = firsts is not None and not mine.streams[pair.stream].whole
        pairs.append((rect.cols, codes[rect.table], to, adds))
        column += rect.cols
    return np.array(pairs, np.int64).reshape(-1, 4)


def runs_of(mine: RankModule, firsts: Mapping[int, int] | None = None) -> NDArray[np.int64]:
    """The spans of a rank's float32 answer for ``join``, see RankAnswer; neighbouring columns are one run.

    Args:
        firsts: number of a feature in the module -> first column of the joined answer; None: the columns of the module.

    Returns:
        int64 ``[runs, 4]``: first column of the rank, first column of the joined answer, number of columns, whether other
        ranks add to them.
    """
    runs: list[tuple[int, int, int, int]] = []
    column = 0
    for pair in mine.pairs:
        rect, adds = pair.rect, int(not mine.streams[pair.stream].whole)
        if firsts is None or pair.number in firsts:
            to = pair.column if firsts is None else firsts[pair.number] + rect.col_start
            at, before, columns, added = runs[-1] if runs else (0, 0, 0, -1)
            if (at + columns, before + columns, added) == (column, to, adds):
                runs[-1] = (at, before, columns + rect.cols, adds)
            else:
                runs.append((column, to, rect.cols, adds))
        column += rect.cols
    return np.array(runs, np.int64).reshape(-1, 4)


def unpacked(values: NDArray[np.uint8], pairs: NDArray[np.int64], batch: int) -> NDArray[np.float32]:
    """The float32 ``[batch, columns]`` of a packed answer; ``pairs``: of the rank's own columns.

    Raises:
        RecinferError: ``values`` are no packed answer of these columns for ``batch`` samples.
    """
    columns = int(pairs[:, 0].sum())
    found = np.empty((batch, columns), np.float32)
    try:
        join(
            [RankAnswer(values, PACKED_ANSWER, pairs)],
            np.empty(0, np.int64),
            b"",
            BagPlaces(0, 0, 0, False, 0, batch),
            columns,
            found,
        )
    except ValueError as error:
        raise RecinferError(f"a shard's answer: {error}") from None
    return found
