"""Computes the float model's answers to the golden requests, which an export is checked against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from recinfer.archive.check import Answer, Request
from recinfer.archive.manifest import Manifest, ModuleInfo, TableInfo
from recinfer.errors import ArchiveError
from recinfer.inference.predictor import Predictor
from recinfer.quant.formats.registry import row_format
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["FloatRows", "compare_with_float", "float_embeddings", "rounding_bound"]


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


def compare_with_float(
    predictor: Predictor,
    rows: FloatRows,
    requests: Sequence[Request],
    answers: Sequence[Answer],
    position_weights: Mapping[str, Mapping[str, Tensor]],
) -> tuple[float, float | None]:
    """The largest difference of embeddings and of outputs from the float model's.

    Raises:
        ArchiveError: an embedding differs by more than its precision allows: a bug, or a damaged disk.
    """
    manifest = predictor.manifest
    worst = worst_output = 0.0
    for request, answer in zip(requests, answers):
        floats: list[Tensor] = []
        lengths: list[Tensor | None] = []
        place = 0
        for module in manifest.modules:
            parts = _module_floats(manifest, module, rows, request, position_weights.get(module.path, {}))
            for name, expected, bound, sequence_lengths in parts:
                difference = (answer.embeddings[place] - expected).abs()
                if difference.numel() and not bool((difference <= bound).all()):
                    raise ArchiveError(
                        f"module {module.path!r}, {name}: the archive's embeddings differ from the float model's by "
                        f"{float(difference.max()):.3g}; its precision allows {float(bound.max()):.3g}",
                        rule="C2",
                    )
                worst = max([worst, *difference.flatten().tolist()])
                floats.append(expected)
                lengths.append(sequence_lengths)
                place += 1
        for a, b in zip(answer.outputs, predictor.run_dense_on(request.dense, floats, lengths), strict=True):
            worst_output = max([worst_output, *(a - b).abs().flatten().tolist()])
    return worst, None if manifest.dense is None else worst_output


def float_embeddings(
    manifest: Manifest, rows: FloatRows, request: Request, position_weights: Mapping[str, Mapping[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """The float model's embeddings for a request, as ``Predictor.replay`` orders them, and the lengths of sequences."""
    vectors: list[Tensor] = []
    lengths: list[Tensor | None] = []
    for module in manifest.modules:
        parts = _module_floats(manifest, module, rows, request, position_weights.get(module.path, {}))
        vectors += [found for _, found, _, _ in parts]
        lengths += [counts for _, _, _, counts in parts]
    return vectors, lengths


def _module_floats(
    manifest: Manifest, module: ModuleInfo, rows: FloatRows, request: Request, weights: Mapping[str, Tensor]
) -> list[tuple[str, Tensor, Tensor, Tensor | None]]:
    """(name, float vectors, largest allowed difference, lengths of a sequence) for each tensor of the answer."""
    features = [(t, f) for t in manifest.module_tables(module.path) for f in t.features]
    if module.kind == "sequence":
        parts: list[tuple[str, Tensor, Tensor, Tensor | None]] = []
        for table, name in features:
            bag = request.features[name]
            vectors = rows.rows(table, bag.values())
            parts.append((name, vectors, rounding_bound(table, vectors), bag.lengths().long()))
        return parts
    pooled, bounds = [], []
    for table, name in features:
        vectors, bound = _pooled(table, rows, request.features[name], module, weights.get(name))
        pooled.append(vectors)
        bounds.append(bound)
    return [("pooled", torch.cat(pooled, 1), torch.cat(bounds, 1), None)]


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
