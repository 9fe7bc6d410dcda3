"""Prepares an export: finds the tables and creates the manifest, the dense part and the golden requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

import recinfer
from recinfer.archive.check import Request, golden_requests
from recinfer.archive.cut import Cut, cut_model
from recinfer.archive.dense import ExportedDense, export_dense
from recinfer.archive.leaves import Leaf
from recinfer.archive.manifest import (
    FORMAT,
    FORMAT_VERSION,
    CheckInfo,
    DenseInfo,
    DenseOutput,
    FeatureInfo,
    Manifest,
    MissingShards,
    ModuleInfo,
    QuantizationInfo,
    TableInfo,
    dense_inputs,
)
from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import CheckpointError, ConfigError
from recinfer.excerpts import some
from recinfer.quant.formats.names import Precision
from recinfer.quant.rows import PACKED_TYPES

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = [
    "check_precisions",
    "dense_part",
    "first_manifest",
    "make_requests",
    "read_positions",
    "table_keys",
    "with_dense",
    "with_policies",
]


def check_precisions(plan: Plan) -> None:
    """Raise ConfigError for a precision that archives do not support."""
    for table in plan.tables:
        if table.precision not in PACKED_TYPES:
            raise ConfigError(
                f"table {table.name!r} is planned as {table.precision}; an archive stores "
                f"{', '.join(t.value for t in PACKED_TYPES)}; plan it with one of these"
            )


def table_keys(leaves: list[Leaf], checkpoint: CheckpointReader) -> dict[tuple[str, str], str]:
    """(module path, table) -> its key in the checkpoint; raises CheckpointError for other shapes."""
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
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {some(wrong, 10, '; ')}")
    return keys


def dense_part(
    model: nn.Module,
    leaves: list[Leaf],
    checkpoint: CheckpointReader,
    contract: FeatureContract | None,
    num_dense: int | None,
) -> tuple[Cut | None, ExportedDense | None]:
    """The exported dense part of the model with its weights; (None, None) without one."""
    if contract is not None:
        if num_dense not in (None, contract.num_dense):
            raise ConfigError(
                f"num_dense is {num_dense}, but the feature contract has {contract.num_dense} dense columns"
            )
        num_dense = contract.num_dense
    cut = cut_model(model, leaves, lambda body: load_into(checkpoint, body, only=list(body.state_dict())), num_dense)
    return cut, None if cut is None else export_dense(cut)


def first_manifest(
    name: str,
    version: str,
    plan: Plan,
    leaves: list[Leaf],
    contract: FeatureContract | None,
    missing_shards: MissingShards = "reject",
) -> Manifest:
    """The manifest before the export of the dense part; every feature is required in Predict."""
    tables = tuple(_table(leaf, i, plan) for leaf in leaves for i in range(len(leaf.configs)))
    precisions = {table.precision for table in tables}
    precision: Literal[Precision, "mixed"]
    precision = next(iter(precisions)) if len(precisions) == 1 else "mixed"
    return Manifest(
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
        missing_shards=missing_shards,
    )


def with_dense(manifest: Manifest, cut: Cut | None, dense: ExportedDense | None) -> Manifest:
    """The manifest of :func:`first_manifest` with the dense part, if there is one."""
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
        quantization=QuantizationInfo(0.0, 0.0, 0.0, 0.0),
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
        return tuple(FeatureInfo(name, "reject", "reject", 0) for name in names)
    odd = sorted(set(contract.feature_names) ^ set(names))
    if odd:
        raise ConfigError(f"the feature contract's features differ from the model's: {', '.join(odd[:8])}")
    # A row that the contract calls missing lacks a value; the feature itself is always in the request.
    policies = {feature.name: feature for feature in contract.sparse}
    return tuple(FeatureInfo(n, "reject", policies[n].out_of_range, policies[n].default_row) for n in names)


def with_policies(
    manifest: Manifest, missing: Mapping[str, str | int] | None, out_of_range: Mapping[str, str] | None
) -> Manifest:
    """The manifest with other policies for the named features; ``"*"`` names all other features.

    A feature contract in the manifest gets the same ``out_of_range``, so that raw rows and ids are treated alike.

    Raises:
        ConfigError: an unknown feature or policy.
    """
    missing, out_of_range = missing or {}, out_of_range or {}
    rows = {name: min(t.rows for t in tables) for name, tables in manifest.feature_tables.items()}
    _check_names("missing", missing, rows)
    _check_names("out_of_range", out_of_range, rows)
    features = []
    for feature in manifest.features:
        absent = missing.get(feature.name, missing.get("*", feature.missing))
        beyond = out_of_range.get(feature.name, out_of_range.get("*", feature.out_of_range))
        _check_policies(feature.name, absent, beyond, rows[feature.name])
        features.append(replace(feature, missing=absent, out_of_range=beyond))  # type: ignore[arg-type]
    manifest = replace(manifest, features=tuple(features))
    if manifest.contract is None or not out_of_range:
        return manifest
    by_name = {feature.name: feature.out_of_range for feature in features}
    sparse = [entry | {"out_of_range": by_name[entry["name"]]} for entry in manifest.contract["sparse"]]
    return replace(manifest, contract=manifest.contract | {"sparse": sparse})


def _check_names(what: str, named: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    unknown = [name for name in named if name not in known and name != "*"]
    if unknown:
        raise ConfigError(
            f"{what}: the model has no feature {unknown[0]!r}; its features are {some(known, 20)}, and '*' means all others"
        )


def _check_policies(name: str, missing: str | int, out_of_range: str, rows: int) -> None:
    is_id = isinstance(missing, int) and not isinstance(missing, bool) and 0 <= missing < rows
    if not is_id and missing not in ("empty", "reject"):
        raise ConfigError(
            f"missing: got {missing!r} for feature {name!r}; expected 'empty', 'reject' or an id below {rows}"
        )
    if out_of_range not in ("reject", "default_row"):
        raise ConfigError(
            f"out_of_range: got {out_of_range!r} for feature {name!r}; expected 'reject' or 'default_row'"
        )


def make_requests(manifest: Manifest) -> list[Request]:
    """The golden requests of an archive with this manifest; the same for the same tables and features."""
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


def read_positions(leaves: list[Leaf], checkpoint: CheckpointReader) -> dict[str, dict[str, Tensor]]:
    """Module path -> feature -> position weights [positions], of position-weighted modules."""
    return {
        leaf.path: {feature: checkpoint.read(key) for feature, (key, _) in leaf.position_weights.items()}
        for leaf in leaves
        if leaf.position_weights is not None
    }
