"""The manifest of an archive, as frozen dataclasses."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from recinfer.archive.id_parts import ManifestParts
from recinfer.archive.part import Part, by_key, parts_of, without_absent
from recinfer.archive.paths import FORMAT, FileInfo, shard_path
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.quant.formats.names import Precision

__all__ = [
    "ENGINE_PACKAGES",
    "FORMAT",
    "FORMAT_VERSION",
    "MAX_ONNX_ERROR",
    "MAX_TABLE_BYTES",
    "CheckInfo",
    "DenseInfo",
    "DenseInput",
    "DenseOutput",
    "FeatureInfo",
    "FileInfo",
    "IdsInfo",
    "InputInfo",
    "InputKind",
    "Manifest",
    "MissingShards",
    "ModuleInfo",
    "OnnxInfo",
    "ProgramInfo",
    "QuantizationInfo",
    "Signature",
    "TableInfo",
    "UserInfo",
    "dense_inputs",
    "engine_text",
    "lookup_inputs",
    "required_files",
    "shard_path",
]

FORMAT_VERSION = 1
MAX_ONNX_ERROR = 1e-5
MAX_TABLE_BYTES = 64 << 20
"""Largest table, as float32, whose rows forward may read as a whole."""
ENGINE_PACKAGES = {"onnx": "onnxruntime", "torch": "torch"}
"""The package of each engine of the dense part, the name that users know."""

MissingShards = Literal["reject", "default_rows"]


@dataclass(frozen=True)
class QuantizationInfo:
    """The quantization error of a table: largest absolute error and root mean square error over all rows.

    ``max_step`` is the largest scale step (0 for precisions without a scale). FBGEMM gives a row of one value the scale 1,
    though it is stored exactly, so a table with such a row has at least 1 here.
    ``relative_error`` is ``rms_error`` over the root mean square of the float values.
    """

    max_step: float
    max_abs_error: float
    rms_error: float
    relative_error: float


@dataclass(frozen=True)
class TableInfo:
    """A table of the archive: ``ranks``, ascending, hold its pieces; ``sharding`` is a ``ShardingType`` value."""

    name: str
    module: str
    rows: int
    dim: int
    precision: Precision
    pooling: Literal["sum", "mean", "none"]
    features: tuple[str, ...]
    sharding: str
    ranks: tuple[int, ...]
    quantization: QuantizationInfo

    @property
    def data_type(self) -> DataType:
        """Precision as the configs name it."""
        return DataType.parse(self.precision)

    @property
    def full_name(self) -> str:
        """``module.table``, for messages."""
        return f"{self.module}.{self.name}" if self.module else self.name


@dataclass(frozen=True)
class FeatureInfo:
    """A sparse feature, with its policies for requests that lack it or carry ids beyond its table.

    ``missing``: a prediction without the feature fails (``"reject"``, the default), or the feature is an empty bag
    (``"empty"``) or this id in every sample. ``out_of_range``: an id out of range fails the request, or becomes
    ``default_row``.
    """

    name: str
    missing: str | int
    out_of_range: Literal["reject", "default_row"]
    default_row: int


@dataclass(frozen=True)
class ModuleInfo:
    """One embedding collection of the model.

    ``features`` in output order, ``outputs`` the embedding name of each. ``position_weights`` gives the number of
    positions per feature, for tables with a position-weighted processor.
    """

    path: str
    kind: Literal["pooled", "sequence"]
    is_weighted: bool
    tables: tuple[str, ...]
    features: tuple[str, ...]
    outputs: tuple[str, ...]
    position_weights: dict[str, int] | None


ProgramInputKind = Literal[
    "dense",
    "pooled",
    "values",
    "lengths",
    "tensor",
    "jagged_values",
    "jagged_lengths",
    "jagged_weights",
    "user",
    "table",
]


@dataclass(frozen=True)
class DenseInput:
    """One input of the dense program or the ids program.

    ``dense`` [B, dim], ``pooled`` [B, dim] of a module, ``values`` [N, dim] and ``lengths`` [B] int64 of one sequence
    feature. Only with a signature: ``tensor``, the input that ``feature`` names, and ``jagged_values``, ``jagged_lengths``
    [B] int64 and ``jagged_weights`` of a jagged one; ``user``, a tensor [B, ...] of the user program;
    ``table``, all rows [rows, dim] of the table ``feature`` of a module, dequantized.
    """

    name: str
    kind: ProgramInputKind
    module: str | None
    feature: str | None
    dim: int


@dataclass(frozen=True)
class DenseOutput:
    """One output, float32 [B, *shape]."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class OnnxInfo:
    """The ONNX form of the dense program; the error is its largest difference from torch on random inputs."""

    opset: int
    max_abs_error: float


