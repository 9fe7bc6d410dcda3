"""The report of an export: error and size of each table and, with held-out rows, the change in model quality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from recinfer.archive.manifest import Manifest
from recinfer.inference.comparison import Comparison
from recinfer.inference.evaluation import Evaluation
from recinfer.inference.results import input_specs
from recinfer.printed import Printed, rich_text, short_names, slim_table
from recinfer.quant.rows import row_bytes
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table

__all__ = ["ExportReport", "TableReport", "make_report"]

_NOT_COMPARED = (
    "compared only with the float model that was exported; a reference (--reference FILE) also compares with "
    "outputs recorded in training"
)


@dataclass(frozen=True)
class TableReport:
    """The bytes of one table in the checkpoint and in the archive, and the errors of its stored values over all rows.

    ``relative_error`` is the root mean square of the error over that of the weights.
    """

    table: str
    precision: str
    rows: int
    dim: int
    bytes_before: int
    bytes_after: int
    max_abs_error: float
    rms_error: float
    relative_error: float


@dataclass(frozen=True)
class ExportReport(Printed):
    """The report of an export, which prints as tables.

    Attributes:
        tables: size and error of each table.
        evaluation: of held-out rows, if the export had some.
        reference: the comparison with recorded outputs, if the export had some.
        notes: what the export took for granted about the inputs, a sentence each.
    """

    tables: tuple[TableReport, ...]
    evaluation: Evaluation | None
    reference: Comparison | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        data = asdict(self)
        data["reference"] = None if self.reference is None else self.reference.to_dict()
        if self.evaluation is not None:
            data["evaluation"]["auc_drop"] = self.evaluation.auc_drop
        return data

    def __rich__(self) -> Group:
        from rich.console import Group

        parts: list[RenderableType] = [self._table_of_tables()]
        if self.evaluation is not None:
            parts.append(_table_of_quality(self.evaluation))
        parts.append(_NOT_COMPARED if self.reference is None else self.reference)
        return Group(*parts, *self.notes)

    def __str__(self) -> str:
        return rich_text(self)

    def _table_of_tables(self) -> Table:
        numbers = ("rows", "dim", "before", "after", "max\nerror", "RMS", "relative")
        table = slim_table("table", "precision", *numbers, numbers=numbers)
        for name, t in zip(short_names([t.table for t in self.tables]), self.tables):
            table.add_row(
                name,
                t.precision,
                f"{t.rows:,}",
                str(t.dim),
                size_text(t.bytes_before),
                size_text(t.bytes_after),
                *(f"{error:.2g}" for error in (t.max_abs_error, t.rms_error, t.relative_error)),
            )
        return table


def _table_of_quality(found: Evaluation) -> Table:
    from rich.table import Table

    table = Table(f"{found.rows:,} held-out rows", "float", "quantized", "difference")
    for name, what in (("AUC", "auc"), ("log-loss", "log_loss"), ("normalized entropy", "normalized_entropy")):
        before, after = getattr(found.float_model, what), getattr(found.quantized_model, what)
        table.add_row(name, f"{before:.5f}", f"{after:.5f}", f"{after - before:+z.5f}")
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def make_report(
    manifest: Manifest,
    element_bytes: Mapping[tuple[str, str], int],
    evaluation: Evaluation | None,
    reference: Comparison | None = None,
) -> ExportReport:
    """The report; ``element_bytes`` is a table's (module path, name) -> bytes of a number in the checkpoint."""
    tables = tuple(
        TableReport(
            table=t.full_name,
            precision=t.precision,
            rows=t.rows,
            dim=t.dim,
            bytes_before=t.rows * t.dim * element_bytes[t.module, t.name],
            bytes_after=t.rows * row_bytes(t.dim, t.data_type),
            max_abs_error=t.quantization.max_abs_error,
            rms_error=t.quantization.rms_error,
            relative_error=t.quantization.relative_error,
        )
        for t in manifest.tables
    )
    return ExportReport(tables, evaluation, reference, tuple(_fixed_inputs(manifest)))


def _fixed_inputs(manifest: Manifest) -> Iterator[str]:
    """Notes on tensors whose first axis is not the batch: an example batch cannot tell whether it may vary."""
    for spec in input_specs(manifest):
        if spec.is_shared and spec.shape and spec.shape[0] != 1:
            yield (
                f"input {spec.name!r} is taken as one tensor {spec.expected()} for all samples, as in the example batch; two "
                f"example batches of different sizes tell whether its sizes may vary"
            )
