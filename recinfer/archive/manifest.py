"""The manifest: frozen dataclasses of what an archive holds, read from JSON and checked against rules J3 and M1 to M9."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from recinfer.archive.paths import check_path
from recinfer.archive.strict_json import build, loads
from recinfer.errors import ArchiveError, RecinferError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "MAX_ONNX_ERROR",
    "CheckInfo",
    "DenseInfo",
    "DenseInput",
    "DenseOutput",
    "FeatureInfo",
    "FileInfo",
    "Manifest",
    "ModuleInfo",
    "OnnxInfo",
    "QuantizationInfo",
    "TableInfo",
    "dense_inputs",
    "required_files",
    "shard_path",
]

FORMAT = "recinfer.archive"
FORMAT_VERSION = 1
MAX_ONNX_ERROR = 1e-5
MAX_NAME = 256
MAX_ROWS = 1 << 40
MAX_DIM = 1 << 16
MAX_RANKS = 1 << 16
MAX_DENSE = 1 << 20

Precision = Literal["int8", "int4", "int2", "fp16", "fp32"]


@dataclass(frozen=True)
class QuantizationInfo:
    """How far a table's stored values are from its float values: over all rows, absolute and root mean square.

    ``max_step`` is the largest scale step (0 for FP16 and FP32); half of it bounds the error of an element.
    """

    max_step: float
    max_abs_error: float
    rms_error: float


@dataclass(frozen=True)
class TableInfo:
    """One table. ``ranks`` are those that hold a piece of it, ascending; ``sharding`` a ``ShardingType`` value."""

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
    """One sparse feature and what happens to requests that lack it or carry ids beyond its table.

    ``missing``: an absent feature is an empty bag (``"empty"``), refused (``"reject"``), or this id in every sample.
    ``out_of_range``: such an id fails the request, or becomes ``default_row``.
    """

    name: str
    missing: str | int
    out_of_range: Literal["reject", "default_row"]
    default_row: int


@dataclass(frozen=True)
class ModuleInfo:
    """One embedding collection of the model.

    ``features`` in output order, ``outputs`` the embedding name of each. ``position_weights`` gives the number of
    positions per feature when a position-weighted processor stands before the tables.
    """

    path: str
    kind: Literal["pooled", "sequence"]
    is_weighted: bool
    tables: tuple[str, ...]
    features: tuple[str, ...]
    outputs: tuple[str, ...]
    position_weights: dict[str, int] | None


@dataclass(frozen=True)
class DenseInput:
    """One input of the dense program: ``dense`` [B, dim], ``pooled`` [B, dim] of a module, ``values`` [N, dim] and
    ``lengths`` [B] int64 of one sequence feature."""

    name: str
    kind: Literal["dense", "pooled", "values", "lengths"]
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
    """The dense program. ``onnx_refused`` says why there is no ONNX form, when there is none."""

    engine: Literal["onnx", "torch"]
    num_dense: int
    inputs: tuple[DenseInput, ...]
    outputs: tuple[DenseOutput, ...]
    onnx: OnnxInfo | None
    onnx_refused: str | None


@dataclass(frozen=True)
class CheckInfo:
    """The golden requests, and how far their answers are from the float model's (largest absolute differences)."""

    num_requests: int
    max_embedding_error: float
    max_output_error: float | None


