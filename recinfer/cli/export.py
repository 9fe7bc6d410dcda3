"""``recinfer export``: writes an archive from a checkpoint and a plan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.declared import takes_groups
from recinfer.cli.id_options import ExportIds
from recinfer.cli.inspect import describe_archive
from recinfer.cli.models import (
    CheckpointOption,
    InputsOption,
    ModelOption,
    ReferenceOption,
    TablePrecisionOption,
    open_checkpoint,
    parse_precisions,
)
from recinfer.cli.options import DataFormat, MissingShards, parse_pair
from recinfer.errors import ConfigError
from recinfer.excerpts import some
from recinfer.quant.formats.names import Precision
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from torch import nn

    from recinfer.capture import Captured
    from recinfer.distributed.planner.plan import Plan
    from recinfer.inference.report import ExportReport

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "export"
EXAMPLE = "Example: recinfer export --checkpoint movielens.ckpt --plan plan.json --out movielens.rqa"


@takes_groups
def run(
    checkpoint: CheckpointOption,
    out: Annotated[Path, typer.Option("--out", help="Archive folder to write, usually named *.rqa.")],
    model: ModelOption = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan from `recinfer plan`; it also sets the precisions.")
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(min=1, max=65536, help="Make a plan for this many CPU ranks instead of reading --plan."),
    ] = None,
    precision: Annotated[
        Precision | None, typer.Option(help="Element type of the stored rows.", show_default="int8, or the plan's")
    ] = None,
    table_precision: TablePrecisionOption = None,
    name: Annotated[
        str | None, typer.Option(help="Name that the model is served under.", show_default="the checkpoint's")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Version of the model.", show_default="the checkpoint's, or 1")
    ] = None,
    inputs: InputsOption = None,
    program: Annotated[
        Path | None,
        typer.Option(
            "--program",
            help="Program that recinfer/capture.py wrote where the model was trained, instead of --model and --inputs.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        list[str] | None,
        typer.Option(
            "--user",
            metavar="NAME",
            help="Input of the user (a feature or a tensor, as `inspect` names it); repeatable. What depends on these alone runs "
            "once for a request with a context, not once per candidate.",
        ),
    ] = None,
    eval_data: Annotated[
        Path | None,
        typer.Option(
            "--eval-data",
            help="Held-out rows to measure the AUC of the float and the quantized model on.",
            show_default=False,
        ),
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="Format of --eval-data.")] = DataFormat.criteo,
    eval_limit: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows of --eval-data.", show_default="all")
    ] = None,
    eval_output: Annotated[
        str | None, typer.Option(help="Name of the output that holds the logits, for models with several outputs.")
    ] = None,
    max_auc_drop: Annotated[
        float | None, typer.Option(min=0, help="Fail if quantization lowers the AUC on --eval-data by more than this.")
    ] = None,
    missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE=POLICY",
            help="Policy for a feature missing from a Predict request: reject, empty (no ids), or an id to use for "
            "every sample; repeatable. '*' means all other features.",
            show_default="reject",
        ),
    ] = None,
    out_of_range: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FEATURE=POLICY",
            help="Policy for an id outside its table: reject, or default (use the default row and count it); "
            "repeatable. '*' means all other features.",
            show_default="reject, or the feature contract's",
        ),
    ] = None,
    contract: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Feature contract by which raw rows become features: JSON of its to_dict().",
            show_default="the checkpoint's",
        ),
    ] = None,
    *,
    ids: ExportIds,
    reference: ReferenceOption = None,
    missing_shards: Annotated[
        MissingShards,
        typer.Option(
            help="What a ranker may do when a rank is unavailable: error, or default-rows (flagged in the response)."
        ),
    ] = MissingShards.error,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing archive.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Quantize and shard a checkpoint into an archive, and check the archive against the float model.

    Memory use is bounded: tables are read in chunks. An archive appears under --out only when it is complete.
    """
    from recinfer.archive.captured import collections_of, read_program
    from recinfer.checkpoint import CheckpointReader, resolve_inputs
    from recinfer.data.contract import FeatureContract
    from recinfer.inference.evaluation import EvalData
    from recinfer.inference.export import export_archive
    from recinfer.inference.recorded import RecordedReference

    if max_auc_drop is not None and eval_data is None:
        raise ConfigError("--max-auc-drop needs rows to measure on: give --eval-data FILE and --format FORMAT")
    output = Output(as_json)
    started = time.perf_counter()
    if program is not None and (model is not None or inputs is not None):
        raise ConfigError("got --program with --model or --inputs; a captured program has the model and its inputs")
    exported: nn.Module | Captured
    if program is None:
        reader, module = open_checkpoint(checkpoint, model)
        exported = module
    else:
        reader, exported = CheckpointReader(checkpoint), read_program(program)
        module = collections_of(exported)
    about = reader.model_json or {}
    given = reader.contract if contract is None else FeatureContract.read(contract)
    held_out = EvalData.read(eval_data, format.value, given, eval_limit) if eval_data else None
    recorded = None if reference is None else RecordedReference.read(reference)
    chosen = _plan(module, plan, world_size, precision, table_precision, ids.indexed(given))
    reports: list[ExportReport] = []

    def on_report(report: ExportReport) -> None:
        reports.append(report)
        output.show(report)

    archive = export_archive(
        exported,
        reader,
        chosen,
        out,
        name=name or about.get("name") or out.stem,
        version=version or about.get("version") or "1",
        contract=given,
        inputs=resolve_inputs(inputs) if inputs else (),
        user=user or (),
        missing=_missing(missing),
        out_of_range=_out_of_range(out_of_range),
        missing_shards=missing_shards.in_manifest,
        overwrite=overwrite,
        eval_data=held_out,
        eval_output=eval_output,
        max_auc_drop=max_auc_drop,
        reference=recorded,
        on_report=on_report,
        **ids.arguments,
    )
    manifest = archive.manifest
    worst = max(manifest.tables, key=lambda table: table.quantization.max_abs_error)
    error = f"largest error of a stored value {worst.quantization.max_abs_error:.2g}, in table {worst.full_name}"
    if manifest.dense is not None:
        colour = "green" if manifest.dense.engine == "onnx" else "yellow"
        output.show(Text.assemble("the dense part runs on ", (manifest.dense.runs_on, colour)))
    if manifest.string_features:
        output.show(Text(f"features that take strings: {some(sorted(manifest.string_features))}"))
    seconds = time.perf_counter() - started
    output.show(styled("green", "wrote", f" {out}  {size_text(manifest.bytes_total)}, {error}  {seconds:.1f} s"))
    output.finish(
        {**describe_archive(manifest), "archive": str(out), "report": reports[0].to_dict(), "seconds": seconds}
    )


