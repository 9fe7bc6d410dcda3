"""Writes and reads delta files, which hold an archive's changed rows and dense part; DELTA.md specifies the format."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.check import ANSWERS
from recinfer.archive.id_parts import DeltaParts
from recinfer.archive.manifest import CheckInfo, DenseInfo, FileInfo, Manifest, QuantizationInfo, required_files
from recinfer.archive.manifest_rules import check_rules
from recinfer.archive.mapping import MappedShards
from recinfer.archive.part import DeltaPart, Tensors, parts_of, without_absent
from recinfer.archive.rank_files import tensor_spans
from recinfer.archive.reader import Archive
from recinfer.archive.writer import exists, partial_folder, put_at, remove_stale
from recinfer.errors import ArchiveError, UnavailableError
from recinfer.files import refuse_url
from recinfer.quant.buffers import Buffers
from recinfer.quant.rows import row_bytes, slice_packed_columns
from recinfer.strict_json import MAX_JSON_BYTES, build, loads

__all__ = ["Delta", "DeltaInfo", "DeltaTable", "DeltaWriter", "delta_file", "patch_rows", "read_delta", "with_delta"]

FORMAT = "recinfer.delta"
FORMAT_VERSION = 1
FILE_FORMAT = "recinfer.delta/1"
MAX_HEADER_BYTES = 64 << 20
_PAGE = 4096
_BLOCK = 1 << 16  # rows written at a time


@dataclass(frozen=True)
class DeltaTable:
    """Changed rows of one table."""

    module: str
    table: str
    rows: int
    row_bytes: int
    rows_sha256: str
    packed_sha256: str


@dataclass(frozen=True)
class DeltaInfo(DeltaParts):
    """The content of ``delta.json``. ``quantization`` covers all tables of the archive, in its order, after the
    delta. A part of an id step (:class:`recinfer.archive.part.DeltaPart`) is absent where it has no entry."""

    format: str
    format_version: int
    model: str
    version: str
    created: str
    base: str
    previous: str
    sequence: int
    tables: tuple[DeltaTable, ...]
    quantization: tuple[QuantizationInfo, ...]
    dense: DenseInfo | None
    check: CheckInfo
    files: tuple[FileInfo, ...]

    def to_json(self) -> str:
        """Readable, deterministic JSON."""
        return json.dumps(without_absent(self, asdict(self)), indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True)
class Delta:
    """An opened delta; its rows are memory-mapped from the file.

    Attributes:
        info: the content of its delta.json.
        sha256: SHA-256 of ``delta.json``; the ``previous`` of the next delta.
        rows: per entry of ``info.tables``, int64 [n], ascending.
        packed: per entry, uint8 [n, row bytes].
        files: new contents by path.
        path: the delta's file; None while the delta is being written.
        parts: the entries of the parts of id steps, with their tensors.
    """

    info: DeltaInfo
    sha256: str
    rows: tuple[NDArray[np.int64], ...]
    packed: tuple[NDArray[np.uint8], ...]
    files: Mapping[str, bytes]
    path: Path | None = None
    parts: tuple[tuple[DeltaPart, Tensors], ...] = ()

    @property
    def num_rows(self) -> int:
        """Changed rows of all tables."""
        return sum(len(rows) for rows in self.rows)

    def patch(self, module: str, table: str, start: int, packed_RP: Tensor) -> Tensor:
        """Replace, in place, the rows that this delta changes in a table's whole packed rows ``start ...``."""
        for entry, rows, packed in zip(self.info.tables, self.rows, self.packed):
            if (entry.module, entry.table) == (module, table):
                low, high = np.searchsorted(rows, [start, start + len(packed_RP)])
                packed_RP.numpy()[rows[low:high] - start] = packed[low:high]
        return packed_RP


# ---------------------------------------------------------------- reading