@dataclass(frozen=True)
class FileInfo:
    """One file of the archive; ``path`` is relative, with ``/``."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All of ``manifest.json``. ``FORMAT.md`` says what each part means and which rule guards it."""

    format: str
    format_version: int
    model: str
    version: str
    created: str
    versions: dict[str, str]
    precision: Literal["int8", "int4", "int2", "fp16", "fp32", "mixed"]
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

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read and check; raises ArchiveError with the rule that is broken."""
        raw = loads(data, "manifest.json")
        if raw.get("format") != FORMAT or raw.get("format_version") != FORMAT_VERSION:
            raise ArchiveError(
                f"format {_short(raw.get('format'))}, version {_short(raw.get('format_version'))}; this recinfer reads "
                f"{FORMAT!r}, version {FORMAT_VERSION}; export the model again or install the recinfer that wrote it",
                rule="M1",
            )
        manifest = build(cls, raw, "manifest")
        manifest.check_rules()
        return manifest

    def to_json(self) -> str:
        """Readable, deterministic JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    @property
    def name(self) -> str:
        """The model's name."""
        return self.model

    def check_rules(self) -> None:
        """Raise ArchiveError unless rules F2, F7 and M2 to M9 hold."""
        self.check_before_writing()
        self._check_files()

    def check_before_writing(self) -> None:
        """The rules that need no files: M2 to M8."""
        for name, kind in self._names():
            _check_name(name, kind)
        self._check_numbers()
        self._check_tables()
        self._check_features()
        found = {table.precision for table in self.tables}
        expected = found.pop() if len(found) == 1 else "mixed"
        if self.precision != expected:
            raise ArchiveError(f"precision is {self.precision!r}; the tables' is {expected!r}", rule="M6")
        self._check_dense()
        self._check_contract()

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

    def _names(self) -> Iterator[tuple[str, str]]:
        yield self.model, "model"
        yield self.version, "version"
        for table in self.tables:
            yield table.name, "table"
        for module in self.modules:
            yield module.path, "module"
            for output in module.outputs:
                yield output, "output"
        for feature in self.features:
            yield feature.name, "feature"
        if self.dense is not None:
            for dense_output in self.dense.outputs:
                yield dense_output.name, "output"

    def _check_numbers(self) -> None:
        _check_range("world_size", self.world_size, 1, MAX_RANKS)
        for t in self.tables:
            _check_range(f"table {t.full_name!r}: rows", t.rows, 1, MAX_ROWS)
            _check_range(f"table {t.full_name!r}: dim", t.dim, 1, MAX_DIM)
            q = t.quantization
            for what in ("max_step", "max_abs_error", "rms_error"):
                _check_range(f"table {t.full_name!r}: {what}", getattr(q, what), 0, math.inf)
        for f in self.files:
            _check_range(f"file {f.path!r}: bytes", f.bytes, 0, 1 << 62)
        _check_range("check.num_requests", self.check.num_requests, 1, 1 << 10)
        for module in self.modules:
            for feature, positions in (module.position_weights or {}).items():
                _check_range(f"position_weights of {feature!r}", positions, 1, 1 << 24)
        if self.dense is not None:
            _check_range("dense.num_dense", self.dense.num_dense, 0, MAX_DENSE)
            for output in self.dense.outputs:
                for size in output.shape:
                    _check_range(f"output {output.name!r}: shape", size, 0, MAX_DENSE)

    def _check_tables(self) -> None:
        paths = [module.path for module in self.modules]
        if not paths or len(set(paths)) != len(paths):
            raise ArchiveError(f"modules {paths[:5]}; expected at least one, each path once", rule="M4")
        names: dict[str, list[str]] = {path: [] for path in paths}
        for t in self.tables:
            if t.module not in names:
                raise ArchiveError(f"table {t.name!r} is of module {t.module!r}, which is not listed", rule="M4")
            names[t.module].append(t.name)
        kinds = {module.path: module.kind for module in self.modules}
        for module in self.modules:
            have = names[module.path]
            if not have or list(module.tables) != have or len(set(have)) != len(have):
                raise ArchiveError(
                    f"module {module.path!r} lists tables {list(module.tables)[:5]}; "
                    f"expected {have[:5]}, each once and at least one",
                    rule="M4",
                )
        for t in self.tables:
            if (t.pooling == "none") != (kinds[t.module] == "sequence"):
                raise ArchiveError(
                    f"table {t.full_name!r} pools by {t.pooling!r} in a {kinds[t.module]} module", rule="M4"
                )

    def _check_features(self) -> None:
        names = [feature.name for feature in self.features]
        if len(set(names)) != len(names) or set(names) != self.feature_tables.keys():
            odd = sorted(set(names) ^ self.feature_tables.keys())[:5]
            raise ArchiveError(
                f"features are not the ones that tables read, each once: differs in {odd or 'repeats'}", rule="M5"
            )
        for feature in self.features:
            rows = min(table.rows for table in self.feature_tables[feature.name])
            missing = feature.missing
            if missing not in ("empty", "reject") and not (isinstance(missing, int) and 0 <= missing < rows):
                raise ArchiveError(
                    f"feature {feature.name!r}: missing is {_short(missing)}; expected 'empty', 'reject' or an id "
                    f"below {rows}",
                    rule="M5",
                )
            if not 0 <= feature.default_row < rows:
                raise ArchiveError(
                    f"feature {feature.name!r}: default_row is {feature.default_row}; expected an id below {rows}",
                    rule="M5",
                )
        for module in self.modules:
            self._check_module_features(module)

    def _check_module_features(self, module: ModuleInfo) -> None:
        tables = self.module_tables(module.path)
        features = [feature for t in tables for feature in t.features]
        count = Counter(features)
        outputs = [f"{name}@{t.name}" if count[name] > 1 else name for t in tables for name in t.features]
        weighted = module.position_weights
        if (list(module.features), list(module.outputs)) != (features, outputs) or not features:
            raise ArchiveError(
                f"module {module.path!r}: features or outputs are not its tables' features in table order", rule="M5"
            )
        if len(set(outputs)) != len(outputs):
            raise ArchiveError(f"module {module.path!r}: a table lists a feature twice", rule="M5")
        if weighted is not None and (
            not module.is_weighted or module.kind != "pooled" or not weighted.keys() <= set(features)
        ):
            raise ArchiveError(
                f"module {module.path!r}: position_weights are for features of a weighted pooled module", rule="M5"
            )

    def _check_dense(self) -> None:
        dense = self.dense
        if dense is None:
            return
        if dense.inputs != dense_inputs(self, dense.num_dense):
            raise ArchiveError("dense.inputs are not those that modules and num_dense imply, in order", rule="M7")
        names = [output.name for output in dense.outputs]
        if not names or len(set(names)) != len(names):
            raise ArchiveError(f"dense.outputs {names[:5]}; expected at least one, each name once", rule="M7")
        if dense.onnx is None:
            if dense.engine == "onnx":
                raise ArchiveError("dense.engine is 'onnx' without an onnx block", rule="M7")
        elif not 0 <= dense.onnx.max_abs_error <= MAX_ONNX_ERROR:
            raise ArchiveError(
                f"dense.onnx.max_abs_error is {dense.onnx.max_abs_error}; expected 0 to {MAX_ONNX_ERROR}", rule="M7"
            )

    def _check_contract(self) -> None:
        if self.contract is None:
            return
        from recinfer.data.contract import FeatureContract

        try:
            contract = FeatureContract.from_dict(self.contract)
            features, num_dense = list(contract.feature_names), contract.num_dense
        except (RecinferError, ValueError, TypeError, KeyError, AttributeError, LookupError, OverflowError) as error:
            raise ArchiveError(f"contract is not a feature contract: {error}", rule="M8") from None
        if set(features) != {feature.name for feature in self.features}:
            odd = sorted(set(features) ^ {feature.name for feature in self.features})[:5]
            raise ArchiveError(f"the contract's features are not the archive's; differs in {odd}", rule="M8")
        for feature in contract.sparse:
            rows = min(table.rows for table in self.feature_tables[feature.name])
            if feature.num_embeddings > rows:
                raise ArchiveError(
                    f"the contract makes {feature.num_embeddings} ids of feature {feature.name!r}; its table has {rows} "
                    "rows",
                    rule="M8",
                )
        if self.dense is not None and num_dense != self.dense.num_dense:
            raise ArchiveError(
                f"the contract has {num_dense} dense columns; the program takes {self.dense.num_dense}", rule="M8"
            )

    def _check_files(self) -> None:
        paths = [file.path for file in self.files]
        for file in self.files:
            check_path(file.path)
            if len(file.sha256) != 64 or set(file.sha256) - set("0123456789abcdef"):
                raise ArchiveError(f"file {file.path!r}: sha256 {_short(file.sha256)} is not 64 hex digits", rule="F5")
        required = required_files(self)
        if len(set(paths)) != len(paths) or set(paths) != set(required):
            odd = sorted(set(paths) ^ set(required))[:5]
            raise ArchiveError(f"files are not the ones this archive needs, each once: {odd or 'repeats'}", rule="F7")
        total = sum(file.bytes for file in self.files)
        if total != self.bytes_total:
            raise ArchiveError(f"bytes_total is {self.bytes_total}; the files have {total}", rule="M9")


