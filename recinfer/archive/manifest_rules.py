"""Checks the manifest: rules J3, M1 to M10, V1, V2 and V7 of FORMAT.md, and F2 and F7 for the files that it lists."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from recinfer.archive.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MAX_ONNX_ERROR,
    MAX_TABLE_BYTES,
    DenseInfo,
    DenseInput,
    Manifest,
    ModuleInfo,
    OnnxInfo,
    Signature,
    UserInfo,
    dense_inputs,
    lookup_inputs,
    required_files,
)
from recinfer.archive.paths import check_path
from recinfer.distributed.planner.plan import MAX_RANKS
from recinfer.errors import ArchiveError, RecinferError
from recinfer.excerpts import excerpt
from recinfer.strict_json import build, loads

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
    """Raise ArchiveError unless rules F2, F7, M2 to M10, V1, V2 and V7 hold."""
    check_before_writing(m)
    _check_files(m)


def check_before_writing(m: Manifest) -> None:
    """Raise ArchiveError unless rules M2 to M8, M10, V1, V2 and V7 hold, which need no files."""
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
    for part in m.parts:
        part[0].check(part, m)


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
    if m.signature is not None:
        if m.dense is None:
            raise ArchiveError("signature without a dense part", rule="M10")
        for name in m.signature.arguments:
            yield name, "argument"


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
    names = [output.name for output in dense.outputs]
    if not names or len(set(names)) != len(names):
        raise ArchiveError(f"dense.outputs {names[:5]}; expected at least one, each name once", rule="M7")
    if [i.dim for i in dense.inputs if i.kind == "dense"] != [dense.num_dense] * (dense.num_dense > 0):
        raise ArchiveError(f"num_dense is {dense.num_dense}, and dense.inputs disagree", rule="M7")
    if m.signature is not None:
        _check_signature(m, m.signature, dense)
    elif dense.inputs != dense_inputs(m, dense.num_dense):
        raise ArchiveError("dense.inputs differ from those that modules and num_dense imply, in order", rule="M7")
    _check_engine("dense", dense.engine, dense.onnx, "M7")


_DTYPES = frozenset(("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"))


def _check_signature(m: Manifest, s: Signature, dense: DenseInfo) -> None:
    """Rule M10."""

    def refuse(message: str) -> ArchiveError:
        return ArchiveError(f"signature: {message}", rule="M10")

    by_name = {i.name: i for i in s.inputs}
    if len(by_name) != len(s.inputs):
        raise refuse("an input is named twice")
    for i in s.inputs:
        _check_name(i.name, "input")
        _check_name(i.path, "input")
        free = [size for size in i.shape if isinstance(size, str)]
        sizes = [size for size in i.shape if isinstance(size, int)]
        if i.dtype not in _DTYPES or len(i.shape) > 8 or any(not 0 <= size <= MAX_DENSE for size in sizes):
            raise refuse(f"input {i.name!r} is {i.dtype} {list(i.shape)[:8]}")
        for size in free:
            _check_name(size, "axis")
        if i.kind != "tensor" and (not i.shape or isinstance(i.shape[0], int)):
            raise refuse(f"the values of input {i.name!r} have the fixed number {i.shape[:1]}")
        if i.kind == "ids" and (len(i.shape) != 1 or i.dtype not in ("int64", "int32")):
            raise refuse(f"the ids {i.name!r} are {i.dtype} {list(i.shape)}")
    jagged = {name for name, i in by_name.items() if i.kind != "tensor"}
    for name, count in s.per_sample.items():
        if name not in jagged or not 1 <= count <= MAX_DENSE:
            raise refuse(f"per_sample gives {name!r} {count} values")
    for name, other in s.as_long_as.items():
        if name not in jagged or other not in jagged or other in s.as_long_as:
            raise refuse(f"as_long_as says {excerpt(name)} is as long as {excerpt(other)}")
    for name, other in s.counts.items():
        given = by_name.get(name)
        if given is None or given.kind != "ids" or other not in jagged or other == name or other in s.per_sample:
            raise refuse(f"counts says {excerpt(name)} counts the values of {excerpt(other)}")
    if len(set(s.counts.values())) != len(s.counts):
        raise refuse("counts says that two inputs count the values of one")
    axes = {size for i in s.inputs if i.kind == "tensor" for size in i.shape[1:] if size != "batch"}
    for axis, largest in s.at_most.items():
        if axis not in axes or not 1 <= largest <= MAX_DENSE:
            raise refuse(f"at_most gives the axis {excerpt(axis)} the size {largest}")
    computed = set() if s.ids is None else set(s.ids.features)
    looked_up = {feature.name for feature in m.features}
    if s.ids is not None:
        if not computed or len(computed) != len(s.ids.features) or not computed <= looked_up:
            raise refuse("ids.features are not features of tables, each once")
        if not set(s.ids.weighted) <= computed:
            raise refuse("ids.weighted are not features of the ids program")
        _check_engine("signature.ids", s.ids.engine, s.ids.onnx, "M10")
        _check_program_inputs(m, s, s.ids.inputs, refuse)
    if not looked_up - computed <= {i.name for i in s.inputs if i.kind == "ids"}:
        raise refuse("a table reads a feature that is neither an input nor computed")
    vectors = ("pooled", "values", "lengths")
    if tuple(i for i in dense.inputs if i.kind in vectors) != lookup_inputs(m):
        raise ArchiveError("dense.inputs of lookups differ from those that modules imply, in order", rule="M7")
    _check_program_inputs(m, s, tuple(i for i in dense.inputs if i.kind not in vectors), refuse)
    _check_returns(s.returns, {output.name for output in dense.outputs}, refuse)
    if s.user is not None:
        _check_user(m, s, s.user, dense, refuse)


def _check_user(
    m: Manifest, s: Signature, user: UserInfo, dense: DenseInfo, refuse: Callable[[str], ArchiveError]
) -> None:
    """The user program reads inputs of the dense program, the candidates program the others and the user program's."""
    names = {i.name for i in s.inputs}
    if not user.names or len(set(user.names)) != len(user.names) or not set(user.names) <= names:
        raise refuse(f"user.names {list(user.names)[:5]} are not inputs, each once")
    if not user.between or len(set(user.between)) != len(user.between):
        raise refuse("user.between names a tensor twice, or none")
    for name in user.between:
        _check_name(name, "user tensor")
    whole = set(dense.inputs)
    if not user.user.inputs or not set(user.user.inputs) <= whole:
        raise refuse("the user program takes an input that the dense program does not take")
    given = [i for i in user.candidates.inputs if i.kind == "user"]
    others = [i for i in user.candidates.inputs if i.kind != "user"]
    if [i.name for i in given] != list(user.between) or not set(others) <= whole:
        raise refuse("the candidates program takes other inputs than the dense program and the user program give")
    for where, program in (("user", user.user), ("candidates", user.candidates)):
        if len({i.name for i in program.inputs}) != len(program.inputs):
            raise refuse(f"the {where} program takes an input twice")
        _check_engine(f"signature.user.{where}", program.engine, program.onnx, "M10")


