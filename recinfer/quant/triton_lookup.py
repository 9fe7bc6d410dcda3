"""A Triton kernel that looks up packed rows of all tables of a device in one launch.

The kernel reads the rows of :mod:`recinfer.quant.rows` in their memory layout. A program takes a tile of bags (or of
single ids, unpooled) and up to 256 columns of one table; sums are float32, in the order of the ids. It also counts ids
out of range, so that a lookup need not wait for the device first.

On a machine without a GPU the same code runs in Triton's interpreter: set ``TRITON_INTERPRET=1`` before Python starts. That
is for tests; it is thousands of times slower than FBGEMM.

Shape suffixes: F keys of the input, B batch, N ids, D output columns.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Buffers, Placed

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise UnavailableError(
        "Triton is not installed; install a CUDA build of torch, which includes it, or run pip install "
        f"'recinfer[triton]' ({error})"
    ) from error
from recinfer.quant.row_cache import CACHE_FIELDS, FIRST_CACHE_FIELD, RowCache, cache_of, cached_offset

__all__ = ["Launch", "Read", "TritonTables"]

_FORMATS = {
    DataType.INT2: 2,
    DataType.INT4: 4,
    DataType.INT8: 8,
    DataType.FP16: 16,
    DataType.FP32: 32,
    DataType.BF16: 64,
}
"""The row formats of this kernel, each a power of two: one number says which of them occur."""
_NUM_FORMATS = tl.constexpr(len(_FORMATS))
_OUTPUT_DTYPES = (torch.float32, torch.float16)
_MOST_COLUMNS = 256  # columns of a program; wider tables take several programs
_FIELDS = FIRST_CACHE_FIELD.value + CACHE_FIELDS  # fields of a description, in the order of _lookup's reads


@triton.jit
def _row_values(
    starts, take, first, columns,
    FORMAT: tl.constexpr, COLUMNS: tl.constexpr, ALIGNMENT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Columns ``first`` to ``first + COLUMNS`` of the rows that begin at ``starts`` [rows, 1], float32; 0 where not taken."""
    if FORMAT == 32:
        column = first + tl.arange(0, COLUMNS)[None, :]
        pointers = starts.to(tl.pointer_type(tl.float32)) + column
        return tl.load(pointers, mask=take & (column < columns), other=0.0)
    elif FORMAT == 16:
        column = first + tl.arange(0, COLUMNS)[None, :]
        pointers = starts.to(tl.pointer_type(tl.float16)) + column
        return tl.load(pointers, mask=take & (column < columns), other=0.0).to(tl.float32)
    elif FORMAT == 64:  # BF16: the upper halves of float32 numbers
        column = first + tl.arange(0, COLUMNS)[None, :]
        pointers = starts.to(tl.pointer_type(tl.uint16)) + column
        high = tl.load(pointers, mask=take & (column < columns), other=0).to(tl.uint32)
        return (high << 16).to(tl.float32, bitcast=True)
    else:
        per_byte: tl.constexpr = 8 // FORMAT  # an integer format is the number of bits of its codes
        if ALIGNMENT >= 4:  # scale and bias in one load
            both = tl.load(starts.to(tl.pointer_type(tl.uint32)), mask=take, other=0)
            scale, bias = both & 0xFFFF, both >> 16
        else:  # a row may begin at any byte
            scale = tl.load(starts, mask=take, other=0).to(tl.uint32)
            scale += tl.load(starts + 1, mask=take, other=0).to(tl.uint32) << 8
            bias = tl.load(starts + 2, mask=take, other=0).to(tl.uint32)
            bias += tl.load(starts + 3, mask=take, other=0).to(tl.uint32) << 8
        byte = tl.multiple_of(first // per_byte, 4) + tl.arange(0, COLUMNS // per_byte)[None, :]
        end = (columns + per_byte - 1) // per_byte
        if per_byte <= UNIT:
            end = tl.multiple_of(end, UNIT // per_byte)
        packed = tl.load(starts + 4 + byte, mask=take & (byte < end), other=0)
        if FORMAT == 8:
            codes = packed
        elif FORMAT == 4:
            codes = tl.interleave(packed & 15, packed >> 4)
        else:
            even = tl.interleave(packed & 3, (packed >> 4) & 3)
            codes = tl.interleave(even, tl.interleave((packed >> 2) & 3, packed >> 6))
        scale = scale.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        bias = bias.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return codes.to(tl.float32) * scale + bias


@triton.jit
def _tile(
    rows_ptr, ids_ptr, offsets_ptr, weights_ptr, out_ptr, starts_ptr, bad_ptr, chunk_ptr, tags_ptr, batch,
    FORMAT: tl.constexpr, ALIGNMENT: tl.constexpr, POOLED: tl.constexpr, WEIGHTED: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """``TILE`` bags of one key, or single ids, and ``COLUMNS`` columns of one table."""
    start = tl.multiple_of(tl.load(chunk_ptr + 2), ALIGNMENT)
    row_bytes = tl.multiple_of(tl.load(chunk_ptr + 3), ALIGNMENT)
    rows = tl.load(chunk_ptr + 4)
    # The compiler generates wide loads and stores only for provably aligned accesses, masks included.
    first = tl.multiple_of(tl.load(chunk_ptr + 5), 16)
    columns = tl.multiple_of(tl.load(chunk_ptr + 6), UNIT)
    out_column = tl.multiple_of(tl.load(chunk_ptr + 7), UNIT)
    out_stride = tl.multiple_of(tl.load(chunk_ptr + 9), UNIT)
    key = tl.load(chunk_ptr + 10)
    lane = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if POOLED:
        there = lane < batch
        begin = tl.load(offsets_ptr + key * batch + lane, mask=there, other=0).to(tl.int64)
        end = tl.load(offsets_ptr + key * batch + lane + 1, mask=there, other=0).to(tl.int64)
        out_start = out_column
    else:
        begin = tl.load(offsets_ptr + key * batch).to(tl.int64) + lane
        there = begin < tl.load(offsets_ptr + (key + 1) * batch).to(tl.int64)
        end = tl.where(there, begin + 1, begin)
        out_start = tl.multiple_of(tl.load(starts_ptr + tl.load(chunk_ptr)), UNIT)
    if CACHED:
        cache_start, first_tag, slots = cache_of(chunk_ptr, ALIGNMENT)
    most = tl.max(end - begin, axis=0)
    total = tl.zeros((TILE, COLUMNS), dtype=tl.float32)
    bad = tl.zeros((TILE,), dtype=tl.int32)
    for step in range(0, most):
        at = begin + step
        inside = at < end
        row = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int64)
        valid = (row >= 0) & (row < rows)
        bad += (inside & (valid == 0)).to(tl.int32)
        take = inside & valid
        offset = start + tl.where(take, row, 0) * row_bytes
        if CACHED:
            offset = cached_offset(offset, tags_ptr, row, take, row_bytes, cache_start, first_tag, slots)
            offset = tl.multiple_of(offset, ALIGNMENT)
        starts = rows_ptr + offset[:, None]
        values = _row_values(starts, take[:, None], first, columns, FORMAT, COLUMNS, ALIGNMENT, UNIT)
        if WEIGHTED:
            values *= tl.load(weights_ptr + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += values
    if POOLED:  # noqa: SIM102  the first is known when the kernel is compiled, the second when it runs
        if tl.load(chunk_ptr + 8) != 0:  # MEAN
            total = total / tl.maximum(end - begin, 1).to(tl.float32)[:, None]
    column = first + tl.arange(0, COLUMNS)[None, :]
    place = out_start + lane[:, None] * out_stride + column
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there[:, None] & (column < columns))
    if first == 0:
        count = tl.sum(bad, axis=0)
        if count > 0:
            tl.atomic_add(bad_ptr + tl.load(chunk_ptr), count)


# Inputs may begin at any element: no access of them gets wider by their alignment, and each would be compiled anew.
@triton.jit(do_not_specialize=["batch"], do_not_specialize_on_alignment=["ids_ptr", "offsets_ptr", "weights_ptr"])
def _lookup(
    rows_ptr, ids_ptr, offsets_ptr, weights_ptr, out_ptr, starts_ptr, bad_ptr, chunks_ptr, tags_ptr, batch,
    TYPES: tl.constexpr, ALIGNMENT: tl.constexpr, POOLED: tl.constexpr, WEIGHTED: tl.constexpr,
    TILE: tl.constexpr, COLUMNS: tl.constexpr, UNIT: tl.constexpr, FIELDS: tl.constexpr,
    CACHED: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of bags or ids, descriptions of a table's columns).

    ``TYPES`` is the sum of the formats that occur, ``ALIGNMENT`` divides the place of every row, ``UNIT`` the
    columns of every table, the output's stride and its starts. Unpooled, the output of a read begins at its element of
    ``starts_ptr``. ``CACHED``: some tables have a cache.
    """
    chunk_ptr = chunks_ptr + tl.program_id(1) * FIELDS
    rows_format = tl.load(chunk_ptr + 1)
    for width in tl.static_range(_NUM_FORMATS):
        if (TYPES & (2 << width)) != 0:  # noqa: SIM102  the same
            if rows_format == 2 << width:
                _tile(
                    rows_ptr, ids_ptr, offsets_ptr, weights_ptr, out_ptr, starts_ptr, bad_ptr, chunk_ptr, tags_ptr, batch,
                    2 << width, ALIGNMENT, POOLED, WEIGHTED, TILE, COLUMNS, UNIT, CACHED,
                )  # fmt: skip


class Read(NamedTuple):
    """The table columns that one lookup of a key reads.

    Attributes:
        placed: the rows. Ids count from its first row.
        key: number of the input's key whose ids it takes.
        pooling: SUM or MEAN; NONE for one row per id.
    """

    placed: Placed
    key: int
    pooling: PoolingType = PoolingType.SUM


class Launch(NamedTuple):
    """Launch parameters of the kernel: elements of a program's tile, and number of warps. Measured by
    tools/gpu_trial.py."""

    elements: int = 2048
    warps: int = 4


class TritonTables:
    """Lookups of packed tables of any precision and width in one launch.

    Args:
        reads: in the order of the output; all pooled or all unpooled. Several may take one key.
        buffers: hold the rows; referenced, never copied. INT rows may begin at any byte; at an alignment of 4 or more
            the kernel loads
            scale and bias at once.
        output_dtype: float32 or float16. Sums are float32.
        launch: launch parameters of the kernel.

    Attributes:
        pooled: they are pooled: a call looks up vectors of bags; else :meth:`rows` looks up one vector per id.
        starts: first column of each read in the output of a pooled lookup.
        total_dim: columns of all reads.
        cache: of rows in host memory; None: no read has ``"cached"`` memory.

    Raises:
        ConfigError: incompatible reads, rows that the kernel lacks, or an unsupported output type.
    """

    def __init__(
        self,
        reads: Sequence[Read],
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
        launch: Launch | None = None,
    ) -> None:
        if output_dtype not in _OUTPUT_DTYPES:
            raise ConfigError(f"output_dtype: got {output_dtype}; expected one of {sorted(map(str, _OUTPUT_DTYPES))}")
        if not reads:
            raise ConfigError("reads: got none; expected at least one table to look up")
        unpooled = {read.pooling is PoolingType.NONE for read in reads}
        if len(unpooled) > 1:
            raise ConfigError("reads: got pooled and unpooled tables; expected a separate launch for each kind")
        self.reads, self.buffers, self.output_dtype = tuple(reads), buffers, output_dtype
        self.launch = launch or Launch()
        self.pooled = not unpooled.pop()
        widths = [read.placed.rect.cols for read in reads]
        self.columns = min(_MOST_COLUMNS, max(16, _power_of_two(max(widths))))
        lacking = sorted({read.placed.data_type.value for read in reads} - {known.value for known in _FORMATS})
        if lacking:
            raise ConfigError(f"Triton's kernel has no {', '.join(lacking)} rows; give the tables another precision")
        self._types = sum({_FORMATS[read.placed.data_type] for read in reads})
        self.starts = [0, *accumulate(widths)][:-1]
        self.total_dim = sum(widths)
        self._unit = math.gcd(16, *widths)
        device = buffers.device
        cache = RowCache([read.placed for read in reads], buffers)
        self.cache = cache if len(cache) else None
        chunks = [self._chunk(n, first) for n, width in enumerate(widths) for first in range(0, width, self.columns)]
        self._chunks = torch.tensor(chunks, dtype=torch.int64, device=device)
        self._keys = torch.tensor([read.key for read in reads], dtype=torch.int64, device=device)
        self._widths = torch.tensor(widths, dtype=torch.int64, device=device)
        # One description of each cached read.
        filled = [chunk for chunk in chunks if chunk[5] == 0 and chunk[-1]] if self.cache else []
        self._filled = torch.tensor(filled, dtype=torch.int64, device=device)
        self._base = _without_storage(buffers.near)

    def _chunk(self, number: int, first: int) -> list[int]:
        """The parameters of one column of programs."""
        read, alignment = self.reads[number], self.buffers.row_alignment
        placed, rect = read.placed, read.placed.rect
        start = placed.offset
        if self.buffers.memory_of(placed) != "near" and self.buffers.managed is not None:
            # The kernel takes one pointer: rows in the other buffer are at a distance from it. A GPU and its host share
            # one address space, so the distance reaches pinned host memory too.
            start += self.buffers.managed.data_ptr() - self.buffers.near.data_ptr()
        fields = [
            number,
            _FORMATS[placed.data_type],
            start,
            placed.row_bytes(alignment),
            rect.rows,
            first,
            rect.cols,
            self.starts[number],
            int(read.pooling is PoolingType.MEAN),
            self.total_dim if self.pooled else rect.cols,
            read.key,
            *(self.cache.fields(placed) if self.cache else [0] * CACHE_FIELDS),
        ]
        assert len(fields) == _FIELDS
        return fields

    def new_counter(self) -> Tensor:
        """Zeroed counts of ids out of range, int32 ``[reads]``, on the device."""
        return torch.zeros(len(self.reads), dtype=torch.int32, device=self.buffers.device)

    def __call__(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch: int,
        bad: Tensor,
        out: Tensor | None = None,
    ) -> Tensor:
        """Look up pooled tables. Returns at once: on a GPU the result is ready when the current stream reaches it.

        Args:
            ids: int32 or int64 ``[N]``, on the tables' device.
            offsets: of bags, int32 or int64 ``[F x B + 1]``, key after key.
            weights: of ids, float ``[N]``; None: 1.
            batch: B.
            bad: int32 ``[reads]``; each read's ids out of range, which give zeros, are added to its count; read it together with
                the result.
            out: where to write, contiguous.

        Returns:
            ``[B, total_dim]``.
        """
        assert self.pooled, "unpooled tables are looked up by rows()"
        if out is None:
            out = torch.empty(batch, self.total_dim, dtype=self.output_dtype, device=ids.device)
        self._launch(ids, offsets, weights, batch, batch, bad, out, self._keys)
        return out

    def rows(self, ids: Tensor, offsets: Tensor, *, batch: int, bad: Tensor, edges: Sequence[int]) -> list[Tensor]:
        """Look up unpooled tables, all widths in one launch; returns at once.

        Args:
            ids, offsets, batch, bad: as of a pooled lookup.
            edges: position of each key's first id, and N: ``offsets[::batch]``, on the host.

        Returns:
            Of each read ``[ids of its key, columns]``, one after another in one tensor's memory.
        """
        counts = [edges[read.key + 1] - edges[read.key] for read in self.reads]
        shapes = [(count, read.placed.rect.cols) for count, read in zip(counts, self.reads)]
        sizes = [count * columns for count, columns in shapes]
        out = torch.empty(sum(sizes), dtype=self.output_dtype, device=ids.device)
        if out.numel():
            # On the device: from the host it would be one more copy.
            first = offsets[::batch]
            elements = (first[1:] - first[:-1]).long()[self._keys] * self._widths
            self._launch(ids, offsets, None, batch, max(counts), bad, out, elements.cumsum(0) - elements)
        return [part.view(shape) for part, shape in zip(out.split(sizes), shapes)]

    def _launch(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        batch: int,
        lanes: int,
        bad: Tensor,
        out: Tensor,
        starts: Tensor,
    ) -> None:
        """``lanes``: bags of a key, or the most ids of one; ``starts``: int64, not read when pooled."""
        _check_can_run(ids.device)
        if lanes == 0:
            return
        # One tile for every batch: another would be compiled in the request that first needs it.
        tile = max(1, self.launch.elements // self.columns)
        grid = (-(-lanes // tile), len(self._chunks))
        cache = self.cache
        with contextlib.nullcontext() if cache is None else cache.turn():
            _lookup[grid](
                self._base, ids, offsets, ids if weights is None else weights, out, starts, bad, self._chunks,
                self._chunks if cache is None else cache.tags, batch,
                TYPES=self._types, ALIGNMENT=self.buffers.row_alignment & -self.buffers.row_alignment, POOLED=self.pooled,
                WEIGHTED=weights is not None, TILE=tile, COLUMNS=self.columns, UNIT=self._unit, FIELDS=_FIELDS,
                CACHED=cache is not None, num_warps=self.launch.warps,
            )  # fmt: skip
            if cache is not None and ids.numel():
                cache.fill(self._base, ids, offsets, self._filled, batch)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _without_storage(buffer: Tensor) -> Tensor:
    """A tensor that starts at ``buffer``'s address. The interpreter copies the storage of every argument, which would
    be all tables."""
    if buffer.device.type != "cpu":
        return buffer
    return torch.frombuffer((ctypes.c_uint8 * 1).from_address(buffer.data_ptr()), dtype=torch.uint8)


def _check_can_run(device: torch.device) -> None:
    if device.type != "cuda" and isinstance(_lookup, triton.JITFunction):
        raise ConfigError(
            f"Triton's kernel cannot run on {device.type}; use a GPU, FBGEMM's kernel on the CPU, or Triton's "
            f"interpreter (start Python with TRITON_INTERPRET=1)"
        )