def _missing(pairs: list[str] | None) -> dict[str, str | int]:
    """``["user=empty", "item=3"]`` as {feature: policy}, an id as a number."""
    split = [parse_pair(pair, "--missing", "FEATURE=empty, FEATURE=reject or FEATURE=ID") for pair in pairs or ()]
    return {feature: int(policy) if policy.isdecimal() else policy for feature, policy in split}


def _out_of_range(pairs: list[str] | None) -> dict[str, str]:
    """``["user=default"]`` as {feature: policy}, in the manifest's words."""
    split = [parse_pair(pair, "--out-of-range", "FEATURE=default or FEATURE=reject") for pair in pairs or ()]
    return {feature: "default_row" if policy == "default" else policy for feature, policy in split}


def _plan(
    module: nn.Module,
    path: Path | None,
    world_size: int | None,
    precision: Precision | None,
    table_precision: list[str] | None,
    indexed: Mapping[str, int],
) -> Plan:
    """The plan to export by: the file's, or one made now."""
    from recinfer.distributed.planner import Plan, plan_inference
    from recinfer.modules.embedding_configs import DataType

    per_table = parse_precisions(table_precision)
    if path is None:
        chosen = DataType.parse(precision or "int8")
        return plan_inference(
            module,
            world_size=world_size or 1,
            compute_device="cpu",
            precision=chosen,
            per_table_precision=per_table,
            indexed=indexed,
        )
    plan = Plan.load(path)
    if world_size not in (None, plan.world_size):
        raise ConfigError(
            f"--world-size {world_size}, but {path} is a plan for {plan.world_size} ranks; give only one of the two"
        )
    if per_table:
        raise ConfigError(
            "got --table-precision and --plan, but a plan sets the precisions; give --table-precision to `recinfer "
            "plan`"
        )
    other = sorted({t.precision.value for t in plan.tables} - {precision.upper()} if precision else ())
    if precision and other:
        raise ConfigError(
            f"--precision {precision}, but {path} is a plan for {', '.join(other).lower()}; run `recinfer plan "
            f"--precision {precision}`"
        )
    return plan
