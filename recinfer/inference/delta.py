"""Creates a delta from an archive and a new checkpoint: packs every row and keeps those that differ.

The delta is tested before the file appears: applied to the archive, it must be as close to the new float model as an
export must be. The delta's answers to the golden requests are stored in the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.archive.check import ANSWERS, pack_answers, read_requests
from recinfer.archive.delta import (
    FORMAT,
    FORMAT_VERSION,
    Delta,
    DeltaInfo,
    DeltaWriter,
    delta_file,
    read_delta,
)
from recinfer.archive.leaves import find_leaves
from recinfer.archive.manifest import CheckInfo, FileInfo, Manifest, QuantizationInfo
from recinfer.archive.part import by_key
from recinfer.archive.positions import PATH as POSITIONS
from recinfer.archive.positions import pack_position_weights
from recinfer.archive.reader import open_archive
from recinfer.archive.rows import RowReader
from recinfer.checkpoint import CheckpointReader
from recinfer.data.contract import FeatureContract
from recinfer.distributed.planner.plan import TablePlan
from recinfer.distributed.planner.plan.plan import misfits, of_tables
from recinfer.errors import ConfigError
from recinfer.excerpts import some
from recinfer.inference.float_model import FloatModel, FloatRows
from recinfer.inference.predictor import Predictor
from recinfer.inference.prepare import cut_and_export, first_manifest, read_positions, table_keys
from recinfer.inference.progress import byte_bar, spinner
from recinfer.inference.quantize import quantize_tables
from recinfer.vocabulary.written import Vocabularies, vocabulary_changes

__all__ = ["DeltaReport", "make_delta"]

_BLOCK_BYTES = 1 << 20
_NEW_VERSION = "a delta changes only numbers, so export this checkpoint as a new version"


@dataclass(frozen=True)
class DeltaReport:
    """The report of a written delta.

    Attributes:
        sequence: the delta's place in the chain.
        changed: table -> changed rows, of tables that have some.
        rows, num_bytes: changed rows of all tables; the file's size.
        dense_changed: files of the dense part that differ.
    """

    sequence: int
    changed: dict[str, int]
    rows: int
    num_bytes: int
    dense_changed: tuple[str, ...]


def make_delta(
    base: str | os.PathLike[str],
    model: nn.Module,
    checkpoint: CheckpointReader,
    out: str | os.PathLike[str],
    *,
    after: Sequence[str | os.PathLike[str]] = (),
    inputs: Sequence[Any] = (),
    vocabularies: Vocabularies | None = None,
    max_chunk_bytes: int = 16 << 20,
    progress: bool = True,
    overwrite: bool = False,
) -> DeltaReport:
    """Write the delta between an archive and a new checkpoint.

    Args:
        base: the archive.
        model: the exported model with its tables on meta; only numbers may differ.
        checkpoint: the new weights.
        out: the delta's path, by custom ``*.rqd``.
        after: deltas that are applied before this one, in their order.
        inputs: the example batches that the archive was exported with.
        vocabularies: those of the new checkpoint, as for :func:`recinfer.inference.export.export_archive`; those of strings may
            be absent, and are the archive's.
        max_chunk_bytes: float bytes of a chunk of a table; a few chunks are in memory at a time.
        progress: show a bar on stderr.
        overwrite: replace a file that is at ``out``.

    Raises:
        ConfigError: the model is not the archive's: other tables, features or shapes need a new archive.
        CheckpointError: a key is missing or has another shape.
        ArchiveError: the archive or a delta breaks a rule, or ``out`` exists.
        UnavailableError: the disk is full.
    """
    applied = [read_delta(path) for path in after]
    predictor = Predictor(open_archive(base))
    for delta in applied:
        predictor.apply(delta)
    stored = predictor.archive
    manifest = predictor.manifest
    contract = None if manifest.contract is None else FeatureContract.from_dict(manifest.contract)
    leaves = find_leaves(model)
    _check_contract(contract, checkpoint.contract)
    if found := misfits(stored.plan, model):
        raise ConfigError(f"{_NEW_VERSION}: the model's tables differ from the archive's plan: {found}")
    checkpoint.align(model)
    keys = table_keys(leaves, checkpoint)
    with spinner("exporting the dense part", progress):
        user = () if manifest.signature is None or manifest.signature.user is None else manifest.signature.user.names
        parts = cut_and_export(model, leaves, checkpoint, contract, inputs, user)
    if parts.cut is not None:
        of_tables(stored.plan, parts.cut.tables)
    fresh = first_manifest(manifest.model, manifest.version, stored.plan, leaves, contract, parts)
    _check_same(manifest, fresh)
    weights = read_positions(leaves, parts.cut, checkpoint)
    files = parts.files()
    if weights:
        files[POSITIONS] = pack_position_weights(weights)
    known = {file.path: file.sha256 for file in manifest.files}
    files = {path: data for path, data in files.items() if sha256(data).hexdigest() != known.get(path)}
    requests = [request for request, _ in read_requests(stored)]
    changes = vocabulary_changes(stored, applied, model, checkpoint, vocabularies, predictor.intake.strings)
    steps = predictor.intake.at(stored, [*applied, changes]).steps
    rows = FloatRows(manifest, [predictor.looked_up(request, steps) for request in requests])
    with delta_file(Path(out), overwrite=overwrite) as path:
        writer = DeltaWriter(path, manifest)
        try:
            stats = _write_changes(predictor, applied, keys, checkpoint, rows, writer, max_chunk_bytes, progress)
            for entry, tensors in changes.parts:
                writer.add_part(entry, tensors)
            info = DeltaInfo(
                format=FORMAT,
                format_version=FORMAT_VERSION,
                model=manifest.model,
                version=manifest.version,
                created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                base=stored.manifest_sha256,
                previous=applied[-1].sha256 if applied else stored.manifest_sha256,
                sequence=len(applied) + 1,
                tables=tuple(writer.entries),
                quantization=tuple(stats[t.module, t.name] for t in manifest.tables),
                dense=fresh.dense,
                check=manifest.check,
                files=_listed(files),
                **by_key(entry for entry, _ in changes.parts),
            )
            trial = predictor.with_delta_applied(writer.contents(info, files))
            answers = [trial.replay(request) for request in requests]
            errors = FloatModel(trial, rows, weights).largest_errors(requests, answers)
            del trial  # frees its changed pages, which the check below maps again
            dense_changed = tuple(sorted(files))
            files[ANSWERS] = pack_answers(answers)
            info = replace(info, check=CheckInfo(len(requests), *errors), files=_listed(files))
            writer.finish(info, files)
        finally:
            writer.close()
        predictor.with_delta_applied(read_delta(path))  # a server applies the finished file in this way
        size = path.stat().st_size
    changed = {".".join(part for part in (e.module, e.table) if part): e.rows for e in info.tables}
    return DeltaReport(info.sequence, changed, sum(changed.values()), size, dense_changed)


def _listed(files: dict[str, bytes]) -> tuple[FileInfo, ...]:
    return tuple(FileInfo(path, len(data), sha256(data).hexdigest()) for path, data in sorted(files.items()))


def _check_contract(old: FeatureContract | None, new: FeatureContract | None) -> None:
    """Raises ConfigError if the new checkpoint was trained on inputs that the archive's feature contract does not give.

    The weights would then be looked up by other ids and run on other dense numbers than in training, without an error.
    The policy for ids out of range stays the archive's.
    """
    if old is None or new is None:
        return
    sparse = {f.name: replace(f, out_of_range="reject") for f in old.sparse}
    changed = [f.name for f in new.sparse if sparse.get(f.name) != replace(f, out_of_range="reject")]
    changed += [f.name for f in new.dense if f not in old.dense]
    if changed or old.feature_names != new.feature_names or old.dense != new.dense:
        which = f" of {some(changed, 10)}" if changed else ""
        raise ConfigError(
            f"{_NEW_VERSION}: the checkpoint's feature contract{which} differs from the archive's "
            "(`recinfer train --start-from CHECKPOINT` keeps it)"
        )


def _check_same(old: Manifest, new: Manifest) -> None:
    """Raises ConfigError unless the new model differs from the archive only in numbers; policies stay the archive's."""
    if old.modules != new.modules:
        raise ConfigError(f"{_NEW_VERSION}: the model's modules differ from the archive's")
    for mine, theirs in zip(old.tables, new.tables):
        if replace(mine, quantization=theirs.quantization) != theirs:
            raise ConfigError(f"{_NEW_VERSION}: table {mine.full_name!r} differs from the archive's")
    parts = [None if m.dense is None else (m.dense.num_dense, m.dense.inputs, m.dense.outputs) for m in (old, new)]
    if parts[0] != parts[1]:
        raise ConfigError(f"{_NEW_VERSION}: the dense part's inputs or outputs differ from the archive's")
    # Archives of earlier versions have no signature, and those files of the ids program cannot change in a delta.
    if old.signature is not None and new.signature is not None and old.signature.ids != new.signature.ids:
        raise ConfigError(f"{_NEW_VERSION}: the program that computes ids differs from the archive's")


