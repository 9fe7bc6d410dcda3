"""The structs of the compiled loops of ``_ranks.c``, in the order of the C structs' fields, and where a rank's columns are joined.

Packed answers hold stored rows of bags of at most one id: an INT8 row of 16 columns crosses the wire in 20 bytes instead of 64;
the ranker turns it into the shard server's floats by the same compiled loop. ``pack`` of recinfer.quant._tables decides by feature.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.quant.formats.registry import row_format
from recinfer.serving.shards.rank_modules import RankModule
from recinfer.serving.wire.arrays import Buffer

__all__ = ["PACKED_ANSWER", "PlainFind", "PlainPart", "RankAnswer", "RankSpans", "RankStreams", "is_packed", "spans_of"]

PACKED_ANSWER = -1
"""``RankAnswer.columns`` of a rank whose answer is packed."""


class PlainPart(NamedTuple):
    """One part of a plain ``ShardRequest``. Places are offsets in the request's bytes.

    Attributes:
        rank, module: numbers of the rank and of the module for the lookup.
        length_bytes: size of one length: 4, 1, or 0 where each bag holds one id and no lengths are sent.
        lengths_at, lengths_size: offset of the lengths, and their bytes.
        ids_at, ids: offset of the ids, and their number.
        wide: whether ids are int64, else int32.
    """

    rank: int
    module: int
    length_bytes: int
    lengths_at: int
    lengths_size: int
    ids_at: int
    ids: int
    wide: bool


class PlainFind(NamedTuple):
    """A plain ``ShardRequest``, the result of ``read_find``.

    Attributes:
        version: key of the archive's version.
        batch: number of samples.
        stored: whether rows may be sent as the tables store them.
        parts: the fields of a :class:`PlainPart` for each part.
    """

    version: str
    batch: int
    stored: bool
    parts: list[tuple[Any, ...]]


class RankStreams(NamedTuple):
    """The input of ``split`` for one rank's part of a request.

    Attributes:
        head_without_lengths, head_of_byte_lengths, head_of_int_lengths: the ``ShardPart`` without its lengths and ids, for
            lengths of 0, 1 and 4 bytes.
        streams: int64 ``[S, 3]``: place of the stream's feature among the request's keys, or -1; first row; number of rows.
        wide: whether its ids are sent as int64, else int32.
    """

    head_without_lengths: bytes
    head_of_byte_lengths: bytes
    head_of_int_lengths: bytes
    streams: NDArray[np.int64]
    wide: bool


class RankAnswer(NamedTuple):
    """One rank's answer, for ``join``.

    Attributes:
        values: float32 ``[batch, columns]`` as a buffer, or a packed answer (``pack`` of ``recinfer.quant._tables``).
        columns: of ``values``; :data:`PACKED_ANSWER` where they are packed.
        spans: where the columns go. Of float32 values, int64 ``[R, 4]``: first column of the rank, first column of the
            joined answer, number of columns, whether other ranks add to them. Of packed ones, int64 ``[P, 4]``: number of
            columns, code of the row format, first column of the joined answer or -1, whether other ranks add to them.
    """

    values: Buffer | NDArray[Any]
    columns: int
    spans: NDArray[np.int64]


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
        return RankAnswer(values, self.columns, self.runs)


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
