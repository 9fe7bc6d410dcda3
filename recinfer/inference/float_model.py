"""The float model of an archive: float rows of the ids that some requests read, through the archive's dense program.

The float checkpoint is not loaded: its rows are collected while the tables are read, so memory is bounded by these rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recinfer.archive.check import Answer, Request
from recinfer.archive.manifest import Manifest, ModuleInfo, TableInfo
from recinfer.errors import ArchiveError
from recinfer.inference.predictor import Predictor
from recinfer.quant.formats.registry import row_format
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["FloatModel", "FloatRows", "FloatVectors", "PositionWeights", "rounding_bound", "table_columns"]

PositionWeights = Mapping[str, Mapping[str, Tensor]]
"""Module path -> feature -> the weight of each position of a bag."""


class FloatRows:
    """The float rows that the golden requests read, collected while the tables are read."""

    def __init__(self, manifest: Manifest, requests: Sequence[Request]) -> None:
        self._ids: dict[tuple[str, str], Tensor] = {}
        self._rows: dict[tuple[str, str], Tensor] = {}
        for table in manifest.tables:
            ids = torch.cat([r.features[f].values() for r in requests for f in table.features])
            self._ids[table.module, table.name] = ids.unique()
            self._rows[table.module, table.name] = torch.zeros(len(self._ids[table.module, table.name]), table.dim)

    def collect(self, module: str, table: str, first_row: int, chunk: Tensor) -> None:
        """Collect the needed rows of a chunk that starts at row ``first_row``."""
        ids = self._ids[module, table]
        low, high = ids.numpy().searchsorted((first_row, first_row + len(chunk)))  # cheaper to call than torch's
        if low < high:
            self._rows[module, table][low:high] = chunk[ids[low:high] - first_row]

    def rows(self, table: TableInfo, ids: Tensor) -> Tensor:
        """Float rows [N, dim] of ids [N]."""
        key = table.module, table.name
        return self._rows[key][torch.searchsorted(self._ids[key], ids)]

    def ids(self, table: TableInfo) -> Tensor:
        """The ids of the collected rows, ascending."""
        return self._ids[table.module, table.name]

    def with_rows(self, rows: Mapping[tuple[str, str], Tensor]) -> FloatRows:
        """A copy with other rows for the same ids: (module path, table) -> float32 [ids, dim]."""
        other = FloatRows.__new__(FloatRows)
        other._ids, other._rows = self._ids, dict(rows)
        return other


class FloatVectors(NamedTuple):
    """One tensor of a request's float embeddings: a pooled module, or a feature of a sequence module.

    Attributes:
        module: path of the module.
        name: "pooled", or the feature.
        vectors: float32 [B, D] or [ids, dim].
        bound: the largest difference of the archive's vectors that their precision allows, of the same shape.
        lengths: int64 [B] of a sequence.
    """

    module: str
    name: str
    vectors: Tensor
    bound: Tensor
    lengths: Tensor | None


class FloatModel:
    """The float model of an archive.

    Args:
        predictor: the archive, whose dense program runs.
        rows: the float rows that lookups of these requests read.
        position_weights: the float weights of modules with weights by position.
    """

    def __init__(self, predictor: Predictor, rows: FloatRows, position_weights: PositionWeights) -> None:
        self.predictor = predictor
        self.manifest = predictor.manifest
        self.rows = rows
        self._position_weights = position_weights

    def with_rows(self, rows: Mapping[tuple[str, str], Tensor]) -> FloatModel:
        """A copy with other rows for the same ids: (module path, table) -> float32 [ids, dim]."""
        return FloatModel(self.predictor, self.rows.with_rows(rows), self._position_weights)

    def embeddings(self, request: Request) -> list[FloatVectors]:
        """The float embeddings of a request, in the order of ``Predictor.replay``."""
        looked_up = self.predictor.looked_up(request)
        found: list[FloatVectors] = []
        for module in self.manifest.modules:
            found += _module_floats(
                self.manifest, module, self.rows, looked_up, self._position_weights.get(module.path, {})
            )
        return found

    def outputs(
        self, request: Request, embeddings: Sequence[FloatVectors], vectors: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        """The dense program's outputs for a request's embeddings, or for other ``vectors`` in their place."""
        given = [e.vectors for e in embeddings] if vectors is None else vectors
        return self.predictor.run_dense_on(request, given, [e.lengths for e in embeddings])

    def compare(self, request: Request, answer: Answer) -> tuple[float, list[Tensor]]:
        """The largest difference of an answer's embeddings from the float ones, and the float model's outputs.

        Raises:
            ArchiveError: an embedding differs by more than its precision allows: a bug, or a damaged disk.
        """
        worst = 0.0
        found = self.embeddings(request)
        for expected, vectors in zip(found, answer.embeddings, strict=True):
            difference = (vectors - expected.vectors).abs()
            if difference.numel() and not bool((difference <= expected.bound).all()):
                raise ArchiveError(
                    f"module {expected.module!r}, {expected.name}: the archive's embeddings differ from the float model's by "
                    f"{float(difference.max()):.3g}; its precision allows {float(expected.bound.max()):.3g}",
                    rule="C2",
                )
            worst = max([worst, *difference.flatten().tolist()])
        return worst, self.outputs(request, found)

    def largest_errors(self, requests: Sequence[Request], answers: Sequence[Answer]) -> tuple[float, float | None]:
        """The largest difference of embeddings, and of outputs (None without a dense part), over all requests.

        Raises:
            ArchiveError: see :meth:`compare`.
        """
        worst = worst_output = 0.0
        for request, answer in zip(requests, answers):
            difference, outputs = self.compare(request, answer)
            worst = max(worst, difference)
            for a, b in zip(answer.outputs, outputs, strict=True):
                worst_output = max([worst_output, *(a - b).abs().flatten().tolist()])
        return worst, None if self.manifest.dense is None else worst_output


def table_columns(manifest: Manifest) -> Iterator[tuple[TableInfo, int, slice]]:
    """(table, number of the tensor, columns) of each table's vectors in :meth:`FloatModel.embeddings`."""
    place = 0
    for module in manifest.modules:
        column = 0
        for table in manifest.module_tables(module.path):
            num = len(table.features)
            if module.kind == "sequence":
                yield from ((table, place + i, slice(0, table.dim)) for i in range(num))
                place += num
            else:
                yield table, place, slice(column, column + table.dim * num)
                column += table.dim * num
        place += module.kind != "sequence"


