"""Options and helpers for commands that read a checkpoint: opening it with its model, and precisions by table."""

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
    "InputsOption",
    "ModelOption",
    "ReferenceOption",
    "TablePrecisionOption",
    "open_checkpoint",
    "parse_precisions",
]

CheckpointOption = Annotated[
    Path,
    typer.Option(
        "--checkpoint",
        help="Checkpoint: a .pt or .safetensors state dict, or a folder of torch's distributed checkpoints.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MODULE:FUNCTION",
        help="Function that returns your nn.Module on the meta device. Default: the model that the checkpoint's "
        "model.json describes.",
        show_default=False,
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE|PKG.MODULE:FUNCTION",
        help="Example batch: the arguments of forward as a file of torch.save (tensors in plain containers) or a function that "
        "returns them; a list of two batches tells which axes are free. Default: a made batch, for a forward that takes one "
        "float matrix and passes its sparse inputs on.",
        show_default=False,
    ),
]
TablePrecisionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--table-precision",
        metavar="TABLE=PRECISION",
        help="Precision of one table (MODULE.TABLE, as `plan` and `inspect` print it) or of all tables with a name; "
        "repeatable.",
    ),
]
ReferenceOption = Annotated[
    Path | None,
    typer.Option(
        "--reference",
        help="Inputs and float outputs recorded in training (.npz or .pt). Export fails if this model's outputs "
        "differ from them.",
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
