"""``recinfer demo``: runs all stages of the pipeline and measures the served model through the gRPC client."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table

from recinfer.cli.console import JsonOption, Output, styled
from recinfer.cli.declared import takes_groups
from recinfer.cli.id_options import DemoIds, ExportIds
from recinfer.cli.measure import Latency, Quality, measure_latency, quality_of, served_logits
from recinfer.cli.options import DataFormat
from recinfer.errors import ArchiveError
from recinfer.serving.server_process import served
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.archive.manifest import Manifest
    from recinfer.data.dataset import Dataset
    from recinfer.distributed.planner import Plan

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "demo"
EXAMPLE = "Example: recinfer demo --data ratings.inter --format movielens"

_REQUESTS = 300  # requests of each kind and batch size, for the latencies
_BATCHES = (1, 32)
_EPOCHS = {DataFormat.synthetic: 1, DataFormat.criteo: 4, DataFormat.movielens: 2}
_LIMITS = {DataFormat.synthetic: 100_000}


@takes_groups
def run(
    data: Annotated[
        Path | None, typer.Option("--data", help="File with the rows to train on. Default: synthetic rows.")
    ] = None,
    format: Annotated[DataFormat, typer.Option("--format", help="Format of the rows.")] = DataFormat.synthetic,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Folder to keep checkpoint, plan and archive in.", show_default="a temporary folder"
        ),
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of ranks to shard over.")] = 2,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Passes over the training split.", show_default="by format")
    ] = None,
    embedding_dim: Annotated[int, typer.Option(min=1, help="Embedding dimension of every table.")] = 16,
    limit: Annotated[
        int | None, typer.Option(min=20, help="Use only the first N rows.", show_default="by format")
    ] = None,
    *,
    ids: DemoIds,
    seed: Annotated[int, typer.Option(help="Random seed of the rows, the split and the initial weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Run the whole pipeline on this machine: train, plan, export to INT8, verify, serve and query.

    Prints the plan, AUC and log-loss of the float model and of the served INT8 archive, file sizes and latencies.
    """
    from recinfer.data.dataset import load_dataset
    from recinfer.training import train

    started = time.perf_counter()
    output = Output(as_json)
    output.note(f"rows: {data or 'synthetic, in the Criteo format'}")
    dataset = load_dataset(data, format.value, limit=limit or _LIMITS.get(format), seed=seed)
    epochs = epochs or _EPOCHS[format]
    with _folder(out) as folder:
        checkpoint = folder / "model.ckpt"
        output.note(f"train: {len(dataset.train):,} rows, {len(dataset.test):,} held out, {epochs} epochs")
        compared = ids.train(
            dataset, checkpoint, epochs=epochs, embedding_dim=embedding_dim, seed=seed, note=output.note
        )
        if compared is None:
            train(dataset, embedding_dim=embedding_dim, epochs=epochs, seed=seed, out=checkpoint)
        else:
            output.show(compared[0])
        report = _pipeline(output, folder, dataset, checkpoint, world_size) | (compared[1] if compared else {})
    report["seconds"] = time.perf_counter() - started
    kept = f"checkpoint, plan and archive are in {out}" if out else "--out DIR keeps checkpoint, plan and archive"
    output.show(styled("green", "done", f" in {report['seconds']:.1f} s; the server has stopped; {kept}"))
    output.finish(report)


def _pipeline(output: Output, folder: Path, dataset: Dataset, checkpoint: Path, world_size: int) -> dict[str, Any]:
    """Run the stages from a checkpoint on in order, show the summary and return it as plain data."""
    from recinfer.checkpoint import CheckpointReader, load_into
    from recinfer.distributed.planner import plan_inference
    from recinfer.inference.export import export_archive
    from recinfer.inference.verify import verify
    from recinfer.serving.client.client import InferenceClient
    from recinfer.training.batches import Examples
    from recinfer.training.model import predict_logits

    reader = CheckpointReader(checkpoint)
    assert reader.contract is not None, "training stores its contract"
    held_out = Examples.from_columns(reader.contract, dataset.take(dataset.test))
    live = reader.build_model(device="cpu").eval()
    load_into(reader, live)
    float_logits = predict_logits(live, held_out)

    output.note(f"plan: {world_size} ranks on CPU, INT8")
    module = reader.build_model(device="meta")
    plan = plan_inference(module, world_size=world_size, indexed=ExportIds().indexed(reader.contract))
    plan.save(folder / "plan.json")

    output.note("quantize, shard, archive: checked against the float model as it is written, then verified")
    manifest = export_archive(
        module,
        reader,
        plan,
        folder / "model.rqa",
        name=dataset.name,
        version="1",
        contract=reader.contract,
        overwrite=True,
    ).manifest
    checked = verify(folder / "model.rqa")
    output.show(checked)
    if not checked.ok:
        raise ArchiveError("the archive's outputs differ from those stored at export; see the lines above")

    output.note("serve: in a separate process on a free loopback port, queried through the client")
    with served(folder / "model.rqa") as target, InferenceClient(target, timeout=60.0) as client:
        int8_logits = served_logits(client, held_out)
        latencies = [
            measure_latency(client, call, held_out, batch, _REQUESTS)
            for call in ("lookup", "predict")
            for batch in _BATCHES
        ]

    labels = held_out.labels.numpy()
    quality = {"float": quality_of(labels, float_logits), "int8": quality_of(labels, int8_logits)}
    sizes = {"checkpoint": reader.num_bytes(), "archive": manifest.bytes_total}
    _show(output, plan, manifest, quality, sizes, latencies)
    return {
        "model": manifest.model,
        "rows": {"train": len(dataset.train), "test": len(dataset.test)},
        "world_size": plan.world_size,
        "plan_hash": plan.hash,
        "quality": {name: asdict(found) for name, found in quality.items()},
        "auc_difference": abs(quality["float"].auc - quality["int8"].auc),
        "max_logit_difference": float(abs(float_logits - int8_logits).max()),
        "bytes": sizes,
        "latency_seconds": [asdict(latency) for latency in latencies],
    }


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """``out``, created if it does not exist, or a temporary folder that is removed at the end."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="recinfer-demo-") as folder:
        yield Path(folder)


def _show(
    output: Output,
    plan: Plan,
    manifest: Manifest,
    quality: dict[str, Quality],
    sizes: dict[str, int],
    latencies: list[Latency],
) -> None:
    from recinfer.distributed.planner.stats import format_plan

    found = Table("held-out rows", "float", "served INT8", "change")
    for what, name in (("auc", "AUC"), ("log_loss", "log-loss")):
        before, after = (getattr(quality[which], what) for which in ("float", "int8"))
        found.add_row(name, f"{before:.5f}", f"{after:.5f}", f"{after - before:+z.5f}")
    space = Table("size", "bytes", "ratio")
    for label, name in (("fp32 checkpoint", "checkpoint"), ("INT8 archive", "archive")):
        space.add_row(label, size_text(sizes[name]), f"{sizes[name] / sizes['checkpoint']:.2f}")
    times = Table("gRPC request", "rows", "p50", "p99")
    for latency in latencies:
        times.add_row(latency.call, str(latency.batch), *(f"{s * 1e3:.2f} ms" for s in (latency.p50, latency.p99)))
    for table in (found, space, times):
        for column in table.columns[1:]:
            column.justify = "right"
    title = f"{manifest.model} {manifest.version}: {manifest.world_size} ranks, {manifest.precision}"
    side_by_side = Table.grid(padding=(0, 3))
    side_by_side.add_row(found, space, times)
    output.show(*format_plan(plan), Panel(side_by_side, title=title, expand=False))
