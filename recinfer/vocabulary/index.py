"""The index of a table's ids: built from a vocabulary, written to a file, and mapped from it as it is.

Rules V3 to V6 of recinfer/archive/FORMAT.md describe the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import ArchiveError
from recinfer.vocabulary._index import build, change, check
from recinfer.vocabulary.table import MAX_VOCABULARY_ROWS, Segment, TableVocabulary

__all__ = [
    "HEADER_BYTES",
    "IdIndex",
    "IndexShape",
    "build_index",
    "open_index",
    "segment_array",
    "segment_block",
    "table_structs",
]

MAGIC = b"RQINDEX1"
HEADER_BYTES = 64
_BUCKET_BYTES, _SLOTS = 64, 5
_MAX_SECTIONS = 31
_MAX_SECTION_BUCKETS = 1 << 32
# With an id for each row, seven in eight ids are then in their home bucket, and a row takes at most 16 bytes.
_TARGET_LOAD = 0.85
_MOST_SEEDS = 8
_NUMBERS = ("sections", "section_buckets", "ids", "rows", "seed")
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("sections", "<u8"),
        ("section_buckets", "<u8"),
        ("ids", "<u8"),
        ("rows", "<u8"),
        ("seed", "<u8"),
        ("zero", "V16"),
    ]
)
_BUCKET = np.dtype([("ids", "<i8", _SLOTS), ("rows", "<u4", _SLOTS), ("used", "u1"), ("away", "u1"), ("zero", "<u2")])


@dataclass(frozen=True)
class IndexShape:
    """Sizes of an index.

    Attributes:
        sections, section_buckets: it has ``sections * section_buckets`` buckets of five slots; ``section_buckets`` is a power of two.
        ids: number of ids.
        rows: rows of the table.
        seed: of the hash; another one where ids collide too often.
    """

    sections: int
    section_buckets: int
    ids: int
    rows: int
    seed: int = 0

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return self.sections * self.section_buckets

    @property
    def load(self) -> float:
        """The part of the slots that hold an id."""
        return self.ids / (self.buckets * _SLOTS)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self.buckets * _BUCKET_BYTES

    def header(self) -> bytes:
        """The first bytes of the file."""
        found = np.zeros((), _HEADER)
        found["magic"] = MAGIC
        for name in _NUMBERS:
            found[name] = getattr(self, name)
        return found.tobytes()


@dataclass(frozen=True, eq=False)
class IdIndex:
    """An index in memory, mapped or built.

    Attributes:
        shape: its sizes.
        buckets: uint8 ``[buckets * 64]``.
    """

    shape: IndexShape
    buckets: NDArray[np.uint8]

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All ids ``[N]``, ascending, and their rows ``[N]``."""
        each = self.buckets.view(_BUCKET)
        used = np.arange(_SLOTS) < each["used"][:, None]
        ids, rows = each["ids"][used], each["rows"][used].astype(np.int64)
        order = np.argsort(ids)
        return ids[order], rows[order]

    def changed(self, ids: NDArray[np.int64], rows: NDArray[np.int64]) -> IdIndex | None:
        """Give ``ids`` (each once) other rows, in place; -1 takes an id out. None if the index is too full."""
        shape = self.shape
        if not change(self.buckets, shape.sections, shape.section_buckets, shape.seed, ids, rows):
            return None
        count = int(self.buckets.view(_BUCKET)["used"].sum(dtype=np.int64))
        return IdIndex(replace(shape, ids=count), self.buckets)

    def check(self, name: str, segments: Sequence[Segment], input_hash_size: int) -> None:
        """Read every bucket; raises ArchiveError (V4 to V6) that begins with ``name``."""
        shape = self.shape
        if shape.ids > shape.rows or shape.ids >= shape.buckets * _SLOTS:
            raise ArchiveError(
                f"{name}: {shape.ids} ids in {shape.buckets * _SLOTS} slots, for a table of {shape.rows} rows; expected fewer "
                "ids than slots and at most one id per row",
                rule="V4",
            )
        wrong, bucket, place, ids = check(
            self.buckets,
            shape.sections,
            shape.section_buckets,
            shape.seed,
            shape.rows,
            segment_array(segments),
            segment_block(segments, input_hash_size),
        )
        if wrong:
            each = self.buckets.view(_BUCKET)[bucket]
            rule, text = _WRONG[wrong]
            raise ArchiveError(
                f"{name}: bucket {bucket}: "
                + text.format(id=each["ids"][place], row=each["rows"][place], used=each["used"], away=each["away"]),
                rule=rule,
            )
        if ids != shape.ids:
            raise ArchiveError(f"{name}: the buckets hold {ids} ids; the header says {shape.ids}", rule="V4")


