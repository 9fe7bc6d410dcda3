"""``recinfer inspect``: shows the contents of an archive, a plan or a delta."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from recinfer.cli.archives import local_archive
from recinfer.cli.console import JsonOption, Output
from recinfer.errors import ConfigError, NotFoundError
from recinfer.printed import short_names, slim_table
from recinfer.remote.location import is_url
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.archive.delta import Delta
    from recinfer.archive.manifest import Manifest
    from recinfer.archive.part import ShownPart
    from recinfer.distributed.planner.plan import Plan

__all__ = ["EXAMPLE", "NAME", "archive_tables", "describe_archive", "describe_delta", "describe_plan", "run"]

NAME = "inspect"
EXAMPLE = "Example: recinfer inspect movielens.rqa --json | tail -1"


def run(
    path: Annotated[
        str,
        typer.Argument(help="Archive folder, or its URL; plan file (JSON) or delta (.rqd).", show_default=False),
    ],
    device: Annotated[
        str | None,
        typer.Option("--device", help="Also show which lookup kernel an archive would use on cpu or cuda, and why."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the contents of an archive, a plan file or an .rqd file: tables, shards, precisions, sizes and hashes.

    For a delta: the tables and rows that it changes, its size, and the archive and earlier delta that it applies to.
    """
    output = Output(as_json)
    kernel = None
    if device is not None:
        if device.partition(":")[0] not in ("cpu", "cuda"):
            raise ConfigError(f"--device {device}: expected cpu or cuda")
        from recinfer.quant.kernels import choose_kernel

        kernel = choose_kernel(device)
    at = local_archive(path, output, rows=False)
    if at.is_dir():
        from recinfer.archive.reader import open_archive
        from recinfer.inference.id_steps import SHOWN

        archive = open_archive(at, ranks=() if is_url(path) else None)
        manifest = archive.manifest
        output.show(*archive_tables(manifest))
        parts = [part for show in SHOWN if (part := show(archive)).entries]
        output.show(*map(_part_table, parts))
        if kernel is not None:
            output.show(f"lookups on {device}: {kernel.name} ({kernel.reason})")
        described: dict[str, Any] = {} if kernel is None else {"kernel": kernel.name, "kernel_reason": kernel.reason}
        output.finish({**describe_archive(manifest), **described, **{part.key: part.entries for part in parts}})
    elif at.suffix == ".rqd" and at.exists():
        from recinfer.archive.delta import read_delta

        delta = read_delta(at)
        output.show(*_delta_tables(delta, at.stat().st_size))
        output.finish(describe_delta(delta, at.stat().st_size))
    elif at.exists():
        from recinfer.distributed.planner.plan import Plan
        from recinfer.distributed.planner.stats import format_plan

        plan = Plan.load(at)
        output.show(*format_plan(plan))
        output.finish(describe_plan(plan))
    else:
        raise NotFoundError(f"{path} does not exist; expected an archive folder, a plan.json or a delta (.rqd)")


def _part_table(part: ShownPart) -> Table:
    table = slim_table(*part.columns, numbers=part.numbers, title=part.title)
    for cells in zip(*part.columns.values()):
        table.add_row(*map(Text, cells))
    return table


def describe_archive(manifest: Manifest) -> dict[str, Any]:
    """A summary of the manifest as plain data, the output of ``inspect --json`` for an archive."""
    from recinfer.archive.manifest import ENGINE_PACKAGES
    from recinfer.inference.results import input_specs

    dense = manifest.dense
    ids = None if manifest.signature is None else manifest.signature.ids
    return {
        "kind": "archive",
        "format_version": manifest.format_version,
        "model": manifest.model,
        "version": manifest.version,
        "created": manifest.created,
        "versions": manifest.versions,
        "precision": manifest.precision,
        "world_size": manifest.world_size,
        "plan_hash": manifest.plan_hash,
        "tables": [
            {
                "name": t.name,
                "module": t.module,
                "rows": t.rows,
                "dim": t.dim,
                "precision": t.precision,
                "pooling": t.pooling,
                "features": list(t.features),
                "sharding": t.sharding,
                "ranks": list(t.ranks),
                "max_abs_error": t.quantization.max_abs_error,
            }
            for t in manifest.tables
        ],
        "features": [asdict(feature) for feature in manifest.features],
        "num_dense": dense.num_dense if dense else 0,
        "outputs": [o.name for o in dense.outputs] if dense else [],
        "engine": ENGINE_PACKAGES[dense.engine] if dense else None,
        "engine_reason": dense.onnx_refused if dense and dense.engine == "torch" else None,
        "inputs": [{**asdict(spec), "facts": spec.facts} for spec in input_specs(manifest)],
        "computed_features": sorted(manifest.computed_features),
        "ids_engine": ENGINE_PACKAGES[ids.engine] if ids else None,
        "ids_engine_reason": ids.onnx_refused if ids and ids.engine == "torch" else None,
        "has_contract": manifest.contract is not None,
        "missing_shards": manifest.missing_shards,
        "num_files": len(manifest.files),
        "bytes_total": manifest.bytes_total,
    }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """A summary of the plan as plain data, the output of ``inspect --json`` for a plan."""
    return {
        "kind": "plan",
        "world_size": plan.world_size,
        "compute_device": plan.compute_device,
        "plan_hash": plan.hash,
        "tables": [
            {
                "name": t.table,
                "module": t.module,
                "rows": t.num_embeddings,
                "dim": t.embedding_dim,
                "precision": t.precision.value.lower(),
                "sharding": t.sharding_type,
                "compute_kernel": t.compute_kernel,
                "ranks": list(t.ranks),
            }
            for t in plan.tables
        ],
        "estimates": plan.estimates,
    }


