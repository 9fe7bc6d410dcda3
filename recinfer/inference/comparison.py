"""Compares a model's outputs with outputs that another program recorded for the same inputs.

There are two comparisons:

* At export, the checkpoint's float rows are available. Float rows through the exported dense program must give the
  recorded outputs up to the rounding of float32 sums; each embedding of the archive must be as near to the float one as
  its precision allows.
* An archive has only quantized rows. Each element of a row is within half a step of its float value, so the dense
  program is run on rows moved up or down by that, at random: the root mean square change of an output, times
  ``_DEVIATIONS``, bounds the difference from the float model's output. Rounding errors are uniform over the step, so the
  bound is 7 of their standard deviations, for any dense program, shared tables and repeated ids. On a flat part of the
  program (a saturated sigmoid) small moves change nothing: rows are therefore also moved by ``_DEVIATIONS`` times as
  much, and the larger result is used.

TorchRec pools a table of FP16 or BF16 rows in that type: it rounds weights, sums and means. In both comparisons, vectors
that were pooled from rows which a 16-bit type holds are moved as well, by what it rounds off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest, TableInfo
from recinfer.archive.positions import read_position_tensors
from recinfer.archive.reader import Archive, open_archive
from recinfer.archive.rows import RowReader
from recinfer.inference.float_model import FloatModel, FloatRows, rounding_bound, table_columns
from recinfer.inference.predictor import Predictor
from recinfer.inference.recorded import RecordedBatch, RecordedReference
from recinfer.quant.rows import unpack_rows

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

__all__ = ["Comparison", "RowDifference", "compare_archive", "compare_export"]

_RELATIVE = 1e-4  # share of an output's largest recorded value, for float32 sums in another order
_ABSOLUTE = 1e-6
_DRAWS = 16
_DEVIATIONS = 4.0
_SHOWN = 10
_GAP = 64  # rows of a table that are read rather than skipped
_SMALL = 0.01  # share of the largest recorded value; other blocks, other weights or dropout differ by more


@dataclass(frozen=True)
class RowDifference:
    """The largest difference in one output of one recorded row that exceeds its bound."""

    row: int
    output: str
    recorded: float
    found: float
    difference: float
    bound: float


@dataclass(frozen=True)
class Comparison:
    """The comparison of recorded outputs with a model's outputs.

    Attributes:
        reference: the file's name.
        model: the compared model: ``"float"``, the checkpoint's float model as an export built it, or ``"archive"``.
        rows, num_wrong: recorded rows; those with an output over its bound.
        max_difference: largest difference of the compared model from the record.
        max_bound: the largest difference that was allowed.
        archive_difference: largest difference of the archive from the record; with ``"float"`` this is the effect of
            the precision.
        wrong: rows over their bound, the furthest over it first, at most 10.
        blunt: outputs for which the precision allows more than the standard deviation of the recorded values (of one
            recorded row: than the values), so that a wrong model may pass.
        largest_recorded: largest absolute recorded value of any output.
    """

    reference: str
    model: Literal["float", "archive"]
    rows: int
    num_wrong: int
    max_difference: float
    max_bound: float
    archive_difference: float
    wrong: tuple[RowDifference, ...]
    blunt: tuple[str, ...]
    largest_recorded: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every recorded output is within its bound, and no bound exceeds the spread of the recorded values."""
        return not self.num_wrong and not self.blunt

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {"ok": self.ok, **asdict(self)}

    def message(self) -> str:
        """The reason why :attr:`ok` is false: the worst difference with its usual causes, or bounds that prove little."""
        if not self.wrong:
            return (
                f"this comparison proves little for {', '.join(self.blunt)}: the precision's bound (at most {self.max_bound:.3g}) "
                f"exceeds the standard deviation of the recorded values, so that other weights would pass too. Compare at "
                f"export, where the float rows are available (recinfer export --reference), or give the tables a wider precision"
            )
        worst = self.wrong[0]
        explains = "float32 arithmetic" if self.model == "float" else "the archive's precision"
        if worst.difference <= _SMALL * self.largest_recorded:
            causes = (
                f"So small a difference (the largest recorded value is {self.largest_recorded:.3g}) is usually one of arithmetic: "
                "outputs recorded under autocast or with TF32, or with a checkpoint of another step"
            )
        else:
            causes = (
                "The usual cause: forward concatenates pooled.values(). TorchRec's "
                "DistributedModelParallel gives its blocks in the order of the sharding, recinfer in the order of the module's "
                "features; take them by name, torch.cat([pooled[name] for name in NAMES], dim=1), with NAMES as "
                "pooled.keys() printed them in training. Other causes: outputs recorded in training mode (dropout, batch norm), "
                "under autocast, or with other weights than the checkpoint's"
            )
        return (
            f"{self.num_wrong} of {self.rows} rows of {self.reference} have other outputs than this model: row {worst.row}, "
            f"output {worst.output!r}: recorded {worst.recorded:.6g}, got {worst.found:.6g}, a difference of "
            f"{worst.difference:.3g} where {explains} allows {worst.bound:.3g}. {causes}"
        )

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        what = "the float model" if self.model == "float" else "the archive"
        summary = (
            f"reference {self.reference}: {self.rows - self.num_wrong} of {self.rows} rows agree; {what} is off by at most "
            f"{self.max_difference:.3g}, allowed is {self.max_bound:.3g}"
        )
        if self.model == "float" and self.ok:
            summary += f"; the archive is off by at most {self.archive_difference:.3g}"
        parts: list[RenderableType] = [Text(summary)]
        if self.wrong:
            table = Table("row", "output", "recorded", what.removeprefix("the "), "difference", "bound")
            for w in self.wrong:
                numbers = (f"{n:.6g}" for n in (w.recorded, w.found, w.difference, w.bound))
                table.add_row(str(w.row), w.output, *numbers)
            for column in (0, 2, 3, 4, 5):
                table.columns[column].justify = "right"
            parts.append(table)
        return Group(*parts)


