"""A device cache of the rows that lookups of tables in host memory read most, for the Triton kernel.

The cache of a table is direct-mapped: a row can be in one slot only, that of its hash. A lookup reads a row from its slot if the
slot's tag is the row, and from host memory otherwise; the bytes are the same. After each lookup one launch lets the ids it had vote
for the rows of their slots.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from recinfer.quant.buffers import SLACK_BYTES, Buffers, Placed

__all__ = ["CACHE_FIELDS", "FIRST_CACHE_FIELD", "LOAD_FACTOR", "RowCache", "cache_of", "cached_offset"]

LOAD_FACTOR = 0.2
"""Slots per row of a table, as of FBGEMM's cache; archives have no load factor."""
CACHE_FIELDS = 3  # at the end of a program's description; see RowCache.fields
FIRST_CACHE_FIELD = tl.constexpr(11)  # index of the first cache field in the description
_MOST_VOTES = tl.constexpr(15)  # so that a row which is no longer asked for loses its slot soon
_TABLE_ALIGNMENT = 128
_TILE, _COPY_BYTES, _MOST_PROGRAMS = 64, 128, 512  # ids and bytes of a row at a time; programs per table


@triton.jit
def _slot(row, slots):
    """Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, section 6.4), scaled to ``slots`` < 2^31.
    It spreads neighbouring rows evenly."""
    return (((row * 2654435769) & 0xFFFFFFFF) * slots) >> 32


@triton.jit
def cache_of(chunk_ptr, ALIGNMENT: tl.constexpr):
    """The cache of a description's table: its distance from the rows' pointer, its first tag, and its slots (0: no cache)."""
    start = tl.multiple_of(tl.load(chunk_ptr + FIRST_CACHE_FIELD), ALIGNMENT)
    return start, tl.load(chunk_ptr + FIRST_CACHE_FIELD + 1), tl.load(chunk_ptr + FIRST_CACHE_FIELD + 2)


@triton.jit
def cached_offset(offset, tags_ptr, row, take, row_bytes, cache_start, first_tag, slots):
    """``offset`` [rows] of the rows ``row`` [rows], replaced by those in the cache for rows that it has."""
    # Tables without a cache have one tag that is never a row: with a branch, the compiler would lose the offsets' alignment.
    slot = tl.where(take, _slot(row, slots), 0)
    hit = tl.load(tags_ptr + first_tag + slot, mask=take, other=-1) == row
    return tl.where(hit, cache_start + slot * row_bytes, offset)


