"""The ranker's side of small requests: compiled loops from a request's bytes to messages for shard servers, and back.

One call splits a request by rank and another joins the answers, instead of the array operations of the decoded path
(recinfer.serving.shards.lookups); the messages and the vectors are the same, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.inference.direct import MAX_HEADS
from recinfer.lru import LruCache
from recinfer.quant.bags import BagPlaces
from recinfer.serving.engine.remote_byte_path import Answers
from recinfer.serving.shards._ranks import join, split
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.fan_out_request import FanOutCallback, ShardQuery, begin_fan_out
from recinfer.serving.shards.messages import Parts, part_head
from recinfer.serving.shards.packed import is_packed, pairs_of, runs_of
from recinfer.serving.shards.rank_structs import PACKED_ANSWER, RankAnswer, RankStreams
from recinfer.serving.shards.split import ModuleSplit

__all__ = ["RemoteOrder", "RemoteTables"]

_MAX_ORDERS = 256  # cached orders of keys; clients send a handful


@dataclass(frozen=True, eq=False)
class _Rank:
    """A rank's prepared split and join for one order of a request's keys.

    Attributes:
        streams: input of ``split`` for the rank's part.
        columns: number of columns of its answer.
        runs, pairs: ``RankAnswer.spans`` of a float32 answer, and of a packed answer.
    """

    rank: int
    streams: RankStreams
    columns: int
    runs: NDArray[np.int64]
    pairs: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RemoteOrder:
    """The prepared split of one order of a request's keys.

    Attributes:
        names, dims, columns, complete, heads: see recinfer.inference.direct.DirectOrder.
        limits: int64 ``[keys]``, rows of each key's tables.
        ranks: the ranks that hold rows of the module; ``streams``: the input of ``split`` for these ranks.
        means: int64 ``[M, 3]``: key, first and last column to divide by the number of ids.
    """

    names: tuple[str, ...]
    dims: tuple[int, ...]
    columns: int
    complete: bool
    limits: NDArray[np.int64]
    ranks: tuple[_Rank, ...]
    streams: list[RankStreams]
    means: NDArray[np.int64]
    heads: LruCache[Any, bytes] = field(default_factory=partial(LruCache, MAX_HEADS))


class RemoteTables:
    """The tables of a model whose only embedding module is pooled, unweighted and on other hosts. Any thread may call it.

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
        self._split = split
        self._rows = rows
        self._by_rank = {rank.rank: rank for rank in split.ranks}
        self._fan_out = fan_out
        self._version = version
        self._default_rows = default_rows
        self.at_end_of_turn = fan_out.at_end_of_turn
        self._names = tuple(names)
        self._dims = tuple(dims)
        self._known = frozenset(split.features)
        self._orders: LruCache[bytes, RemoteOrder] = LruCache(_MAX_ORDERS)

    def order(self, block: bytes) -> RemoteOrder | None:
        """The order that :meth:`learn` made for the bytes ``block``, or None."""
        return self._orders[block]

    def learn(self, block: bytes, keys: Sequence[str]) -> RemoteOrder | None:
        """Make and cache the order for ``block``, the bytes of ``keys``; None if the keys are not features of the model,
        each once."""
        at = {key: place for place, key in enumerate(keys)}
        if not at or len(at) != len(keys) or not self._known.issuperset(at):
            return None
        firsts: dict[int, int] = {}  # feature of the module -> its first column of the answer
        column = 0
        for number, (feature, dim) in enumerate(zip(self._split.features, self._dims)):
            if feature in at:
                firsts[number] = column
                column += dim
        ranks = tuple(self._rank(rank, at, firsts) for rank in self._split.ranks)
        means = []
        for number, first, last in self._split.mean_columns:
            if number in firsts:
                start = firsts[number]
                means.append((at[self._split.features[number]], start + first, start + last))
        order = RemoteOrder(
            tuple(self._names[number] for number in firsts),
            tuple(self._dims[number] for number in firsts),
            column,
            len(at) == len(self._known),
            np.array([self._rows[key] for key in keys], np.int64),
            ranks,
            [rank.streams for rank in ranks],
            np.array(means, np.int64).reshape(-1, 3),
        )
        self._orders[block] = order
        return order

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
        pairs = pairs_of(mine, self._split.layout.configs, firsts)
        return _Rank(rank.rank, rank_streams, rank.num_columns, runs_of(mine, firsts), pairs)

    def split(self, order: RemoteOrder, data: bytes, bags: BagPlaces) -> dict[int, Parts] | None:
        """Each rank's part of the request; None if an id is out of range or the lengths do not fit."""
        found = split(data, bags, order.limits, order.streams)
        if found is None:
            return None
        return {rank.rank: [[part]] for rank, part in zip(order.ranks, found) if part is not None}

    def begin(self, parts: Mapping[int, Parts], batch: int, deadline: float, done: FanOutCallback) -> None:
        """See :func:`recinfer.serving.shards.fan_out_request.begin_fan_out`."""

        def fits(rank: int, arrays: list[NDArray[Any]]) -> bool:
            return self._by_rank[rank].is_answer(arrays[0], batch)

        query = ShardQuery(self._version, batch, parts, deadline, self._fan_out.half, self._default_rows, fits)
        begin_fan_out(self._fan_out, query, done)

    def join(
        self,
        order: RemoteOrder,
        answers: Answers,
        data: bytes,
        bags: BagPlaces,
        into: bytes | NDArray[np.float32],
    ) -> Any:
        """Float32 ``[batch, order.columns]``, zero where no rank answered: see ``recinfer.serving.shards._ranks.join``."""
        found: list[RankAnswer] = []
        for rank in order.ranks:
            arrays = answers.get(rank.rank)
            if arrays is None:
                continue
            if is_packed(arrays[0]):
                found.append(RankAnswer(arrays[0], PACKED_ANSWER, rank.pairs))
            else:
                values = arrays[0] if arrays[0].dtype == np.float32 else arrays[0].astype(np.float32)
                found.append(RankAnswer(values, rank.columns, rank.runs))
        return join(found, order.means, data, bags, order.columns, into)
