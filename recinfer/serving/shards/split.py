"""Splits a request's ids by rank and joins the ranks' answers: the ranker's side of the layout.

Decoded requests are split here: their weights, unpooled modules and ids that steps have changed are arrays, which the compiled
split of plain requests (recinfer.serving.shards.remote_tables) does not take. Pooled answers are joined by one compiled loop.

Shapes: F features, S streams of a rank, B samples, N ids, D columns. Loops run over features and ranks, never over ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.inference.bags import Bags, offsets_of
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, PoolingType
from recinfer.quant.bags import BagPlaces
from recinfer.serving.shards._ranks import is_packed_answer, join
from recinfer.serving.shards.messages import encode_part
from recinfer.serving.shards.rank_modules import ModuleLayout, RankModule
from recinfer.serving.shards.rank_structs import is_packed, spans_of
from recinfer.serving.wire.arrays import Buffer
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["ModuleSplit", "Section"]

_INT32_ROWS = 1 << 31


@dataclass(slots=True, eq=False)
class Section:
    """One rank's part of a request for one module.

    Attributes:
        parts: buffers of the message.
        offsets: ``[S * B + 1]``, offsets of the sent ids.
        positions: the position of each sent id among its stream's ids of the whole request; None if all ids were sent.
    """

    parts: list[Buffer]
    offsets: NDArray[Any]
    positions: NDArray[np.intp] | None


class _RankSplit:
    """One rank's streams, as arrays."""

    def __init__(
        self, number: int, mine: RankModule, configs: Sequence[BaseEmbeddingConfig], firsts: Mapping[int, int]
    ) -> None:
        self.rank = mine.rank
        self._number = number
        self.mine = mine
        self.names = tuple(stream.feature for stream in mine.streams)
        self._starts = np.array([stream.row_start for stream in mine.streams], np.int64)
        self._rows = np.array([stream.rows for stream in mine.streams], np.int64)
        narrow = max(stream.rows for stream in mine.streams) <= _INT32_ROWS
        self.wide = not narrow
        self._type = np.dtype(np.int32 if narrow else np.int64)
        self.spans = spans_of(mine, configs, firsts)

    def is_answer(self, values: NDArray[Any], batch: int, offsets: NDArray[Any] | None = None) -> bool:
        """Whether ``values`` are of the size of this rank's rows for ``batch`` samples.

        Args:
            offsets: offsets of the sent section, for an unpooled module.
        """
        if offsets is None:
            if is_packed(values):
                return bool(is_packed_answer(values, self.spans.pairs, batch))
            return values.size == batch * self.spans.columns
        edges = offsets[::batch].tolist()
        wanted = sum((edges[pair.stream + 1] - edges[pair.stream]) * pair.rect.cols for pair in self.mine.pairs)
        return not is_packed(values) and values.size == wanted

    def section(self, bags: Bags, keep_positions: bool) -> Section | None:
        """The rank's part of ``bags``, whose ids are in range; None without any id."""
        mine = bags.arranged(self.names)
        if not mine.values.size:
            return None
        if not self.mine.cuts_rows:
            lengths_SB = mine.lengths_FB
            ids = mine.values.astype(self._type, copy=False)
            parts = encode_part(self.rank, self._number, lengths_SB, ids, mine.weights)
            return Section(parts, mine.offsets, None)
        batch, values_N = mine.batch, mine.values
        edges = mine.offsets[::batch]
        counts_S = edges[1:] - edges[:-1]
        local_N = values_N - np.repeat(self._starts.astype(values_N.dtype), counts_S)
        # Read as an unsigned number, a row before the first row is huge.
        unsigned = np.uint64 if local_N.dtype == np.int64 else np.uint32
        keep_N = local_N.view(unsigned) < np.repeat(self._rows.astype(unsigned), counts_S)
        before = offsets_of(keep_N, mine.offsets.dtype)
        offsets = before[mine.offsets]
        if not offsets[-1]:
            return None
        lengths_SB = offsets[1:] - offsets[:-1]
        ids = local_N[keep_N].astype(self._type, copy=False)
        weights = None if mine.weights is None else mine.weights[keep_N]
        positions = None
        if keep_positions:
            positions = np.flatnonzero(keep_N)
            positions -= np.repeat(edges[:-1], offsets[::batch][1:] - offsets[::batch][:-1])
        return Section(encode_part(self.rank, self._number, lengths_SB, ids, weights), offsets, positions)