@dataclass(frozen=True)
class DenseInfo:
    """The dense program. ``onnx_refused`` is the reason for a missing ONNX form."""

    engine: Literal["onnx", "torch"]
    num_dense: int
    inputs: tuple[DenseInput, ...]
    outputs: tuple[DenseOutput, ...]
    onnx: OnnxInfo | None
    onnx_refused: str | None

    @property
    def runs_on(self) -> str:
        """The engine that runs the dense program on the CPU, as text: ``onnxruntime``, or ``torch`` with the reason."""
        return engine_text(self.engine, self.onnx_refused)


InputKind = Literal["tensor", "ids", "jagged"]


@dataclass(frozen=True)
class InputInfo:
    """One input of forward, as requests name it.

    Attributes:
        name: the name in requests.
        path: the place in forward's arguments, as ``batch.sparse_features['base']``.
        kind: ``tensor``; ``ids`` of a feature, any number a sample; ``jagged``: numbers, any number a sample.
        dtype: of the tensor or the values, as ``float32``.
        shape: of the tensor or the values: a number per fixed axis, ``batch``, or text for another free axis.
        weighted: whether forward reads a weight per value.
    """

    name: str
    path: str
    kind: InputKind
    dtype: str
    shape: tuple[int | str, ...]
    weighted: bool


@dataclass(frozen=True)
class IdsInfo:
    """The ids program, which computes the ids of some features from the inputs.

    Attributes:
        features: the features that it computes; the program returns ``computed/<feature>/values`` and
            ``computed/<feature>/lengths`` of each, and ``computed/<feature>/weights`` of those in ``weighted``.
    """

    engine: Literal["onnx", "torch"]
    inputs: tuple[DenseInput, ...]
    features: tuple[str, ...]
    weighted: tuple[str, ...]
    onnx: OnnxInfo | None
    onnx_refused: str | None

    @property
    def runs_on(self) -> str:
        """The engine that runs the ids program, as text; see :attr:`DenseInfo.runs_on`."""
        return engine_text(self.engine, self.onnx_refused)

    @property
    def outputs(self) -> list[str]:
        """Names of the program's outputs, in order."""
        return [
            f"computed/{name}/{part}"
            for name in self.features
            for part in ("values", "lengths", "weights")
            if part != "weights" or name in self.weighted
        ]


@dataclass(frozen=True)
class ProgramInfo:
    """A program of an archive; ``onnx_refused`` is the reason for a missing ONNX form."""

    engine: Literal["onnx", "torch"]
    inputs: tuple[DenseInput, ...]
    onnx: OnnxInfo | None
    onnx_refused: str | None


@dataclass(frozen=True)
class UserInfo:
    """The dense program in two parts, for one user and many candidates.

    Attributes:
        names: the inputs of the user.
        between: names of the user program's outputs, in order; float or integer tensors, the batch first.
        user: reads the user's inputs alone.
        candidates: reads the other inputs and the user program's outputs; returns the dense program's outputs.
    """

    names: tuple[str, ...]
    between: tuple[str, ...]
    user: ProgramInfo
    candidates: ProgramInfo


@dataclass(frozen=True)
class Signature:
    """Inputs and result of forward.

    Attributes:
        arguments: names of forward's positional arguments.
        inputs: the inputs that forward uses.
        per_sample: input -> the number of values of every sample, which forward relies on.
        as_long_as: input -> the input that has as many values, sample by sample, which forward relies on.
        at_most: free axis, as shapes of inputs name it -> its largest size.
        ids: the ids program; None where forward passes ids on as they are.
        returns: forward's result as plain data, with ``{"output": name}`` for each tensor.
        user: the dense program in two parts; None unless the export named the user's inputs.
        counts: ids input -> the ids or jagged input whose values it counts: sample by sample its numbers, which are not
            negative, sum to that input's number of values.
    """

    arguments: tuple[str, ...]
    inputs: tuple[InputInfo, ...]
    per_sample: dict[str, int]
    as_long_as: dict[str, str]
    at_most: dict[str, int]
    ids: IdsInfo | None
    returns: dict[str, Any]
    user: UserInfo | None
    counts: dict[str, str] = field(default_factory=dict)

    @property
    def is_plain(self) -> bool:
        """Whether any ids may reach the lookups as they are."""
        return self.ids is None and not self.per_sample and not self.as_long_as and not self.counts