def describe_delta(delta: Delta, num_bytes: int) -> dict[str, Any]:
    """A summary of a delta as plain data, the output of ``inspect --json`` for a delta.

    Args:
        num_bytes: size of the delta's file.
    """
    info = delta.info
    return {
        "kind": "delta",
        "format_version": info.format_version,
        "model": info.model,
        "version": info.version,
        "created": info.created,
        "sequence": info.sequence,
        "base": info.base,
        "previous": info.previous,
        "sha256": delta.sha256,
        "tables": [
            {"name": t.table, "module": t.module, "rows": t.rows, "bytes": t.rows * t.row_bytes} for t in info.tables
        ],
        "rows": delta.num_rows,
        "dense_files": [file.path for file in info.files],
        "num_bytes": num_bytes,
    }


def _delta_tables(delta: Delta, num_bytes: int) -> list[Table]:
    info = delta.info
    title = f"delta {info.sequence} of {info.model} {info.version}"
    about = Table(show_header=False, box=None, title=title, title_justify="left")
    about.add_row("created", info.created)
    about.add_row("archive", info.base)
    about.add_row("applies to", "the archive" if info.sequence == 1 else f"the archive after delta {info.previous}")
    about.add_row("size", f"{size_text(num_bytes)}, {delta.num_rows:,} rows of {len(info.tables)} tables")
    about.add_row("other files", ", ".join(file.path for file in info.files) or "none")
    tables = slim_table("table", "changed rows", "bytes", numbers=("changed rows", "bytes"))
    names = short_names([f"{t.module}.{t.table}" if t.module else t.table for t in info.tables])
    for name, t in zip(names, info.tables):
        tables.add_row(name, f"{t.rows:,}", size_text(t.rows * t.row_bytes))
    return [about, tables]


def archive_tables(manifest: Manifest) -> list[Table]:
    about = Table(show_header=False, box=None, title=f"{manifest.model} {manifest.version}", title_justify="left")
    dense = manifest.dense
    built = ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items()))
    about.add_row("format", str(manifest.format_version))
    about.add_row("created", f"{manifest.created}  ({built})")
    about.add_row("precision", manifest.precision)
    about.add_row("ranks", str(manifest.world_size))
    about.add_row("plan", manifest.plan_hash)
    about.add_row("size", f"{size_text(manifest.bytes_total)} in {len(manifest.files)} files")
    if dense:
        outputs = ", ".join(o.name for o in dense.outputs)
        about.add_row("dense part", f"{dense.num_dense} dense inputs -> {outputs}, runs on {dense.runs_on}")
    if manifest.signature is not None and manifest.signature.ids is not None:
        ids = manifest.signature.ids
        about.add_row("ids program", f"ids of {', '.join(ids.features)}, runs on {ids.runs_on}")
    if manifest.signature is not None and manifest.signature.user is not None:
        names = ", ".join(manifest.signature.user.names)
        about.add_row(
            "user", f"{names}: the part of these alone runs once for a request that gives them as its context"
        )
    about.add_row("raw rows", "yes, the archive has a feature contract" if manifest.contract else "no feature contract")
    if manifest.missing_shards == "default_rows":
        about.add_row("missing shards", "default rows instead, flagged")
    headings = ("table", "features", "rows", "dim", "precision", "pooling", "sharding", "ranks", "max\nerror")
    tables = slim_table(*headings, numbers=("rows", "dim", "max\nerror"))
    for name, t in zip(short_names([t.full_name for t in manifest.tables]), manifest.tables):
        error = f"{t.quantization.max_abs_error:.2g}"
        ranks = ", ".join(map(str, t.ranks))
        features = ", ".join(t.features)
        tables.add_row(name, features, f"{t.rows:,}", str(t.dim), t.precision, t.pooling, t.sharding, ranks, error)
    return [about, tables, *_inputs(manifest), _policies(manifest)]


def _inputs(manifest: Manifest) -> list[Table]:
    """The inputs of forward as requests name them; no table for an archive without a signature."""
    from recinfer.inference.results import input_specs

    specs = input_specs(manifest)
    if not specs:
        return []
    table = slim_table("input", "path", "kind", "dtype", "shape", "facts")
    for spec in specs:
        kind = f"{spec.kind}, weighted" if spec.weighted else spec.kind
        sizes = ", ".join("any" if size.startswith("values of ") else size for size in map(str, spec.shape))
        table.add_row(spec.name, spec.path, kind, spec.dtype, f"[{sizes}]", spec.facts)
    return [table]


def _policies(manifest: Manifest) -> Table:
    """The policies for missing features and out-of-range ids, one table row for all features with the same policies."""
    by_policy: dict[tuple[str, str], list[str]] = {}
    for f in manifest.features:
        missing = f"id {f.missing}" if isinstance(f.missing, int) else f.missing
        out_of_range = "reject" if f.out_of_range == "reject" else f"row {f.default_row}"
        by_policy.setdefault((missing, out_of_range), []).append(f.name)
    policies = slim_table("missing in Predict", "id out of range", "features")
    for (missing, out_of_range), names in by_policy.items():
        policies.add_row(missing, out_of_range, ", ".join(names))
    return policies
