"""The structs that the compiled loops of ``_ranks.c`` take and return, field by field in the order of the C structs of the same names."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recinfer.serving.wire.arrays import Buffer

__all__ = ["PACKED_ANSWER", "PlainFind", "PlainPart", "RankAnswer", "RankStreams"]

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