@triton.jit(do_not_specialize=["batch", "turn"], do_not_specialize_on_alignment=["ids_ptr", "offsets_ptr"])
def _fill(
    rows_ptr, ids_ptr, offsets_ptr, tags_ptr, votes_ptr, turns_ptr, chunks_ptr, batch, turn,
    ALIGNMENT: tl.constexpr, FIELDS: tl.constexpr, TILE: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Grid: (programs that share a key's ids, descriptions of cached tables).

    The majority vote of Boyer and Moore (MJRTY, a fast majority vote algorithm, 1981) in each slot: an id of the slot's row adds
    a vote, another takes one, and at none the slot is the other's. Programs run in any order, so counts are approximate.

    ``turn`` is the number of the launch: a slot changes its row once in a launch, so only one program writes it, and since no
    lookup runs meanwhile, its tag need not be invalid while the row is copied.
    """
    chunk_ptr = chunks_ptr + tl.program_id(1) * FIELDS
    key = tl.load(chunk_ptr + 10)
    start = tl.multiple_of(tl.load(chunk_ptr + 2), ALIGNMENT)
    row_bytes = tl.multiple_of(tl.load(chunk_ptr + 3), ALIGNMENT)
    rows = tl.load(chunk_ptr + 4)
    cache_start, first_tag, slots = cache_of(chunk_ptr, ALIGNMENT)
    begin = tl.load(offsets_ptr + key * batch).to(tl.int64)
    end = tl.load(offsets_ptr + (key + 1) * batch).to(tl.int64)
    for at in range(begin + tl.program_id(0) * TILE, end, tl.num_programs(0) * TILE):
        lane = at + tl.arange(0, TILE)
        row = tl.load(ids_ptr + lane, mask=lane < end, other=0).to(tl.int64)
        take = (lane < end) & (row >= 0) & (row < rows)
        slot = tl.where(take, _slot(row, slots), 0)
        place = first_tag + slot
        hit = tl.load(tags_ptr + place, mask=take, other=-1) == row
        votes = tl.load(votes_ptr + place, mask=take, other=0)
        tl.atomic_add(votes_ptr + place, 1, mask=take & hit & (votes < _MOST_VOTES), sem="relaxed")
        tl.atomic_add(votes_ptr + place, -1, mask=take & (hit == 0) & (votes > 0), sem="relaxed")
        asks = take & (hit == 0) & (votes <= 0)
        takes = asks & (tl.atomic_xchg(turns_ptr + place, turn, mask=asks, sem="relaxed") != turn)
        if tl.max(takes.to(tl.int32), axis=0) > 0:
            for first in range(0, row_bytes, BYTES):
                byte = tl.multiple_of(first, BYTES) + tl.arange(0, BYTES)[None, :]
                inside = takes[:, None] & (byte < row_bytes)
                source = rows_ptr + start + tl.where(takes, row, 0)[:, None] * row_bytes + byte
                copied = tl.load(source, mask=inside, other=0)
                tl.store(rows_ptr + cache_start + slot[:, None] * row_bytes + byte, copied, mask=inside)
            tl.store(tags_ptr + place, row, mask=takes)
            tl.store(votes_ptr + place, 1, mask=takes)


class RowCache:
    """The cache of the ``"cached"`` tables of one launch.

    Lookups through it take turns, on the host and on the device: a fill must not write a row that another stream's lookup reads.
    It starts empty, and is emptied when rows were written by :meth:`Buffers.write`.

    Args:
        tables: of the launch. Only those that ``buffers`` has in ``"cached"`` memory are cached.
        buffers: hold the rows.

    Attributes:
        tags: int64 ``[slots + 1]`` of all tables: the row, counted from the rectangle's first, or -1. The last stays -1.
    """

    def __init__(self, tables: Sequence[Placed], buffers: Buffers) -> None:
        self.buffers = buffers
        self._fields: dict[Placed, tuple[int, int, int]] = {}
        size = first_tag = 0
        for table in dict.fromkeys(tables):
            slots = math.ceil(LOAD_FACTOR * table.rect.rows)
            if buffers.memory_of(table) == "cached" and slots:
                self._fields[table] = size, first_tag, slots
                first_tag += slots
                size += -(-slots * table.row_bytes(buffers.row_alignment) // _TABLE_ALIGNMENT) * _TABLE_ALIGNMENT
        device = buffers.device
        self._rows = torch.zeros(size + SLACK_BYTES, dtype=torch.uint8, device=device)
        self._slots = first_tag
        self.tags = torch.full((self._slots + 1,), -1, dtype=torch.int64, device=device)
        self._votes, self._turns = torch.zeros(2, self._slots, dtype=torch.int32, device=device)
        self._turn, self._writes, self._lock = 0, buffers.writes, threading.Lock()
        self._over = torch.cuda.Event() if device.type == "cuda" else None

    def __len__(self) -> int:
        """Number of slots."""
        return self._slots

    def fields(self, table: Placed) -> tuple[int, int, int]:
        """For :func:`cache_of`: distance in bytes of its slots from the near buffer, its first tag, and its slots."""
        if table not in self._fields:
            return 0, self._slots, 0
        start, first_tag, slots = self._fields[table]
        return start + self._rows.data_ptr() - self.buffers.near.data_ptr(), first_tag, slots

    def hits(self, table: Placed, rows: Tensor) -> Tensor:
        """Whether the cache has each of ``rows`` (int64, counted from the rectangle's first), bool; for tests and
        measurements."""
        _, first_tag, slots = self._fields[table]
        return self.tags[first_tag + _slot.fn(rows, slots)] == rows

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, the current stream alone uses the cache, which has no stale row."""
        with self._lock:
            stream = None if self._over is None else torch.cuda.current_stream(self.buffers.device)
            if self._over is not None and stream is not None:
                stream.wait_event(self._over)
            writes = self.buffers.writes
            if writes != self._writes:
                self._writes = writes
                self.tags.fill_(-1)
                self._votes.zero_()
            try:
                yield
            finally:
                if self._over is not None:
                    self._over.record(stream)

    def fill(self, base: Tensor, ids: Tensor, offsets: Tensor, chunks: Tensor, batch: int) -> None:
        """Let the ids of a lookup vote; within :meth:`turn`.

        Args:
            base: the pointer from which rows are at a distance.
            ids, offsets, batch: of the lookup.
            chunks: int64 ``[reads, fields]``, one description of each read of a cached table.
        """
        self._turn = (self._turn + 1) & 0x7FFFFFFF
        alignment = self.buffers.row_alignment
        grid = (min(_MOST_PROGRAMS, -(-ids.numel() // _TILE)), len(chunks))
        _fill[grid](
            base, ids, offsets, self.tags, self._votes, self._turns, chunks, batch, self._turn,
            ALIGNMENT=alignment & -alignment, FIELDS=chunks.shape[1], TILE=_TILE, BYTES=_COPY_BYTES,
        )  # fmt: skip

    def forget(self) -> None:
        """Empty the cache before the next lookup."""
        with self._lock:
            self._writes = -1