def compare_archive(path: str | os.PathLike[str], reference: RecordedReference) -> Comparison:
    """Compare an archive with recorded float outputs, within the bounds of its precision.

    Raises:
        ArchiveError: the archive breaks a rule of FORMAT.md.
        ConfigError, InputError: the reference does not fit the model, or the dense part cannot run on its rows.
    """
    archive = open_archive(path)
    manifest = archive.manifest
    batches = reference.batches(manifest)
    predictor = Predictor(archive)
    looked_up = [predictor.looked_up(batch.request) for batch in batches]
    stored, bounds = _stored_rows(archive, FloatRows(manifest, looked_up))
    draws = _Draws(FloatModel(predictor, stored, read_position_tensors(archive)), bounds)
    tally = _Tally(reference, manifest, batches, "archive")
    for batch in batches:
        found = predictor.replay(batch.request).outputs
        tally.add(batch, found, found, draws.allowed(batch.request, found))
    return tally.comparison()


def compare_export(model: FloatModel, reference: RecordedReference, batches: Sequence[RecordedBatch]) -> Comparison:
    """Compare the float model of a checkpoint with recorded outputs, and the archive's embeddings with the float model's.

    Args:
        model: the archive that is being written and its float model, with the float rows of the recorded ids.
        batches: ``reference.batches`` of the archive's manifest.

    Raises:
        ArchiveError: an embedding of the archive differs by more than its precision allows.
        ConfigError: the dense part cannot run on recorded rows.
    """
    manifest, rows = model.manifest, model.rows
    exact = {
        (table.module, table.name): torch.zeros_like(rows.rows(table, rows.ids(table))) for table in manifest.tables
    }
    draws = _Draws(model, exact)
    tally = _Tally(reference, manifest, batches, "float")
    for batch in batches:
        answer = model.predictor.replay(batch.request)
        _, found = model.compare(batch.request, answer)
        tally.add(batch, found, answer.outputs, draws.allowed(batch.request, found))
    return tally.comparison()