def _check_program_inputs(
    m: Manifest, s: Signature, inputs: tuple[DenseInput, ...], refuse: Callable[[str], ArchiveError]
) -> None:
    """Each input of a program is an input of the signature, in a form that it has."""
    by_name = {i.name: i for i in s.inputs}
    if len({i.name for i in inputs}) != len(inputs):
        raise refuse("a program takes an input twice")
    for i in inputs:
        if i.kind == "dense":
            tensors = [t for t in s.inputs if t.kind == "tensor"]
            if len(tensors) != 1 or tensors[0].dtype != "float32" or tensors[0].shape != ("batch", m.num_dense):
                raise refuse("dense is not the only tensor, float32 [batch, num_dense]")
            if i != DenseInput("dense", "dense", None, None, m.num_dense):
                raise refuse("dense is described otherwise than its tensor")
            continue
        if i.kind == "table":
            tables = [t for t in m.tables if (t.module, t.name) == (i.module, i.feature)]
            if not tables or tables[0].dim != i.dim or 4 * tables[0].rows * i.dim > MAX_TABLE_BYTES:
                raise refuse(f"a program takes {excerpt(i.name)}, which is no table of at most {MAX_TABLE_BYTES} bytes")
            continue
        about = by_name.get(i.feature or "")
        if about is None or (i.kind == "tensor") != (about.kind == "tensor") or i.module is not None:
            raise refuse(f"a program takes {excerpt(i.name)}, which is no input")
        if i.kind == "jagged_weights" and not about.weighted:
            raise refuse(f"a program takes weights of {i.feature!r}, which has none")
        _check_range(f"program input {i.name!r}: dim", i.dim, 0, MAX_DENSE)


def _check_returns(value: Any, outputs: set[str], refuse: Callable[[str], ArchiveError], depth: int = 0) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or len(value) != 1 or depth > 8:
        raise refuse("returns is not the structure of a result")
    ((kind, inner),) = value.items()
    if kind == "output" and isinstance(inner, str) and inner in outputs:
        return
    if kind == "dict" and isinstance(inner, dict):
        children = list(inner.values())
    elif kind in ("tuple", "list") and isinstance(inner, list):
        children = inner
    else:
        raise refuse(f"returns has {excerpt(repr(kind))}: {excerpt(repr(inner))}")
    for child in children:
        _check_returns(child, outputs, refuse, depth + 1)


def _check_engine(where: str, engine: str, onnx: OnnxInfo | None, rule: str) -> None:
    if onnx is None:
        if engine == "onnx":
            raise ArchiveError(f"{where}.engine is 'onnx' without an onnx block", rule=rule)
    elif not 0 <= onnx.max_abs_error <= MAX_ONNX_ERROR:
        raise ArchiveError(
            f"{where}.onnx.max_abs_error is {onnx.max_abs_error}; expected 0 to {MAX_ONNX_ERROR}", rule=rule
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
        if feature.num_embeddings > rows and feature.name not in m.raw_features:
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