def shard_path(rank: int) -> str:
    """The archive path of one rank's shard file."""
    return f"shards/rank-{rank:05d}.safetensors"


def required_files(manifest: Manifest) -> list[str]:
    """The paths that an archive with this manifest consists of, besides ``manifest.json``."""
    paths = ["plan.json", *(shard_path(rank) for rank in range(manifest.world_size))]
    if manifest.dense is not None:
        paths.append("dense/model.pt2")
        if manifest.dense.onnx is not None:
            paths.append("dense/model.onnx")
    if any(module.position_weights is not None for module in manifest.modules):
        paths.append("dense/position_weights.safetensors")
    return [*paths, "check/requests.safetensors", "check/answers.safetensors"]


def dense_inputs(manifest: Manifest, num_dense: int) -> tuple[DenseInput, ...]:
    """The inputs of the dense program, in order: ``dense``, then module by module."""
    inputs: list[DenseInput] = []
    if num_dense:
        inputs.append(DenseInput("dense", "dense", None, None, num_dense))
    for i, module in enumerate(manifest.modules):
        dims = [t.dim for t in manifest.module_tables(module.path) for _ in t.features]
        if module.kind == "pooled":
            inputs.append(DenseInput(f"pooled_{i}", "pooled", module.path, None, sum(dims)))
            continue
        for j, (output, dim) in enumerate(zip(module.outputs, dims)):
            inputs.append(DenseInput(f"sequence_{i}_{j}_values", "values", module.path, output, dim))
            inputs.append(DenseInput(f"sequence_{i}_{j}_lengths", "lengths", module.path, output, 1))
    return tuple(inputs)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _check_name(name: str, kind: str) -> None:
    if (
        len(name) > MAX_NAME
        or not name.isprintable()
        or (not name and kind != "module")
        or ("/" in name and kind == "module")
    ):
        raise ArchiveError(
            f"{kind} name {_short(name)}; expected 1 to {MAX_NAME} printable characters, no '/' in a module path",
            rule="M2",
        )


def _check_range(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ArchiveError(f"{what} is {_short(value)}; expected {low} to {high}", rule="M3")