class _Tally:
    """Counts the rows that exceed their bounds, and keeps the worst differences."""

    def __init__(
        self,
        reference: RecordedReference,
        manifest: Manifest,
        batches: Sequence[RecordedBatch],
        model: Literal["float", "archive"],
    ) -> None:
        assert manifest.dense is not None
        self._reference = reference
        self._model = model
        self._outputs = [output.name for output in manifest.dense.outputs]
        recorded = [torch.cat([batch.outputs[i] for batch in batches]) for i in range(len(self._outputs))]
        self._tight = [_RELATIVE * float(r.abs().max()) + _ABSOLUTE if r.numel() else _ABSOLUTE for r in recorded]
        self._spread = [_spread(r) for r in recorded]
        self._largest = max(_largest(r.abs()) for r in recorded)
        self._rows = sum(len(batch.outputs[0]) for batch in batches)
        self._num_wrong = 0
        self._differences = [0.0]
        self._bounds = [0.0]
        self._archive = [0.0]
        self._median_bounds: list[list[float]] = [[] for _ in self._outputs]
        self._wrong: list[tuple[float, RowDifference]] = []

    def add(
        self, batch: RecordedBatch, found: Sequence[Tensor], archive: Sequence[Tensor], allowed: Sequence[Tensor]
    ) -> None:
        """Compare one batch of the model's outputs ``found``; ``allowed`` is added to the bound of float32 sums."""
        rows = len(batch.outputs[0])
        wrong = torch.zeros(rows, dtype=torch.bool)
        for i, name in enumerate(self._outputs):
            here, recorded = found[i].reshape(rows, -1), batch.outputs[i].reshape(rows, -1)
            if not here.shape[1]:
                continue
            bound = allowed[i].reshape(rows, -1) + self._tight[i]
            difference = (here - recorded).abs()
            over = ~(difference <= bound)  # also true for NaN
            excess = torch.where(over, (difference / bound).nan_to_num(torch.inf, torch.inf), 0.0)
            self._differences.append(_largest(difference))
            self._bounds.append(_largest(bound))
            self._archive.append(_largest((archive[i].reshape(rows, -1) - recorded).abs()))
            self._median_bounds[i].append(float(bound.median()))
            wrong |= over.any(1)
            worst, column = excess.max(1)
            for row in worst.argsort(descending=True, stable=True)[:_SHOWN].tolist():
                if worst[row] > 0:
                    at = row, int(column[row])
                    numbers = (float(t[at]) for t in (recorded, here, difference, bound))
                    self._wrong.append((float(worst[row]), RowDifference(batch.first_row + row, name, *numbers)))
        self._num_wrong += int(wrong.sum())
        self._wrong = sorted(self._wrong, key=lambda pair: -pair[0])[:_SHOWN]

    def comparison(self) -> Comparison:
        """The comparison of all added batches."""
        blunt = tuple(
            name
            for name, bounds, spread in zip(self._outputs, self._median_bounds, self._spread)
            if self._model == "archive" and bounds and max(bounds) > spread
        )
        return Comparison(
            reference=self._reference.path,
            model=self._model,
            rows=self._rows,
            num_wrong=self._num_wrong,
            max_difference=_largest(torch.tensor(self._differences)),
            max_bound=_largest(torch.tensor(self._bounds)),
            archive_difference=_largest(torch.tensor(self._archive)),
            wrong=tuple(row for _, row in self._wrong),
            blunt=blunt,
            largest_recorded=self._largest,
        )


def _largest(values: Tensor) -> float:
    """The largest value; NaN if any value is NaN."""
    return float(values.max()) if values.numel() else 0.0


def _spread(recorded: Tensor) -> float:
    """The largest standard deviation of recorded values [B, ...] over the rows; of one row, its largest size."""
    return _largest(recorded.std(0) if len(recorded) > 1 else recorded.abs())