@dataclass(frozen=True)
class CheckInfo:
    """The number of golden requests, and the largest absolute differences of their answers from the float model's."""

    num_requests: int
    max_embedding_error: float
    max_output_error: float | None


@dataclass(frozen=True)
class Manifest(ManifestParts):
    """The content of ``manifest.json``; ``FORMAT.md`` defines each part and its rules.

    ``missing_shards`` says whether default rows may replace rows of unavailable ranks; its default is ``"reject"``.
    ``signature`` is absent in archives of earlier versions and where there is no dense part, its ``counts`` where it is
    empty, and a part of an id step (:class:`recinfer.archive.part.Part`) where it has no entry. No other key is optional.
    """

    format: str
    format_version: int
    model: str
    version: str
    created: str
    versions: dict[str, str]
    precision: Literal[Precision, "mixed"]
    world_size: int
    plan_hash: str
    tables: tuple[TableInfo, ...]
    modules: tuple[ModuleInfo, ...]
    features: tuple[FeatureInfo, ...]
    dense: DenseInfo | None
    contract: dict[str, Any] | None
    check: CheckInfo
    files: tuple[FileInfo, ...]
    bytes_total: int
    missing_shards: MissingShards = "reject"
    signature: Signature | None = None

    def to_json(self) -> str:
        """Readable, deterministic JSON."""
        values = without_absent(self, asdict(self))
        if self.missing_shards == "reject":  # older readers reject unknown keys
            del values["missing_shards"]
        if self.signature is None:
            del values["signature"]
        elif not self.signature.counts:
            del values["signature"]["counts"]
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    @property
    def num_dense(self) -> int:
        """The number of columns of the dense matrix."""
        return 0 if self.dense is None else self.dense.num_dense

    @cached_property
    def computed_features(self) -> frozenset[str]:
        """The features of lookups whose ids the ids program computes."""
        return (
            frozenset()
            if self.signature is None or self.signature.ids is None
            else frozenset(self.signature.ids.features)
        )

    @cached_property
    def weighted_features(self) -> frozenset[str]:
        """The features whose ids may have weights: those of weighted modules, and those whose weights a program reads."""
        found = {f for m in self.modules if m.is_weighted and m.position_weights is None for f in m.features}
        ids = None if self.signature is None else self.signature.ids
        inputs = [i for program in (self.dense, ids) if program is not None for i in program.inputs]
        read = {i.feature for i in inputs if i.kind == "jagged_weights"}
        return frozenset(found.union(name for name in self.request_features if name in read))

    @cached_property
    def request_features(self) -> tuple[str, ...]:
        """The features of requests: those of lookups that requests bring, then those that programs alone read."""
        if self.signature is None:
            return tuple(feature.name for feature in self.features)
        given = [i.name for i in self.signature.inputs if i.kind == "ids"]
        looked_up = [feature.name for feature in self.features if feature.name not in self.computed_features]
        return tuple(dict.fromkeys([*looked_up, *given]))

    @cached_property
    def named_inputs(self) -> tuple[InputInfo, ...]:
        """The inputs of requests beside ``features`` and ``dense``."""
        if self.signature is None or self.dense is None:
            return ()
        return tuple(
            i for i in self.signature.inputs if i.kind == "jagged" or (i.kind == "tensor" and not self.dense.num_dense)
        )

    @cached_property
    def feature_tables(self) -> dict[str, list[TableInfo]]:
        """Feature name -> the tables it reads, in module and table order."""
        result: dict[str, list[TableInfo]] = {}
        by_key = {(t.module, t.name): t for t in self.tables}
        for module in self.modules:
            for name in module.tables:
                for feature in by_key[module.path, name].features:
                    result.setdefault(feature, []).append(by_key[module.path, name])
        return result

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """The entries of each part of an id step that the archive has."""
        return tuple(parts_of(self, Part))

    def with_parts(self, entries: Iterable[Part]) -> Manifest:
        """The manifest with the entries of parts, each in its field."""
        return replace(self, **by_key(entries))

    @cached_property
    def raw_features(self) -> frozenset[str]:
        """The features whose ids are raw: an id step makes rows of them."""
        return frozenset(name for part in self.parts for entry in part for name in entry.raw_features(self))

    @cached_property
    def string_features(self) -> frozenset[str]:
        """The features of requests whose ids may be strings."""
        return frozenset(name for part in self.parts for entry in part for name in entry.string_features())

    @cached_property
    def string_examples(self) -> dict[str, list[str]]:
        """Some known strings of each feature whose ids may be strings; no entry for a feature without any."""
        found = [entry.string_features() for part in self.parts for entry in part]
        return {name: list(strings) for features in found for name, strings in features.items() if strings}

    def module_tables(self, path: str) -> list[TableInfo]:
        """The tables of one module, in its order."""
        return self._tables_of_module.get(path, [])

    @cached_property
    def _tables_of_module(self) -> dict[str, list[TableInfo]]:
        result: dict[str, list[TableInfo]] = {}
        for table in self.tables:
            result.setdefault(table.module, []).append(table)
        return result

    def configs(self, path: str) -> list[Any]:
        """The table configs of one module, ``data_type`` being the stored precision."""
        configs: list[EmbeddingBagConfig | EmbeddingConfig] = []
        for t in self.module_tables(path):
            common: dict[str, Any] = {
                "num_embeddings": t.rows,
                "embedding_dim": t.dim,
                "name": t.name,
                "data_type": t.data_type,
            }
            if t.pooling == "none":
                configs.append(EmbeddingConfig(feature_names=list(t.features), **common))
            else:
                pooling = PoolingType(t.pooling.upper())
                configs.append(EmbeddingBagConfig(feature_names=list(t.features), pooling=pooling, **common))
        return configs