def _module_floats(
    manifest: Manifest, module: ModuleInfo, rows: FloatRows, request: Request, weights: Mapping[str, Tensor]
) -> list[FloatVectors]:
    features = [(t, f) for t in manifest.module_tables(module.path) for f in t.features]
    if module.kind == "sequence":
        parts = []
        for table, name in features:
            bag = request.features[name]
            vectors = rows.rows(table, bag.values())
            parts.append(FloatVectors(module.path, name, vectors, rounding_bound(table, vectors), bag.lengths().long()))
        return parts
    pooled = [_pooled(table, rows, request.features[name], module, weights.get(name)) for table, name in features]
    both = (torch.cat(parts, 1) for parts in zip(*pooled))
    return [FloatVectors(module.path, "pooled", next(both), next(both), None)]


def rounding_bound(table: TableInfo, vectors: Tensor) -> Tensor:
    """Largest rounding error per element of whole rows [N, dim], which are the float ones or the stored ones."""
    if not vectors.shape[0]:
        return torch.zeros_like(vectors)
    return row_format(table.data_type).rounding_bound(vectors).expand_as(vectors)


def _pooled(
    table: TableInfo, rows: FloatRows, bag: JaggedTensor, module: ModuleInfo, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    lengths = bag.lengths().long()
    vectors = rows.rows(table, bag.values())
    bound = rounding_bound(table, vectors)
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    if module.is_weighted:
        if module.position_weights is None:
            weight = bag.weights()
        elif positions is None:
            weight = torch.ones(len(vectors))
        else:
            weight = positions.float()[torch.arange(len(vectors)) - (lengths.cumsum(0) - lengths)[sample]]
        vectors, bound = vectors * weight.unsqueeze(1), bound * weight.abs().unsqueeze(1)
    total = torch.zeros(len(lengths), table.dim).index_add_(0, sample, vectors)
    allowed = torch.zeros(len(lengths), table.dim).index_add_(0, sample, bound)
    if table.pooling == "mean":
        count = lengths.clamp(min=1).unsqueeze(1)
        total, allowed = total / count, allowed / count
    return total, allowed