def _write_changes(
    predictor: Predictor,
    applied: Sequence[Delta],
    keys: dict[tuple[str, str], str],
    checkpoint: CheckpointReader,
    rows: FloatRows,
    writer: DeltaWriter,
    max_chunk_bytes: int,
    progress: bool,
) -> dict[tuple[str, str], QuantizationInfo]:
    plan = predictor.plan
    total = sum(4 * table.num_embeddings * table.embedding_dim for table in plan.tables)
    with RowReader(predictor.archive) as reader, byte_bar("comparing rows", total, progress) as advance:

        def write(table: TablePlan, start: int, packed: Tensor) -> None:
            old = reader.read(table, start, start + len(packed))
            for delta in applied:
                old = delta.patch(table.module, table.table, start, old)
            changed = _changed_rows(old, packed)
            writer.add_rows(table.module, table.table, (changed + start).numpy(), packed[changed].numpy())

        def collect(table: TablePlan, start: int, chunk: Tensor) -> None:
            rows.collect(table.module, table.table, start, chunk)

        tables = [(table, keys[table.module, table.table]) for table in plan.tables]
        stats = quantize_tables(tables, checkpoint, write, collect, advance, max_chunk_bytes)
        writer.end_table()
    return stats


def _changed_rows(old_RP: Tensor, new_RP: Tensor) -> Tensor:
    """Row numbers, int64, of the rows that differ; compares in blocks that fit the cache."""
    width = old_RP.shape[1]
    if width % 4 == 0:  # four bytes at a time
        old_RP, new_RP = old_RP.view(torch.int32), new_RP.view(torch.int32)
    step = max(1, _BLOCK_BYTES // width)
    parts = [
        (old_RP[at : at + step] != new_RP[at : at + step]).any(1).nonzero().squeeze(1) + at
        for at in range(0, len(old_RP), step)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)