def read_delta(path: str | os.PathLike[str]) -> Delta:
    """Open a delta and check the rules that need no archive: J1, J2, X1 to X4 and parts of X7."""
    path = Path(path)
    if not path.is_file():
        what = "is not a regular file" if path.exists() else "does not exist"
        raise ArchiveError(f"{str(path)!r} {what}; expected a delta (.rqd)", rule="X1")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little") if size >= 8 else -1
        if not 0 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise ArchiveError(
                f"{path.name}: a header of {length} bytes in a file of {size}; it is cut, or no delta", rule="X1"
            )
        header = loads(file.read(length), f"{path.name} (header)")
        # The mapping is copy-on-write, so that its arrays count as writable; recinfer never writes to them.
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.keys() != {"format", "sha256"} or metadata["format"] != FILE_FORMAT:
        raise ArchiveError(
            f"{path.name}: __metadata__ is {str(metadata)[:200]}; expected format {FILE_FORMAT!r} and sha256", rule="X2"
        )
    try:
        spans = tensor_spans(header, size - 8 - length, path.name)
    except ArchiveError as error:
        raise ArchiveError(str(error).partition("] ")[2], rule="X2") from None
    whole = np.frombuffer(data, dtype=np.uint8)
    tensors = {
        key: whole[8 + length + begin :][: header[key]["data_offsets"][1] - begin] for key, begin in spans.items()
    }
    text = tensors.pop("delta.json", None)
    if text is None:
        raise ArchiveError(f"{path.name}: delta.json is missing", rule="X4")
    if len(text) > MAX_JSON_BYTES:
        raise ArchiveError(f"{path.name}: delta.json has {len(text)} bytes", rule="J1")
    if _sha256(text) != metadata["sha256"]:
        raise ArchiveError(
            f"{path.name}: delta.json has another SHA-256 than __metadata__ lists; copy the delta again", rule="X2"
        )
    delta = _check_tensors(path.name, _read_info(text.tobytes()), str(metadata["sha256"]), tensors, header)
    return replace(delta, path=path)


def _read_info(text: bytes) -> DeltaInfo:
    raw = loads(text, "delta.json")
    if raw.get("format") != FORMAT or raw.get("format_version") != FORMAT_VERSION:
        came = f"{str(raw.get('format'))[:80]!r}, version {str(raw.get('format_version'))[:80]}"
        raise ArchiveError(f"delta.json: format {came}; this recinfer reads {FORMAT!r}, {FORMAT_VERSION}", rule="X3")
    try:
        info = build(DeltaInfo, raw, "delta")
    except ArchiveError as error:
        raise ArchiveError(str(error).partition("] ")[2], rule="X3") from None
    numbers = [info.sequence - 1, *(n for t in info.tables for n in (t.rows - 1, t.row_bytes - 1))]
    numbers += [n - 1 for part in parts_of(info, DeltaPart) for entry in part for n, _ in entry.tensors().values()]
    if min(numbers) < 0 or any(file.bytes < 0 for file in info.files):
        raise ArchiveError("delta.json: a count is below its minimum", rule="X3")
    return info


