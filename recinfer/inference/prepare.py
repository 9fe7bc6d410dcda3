"""Prepares an export: finds the tables and creates the manifest, the dense part and the golden requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from recinfer.archive.captured import load_weights
from recinfer.archive.check import Request, golden_requests
from recinfer.archive.cut import Cut, cut_captured, cut_model
from recinfer.archive.dense import ExportedDense, OnnxEngine, TorchEngine, export_part
from recinfer.archive.leaves import Leaf
from recinfer.archive.manifest import (
    FORMAT,
    FORMAT_VERSION,
    CheckInfo,
    DenseInfo,
    DenseOutput,
    FeatureInfo,
    IdsInfo,
    InputInfo,
    Manifest,
    MissingShards,
    ModuleInfo,
    ProgramInfo,
    QuantizationInfo,
    Signature,
    TableInfo,
    UserInfo,
)
from recinfer.archive.samples import samples_of
from recinfer.archive.split import Facts, ModuleLookup
from recinfer.capture import Captured
from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import CheckpointError, ConfigError
from recinfer.excerpts import some
from recinfer.inference.programs import IdsProgram
from recinfer.quant.formats.names import Precision
from recinfer.quant.rows import PACKED_TYPES
from recinfer.version import __version__

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = [
    "CutModel",
    "check_precisions",
    "cut_and_export",
    "first_manifest",
    "make_requests",
    "read_positions",
    "table_keys",
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
        for config in leaf.configs:
            key = leaf.key(config.name)
            keys[leaf.path, config.name] = key
            shape = (config.num_embeddings, config.embedding_dim)
            if key not in checkpoint:
                wrong.append(f"{key} is missing")
            elif checkpoint.shape(key) != shape:
                wrong.append(f"{key} is {list(checkpoint.shape(key))}, the model's table {list(shape)}")
    if wrong:
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {some(wrong, 10, '; ')}")
    return keys


@dataclass(frozen=True)
class CutModel:
    """A model cut at its lookups, with its exported programs by the names of their files; none without a dense part."""

    cut: Cut | None = None
    exported: Mapping[str, ExportedDense] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """The program files of an archive, by path."""
        files: dict[str, bytes] = {}
        for name, exported in self.exported.items():
            files[f"dense/{name}.pt2"] = exported.program
            if exported.onnx is not None:
                files[f"dense/{name}.onnx"] = exported.onnx
        return files

    def ids_program(self, manifest: Manifest) -> IdsProgram | None:
        """The ids program, opened; None without one."""
        signature, exported = manifest.signature, self.exported.get("ids")
        if signature is None or signature.ids is None or exported is None:
            return None
        names = [i.name for i in signature.ids.inputs], signature.ids.outputs
        if exported.onnx is not None:
            return IdsProgram(manifest, OnnxEngine(exported.onnx, *names, 1))
        return IdsProgram(manifest, TorchEngine(exported.program, *names))


def cut_and_export(
    model: nn.Module,
    leaves: list[Leaf],
    checkpoint: CheckpointReader,
    contract: FeatureContract | None,
    inputs: Sequence[Any] = (),
    user: Sequence[str] = (),
    captured: Captured | None = None,
) -> CutModel:
    """Cut the model with its weights at its lookups and export the programs.

    Args:
        inputs: example batches.
        user: names of the user's inputs.
        captured: a trace of another environment in place of ``model`` and ``inputs``.
    """
    num_dense = None if contract is None else contract.num_dense
    cut: Cut | None
    if captured is not None:
        load_weights(captured, checkpoint)
        by_path = {leaf.about.path: leaf for leaf in leaves}
        cut = cut_captured(captured, [by_path[about.path] for about in captured.modules], user)
    else:
        cut = cut_model(
            model,
            leaves,
            lambda body: load_into(checkpoint, body, only=list(body.state_dict())),
            inputs,
            num_dense,
            user,
        )
    if cut is None:
        return CutModel()
    if contract is not None and (cut.num_dense != contract.num_dense or "ids" in cut.parts):
        raise ConfigError(
            f"the feature contract has {contract.num_dense} dense columns and gives ids as lookups read them, but forward "
            f"takes {cut.num_dense or 'other inputs'}; export without the contract, or pass its inputs on unchanged"
        )
    return CutModel(cut, {name: export_part(part) for name, part in cut.parts.items()})


def first_manifest(
    name: str,
    version: str,
    plan: Plan,
    leaves: list[Leaf],
    contract: FeatureContract | None,
    cut_model: CutModel,
    missing_shards: MissingShards = "reject",
) -> Manifest:
    """The manifest before the tables are quantized; every feature is required in Predict."""
    cut = cut_model.cut
    lookups = _lookups(leaves, cut)
    tables = tuple(_table(lookup, i, plan) for lookup in lookups for i in range(len(lookup.leaf.configs)))
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
        modules=tuple(_module(lookup) for lookup in lookups),
        features=_features(lookups, contract),
        dense=_dense(cut_model),
        contract=None if contract is None else contract.to_dict(),
        check=CheckInfo(1, 0.0, None),
        files=(),
        bytes_total=0,
        missing_shards=missing_shards,
        signature=_signature(cut_model),
    )


def _lookups(leaves: Sequence[Leaf], cut: Cut | None) -> list[ModuleLookup]:
    """The lookups of each module: those that forward does, or all that it could do where there is no dense part."""
    return [ModuleLookup.of(leaf) for leaf in leaves] if cut is None else list(cut.lookups)


def _dense(model: CutModel) -> DenseInfo | None:
    cut = model.cut
    if cut is None:
        return None
    program = _program(model, "model")
    return DenseInfo(
        engine=program.engine,
        num_dense=cut.num_dense,
        inputs=program.inputs,
        outputs=tuple(DenseOutput(output, shape) for output, shape in cut.outputs.items()),
        onnx=program.onnx,
        onnx_refused=program.onnx_refused,
    )


def _signature(model: CutModel) -> Signature | None:
    cut = model.cut
    if cut is None:
        return None
    ids = user = None
    if "ids" in cut.parts:
        program = _program(model, "ids")
        ids = IdsInfo(
            engine=program.engine,
            inputs=program.inputs,
            features=tuple(cut.computed),
            weighted=tuple(name for name, weighted in cut.computed.items() if weighted),
            onnx=program.onnx,
            onnx_refused=program.onnx_refused,
        )
    if "user" in cut.parts:
        between = tuple(cut.parts["user"].outputs)
        user = UserInfo(cut.user, between, _program(model, "user"), _program(model, "candidates"))
    return replace(cut.signature, ids=ids, user=user)


def _program(model: CutModel, name: str) -> ProgramInfo:
    assert model.cut is not None
    exported = model.exported[name]
    engine: Literal["onnx", "torch"] = "torch" if exported.onnx is None else "onnx"
    return ProgramInfo(engine, model.cut.parts[name].program.inputs, exported.onnx_info, exported.onnx_refused)


def _versions() -> dict[str, str]:
    versions = {"recinfer": __version__}
    for package in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "onnx", "onnxscript", "onnxruntime"):
        try:
            versions[package] = package_version(package)
        except PackageNotFoundError:
            continue
    return versions


def _table(lookup: ModuleLookup, index: int, plan: Plan) -> TableInfo:
    leaf = lookup.leaf
    config = leaf.configs[index]
    planned = plan.table(leaf.path, config.name)
    pooling: Literal["sum", "mean", "none"] = "none"
    if leaf.about.pooled:
        pooling = "mean" if str(getattr(config, "pooling").value) == "MEAN" else "sum"  # noqa: B009
    return TableInfo(
        name=config.name,
        module=leaf.path,
        rows=config.num_embeddings,
        dim=config.embedding_dim,
        precision=planned.precision.value.lower(),  # type: ignore[arg-type]
        pooling=pooling,
        features=lookup.features[index],
        sharding=planned.sharding_type,
        ranks=tuple(sorted(set(planned.ranks))),
        quantization=QuantizationInfo(0.0, 0.0, 0.0, 0.0),
    )


def _module(lookup: ModuleLookup) -> ModuleInfo:
    leaf, weights = lookup.leaf, lookup.position_weights
    return ModuleInfo(
        path=leaf.path,
        kind="pooled" if leaf.about.pooled else "sequence",
        is_weighted=leaf.about.is_weighted,
        tables=tuple(config.name for config in leaf.configs),
        features=tuple(name for _, name in lookup.columns),
        outputs=tuple(leaf.output_names(lookup.features)),
        position_weights=None if weights is None else {f: size for f, (_, size) in weights.items()},
    )


def _features(lookups: list[ModuleLookup], contract: FeatureContract | None) -> tuple[FeatureInfo, ...]:
    names = list(dict.fromkeys(name for lookup in lookups for _, name in lookup.columns))
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


def make_requests(leaves: Sequence[Leaf], cut: Cut | None) -> list[Request]:
    """The golden requests of an archive; the same for the same tables and features."""
    if cut is not None:
        return golden_requests(cut.samples)
    lookups = _lookups(leaves, None)
    names = dict.fromkeys(name for lookup in lookups for _, name in lookup.columns)
    infos = [InputInfo(name, name, "ids", "int64", ("ids",), False) for name in names]
    return golden_requests(samples_of(lookups, infos, Facts({}, {}, {}), {}, 0))


def read_positions(
    leaves: Sequence[Leaf], cut: Cut | None, checkpoint: CheckpointReader
) -> dict[str, dict[str, Tensor]]:
    """Module path -> feature -> position weights [positions], of position-weighted modules."""
    return {
        lookup.leaf.path: {feature: checkpoint.read(key) for feature, (key, _) in lookup.position_weights.items()}
        for lookup in _lookups(leaves, cut)
        if lookup.position_weights is not None
    }