def engine_text(engine: str, reason: str | None) -> str:
    """The name of an engine as text; for torch with the reason why it is not onnxruntime."""
    if engine == "onnx":
        return ENGINE_PACKAGES[engine]
    return f"torch, which is slower than onnxruntime, because {reason}" if reason else "torch"


def required_files(manifest: Manifest) -> list[str]:
    """The paths of all files of an archive with this manifest, except ``manifest.json``."""
    paths = ["plan.json", *(shard_path(rank) for rank in range(manifest.world_size))]
    if manifest.dense is not None:
        paths.append("dense/model.pt2")
        if manifest.dense.onnx is not None:
            paths.append("dense/model.onnx")
    if manifest.signature is not None and manifest.signature.ids is not None:
        paths.append("dense/ids.pt2")
        if manifest.signature.ids.onnx is not None:
            paths.append("dense/ids.onnx")
    if manifest.signature is not None and manifest.signature.user is not None:
        parts = {"user": manifest.signature.user.user, "candidates": manifest.signature.user.candidates}
        for name, part in parts.items():
            paths += [f"dense/{name}.pt2", *([f"dense/{name}.onnx"] if part.onnx is not None else [])]
    if any(module.position_weights is not None for module in manifest.modules):
        paths.append("dense/position_weights.safetensors")
    paths += [entry.path(number) for part in manifest.parts for number, entry in enumerate(part)]
    return [*paths, "check/requests.safetensors", "check/answers.safetensors"]


def dense_inputs(manifest: Manifest, num_dense: int) -> tuple[DenseInput, ...]:
    """The inputs of a dense program that reads nothing but ``dense`` and vectors: ``dense``, then module by module."""
    inputs: list[DenseInput] = []
    if num_dense:
        inputs.append(DenseInput("dense", "dense", None, None, num_dense))
    return (*inputs, *lookup_inputs(manifest))


def lookup_inputs(manifest: Manifest) -> tuple[DenseInput, ...]:
    """The inputs of the dense program that hold vectors and lengths of lookups, module by module."""
    inputs: list[DenseInput] = []
    for i, module in enumerate(manifest.modules):
        dims = [t.dim for t in manifest.module_tables(module.path) for _ in t.features]
        if module.kind == "pooled":
            inputs.append(DenseInput(f"pooled_{i}", "pooled", module.path, None, sum(dims)))
            continue
        for j, (output, dim) in enumerate(zip(module.outputs, dims)):
            inputs.append(DenseInput(f"sequence_{i}_{j}_values", "values", module.path, output, dim))
            inputs.append(DenseInput(f"sequence_{i}_{j}_lengths", "lengths", module.path, output, 1))
    return tuple(inputs)