def _check_tensors(
    name: str, info: DeltaInfo, sha256: str, tensors: dict[str, NDArray[np.uint8]], header: dict[str, Any]
) -> Delta:
    listed: list[tuple[str, tuple[list[int], str]]] = []
    for i, table in enumerate(info.tables):
        listed.append((f"rows/{i}", ([table.rows, 8], table.rows_sha256)))
        listed.append((f"packed/{i}", ([table.rows, table.row_bytes], table.packed_sha256)))
    for part in parts_of(info, DeltaPart):
        for i, entry in enumerate(part):
            listed += [(f"{kind}/{i}", ([length, 8], digest)) for kind, (length, digest) in entry.tensors().items()]
    listed += [(f"files/{file.path}", ([file.bytes], file.sha256)) for file in info.files]
    expected = dict(listed)
    if tensors.keys() != expected.keys() or len(expected) != len(listed):
        odd = sorted(tensors.keys() ^ expected.keys())[:3]
        raise ArchiveError(f"{name}: tensors {odd or 'twice'} are not those that delta.json lists", rule="X4")
    for key, (shape, digest) in expected.items():
        if header[key]["shape"] != shape:
            raise ArchiveError(f"{name}: {key} has shape {str(header[key]['shape'])[:60]}; expected {shape}", rule="X4")
        if _sha256(tensors[key]) != digest:
            raise ArchiveError(
                f"{name}: {key} has another SHA-256 than delta.json lists; copy the delta again", rule="X4"
            )
    count = range(len(info.tables))
    rows = tuple(np.ascontiguousarray(tensors[f"rows/{i}"]).view("<i8") for i in count)
    seen: set[tuple[str, str]] = set()
    for table, numbers in zip(info.tables, rows):
        if (table.module, table.table) in seen or numbers[0] < 0 or bool((numbers[1:] <= numbers[:-1]).any()):
            raise ArchiveError(f"table {table.table[:80]!r}: listed twice, or its rows do not ascend", rule="X7")
        seen.add((table.module, table.table))
    packed = tuple(tensors[f"packed/{i}"].reshape(-1, info.tables[i].row_bytes) for i in count)
    files = {f.path: tensors[f"files/{f.path}"].tobytes() for f in info.files}
    return Delta(info, sha256, rows, packed, files, parts=_read_parts(info, tensors))


def _read_parts(info: DeltaInfo, tensors: Mapping[str, NDArray[np.uint8]]) -> tuple[tuple[DeltaPart, Tensors], ...]:
    found: list[tuple[DeltaPart, Tensors]] = []
    for part in parts_of(info, DeltaPart):
        changes = [
            (entry, tuple(np.ascontiguousarray(tensors[f"{kind}/{i}"]).view("<i8") for kind in entry.tensors()))
            for i, entry in enumerate(part)
        ]
        part[0].check(changes)
        found += changes
    return tuple(found)


def _sha256(data: NDArray[np.uint8]) -> str:
    return hashlib.sha256(memoryview(data)).hexdigest()  # type: ignore[arg-type]


# ---------------------------------------------------------------- applying


def with_delta(archive: Archive, delta: Delta, applied: tuple[Delta, ...] = ()) -> Archive:
    """The archive with ``delta`` applied to its manifest and small files; :func:`patch_rows` applies it to the rows.

    Args:
        archive: after the deltas ``applied``.

    Raises:
        ArchiveError: X5 to X8.
    """
    _check_fit(archive, delta, applied)
    info, manifest = delta.info, archive.manifest
    tables = tuple(replace(table, quantization=q) for table, q in zip(manifest.tables, info.quantization))
    after = replace(manifest, tables=tables, dense=info.dense, check=info.check)
    files = {file.path: file for file in (*manifest.files, *info.files)}
    needed = required_files(after)
    missing = [path for path in needed if path not in files]
    allowed = {path for path in needed if path.startswith("dense/")} | {ANSWERS}
    odd = [file.path for file in info.files if file.path not in allowed]
    if missing or odd:
        raise ArchiveError(f"the delta has unexpected files {odd[:3]} and lacks {missing[:3]}", rule="X8")
    listed = tuple(sorted((files[path] for path in needed), key=lambda file: file.path))
    after = replace(after, files=listed, bytes_total=sum(file.bytes for file in listed))
    try:
        check_rules(after)
    except ArchiveError as error:
        raise ArchiveError(f"the archive with the delta applied breaks a rule: {error}", rule="X8") from None
    kept = {path: data for path, data in archive.replaced.items() if path in files}
    return replace(archive, manifest=after, replaced={**kept, **delta.files})