_WRONG = {
    1: ("V5", "{used} slots in use, a mark of {away}, or bytes beyond its ids that are not 0"),
    2: ("V6", "id {id} has row {row}, which is not a row of the id's segment of the table"),
    3: ("V6", "id {id} is where no probe finds it"),
    4: ("V6", "id {id} occurs twice"),
    5: ("V6", "id {id} has row {row}, which another id has too"),
}


def segment_array(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Segments for the compiled loops, int64 ``[S, 4]``."""
    return np.array([(s.first_row, s.num_rows, s.miss_row, s.miss_rows) for s in segments], np.int64)


def table_structs(
    opened: Sequence[tuple[IdIndex, Sequence[Segment], int]],
) -> tuple[NDArray[np.uint64], list[NDArray[np.int64]]]:
    """The tables of :func:`recinfer.vocabulary._index.remap`, struct Table of _index.c, and arrays to keep while these are used.

    Args:
        opened: of each table its index, which is also to be kept, its segments and its ``input_hash_size``.
    """
    kept = [segment_array(segments) for _, segments, _ in opened]
    structs = [
        (
            index.buckets.ctypes.data,
            index.shape.sections,
            index.shape.section_buckets,
            index.shape.seed,
            array.ctypes.data,
            len(array),
            segment_block(segments, input_hash_size),
        )
        for (index, segments, input_hash_size), array in zip(opened, kept)
    ]
    return np.array(structs, np.uint64), kept


def segment_block(segments: Sequence[Segment], input_hash_size: int) -> int:
    """Number of ids of a segment; 0 where segments take turns."""
    return -(-input_hash_size // len(segments))


def _shape_of(ids: int, rows: int, load: float) -> IndexShape:
    """The smallest index that has that load with an id for each row: 16 to 31 sections, so that its size is at most a sixteenth
    above the one asked for."""
    buckets = int(rows / (load * _SLOTS)) + 1
    section_buckets = 1
    while section_buckets * _MAX_SECTIONS < buckets:
        section_buckets *= 2
    return IndexShape(-(-buckets // section_buckets), section_buckets, ids, rows)


def build_index(vocabulary: TableVocabulary) -> IdIndex:
    """The index of a checked vocabulary, with room for an id for each row, so that later vocabularies fit as deltas."""
    ids, rows = np.ascontiguousarray(vocabulary.ids), np.ascontiguousarray(vocabulary.rows)
    load = _TARGET_LOAD
    while True:
        shape = _shape_of(len(ids), vocabulary.num_rows, load)
        for seed in range(_MOST_SEEDS):
            shape = replace(shape, seed=seed)
            buckets = np.zeros(shape.buckets * _BUCKET_BYTES, np.uint8)
            if build(buckets, shape.sections, shape.section_buckets, seed, ids, rows):
                return IdIndex(shape, buckets)
        load *= 0.8  # a few ids, for which there are two buckets of equal number more often


def open_index(file: BinaryIO, name: str, rows: int, *, writable: bool = False) -> IdIndex:
    """Map an index file; :meth:`IdIndex.check` reads its buckets.

    Args:
        file: may be closed afterwards.
        name: for messages.
        rows: rows of the table.
        writable: whether the buckets may be changed, in memory of this process only.

    Raises:
        ArchiveError: V3 or V4.
    """
    size = os.fstat(file.fileno()).st_size
    header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), _HEADER)[0]
    if size < HEADER_BYTES or bytes(header["magic"]) != MAGIC or header["zero"].tobytes().strip(b"\0"):
        raise ArchiveError(f"{name}: {size} bytes that do not begin as an id index, {MAGIC.decode()}", rule="V3")
    shape = IndexShape(*(int(header[key]) for key in _NUMBERS))
    power = shape.section_buckets & (shape.section_buckets - 1) == 0
    if not 1 <= shape.sections <= _MAX_SECTIONS or not 1 <= shape.section_buckets < _MAX_SECTION_BUCKETS or not power:
        raise ArchiveError(
            f"{name}: {shape.sections} sections of {shape.section_buckets} buckets; expected 1 to {_MAX_SECTIONS} sections of a "
            "power of two",
            rule="V3",
        )
    if size != shape.num_bytes:
        raise ArchiveError(
            f"{name} has {size} bytes; {shape.buckets} buckets need {shape.num_bytes}: it is truncated or damaged",
            rule="V3",
        )
    if shape.rows != rows or rows > MAX_VOCABULARY_ROWS:
        raise ArchiveError(f"{name}: an index of {shape.rows} rows for a table of {rows}", rule="V4")
    mapped: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
    return IdIndex(shape, np.frombuffer(mapped, np.uint8)[HEADER_BYTES:])
