"""Checks the manifest: rules J3 and M1 to M9 of FORMAT.md, and F2 and F7 for the files that it lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from recinfer.archive.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MAX_ONNX_ERROR,
    Manifest,
    ModuleInfo,
    dense_inputs,
    required_files,
)
from recinfer.archive.paths import check_path
from recinfer.archive.strict_json import build, loads
from recinfer.distributed.planner.plan import MAX_RANKS
from recinfer.errors import ArchiveError, RecinferError
from recinfer.excerpts import excerpt

__all__ = ["check_before_writing", "check_rules", "read_manifest"]

MAX_NAME = 256
MAX_ROWS = 1 << 40
MAX_DIM = 1 << 16
MAX_DENSE = 1 << 20


def read_manifest(data: bytes) -> Manifest:
    """The manifest in ``data``; raises ArchiveError with the rule that is broken."""
    raw = loads(data, "manifest.json")
    if raw.get("format") != FORMAT or raw.get("format_version") != FORMAT_VERSION:
        raise ArchiveError(
            f"format {excerpt(repr(raw.get('format')))}, version {excerpt(repr(raw.get('format_version')))}; this recinfer reads "
            f"{FORMAT!r}, version {FORMAT_VERSION}; export the model again or install the recinfer that wrote it",
            rule="M1",
        )
    manifest = build(Manifest, raw, "manifest")
    check_rules(manifest)
    return manifest


def check_rules(m: Manifest) -> None:
    """Raise ArchiveError unless rules F2, F7 and M2 to M9 hold."""
    check_before_writing(m)
    _check_files(m)


def check_before_writing(m: Manifest) -> None:
    """Raise ArchiveError unless rules M2 to M8 hold, which need no files."""
    for name, kind in _names(m):
        _check_name(name, kind)
    _check_numbers(m)
    _check_tables(m)
    _check_features(m)
    found = {table.precision for table in m.tables}
    expected = found.pop() if len(found) == 1 else "mixed"
    if m.precision != expected:
        raise ArchiveError(f"precision is {m.precision!r}, but the tables have {expected!r}", rule="M6")
    _check_dense(m)
    _check_contract(m)


def _names(m: Manifest) -> Iterator[tuple[str, str]]:
    yield m.model, "model"
    yield m.version, "version"
    yield m.created, "created"
    for package, number in m.versions.items():
        yield package, "package"
        yield number, "package version"
    for table in m.tables:
        yield table.name, "table"
    for module in m.modules:
        yield module.path, "module"
        for output in module.outputs:
            yield output, "output"
    for feature in m.features:
        yield feature.name, "feature"
    if m.dense is not None:
        for dense_output in m.dense.outputs:
            yield dense_output.name, "output"
        yield (m.dense.onnx_refused or "none")[:MAX_NAME], "onnx_refused"


def _check_numbers(m: Manifest) -> None:
    _check_range("world_size", m.world_size, 1, MAX_RANKS)
    for t in m.tables:
        _check_range(f"table {t.full_name!r}: rows", t.rows, 1, MAX_ROWS)
        _check_range(f"table {t.full_name!r}: dim", t.dim, 1, MAX_DIM)
        q = t.quantization
        for what in ("max_step", "max_abs_error", "rms_error", "relative_error"):
            _check_range(f"table {t.full_name!r}: {what}", getattr(q, what), 0, math.inf)
    for f in m.files:
        _check_range(f"file {f.path!r}: bytes", f.bytes, 0, 1 << 62)
    _check_range("check.num_requests", m.check.num_requests, 1, 1 << 10)
    _check_range("check.max_embedding_error", m.check.max_embedding_error, 0, math.inf)
    _check_range("check.max_output_error", m.check.max_output_error or 0, 0, math.inf)
    for module in m.modules:
        for feature, positions in (module.position_weights or {}).items():
            _check_range(f"position_weights of {feature!r}", positions, 1, 1 << 24)
    if m.dense is not None:
        _check_range("dense.num_dense", m.dense.num_dense, 0, MAX_DENSE)
        for output in m.dense.outputs:
            for size in output.shape:
                _check_range(f"output {output.name!r}: shape", size, 0, MAX_DENSE)


def _check_tables(m: Manifest) -> None:
    paths = [module.path for module in m.modules]
    if not paths or len(set(paths)) != len(paths):
        raise ArchiveError(f"modules {paths[:5]}; expected at least one, each path once", rule="M4")
    names: dict[str, list[str]] = {path: [] for path in paths}
    for t in m.tables:
        if t.module not in names:
            raise ArchiveError(f"table {t.name!r} is of module {t.module!r}, which is not listed", rule="M4")
        names[t.module].append(t.name)
    kinds = {module.path: module.kind for module in m.modules}
    for module in m.modules:
        have = names[module.path]
        if not have or list(module.tables) != have or len(set(have)) != len(have):
            raise ArchiveError(
                f"module {module.path!r} lists tables {list(module.tables)[:5]}; "
                f"expected {have[:5]}, each once and at least one",
                rule="M4",
            )
    for t in m.tables:
        if (t.pooling == "none") != (kinds[t.module] == "sequence"):
            raise ArchiveError(f"table {t.full_name!r} pools by {t.pooling!r} in a {kinds[t.module]} module", rule="M4")


def _check_features(m: Manifest) -> None:
    names = [feature.name for feature in m.features]
    if len(set(names)) != len(names) or set(names) != m.feature_tables.keys():
        odd = sorted(set(names) ^ m.feature_tables.keys())[:5]
        raise ArchiveError(
            f"features are not the ones that tables read, each once: differs in {odd or 'repeats'}", rule="M5"
        )
    for feature in m.features:
        rows = min(table.rows for table in m.feature_tables[feature.name])
        missing = feature.missing
        if missing not in ("empty", "reject") and not (isinstance(missing, int) and 0 <= missing < rows):
            raise ArchiveError(
                f"feature {feature.name!r}: missing is {excerpt(repr(missing))}; expected 'empty', 'reject' or an id "
                f"below {rows}",
                rule="M5",
            )
        if not 0 <= feature.default_row < rows:
            raise ArchiveError(
                f"feature {feature.name!r}: default_row is {feature.default_row}; expected an id below {rows}",
                rule="M5",
            )
    for module in m.modules:
        _check_module_features(m, module)


def _check_module_features(m: Manifest, module: ModuleInfo) -> None:
    tables = m.module_tables(module.path)
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


def _check_dense(m: Manifest) -> None:
    dense = m.dense
    if dense is None:
        return
    if dense.inputs != dense_inputs(m, dense.num_dense):
        raise ArchiveError("dense.inputs differ from those that modules and num_dense imply, in order", rule="M7")
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


def _check_contract(m: Manifest) -> None:
    if m.contract is None:
        return
    from recinfer.data.contract import FeatureContract

    try:
        contract = FeatureContract.from_dict(m.contract)
        features, num_dense = list(contract.feature_names), contract.num_dense
    except (RecinferError, ValueError, TypeError, KeyError, AttributeError, LookupError, OverflowError) as error:
        raise ArchiveError(f"contract is not a feature contract: {error}", rule="M8") from None
    if set(features) != {feature.name for feature in m.features}:
        odd = sorted(set(features) ^ {feature.name for feature in m.features})[:5]
        raise ArchiveError(f"the contract's features are not the archive's; differs in {odd}", rule="M8")
    for feature in contract.sparse:
        rows = min(table.rows for table in m.feature_tables[feature.name])
        if feature.num_embeddings > rows:
            raise ArchiveError(
                f"the contract makes {feature.num_embeddings} ids of feature {feature.name!r}; its table has {rows} "
                "rows",
                rule="M8",
            )
    if m.dense is not None and num_dense != m.dense.num_dense:
        raise ArchiveError(
            f"the contract has {num_dense} dense columns; the program takes {m.dense.num_dense}", rule="M8"
        )


def _check_files(m: Manifest) -> None:
    paths = [file.path for file in m.files]
    for file in m.files:
        check_path(file.path)
        if len(file.sha256) != 64 or set(file.sha256) - set("0123456789abcdef"):
            raise ArchiveError(
                f"file {file.path!r}: sha256 {excerpt(repr(file.sha256))} is not 64 hex digits", rule="F5"
            )
    required = required_files(m)
    if len(set(paths)) != len(paths) or set(paths) != set(required):
        odd = sorted(set(paths) ^ set(required))[:5]
        raise ArchiveError(f"files are not the ones this archive needs, each once: {odd or 'repeats'}", rule="F7")
    total = sum(file.bytes for file in m.files)
    if total != m.bytes_total:
        raise ArchiveError(f"bytes_total is {m.bytes_total}; the files have {total}", rule="M9")


def _check_name(name: str, kind: str) -> None:
    if (
        len(name) > MAX_NAME
        or not name.isprintable()
        or (not name and kind != "module")
        or ("/" in name and kind == "module")
    ):
        raise ArchiveError(
            f"{kind} name {excerpt(repr(name))}; expected 1 to {MAX_NAME} printable characters, no '/' in a module path",
            rule="M2",
        )


def _check_range(what: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ArchiveError(f"{what} is {excerpt(repr(value))}; expected {low} to {high}", rule="M3")
