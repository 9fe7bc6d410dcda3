"""Opening what several verbs start from: a checkpoint with its module on meta, and precisions by table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.options import parse_pair

if TYPE_CHECKING:
    from torch import nn

    from recinfer.checkpoint import CheckpointReader
    from recinfer.modules.embedding_configs import DataType

__all__ = [
    "CheckpointOption",
    "ModelOption",
    "ReferenceOption",
    "TablePrecisionOption",
    "open_checkpoint",
    "parse_precisions",
]

CheckpointOption = Annotated[
    Path, typer.Option("--checkpoint", help="Folder of torch.distributed.checkpoint, or a .pt state dict.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MODULE:FUNCTION",
        help="Function that returns your nn.Module on meta; without it the checkpoint's model.json says.",
        show_default=False,
    ),
]
TablePrecisionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--table-precision",
        metavar="TABLE=PRECISION",
        help="Another precision for one table, named as `plan` and `inspect` print it (MODULE.TABLE), or for all tables of a name; repeatable.",
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        help="Inputs and float outputs recorded in training (.npz or .pt); write nothing if this model gives others.",
        show_default=False,
    ),
]


def open_checkpoint(path: Path, model_spec: str | None) -> tuple[CheckpointReader, nn.Module]:
    """The checkpoint at ``path`` and its module on meta, from ``model_spec`` or the checkpoint's own model.json."""
    from recinfer.checkpoint import CheckpointReader, resolve_model

    reader = CheckpointReader(path)
    return reader, resolve_model(model_spec) if model_spec else reader.build_model(device="meta")


def parse_precisions(pairs: list[str] | None) -> dict[str, DataType]:
    """``["t1=int4", ...]`` as {table: precision}; raises ConfigError for another form or an unknown precision."""
    from recinfer.modules.embedding_configs import DataType

    split = [parse_pair(pair, "--table-precision", "TABLE=PRECISION, as in clicks=int4") for pair in pairs or []]
    return {table: DataType.parse(precision) for table, precision in split}
