"""From a checkpoint and a plan to an archive: tables stream through quantization into shards, the dense part is cut out.

The archive is built in a temporary folder, answers its own golden requests there, is compared with the float model, is
opened as any reader would, and only then gets its name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

import recinfer
from recinfer.archive.check import ANSWERS, REQUESTS, Request, golden_requests, pack_answers, pack_requests
from recinfer.archive.cut import Cut, Leaf, cut_model, find_leaves
from recinfer.archive.dense import ExportedDense, export_dense
from recinfer.archive.layout import layout_rank, pieces_by_rank
from recinfer.archive.manifest import (
    FORMAT,
    FORMAT_VERSION,
    CheckInfo,
    DenseInfo,
    DenseOutput,
    FeatureInfo,
    Manifest,
    ModuleInfo,
    QuantizationInfo,
    TableInfo,
    dense_inputs,
)
from recinfer.archive.manifest_rules import check_before_writing
from recinfer.archive.positions import PATH as POSITIONS
from recinfer.archive.positions import pack_position_weights
from recinfer.archive.reader import Archive, open_archive
from recinfer.archive.writer import ArchiveFolder, ShardWriter, archive_folder
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.errors import ArchiveError, CheckpointError, ConfigError
from recinfer.inference.predictor import Predictor
from recinfer.inference.reference import FloatRows, compare_with_float
from recinfer.quant.packing import PACKED_TYPES, pack_rows, quantization_step, unpack_rows

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["export_archive"]

_CACHE_ELEMENTS = 1 << 18  # rows are compared in slices whose temporaries stay in the cache: five times faster


def export_archive(
    model: nn.Module,
    checkpoint: CheckpointReader,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    name: str,
    version: str,
    contract: FeatureContract | None = None,
    num_dense: int | None = None,
    max_chunk_bytes: int = 64 << 20,
    progress: bool = True,
    overwrite: bool = False,
) -> Archive:
    """Quantize, shard and pack ``model`` with the weights of ``checkpoint``.

    Args:
        model: its tables (and the rest, if wanted) on meta; it is not changed.
        checkpoint: float weights under the model's keys.
        plan: covers exactly the model's tables; brings their precisions.
        out: the archive's folder, by custom ``*.rqa``.
        name, version: of the model, to be served under.
        contract: how raw rows become features; its policies become the manifest's.
        num_dense: columns of the dense input; default the contract's, or read off the first Linear that takes it.
        max_chunk_bytes: float bytes of a table in memory at a time; a few times this is used.
        progress: show a bar on stderr.
        overwrite: replace an archive that is there.

    Returns:
        the archive, opened.

    Raises:
        ConfigError: plan, contract or model do not fit together, or the dense part cannot be cut out.
        CheckpointError: a key is missing or has another shape.
        InputError: weights that are not finite, with table and row.
        ArchiveError: the target exists.
        UnavailableError: the disk is full.
    """
    leaves = find_leaves(model)
    plan.check_model(model)
    _check_precisions(plan)
    checkpoint.align(model)
    keys = _table_keys(leaves, checkpoint)
    with archive_folder(Path(out), overwrite=overwrite) as folder:
        cut, dense = _dense_part(model, leaves, checkpoint, contract, num_dense)
        manifest = _first_manifest(name, version, plan, leaves, cut, dense, contract)
        try:
            check_before_writing(manifest)
        except ArchiveError as error:  # a name too long, a contract with more ids than rows: the caller's to mend
            raise ConfigError(f"this model does not fit an archive: {error}") from None
        requests = _requests(manifest)
        rows = FloatRows(manifest, requests)
        stats = _write_shards(folder, plan, keys, checkpoint, rows, max_chunk_bytes, progress)
        folder.add("plan.json", plan.to_json().encode())
        _write_dense(folder, dense, leaves, checkpoint)
        folder.add(REQUESTS, pack_requests(requests))
        tables = tuple(replace(t, quantization=stats[t.module, t.name]) for t in manifest.tables)
        manifest = replace(manifest, tables=tables, files=tuple(folder.files))
        manifest = _answer(folder, manifest, plan, requests, rows, leaves, checkpoint)
        folder.write_manifest(manifest.to_json())
        Predictor(open_archive(folder.root)).check_request(0)
    return open_archive(out)


def _check_precisions(plan: Plan) -> None:
    for table in plan.tables:
        if table.precision not in PACKED_TYPES:
            raise ConfigError(
                f"table {table.name!r} is planned as {table.precision}; an archive stores "
                f"{', '.join(t.value for t in PACKED_TYPES)}; plan it with one of these"
            )


def _table_keys(leaves: list[Leaf], checkpoint: CheckpointReader) -> dict[tuple[str, str], str]:
    """(module path, table) -> its key in the checkpoint, shapes checked."""
    keys = {}
    wrong = []
    for leaf in leaves:
        middle = "embedding_bags" if leaf.pooled else "embeddings"
        for config in leaf.configs:
            key = ".".join(part for part in (leaf.path, middle, config.name, "weight") if part)
            keys[leaf.path, config.name] = key
            shape = (config.num_embeddings, config.embedding_dim)
            if key not in checkpoint:
                wrong.append(f"{key} is missing")
            elif checkpoint.shape(key) != shape:
                wrong.append(f"{key} is {list(checkpoint.shape(key))}, the model's table {list(shape)}")
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(wrong[:10])}{more}")
    return keys


def _dense_part(
    model: nn.Module,
    leaves: list[Leaf],
    checkpoint: CheckpointReader,
    contract: FeatureContract | None,
    num_dense: int | None,
) -> tuple[Cut | None, ExportedDense | None]:
    if contract is not None:
        if num_dense not in (None, contract.num_dense):
            raise ConfigError(f"num_dense is {num_dense}; the contract has {contract.num_dense} dense columns")
        num_dense = contract.num_dense
    cut = cut_model(model, leaves, lambda body: checkpoint.load_into(body, only=list(body.state_dict())), num_dense)
    return cut, None if cut is None else export_dense(cut)


def _first_manifest(
    name: str,
    version: str,
    plan: Plan,
    leaves: list[Leaf],
    cut: Cut | None,
    dense: ExportedDense | None,
    contract: FeatureContract | None,
) -> Manifest:
    """The manifest as far as it is known before anything is written."""
    tables = tuple(_table(leaf, i, plan) for leaf in leaves for i in range(len(leaf.configs)))
    precisions = {table.precision for table in tables}
    precision: Literal["int8", "int4", "int2", "fp16", "fp32", "mixed"]
    precision = next(iter(precisions)) if len(precisions) == 1 else "mixed"
    manifest = Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        model=name,
        version=version,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        versions=_versions(),
        precision=precision,
        world_size=plan.world_size,
        plan_hash=plan.hash,
        tables=tables,
        modules=tuple(_module(leaf) for leaf in leaves),
        features=_features(leaves, contract),
        dense=None,
        contract=None if contract is None else contract.to_dict(),
        check=CheckInfo(1, 0.0, None),
        files=(),
        bytes_total=0,
    )
    if cut is None or dense is None:
        return manifest
    info = DenseInfo(
        engine="torch" if dense.onnx is None else "onnx",
        num_dense=cut.num_dense,
        inputs=dense_inputs(manifest, cut.num_dense),
        outputs=tuple(DenseOutput(output, shape) for output, shape in cut.outputs.items()),
        onnx=dense.onnx_info,
        onnx_refused=dense.onnx_refused,
    )
    assert [i.name for i in info.inputs] == cut.inputs
    return replace(manifest, dense=info)


def _versions() -> dict[str, str]:
    versions = {"recinfer": recinfer.__version__}
    for package in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "onnx", "onnxscript", "onnxruntime"):
        try:
            versions[package] = package_version(package)
        except PackageNotFoundError:
            continue
    return versions


def _table(leaf: Leaf, index: int, plan: Plan) -> TableInfo:
    config = leaf.configs[index]
    planned = plan.table(leaf.path, config.name)
    pooling: Literal["sum", "mean", "none"] = "none"
    if leaf.pooled:
        pooling = "mean" if str(getattr(config, "pooling").value) == "MEAN" else "sum"  # noqa: B009
    return TableInfo(
        name=config.name,
        module=leaf.path,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        precision=planned.precision.value.lower(),  # type: ignore[arg-type]
        pooling=pooling,
        features=tuple(config.feature_names),
        sharding=planned.sharding_type,
        ranks=tuple(sorted(set(planned.ranks))),
        quantization=QuantizationInfo(0.0, 0.0, 0.0),
    )


def _module(leaf: Leaf) -> ModuleInfo:
    weights = leaf.position_weights
    return ModuleInfo(
        path=leaf.path,
        kind="pooled" if leaf.pooled else "sequence",
        is_weighted=leaf.is_weighted,
        tables=tuple(config.name for config in leaf.configs),
        features=tuple(leaf.features),
        outputs=tuple(leaf.outputs),
        position_weights=None if weights is None else {f: size for f, (_, size) in weights.items()},
    )


def _features(leaves: list[Leaf], contract: FeatureContract | None) -> tuple[FeatureInfo, ...]:
    names = list(dict.fromkeys(feature for leaf in leaves for feature in leaf.features))
    if contract is None:
        return tuple(FeatureInfo(name, "empty", "reject", 0) for name in names)
    odd = sorted(set(contract.feature_names) ^ set(names))
    if odd:
        raise ConfigError(f"the contract's features are not the model's; they differ in {', '.join(odd[:8])}")
    policies = {feature.name: feature for feature in contract.sparse}
    return tuple(FeatureInfo(n, policies[n].missing, policies[n].out_of_range, policies[n].default_row) for n in names)


def _requests(manifest: Manifest) -> list[Request]:
    longest: dict[str, int] = {}
    for module in manifest.modules:
        for feature, size in (module.position_weights or {}).items():
            longest[feature] = min(size, longest.get(feature, size))
    return golden_requests(
        [feature.name for feature in manifest.features],
        {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()},
        0 if manifest.dense is None else manifest.dense.num_dense,
        weighted=any(m.is_weighted and m.position_weights is None for m in manifest.modules),
        longest=longest,
    )


def _write_shards(
    folder: ArchiveFolder,
    plan: Plan,
    keys: Mapping[tuple[str, str], str],
    checkpoint: CheckpointReader,
    rows: FloatRows,
    max_chunk_bytes: int,
    progress: bool,
) -> dict[tuple[str, str], QuantizationInfo]:
    stats = {}
    total = sum(table.num_embeddings * table.embedding_dim for table in plan.tables)
    with ShardWriter(folder, plan) as writer, _bar(total, progress) as advance:
        for table in plan.tables:
            measured = _Error(table)
            step = max(1, max_chunk_bytes // (4 * table.embedding_dim))
            key = keys[table.module, table.table]
            for start in range(0, table.num_embeddings, step):
                stop = min(start + step, table.num_embeddings)
                chunk = checkpoint.read_rows(key, start, stop).float()
                packed = pack_rows(chunk, table.precision, table=table.name, first_row=start)
                writer.write_rows(table, start, packed)
                rows.collect(table.module, table.table, start, chunk)
                measured.add(chunk, packed)
                advance(chunk.numel())
            stats[table.module, table.table] = measured.result()
    return stats


class _Error:
    """Gathers how far packed rows are from the float ones."""

    def __init__(self, table: TablePlan) -> None:
        self._table = table
        self._max = self._squares = self._step = 0.0

    def add(self, chunk: Tensor, packed: Tensor) -> None:
        table = self._table
        if table.precision.value == "FP32":
            return
        step = max(1, _CACHE_ELEMENTS // table.embedding_dim)
        for start in range(0, len(chunk), step):
            rows = slice(start, start + step)
            difference = unpack_rows(packed[rows], table.embedding_dim, table.precision).sub_(chunk[rows]).view(-1)
            low, high = difference.aminmax()
            self._max = max(self._max, -float(low), float(high))
            self._squares += float(torch.dot(difference, difference))
        self._step = max(self._step, float(quantization_step(packed, table.embedding_dim, table.precision).max()))

    def result(self) -> QuantizationInfo:
        elements = self._table.num_embeddings * self._table.embedding_dim
        return QuantizationInfo(self._step, self._max, (self._squares / elements) ** 0.5)


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[int], None]]:
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("quantizing tables", total=total)
        yield lambda count: progress.advance(task, count)


def _write_dense(
    folder: ArchiveFolder, dense: ExportedDense | None, leaves: list[Leaf], checkpoint: CheckpointReader
) -> None:
    if dense is not None:
        folder.add("dense/model.pt2", dense.program)
        if dense.onnx is not None:
            folder.add("dense/model.onnx", dense.onnx)
    weights = _position_weights(leaves, checkpoint)
    if weights:
        folder.add(POSITIONS, pack_position_weights(weights))


def _position_weights(leaves: list[Leaf], checkpoint: CheckpointReader) -> dict[str, dict[str, Tensor]]:
    return {
        leaf.path: {feature: checkpoint.read(key) for feature, (key, _) in leaf.position_weights.items()}
        for leaf in leaves
        if leaf.position_weights is not None
    }


def _answer(
    folder: ArchiveFolder,
    manifest: Manifest,
    plan: Plan,
    requests: list[Request],
    rows: FloatRows,
    leaves: list[Leaf],
    checkpoint: CheckpointReader,
) -> Manifest:
    """Let the archive answer its requests, compare with the float model, write the answers; the final manifest."""
    layouts = tuple(layout_rank(pieces, rank, plan.hash) for rank, pieces in enumerate(pieces_by_rank(plan)))
    predictor = Predictor(Archive(folder.root, manifest, plan, layouts))
    answers = [predictor.replay(request) for request in requests]
    errors = compare_with_float(predictor, rows, requests, answers, _position_weights(leaves, checkpoint))
    folder.add(ANSWERS, pack_answers(answers))
    files = tuple(sorted(folder.files, key=lambda file: file.path))
    return replace(
        manifest,
        check=CheckInfo(len(requests), *errors),
        files=files,
        bytes_total=sum(file.bytes for file in files),
    )
