"""Reshards an archive by copying packed rows, without the checkpoint.

The new archive holds the same bytes of every row, the same dense part and the same golden requests and answers, which
it must reproduce before it is renamed to its target.
"""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn

from recinfer.archive.captured import add_at
from recinfer.archive.manifest import Manifest, MissingShards, TableInfo
from recinfer.archive.reader import Archive, open_archive
from recinfer.archive.rows import RowReader, row_chunks
from recinfer.archive.writer import ShardWriter, archive_folder
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.errors import ConfigError
from recinfer.excerpts import some
from recinfer.inference.predictor import Predictor
from recinfer.inference.progress import byte_bar
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.rows import row_bytes
from recinfer.threads import Threads

__all__ = ["embedding_model", "plan_archive", "reshard_archive"]


def reshard_archive(
    path: str | os.PathLike[str],
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    missing_shards: MissingShards | None = None,
    max_chunk_bytes: int = 64 << 20,
    progress: bool = True,
    overwrite: bool = False,
) -> Archive:
    """Shard an archive's tables by another plan.

    Args:
        path: the archive.
        plan: covers exactly its tables, with the precisions they are stored in.
        out: the new archive's folder.
        missing_shards: see recinfer.inference.export.export_archive; None: the archive's value.
        max_chunk_bytes: packed bytes in memory at a time; about three times this is used.
        progress: show a bar on stderr.
        overwrite: replace an archive that is at ``out``.

    Returns:
        the new archive, opened.

    Raises:
        ArchiveError: the archive breaks a rule (its shards are hashed too), ``out`` exists, or the new archive does not
            give the stored golden answers.
        ConfigError: the plan is for other tables or precisions.
        UnavailableError: the disk is full.
    """
    source = open_archive(path)
    _check_plan(plan, source)
    with archive_folder(Path(out), overwrite=overwrite) as folder:
        # Damaged rows must not get a new, valid hash: the old one is checked while copying.
        with Threads(1) as threads:
            checks = [threads.submit(source.check_hash, file) for file in source.manifest.files]
            with ShardWriter(folder, plan) as writer:
                _copy_rows(source, plan, writer, max_chunk_bytes, progress)
            for check in checks:
                check.result()
        folder.add("plan.json", plan.to_json().encode())
        for file in source.manifest.files:
            if file.path != "plan.json" and not file.path.startswith("shards/"):
                folder.add(file.path, source.read(file.path))
        files = tuple(sorted(folder.files, key=lambda file: file.path))
        manifest = replace(
            source.manifest,
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            world_size=plan.world_size,
            plan_hash=plan.hash,
            tables=tuple(_placed(table, plan) for table in source.manifest.tables),
            files=files,
            bytes_total=sum(file.bytes for file in files),
            missing_shards=missing_shards or source.manifest.missing_shards,
        )
        folder.write_manifest(manifest.to_json())
        predictor = Predictor(open_archive(folder.root))
        for index in range(manifest.check.num_requests):
            predictor.check_request(index)
    return open_archive(out)


def plan_archive(manifest: Manifest, *, world_size: int, compute_device: str = "cpu") -> Plan:
    """Plan an archive's tables for another number of ranks, with the planner of `recinfer plan`.

    Raises:
        PlannerError: nothing fits.
    """
    with_index = manifest.raw_features | manifest.string_features
    return plan_inference(
        embedding_model(manifest),
        world_size=world_size,
        compute_device=compute_device,
        per_table_precision={table.full_name: table.data_type for table in manifest.tables},
        indexed={
            feature: table.rows for table in manifest.tables for feature in table.features if feature in with_index
        },
    )


def embedding_model(manifest: Manifest) -> nn.Module:
    """The archive's embedding modules at their paths, on the meta device, as input for the planner."""
    root = nn.Module()
    for module in manifest.modules:
        # Float, as models are; the stored precisions are passed to the planner separately.
        configs = [replace(config, data_type=DataType.FP32) for config in manifest.configs(module.path)]
        meta = torch.device("meta")
        collection: nn.Module
        if module.kind == "pooled":
            collection = EmbeddingBagCollection(tables=configs, is_weighted=module.is_weighted, device=meta)
        else:
            collection = EmbeddingCollection(tables=configs, device=meta)
        if not module.path:
            return collection
        add_at(root, module.path, collection)
    return root


def _check_plan(plan: Plan, archive: Archive) -> None:
    def key(table: TablePlan) -> tuple[str, str]:
        return table.module, table.table

    stored, planned = ({key(t): t for t in p.tables} for p in (archive.plan, plan))
    problems = [f"{stored[k].name} is not planned" for k in stored if k not in planned]
    problems += [f"{planned[k].name} is not in the archive" for k in planned if k not in stored]
    for k in stored:
        if k not in planned:
            continue
        for what in ("num_embeddings", "embedding_dim", "precision"):
            have, want = getattr(stored[k], what), getattr(planned[k], what)
            if have != want:
                problems.append(f"{stored[k].name} has {what} {have}, the plan {want}")
    if problems:
        raise ConfigError(
            f"the plan does not fit the archive: {some(problems, 10, '; ')}; resharding copies rows as stored; "
            f"to change the precision, export from the checkpoint"
        )


def _copy_rows(source: Archive, plan: Plan, writer: ShardWriter, max_chunk_bytes: int, progress: bool) -> None:
    sizes = [(table, row_bytes(table.embedding_dim, table.precision)) for table in plan.tables]
    total = sum(table.num_embeddings * width for table, width in sizes)
    with RowReader(source) as reader, byte_bar("moving rows", total, progress) as advance:
        for table, width in sizes:
            for start, stop in row_chunks(table.num_embeddings, width, max_chunk_bytes):
                writer.write_rows(table, start, reader.read(table, start, stop))
                advance((stop - start) * width)


def _placed(table: TableInfo, plan: Plan) -> TableInfo:
    planned = plan.table(table.module, table.name)
    return replace(table, sharding=planned.sharding_type, ranks=tuple(sorted(set(planned.ranks))))