def _check_fit(archive: Archive, delta: Delta, applied: tuple[Delta, ...]) -> None:
    info, manifest = delta.info, archive.manifest
    if info.base != archive.manifest_sha256:
        raise ArchiveError(
            f"the delta applies to the archive with manifest SHA-256 {info.base[:16]}..., this archive has "
            f"{archive.manifest_sha256[:16]}...; an archive that was exported again or resharded needs a delta of its own: "
            "make one with recinfer delta",
            rule="X5",
        )
    if (info.model, info.version) != (manifest.model, manifest.version):
        raise ArchiveError(
            f"the delta is for model {info.model[:80]!r} {info.version[:80]!r}, this archive is {manifest.model!r} "
            f"{manifest.version!r}",
            rule="X5",
        )
    previous = applied[-1].sha256 if applied else info.base
    if (info.sequence, info.previous) != (len(applied) + 1, previous):
        raise ArchiveError(
            f"the delta has sequence {info.sequence} after {info.previous[:16]}...; expected {len(applied) + 1} after "
            f"{previous[:16]}...: apply all deltas in order, each once",
            rule="X6",
        )
    known = {(t.module, t.name): t for t in manifest.tables}
    for entry, rows in zip(info.tables, delta.rows):
        table = known.get((entry.module, entry.table))
        if table is None or entry.row_bytes != row_bytes(table.dim, table.data_type):
            raise ArchiveError(f"table {entry.table[:80]!r} of the delta is not in the archive", rule="X5")
        if int(rows[-1]) >= table.rows:
            raise ArchiveError(
                f"table {entry.table!r} has {table.rows} rows; the delta changes row {rows[-1]}", rule="X7"
            )
    for part, tensors in delta.parts:
        part.check_fit(tensors, manifest)
    if len(info.quantization) != len(manifest.tables):
        raise ArchiveError("the delta's quantization is not one entry a table", rule="X8")


def patch_rows(mapped: MappedShards, manifest: Manifest, delta: Delta) -> None:
    """Write a delta's rows into a writable buffer (``edit`` of ``map_shards``), in the layout of its shards."""
    tables = {(t.module, t.name): t for t in manifest.tables}
    for entry, rows, packed in zip(delta.info.tables, delta.rows, delta.packed):
        table = tables[entry.module, entry.table]
        for shard in mapped.module_shards.get(entry.module, ()):  # None if other ranks hold the rows
            rect = shard.rect
            if rect.table != entry.table:
                continue
            target = Buffers(mapped.buffer).rows(shard).numpy()
            low, high = np.searchsorted(rows, [rect.row_start, rect.row_stop])
            for at in range(low, high, _BLOCK):
                stop = min(high, at + _BLOCK)
                whole = torch.from_numpy(packed[at:stop])
                piece = slice_packed_columns(whole, table.dim, table.data_type, rect.col_start, rect.col_stop)
                target[rows[at:stop] - rect.row_start] = piece.numpy()


# ---------------------------------------------------------------- writing


