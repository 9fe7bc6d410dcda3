"""Checks ``model.pt2`` before ``torch.export.load``: it may contain only a graph and numbers.

torch unpickles some entries of a program file and evaluates its symbolic expressions and guards as Python. An archive
must be data only, so such entries are rejected: rule D1.
"""

from __future__ import annotations

import ast
import io
import re
import zipfile
from typing import Any

import torch
from torch.export import ExportedProgram

from recinfer.capture import saved
from recinfer.errors import ArchiveError
from recinfer.strict_json import loads

__all__ = ["check_program", "load_program", "program_bytes"]

_ENTRY = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|models/model\.json|archive_format|archive_version|byteorder|version"
    r"|\.data/(version|serialization_id)"
)
_TARGET = re.compile(
    r"torch\.ops\.(aten|prims|fbgemm)\.\w+\.\w+|_operator\.(getitem|add|sub|mul|floordiv|mod|neg|eq|ne|lt|le|gt|ge)"
    r"|torch\.(sym_\w+|_check|_check_is_size)|math\.(ceil|floor)"
)
_FILE_OPERATORS = re.compile(r"file|save|load|dump|from_blob|alloc|share_memory|set_")
_SYMBOL = re.compile(r"Symbol\('[su]\d+'((, (positive|nonnegative|integer)=True))*\)")
_WORDS = re.compile(
    r"\b(Integer|Add|Mul|Mod|PythonMod|FloorDiv|CleanDiv|CeilDiv|Pow|Max|Min|And|Or|Not|Eq|Ne|Ge|Gt|Le|Lt|Equality|Unequality"
    r"|(Strict)?(GreaterThan|LessThan)|int_oo|oo|True|False|evaluate)\b"
)
_ARITHMETIC = re.compile(r"[\d\s(),=<>!+*/%-]*")


def program_bytes(program: ExportedProgram) -> bytes:
    """``program`` as the bytes of ``model.pt2``: without example inputs, source locations and guards."""
    for parameter in program.state_dict.values():
        parameter.requires_grad_(False)
    data = saved(program)
    check_program(data)
    return data


def load_program(data: bytes) -> ExportedProgram:
    """Check and load ``model.pt2``; raises ArchiveError, rules D1 and D2."""
    check_program(data)
    try:
        return torch.export.load(io.BytesIO(data))
    except Exception as error:  # torch's parsers raise exceptions of many types
        raise ArchiveError(f"model.pt2 does not load: {type(error).__name__}: {str(error)[:300]}", rule="D2") from None


def check_program(data: bytes, *, lookups: bool = False) -> None:
    """Raise ArchiveError unless the file holds a graph of known operators and raw numbers only (D1), undamaged (D2).

    Args:
        data: the file.
        lookups: allow the lookup operators of a captured program.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = _entries(archive, len(data))
            parsed = {name: loads(entries[name], f"model.pt2: {name}") for name in entries if name.endswith(".json")}
    except ArchiveError as error:
        raise error if error.rule in ("D1", "D2") else _refused(str(error)) from None
    except Exception as error:  # zipfile raises many kinds on damaged files
        raise _refused(f"it is not a readable zip: {type(error).__name__}: {error}") from None
    for name in ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json"):
        _check_payloads(parsed.get(name), name, entries)
    if "models/model.json" not in parsed:
        raise _refused("models/model.json is missing")
    _check_graph(parsed["models/model.json"], lookups)


def _refused(message: str) -> ArchiveError:
    return ArchiveError(f"dense/model.pt2: {message}", rule="D1")


def _entries(archive: zipfile.ZipFile, size: int) -> dict[str, bytes]:
    """Entry name without its first folder -> bytes (of weights: empty)."""
    infos = archive.infolist()
    if len({info.filename for info in infos}) != len(infos):
        raise _refused("an entry appears twice")
    if sum(info.file_size for info in infos) > size:
        raise _refused("entries are larger than the file")
    roots = {info.filename.partition("/")[0] for info in infos}
    if len(roots) != 1:
        raise _refused(f"expected one top folder, got {sorted(roots)[:5]}")
    for info in infos:
        name = info.filename.partition("/")[2]
        if not _ENTRY.fullmatch(name):
            raise _refused(f"the entry {name[:80]!r} is not part of a graph with raw weights")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise _refused(f"the entry {name!r} is compressed or encrypted")
        if name == "data/sample_inputs/model.pt" and info.file_size:
            raise _refused("it holds sample inputs, which are pickled")
    damaged = archive.testzip()
    if damaged is not None:
        raise ArchiveError(f"dense/model.pt2: {damaged[:80]!r} is damaged: its checksum does not match", rule="D2")
    names = [info.filename.partition("/")[2] for info in infos]
    return {name: archive.read(info) if name.endswith(".json") else b"" for name, info in zip(names, infos)}


def _check_payloads(config: Any, name: str, entries: dict[str, bytes]) -> None:
    items = config.get("config") if isinstance(config, dict) and config.keys() == {"config"} else None
    if not isinstance(items, dict):
        raise _refused(f"{name} is missing or not a config")
    folder = name.rpartition("/")[0]
    for key, entry in items.items():
        path = entry.get("path_name") if isinstance(entry, dict) else None
        if not isinstance(path, str) or f"{folder}/{path}" not in entries or path.endswith(".json"):
            raise _refused(f"{name}: {key[:80]!r} has no raw bytes")
        if entry.get("use_pickle") is not False:
            raise _refused(f"{name}: {key[:80]!r} is pickled")


def _check_graph(graph: dict[str, Any], lookups: bool) -> None:
    if graph.get("guards_code"):
        raise _refused("it carries guards, which are code")
    stack: list[Any] = [graph]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
            if "target" in value:
                _check_target(value["target"], lookups)
            if "expr_str" in value:
                _check_expression(value["expr_str"])
            if value.get("metadata"):
                raise _refused("a node carries metadata")
            if any(key in value for key in ("as_custom_obj", "custom_obj", "as_operator", "as_graph")):
                raise _refused("it holds objects or graphs inside the graph")


_LOOKUP = re.compile(r"torch\.ops\.recinfer\.(pooled|rows|table)\.default")


def _check_target(target: Any, lookups: bool) -> None:
    name = target if isinstance(target, str) else ""
    if lookups and _LOOKUP.fullmatch(name):
        return
    if not _TARGET.fullmatch(name) or _FILE_OPERATORS.search(name):
        raise _refused(f"the operator {str(target)[:80]!r} is not an allowed operator of aten, prims or fbgemm")


_MOST_POWERS = 4
_SMALL = ("Integer(2)", "Integer(3)", "Integer(4)")


def _has_small_powers(text: str) -> bool:
    """Whether the powers in an expression, such as the stride of a square of positions, give no number without end."""
    try:
        calls = [node for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Call)]
    except (SyntaxError, RecursionError, MemoryError):
        return False
    powers = [[ast.unparse(given) for given in call.args] for call in calls if ast.unparse(call.func) == "Pow"]
    return len(powers) == text.count("Pow") <= _MOST_POWERS and all(p[1:] in ([s] for s in _SMALL) for p in powers)


def _check_expression(text: Any) -> None:
    rest = _SYMBOL.sub("0", text) if isinstance(text, str) and len(text) <= 4096 else "?"
    large = "**" in rest or re.search(r"\d{19}", rest) or ("Pow" in rest and not _has_small_powers(rest))
    if large or not _ARITHMETIC.fullmatch(_WORDS.sub("", rest)):
        raise _refused(f"the expression {str(text)[:80]!r} is not integer arithmetic")
