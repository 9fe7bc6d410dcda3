"""Lays out a plan's shards in each rank's file, and writes and reads the safetensors headers of these files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO

from recinfer.archive.manifest import shard_path
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan
from recinfer.errors import ArchiveError
from recinfer.quant.rows import row_bytes
from recinfer.strict_json import loads

__all__ = [
    "PHASE",
    "SHARD_FORMAT",
    "RankFile",
    "StoredRect",
    "rank_file",
    "read_rank_file",
    "rects_by_rank",
    "tensor_spans",
]

PHASE = 4096
"""File offsets of shards are congruent to ``row_start * row_bytes`` modulo this, the page size of most machines."""

SHARD_FORMAT = "recinfer.shard/1"
MAX_HEADER_BYTES = 64 << 20
_PAD = re.compile(r"__pad__/[0-9]{1,9}\Z")


@dataclass(frozen=True)
class StoredRect:
    """One shard of one table in a rank's file; ``start`` is the file offset of its first byte."""

    table: TablePlan
    rect: ShardRect
    row_bytes: int
    start: int = 0

    @property
    def key(self) -> str:
        """Name of its tensor in the file."""
        return f"{self.table.module}/{self.table.table}/r{self.rect.row_start}-c{self.rect.col_start}"

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.rect.rows * self.row_bytes


@dataclass(frozen=True)
class RankFile:
    """The layout of one rank's file: header (with the 8 bytes before it), rectangles in file order, and size."""

    rank: int
    header: bytes
    rects: tuple[StoredRect, ...]
    bytes: int

    @property
    def path(self) -> str:
        """Path of the file in the archive."""
        return shard_path(self.rank)


def rects_by_rank(plan: Plan) -> list[list[StoredRect]]:
    """For every rank its non-empty shards, in plan order, by column and then by row."""
    rects: list[list[StoredRect]] = [[] for _ in range(plan.world_size)]
    for table in plan.tables:
        for rect in sorted(table.shards, key=lambda r: (r.col_start, r.row_start)):
            if rect.rows:
                rects[rect.rank].append(StoredRect(table, rect, row_bytes(rect.cols, table.precision)))
    return rects


def rank_file(rects: Iterable[StoredRect], rank: int, plan_hash: str) -> RankFile:
    """Lay out one rank's file: rectangles in order, each at its alignment behind a padding tensor (rule S6)."""
    entries: dict[str, Any] = {
        "__metadata__": {"format": SHARD_FORMAT, "rank": str(rank), "plan_hash": plan_hash},
    }
    at = 0  # relative to the start of the data, which is at a multiple of PHASE
    placed: list[tuple[StoredRect, int]] = []
    for piece in rects:
        gap = (piece.rect.row_start * piece.row_bytes - at) % PHASE
        if gap:
            entries[f"__pad__/{len(placed)}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [at, at + gap]}
        at += gap
        shape = [piece.rect.rows, piece.row_bytes]
        entries[piece.key] = {"dtype": "U8", "shape": shape, "data_offsets": [at, at + piece.bytes]}
        placed.append((piece, at))
        at += piece.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = len(text) + (-(8 + len(text))) % PHASE
    header = length.to_bytes(8, "little") + text.ljust(length)
    final = tuple(StoredRect(p.table, p.rect, p.row_bytes, len(header) + start) for p, start in placed)
    return RankFile(rank, header, final, len(header) + at)


def read_rank_file(file: BinaryIO, size: int, expected: Iterable[StoredRect], rank: int, plan_hash: str) -> RankFile:
    """Read and check a rank's header against the plan.

    Args:
        file: the shard file, at its start.
        size: bytes in the file.
        expected: this rank's of :func:`rects_by_rank`.

    Raises:
        ArchiveError: rules J1, J2 and S1 to S6.
    """
    what = shard_path(rank)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise ArchiveError(
            f"{what}: a header of {length} bytes in a file of {size} bytes; the file is truncated or damaged", rule="S1"
        )
    text = file.read(length)
    if len(text) < length:
        raise ArchiveError(f"{what}: the header ends after {len(text)} of {length} bytes", rule="S1")
    entries = loads(text, f"{what} (header)")
    _check_metadata(entries.pop("__metadata__", None), plan_hash, rank, what)
    spans = tensor_spans(entries, size - 8 - length, what)
    placed = []
    for piece in expected:
        begin = spans.pop(piece.key, None)
        if begin is None:
            raise ArchiveError(f"{what}: the shard {piece.key!r} of the plan is missing", rule="S4")
        shape = entries[piece.key]["shape"]
        if shape != [piece.rect.rows, piece.row_bytes]:
            raise ArchiveError(
                f"{what}: {piece.key!r} has shape {str(shape)[:60]}; expected {[piece.rect.rows, piece.row_bytes]}",
                rule="S5",
            )
        start = 8 + length + begin
        if (start - piece.rect.row_start * piece.row_bytes) % PHASE:
            raise ArchiveError(
                f"{what}: {piece.key!r} starts at byte {start}; expected "
                f"{piece.rect.row_start * piece.row_bytes % PHASE} modulo {PHASE}",
                rule="S6",
            )
        placed.append(StoredRect(piece.table, piece.rect, piece.row_bytes, start))
    extra = [key for key in spans if not _PAD.match(key)]
    if extra:
        raise ArchiveError(f"{what}: tensors {[k[:80] for k in extra[:3]]} are not in the plan", rule="S4")
    return RankFile(rank, prefix + text, tuple(placed), size)


def _check_metadata(metadata: Any, plan_hash: str, rank: int, what: str) -> None:
    expected = {"format": SHARD_FORMAT, "rank": str(rank), "plan_hash": plan_hash}
    if metadata != expected:
        raise ArchiveError(f"{what}: __metadata__ is {str(metadata)[:200]}; expected {expected}", rule="S2")


def tensor_spans(entries: dict[str, Any], data_bytes: int, what: str) -> dict[str, int]:
    """Tensor name -> first byte in the data; the tensors tile the data (S2, S3)."""
    spans: list[tuple[int, int, str]] = []
    for key, entry in entries.items():
        good = (
            isinstance(entry, dict)
            and entry.keys() == {"dtype", "shape", "data_offsets"}
            and entry["dtype"] == "U8"
            and _sizes(entry["shape"])
            and _sizes(entry["data_offsets"])
            and len(entry["data_offsets"]) == 2
        )
        if good:
            begin, end = entry["data_offsets"]
            good = end - begin == _product(entry["shape"])
        if not good:
            raise ArchiveError(f"{what}: bad entry of {key[:80]!r}: {str(entry)[:200]}", rule="S2")
        spans.append((begin, end, key))
    spans.sort()
    at = 0
    for begin, end, key in spans:
        if begin != at:
            raise ArchiveError(
                f"{what}: {key[:80]!r} begins at {begin}; expected {at}, without a gap or overlap", rule="S3"
            )
        at = end
    if at != data_bytes:
        raise ArchiveError(f"{what}: tensors end at byte {at} of {data_bytes}", rule="S3")
    return {key: begin for begin, _, key in spans}


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _product(shape: list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