class _Draws:
    """The allowed differences of outputs, from random changes of the recorded ids' rows within their bounds.

    Args:
        model: the model with the rows as they are.
        bounds: (module path, table) -> the largest error of each element, [ids, dim].
    """

    def __init__(self, model: FloatModel, bounds: Mapping[tuple[str, str], Tensor]) -> None:
        manifest, stored = model.manifest, model.rows
        half = {(t.module, t.name): _half_precision(stored.rows(t, stored.ids(t))) for t in manifest.tables}
        self._pooling = _pooling_errors(manifest, half)
        bounds = dict(bounds)
        for module in manifest.modules:
            for table in manifest.module_tables(module.path):
                key = table.module, table.name
                if module.is_weighted and half[key]:  # weights were rounded to the rows' type
                    bounds[key] = bounds[key] + half[key] * stored.rows(table, stored.ids(table)).abs()
        exact = not any(half.values()) and not any(bool(bound.any()) for bound in bounds.values())
        self._generator = torch.Generator().manual_seed(0)
        self._models = [
            []
            if exact
            else [
                model.with_rows(_shifted_rows(manifest, stored, bounds, self._generator, scale)) for _ in range(_DRAWS)
            ]
            for scale in (1.0, _DEVIATIONS)
        ]

    def allowed(self, request: Request, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The largest allowed difference of each output element, apart from the rounding of float32 sums."""
        near, far = self._models
        if not near:
            return [torch.zeros_like(output) for output in outputs]
        little = self._root_mean_squares(request, near, 1.0, outputs)
        much = self._root_mean_squares(request, far, _DEVIATIONS, outputs)
        return [torch.maximum(_DEVIATIONS * a, b) for a, b in zip(little, much)]

    def _root_mean_squares(
        self, request: Request, draws: Sequence[FloatModel], scale: float, outputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """The root mean square change of each output element over the draws of rows."""
        squares = [torch.zeros_like(output) for output in outputs]
        for model in draws:
            embeddings = model.embeddings(request)
            vectors = [part.vectors for part in embeddings]
            for place, error in self._pooling:
                vectors[place] = vectors[place] * (1 + scale * error * _signs(vectors[place], self._generator))
            moved = model.outputs(request, embeddings, vectors)
            for total, there, here in zip(squares, moved, outputs):
                total += (there - here).square()
        return [(total / len(draws)).sqrt() for total in squares]


def _half_precision(rows: Tensor) -> float:
    """The largest relative rounding error of a 16-bit type that holds all of these rows exactly; 0 if none does."""
    if not rows.numel():
        return 0.0
    fitting = [dtype for dtype in (torch.bfloat16, torch.float16) if torch.equal(rows.to(dtype).float(), rows)]
    return torch.finfo(fitting[0]).eps / 2 if fitting else 0.0


def _pooling_errors(manifest: Manifest, half: Mapping[tuple[str, str], float]) -> list[tuple[int, Tensor]]:
    """(place in ``FloatModel.embeddings``, relative error of each column [D]) of pooled vectors that training may have
    rounded: a sum once, a mean twice."""
    pooled = {module.path for module in manifest.modules if module.kind != "sequence"}
    errors: dict[int, list[Tensor]] = {}
    for table, place, columns in table_columns(manifest):
        if table.module in pooled:
            error = 2 * half[table.module, table.name]
            errors.setdefault(place, []).append(torch.full((columns.stop - columns.start,), error))
    return [(place, torch.cat(parts)) for place, parts in errors.items() if any(bool(part.any()) for part in parts)]


def _signs(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator) * 2 - 1


def _stored_rows(archive: Archive, rows: FloatRows) -> tuple[FloatRows, dict[tuple[str, str], Tensor]]:
    """The archive's rows of these ids as float32, and the rounding bound of each element, both [ids, dim]."""
    bounds = {}
    with RowReader(archive) as reader:
        for table in archive.manifest.tables:
            planned = archive.plan.table(table.module, table.name)
            ids = rows.ids(table)
            for first, last in _runs(ids):
                start, stop = int(ids[first]), int(ids[last - 1]) + 1
                packed = reader.read(planned, start, stop)
                rows.collect(table.module, table.name, start, unpack_rows(packed, table.dim, table.data_type))
            bounds[table.module, table.name] = rounding_bound(table, rows.rows(table, ids))
    return rows, bounds


def _runs(ids: Tensor) -> list[tuple[int, int]]:
    """Split ascending ids at large gaps into runs: (first, last) positions."""
    cuts = ((ids[1:] - ids[:-1]) > _GAP).nonzero().flatten() + 1
    edges = [0, *cuts.tolist(), len(ids)]
    return [(first, last) for first, last in pairwise(edges) if first < last]


def _shifted_rows(
    manifest: Manifest,
    stored: FloatRows,
    bounds: Mapping[tuple[str, str], Tensor],
    generator: torch.Generator,
    scale: float,
) -> dict[tuple[str, str], Tensor]:
    """The rows with each element moved up or down at random by ``scale`` times its bound."""

    def moved(table: TableInfo) -> Tensor:
        bound = bounds[table.module, table.name]
        return stored.rows(table, stored.ids(table)) + scale * _signs(bound, generator) * bound

    return {(table.module, table.name): moved(table) for table in manifest.tables}