class ModuleSplit:
    """Splits and joins the requests for one embedding module on a ranker. Immutable, so any thread may call it.

    Attributes:
        features: features of its outputs, in order.
        ranks: the ranks that have a part of the module.
        mean_columns: (number of the feature, first and last column in its vector) of columns that ranks sum and the ranker
            divides.
    """

    def __init__(self, number: int, layout: ModuleLayout) -> None:
        self.layout = layout
        self.number = number
        self.features = tuple(f for config in layout.configs for f in config.feature_names)
        self._dims = [config.embedding_dim for config in layout.configs for _ in config.feature_names]
        *starts, self._columns = accumulate(self._dims, initial=0)
        self.ranks = [
            _RankSplit(number, mine, layout.configs, dict(enumerate(starts))) for mine in layout.ranks.values()
        ]
        self._by_rank = {rank.rank: rank for rank in self.ranks}
        self.mean_columns = self._mean_columns()
        means = [
            (feature, starts[feature] + first, starts[feature] + last) for feature, first, last in self.mean_columns
        ]
        self._means = np.array(means, np.int64).reshape(-1, 3)

    def _mean_columns(self) -> list[tuple[int, int, int]]:
        poolings = [getattr(config, "pooling", None) for config in self.layout.configs for _ in config.feature_names]
        return sorted(
            {
                (pair.number, pair.rect.col_start, pair.rect.col_stop)
                for rank in self.ranks
                if rank.mine.pooling is PoolingType.SUM
                for pair in rank.mine.pairs
                if poolings[pair.number] is PoolingType.MEAN
            }
        )

    def split(self, bags: Bags) -> dict[int, Section]:
        """Each rank's part of ``bags``, whose ids are in range and which hold weights only for a weighted module."""
        sections = {}
        for rank in self.ranks:
            section = rank.section(bags, not self.layout.pooled)
            if section is not None:
                sections[rank.rank] = section
        return sections

    def fits(self, rank: int, section: Section, batch: int, values: NDArray[Any]) -> bool:
        """Whether ``values`` have the size of ``rank``'s answer to its section."""
        return self._by_rank[rank].is_answer(values, batch, None if self.layout.pooled else section.offsets)

    def join(
        self, bags: Bags, sections: Mapping[int, Section], found: Mapping[int, NDArray[Any]]
    ) -> Tensor | list[JaggedTensor]:
        """The module's vectors: ``[B, D]``, or a JaggedTensor of each output. A rank without an answer gives rows of zeros."""
        return self._join_pooled(bags, found) if self.layout.pooled else self._join_rows(bags, sections, found)

    def _join_pooled(self, bags: Bags, found: Mapping[int, NDArray[Any]]) -> Tensor:
        out_BD = np.zeros((bags.batch, self._columns), np.float32)
        answers = [rank.spans.answer(found[rank.rank]) for rank in self.ranks if rank.rank in found]
        if answers:
            lengths = bags.arranged(self.features).lengths_FB.astype(np.int32).tobytes() if len(self._means) else b""
            keys = len(self.features) if lengths else 0
            join(answers, self._means, lengths, BagPlaces(0, 0, 0, False, keys, bags.batch), self._columns, out_BD)
        return torch.from_numpy(out_BD)

    def _join_rows(
        self, bags: Bags, sections: Mapping[int, Section], found: Mapping[int, NDArray[Any]]
    ) -> list[JaggedTensor]:
        arranged = bags.arranged(self.features)
        lengths_FB = arranged.lengths_FB
        counts = lengths_FB.sum(1).tolist()
        rows = [np.zeros((count, dim), np.float32) for count, dim in zip(counts, self._dims)]
        for rank in self.ranks:
            flat = found.get(rank.rank)
            if flat is not None:
                _place_rows(rank.mine, bags.batch, sections[rank.rank], flat, rows)
        return [
            JaggedTensor.from_parts_unchecked(torch.from_numpy(mine), None, torch.from_numpy(lengths))
            for mine, lengths in zip(rows, lengths_FB)
        ]


def _place_rows(
    mine: RankModule, batch: int, section: Section, flat: NDArray[Any], rows: Sequence[NDArray[np.float32]]
) -> None:
    """Write one rank's rows to the positions of their ids and columns."""
    edges = section.offsets[::batch].tolist()
    at = 0
    for pair in mine.pairs:
        rect, first, last = pair.rect, edges[pair.stream], edges[pair.stream + 1]
        size = (last - first) * rect.cols
        values = flat[at : at + size].reshape(last - first, rect.cols)
        at += size
        target = rows[pair.number][:, rect.col_start : rect.col_stop]
        if section.positions is None:
            target[:] = values
        else:
            target[section.positions[first:last]] = values
