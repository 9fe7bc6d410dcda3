"""The ranker's side of small requests: compiled loops from a request's bytes to messages for shard servers, and back.

One call splits a request by rank and another joins the answers, instead of the array operations of the decoded path
(recinfer.serving.shards.lookups); the messages and the vectors are the same, to the byte.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.inference.byte_tables import AwaitedLookup, ByteTables, RowsCallback
from recinfer.inference.lookups import NO_TRACE
from recinfer.quant.bags import BagPlaces
from recinfer.serving.shards._ranks import join, split
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.fan_out_request import FanOutCallback, ShardQuery, begin_fan_out
from recinfer.serving.shards.messages import Answers, Parts, part_head
from recinfer.serving.shards.rank_structs import RankSpans, RankStreams, spans_of
from recinfer.serving.shards.split import ModuleSplit

__all__ = ["RemoteLookup", "RemoteRows", "RemoteTables"]


@dataclass(frozen=True, eq=False)
class _Rank:
    """A rank's prepared split and join for one order of a request's keys.

    Attributes:
        streams: input of ``split`` for the rank's part.
        spans: where its columns go.
    """

    rank: int
    streams: RankStreams
    spans: RankSpans


@dataclass(frozen=True, eq=False)
class RemoteLookup(AwaitedLookup):
    """A lookup that is split by rank, answered by the shards and joined.

    Attributes:
        tables: of the ranks.
        limits: int64 ``[keys]``, rows of each key's tables.
        ranks: the ranks that hold rows of the module; ``streams``: the input of ``split`` for these ranks.
        means: int64 ``[M, 3]``: key, first and last column to divide by the number of ids.
    """

    tables: RemoteTables
    limits: NDArray[np.int64]
    ranks: tuple[_Rank, ...]
    streams: list[RankStreams]
    means: NDArray[np.int64]

    def start(
        self, data: bytes, bags: BagPlaces, deadline: float, done: RowsCallback, trace: Mapping[str, str] = NO_TRACE
    ) -> bool:
        """See :class:`AwaitedLookup`."""
        parts = self.split(data, bags)
        if parts is None:
            return False

        def answered(answers: Answers, missing: tuple[int, ...], error: Exception | None) -> None:
            done(None if error is not None else RemoteRows(self, answers, data, bags), missing, error)

        self.tables.begin(parts, bags.batch, deadline, answered, trace)
        return True

    def at_end_of_turn(self, function: Callable[[], object]) -> None:
        """See :class:`AwaitedLookup`."""
        self.tables.at_end_of_turn(function)

    def split(self, data: bytes, bags: BagPlaces) -> dict[int, Parts] | None:
        """Each rank's part of the request; None when an id is out of range."""
        found = split(data, bags, self.limits, self.streams)
        if found is None:
            return None
        return {rank.rank: [[part]] for rank, part in zip(self.ranks, found) if part is not None}

    def join(self, answers: Answers, data: bytes, bags: BagPlaces, into: bytes | NDArray[np.float32]) -> Any:
        """Float32 ``[batch, columns]``, zero where no rank answered: see ``recinfer.serving.shards._ranks.join``."""
        found = [rank.spans.answer(answers[rank.rank][0]) for rank in self.ranks if rank.rank in answers]
        return join(found, self.means, data, bags, self.columns, into)


class RemoteRows:
    """See :class:`recinfer.inference.byte_tables.Rows`: joined from the answers of the shards."""

    __slots__ = ("_answers", "_bags", "_data", "_lock", "_lookup", "_whole")

    def __init__(self, lookup: RemoteLookup, answers: Answers, data: bytes, bags: BagPlaces) -> None:
        self._lookup = lookup
        self._answers = answers
        self._data = data
        self._bags = bags
        self._whole: NDArray[np.float32] | None = None
        self._lock = threading.Lock()  # parts of one request run at once

    def after(self, head: bytes) -> bytes:
        """See Rows."""
        return bytes(self._lookup.join(self._answers, self._data, self._bags, head))

    def fill(self, into: NDArray[np.float32], part: tuple[int, int] | None) -> bool:
        """See Rows."""
        if part is None:
            self._lookup.join(self._answers, self._data, self._bags, into)
            return True
        with self._lock:
            if self._whole is None:
                self._whole = np.empty((self._bags.batch, self._lookup.columns), np.float32)
                self._lookup.join(self._answers, self._data, self._bags, self._whole)
        first, count = part
        into[:] = self._whole[first : first + count]
        return True


class RemoteTables(ByteTables):
    """Tables on other hosts.

    Args:
        split: the split of the module.
        names, dims: names and widths of the module's outputs.
        rows: feature -> number of rows of its smallest table.
        fan_out: calls the shard servers.
        version: key of the version.
        default_rows: see ``ShardQuery``.

    Attributes:
        at_end_of_turn: see :class:`FanOut`.
    """

    def __init__(
        self,
        split: ModuleSplit,
        names: Sequence[str],
        dims: Sequence[int],
        rows: Mapping[str, int],
        fan_out: FanOut,
        version: str,
        *,
        default_rows: bool,
    ) -> None:
        super().__init__(split.features, names, dims, takes_context=False)
        self._split, self._rows, self._by_rank = split, rows, {rank.rank: rank for rank in split.ranks}
        self._fan_out, self._version, self._default_rows = fan_out, version, default_rows
        self.at_end_of_turn = fan_out.at_end_of_turn

    def _prepare(self, places: Mapping[str, int], beside: Mapping[str, int], complete: bool) -> RemoteLookup:
        firsts: dict[int, int] = {}  # feature of the module -> its first column of the answer
        column = 0
        for number, (feature, dim) in enumerate(zip(self._features, self._dims)):
            if feature in places:
                firsts[number] = column
                column += dim
        ranks = tuple(self._rank(rank, places, firsts) for rank in self._split.ranks)
        means = []
        for number, first, last in self._split.mean_columns:
            if number in firsts:
                start = firsts[number]
                means.append((places[self._features[number]], start + first, start + last))
        return RemoteLookup(
            tuple(self._names[number] for number in firsts),
            tuple(self._dims[number] for number in firsts),
            column,
            complete,
            (tuple(places), ()),
            self,
            np.array([self._rows[key] for key in places], np.int64),
            ranks,
            [rank.streams for rank in ranks],
            np.array(means, np.int64).reshape(-1, 3),
        )

    def _rank(self, rank: Any, at: Mapping[str, int], firsts: Mapping[int, int]) -> _Rank:
        mine = rank.mine
        streams = [(at.get(stream.feature, -1), stream.row_start, stream.rows) for stream in mine.streams]
        number = self._split.number
        rank_streams = RankStreams(
            part_head(rank.rank, number, 0),
            part_head(rank.rank, number, 1),
            part_head(rank.rank, number, 4),
            np.array(streams, np.int64),
            rank.wide,
        )
        return _Rank(rank.rank, rank_streams, spans_of(mine, self._split.layout.configs, firsts))

    def begin(
        self,
        parts: Mapping[int, Parts],
        batch: int,
        deadline: float,
        done: FanOutCallback,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> None:
        """See :func:`recinfer.serving.shards.fan_out_request.begin_fan_out`."""

        def fits(rank: int, arrays: list[NDArray[Any]]) -> bool:
            return self._by_rank[rank].is_answer(arrays[0], batch)

        query = ShardQuery(self._version, batch, parts, deadline, self._default_rows, fits, trace)
        begin_fan_out(self._fan_out, query, done)