class DeltaWriter:
    """Streams a delta to a file: rows first, behind space reserved for the header, whose size has a known bound."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._file = path.open("x+b")
        self._tables = {(t.module, t.name): t for t in manifest.tables}
        # Upper limit of the header's size: four tensors per table, one per file, numbers of 20 digits.
        self._room = -(-(512 + 200 * (4 * len(self._tables) + 8)) // _PAGE) * _PAGE
        self._file.seek(self._room)
        self._at = 0
        self._spans: dict[str, tuple[list[int], int]] = {}
        self.entries: list[DeltaTable] = []
        self.parts: list[tuple[DeltaPart, Tensors]] = []
        self._current: tuple[str, str] | None = None
        self._ids: list[NDArray[np.int64]] = []
        self._begin = 0
        self._digest = hashlib.sha256()

    def add_rows(self, module: str, table: str, rows: NDArray[np.int64], packed: NDArray[np.uint8]) -> None:
        """Add changed rows of the current table, in ascending order."""
        if not len(rows):
            return
        if self._current != (module, table):
            self.end_table()
            self._current, self._begin, self._digest = (module, table), self._at, hashlib.sha256()
        self._ids.append(rows)
        self._digest.update(memoryview(packed))  # type: ignore[arg-type]
        self._write(memoryview(packed).cast("B"))  # type: ignore[arg-type]

    def end_table(self) -> None:
        """Finish the current table."""
        if self._current is None:
            return
        module, table = self._current
        ids = np.concatenate(self._ids).astype("<i8")
        width = (self._at - self._begin) // len(ids)
        i = len(self.entries)
        self._spans[f"packed/{i}"] = [len(ids), width], self._begin
        self._add(f"rows/{i}", [len(ids), 8], ids.tobytes())
        digest = hashlib.sha256(ids.tobytes()).hexdigest()
        self.entries.append(DeltaTable(module, table, len(ids), width, digest, self._digest.hexdigest()))
        self._current, self._ids = None, []

    def add_part(self, entry: DeltaPart, tensors: Tensors) -> None:
        """Add an entry of a part of an id step, with its tensors."""
        i = sum(other.key == entry.key for other, _ in self.parts)
        for kind, numbers in zip(entry.tensors(), tensors):
            self._add(f"{kind}/{i}", [len(numbers), 8], numbers.astype("<i8").tobytes())
        self.parts.append((entry, tensors))

    def contents(self, info: DeltaInfo, files: Mapping[str, bytes]) -> Delta:
        """The rows written so far, as a delta to test before the file is finished."""
        self._file.flush()
        rows, packed = [], []
        whole = np.empty(0, dtype=np.uint8)
        if self._at:
            data = mmap.mmap(self._file.fileno(), self._room + self._at, access=mmap.ACCESS_COPY)
            whole = np.frombuffer(data, dtype=np.uint8)[self._room :]
        for i, entry in enumerate(self.entries):
            first, second = self._spans[f"rows/{i}"][1], self._spans[f"packed/{i}"][1]
            rows.append(whole[first : first + 8 * entry.rows].copy().view("<i8"))
            packed.append(whole[second : second + entry.rows * entry.row_bytes].reshape(entry.rows, -1))
        return Delta(info, "", tuple(rows), tuple(packed), files, parts=tuple(self.parts))

    def finish(self, info: DeltaInfo, files: Mapping[str, bytes]) -> None:
        """Write the files, delta.json and the header, and flush them to the disk."""
        for path, data in files.items():
            self._add(f"files/{path}", [len(data)], data)
        text = info.to_json().encode()
        self._add("delta.json", [len(text)], text)
        header: dict[str, Any] = {"__metadata__": {"format": FILE_FORMAT, "sha256": hashlib.sha256(text).hexdigest()}}
        for key, (shape, begin) in self._spans.items():
            size = int(np.prod(shape, dtype=np.int64))
            header[key] = {"dtype": "U8", "shape": shape, "data_offsets": [begin, begin + size]}
        encoded = json.dumps(header, separators=(",", ":")).encode()
        assert len(encoded) + 8 <= self._room, "the header is larger than its bound"
        self._file.seek(0)
        self._file.write((self._room - 8).to_bytes(8, "little") + encoded.ljust(self._room - 8))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file without finishing it."""
        self._file.close()

    def _add(self, key: str, shape: list[int], data: bytes) -> None:
        self._spans[key] = shape, self._at
        self._write(memoryview(data))

    def _write(self, data: memoryview) -> None:
        self._file.write(data)
        self._at += len(data)


@contextmanager
def delta_file(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary path next to ``target``; renames it to ``target`` at the end of the block, removes it on an
    error.

    Raises:
        ConfigError: the target is a URL.
        ArchiveError: the target exists and may not be overwritten, or is not a file.
        UnavailableError: the disk is full, or the folder cannot be written.
    """
    refuse_url(target, "out")
    target = Path(os.path.abspath(target))
    if os.path.lexists(target) and not (overwrite and target.is_file()):
        raise exists(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
        with partial_folder(target) as folder:
            yield folder / "delta"
            put_at(folder / "delta", target, overwrite)
    except OSError as error:
        raise UnavailableError(f"cannot write the delta {str(target)!r}: {error.strerror or error}") from error
