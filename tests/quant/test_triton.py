"""The Triton kernel against the plain-torch reference: in Triton's interpreter, or on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Buffers, Placed, allocate
from recinfer.quant.reference import reference_lookup, reference_pack
from recinfer.quant.rows import PACKED_TYPES, slice_packed_columns

pytest.importorskip("triton", reason="Triton is not installed: pip install 'recinfer[triton]'")
from recinfer.quant import triton_lookup
from recinfer.quant.triton_lookup import Launch, Read, TritonTables
from tests.matrix import by_pairs

SUM, MEAN, NONE = PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 37
DIMS = [4, 8, 12, 20, 64, 100, 128, 200, 256, 260, 512, 1024]


def packed(data_type: DataType, dim: int, seed: int, rows: int = ROWS) -> Tensor:
    return reference_pack(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), data_type)


def placed_in_memory(tables: list[tuple[DataType, int]], alignment: int) -> tuple[Buffers, list[Placed], list[Tensor]]:
    """Tables t0, t1 ... of ``ROWS`` rows, and their packed rows."""
    wanted = [Placed(Rect(0, 0, ROWS, 0, dim, f"t{i}"), kind) for i, (kind, dim) in enumerate(tables)]
    buffers, placed = allocate(wanted, DEVICE, alignment)
    rows = [packed(kind, dim, i) for i, (kind, dim) in enumerate(tables)]
    for spot, of_table in zip(placed, rows):
        buffers.write(spot, of_table)
    return buffers, placed, rows


def bags(keys: int, batch: int, seed: int, dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, offsets and weights; a third of the bags are empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(0, 6, (keys * batch,), generator=generator) - 2).clamp(min=0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, ROWS, (int(offsets[-1]),), generator=generator)
    return ids.to(dtype), offsets.to(dtype), torch.rand(len(ids), generator=generator)


def check(
    tables: list[tuple[DataType, int]],
    poolings: list[PoolingType],
    *,
    batch: int,
    weighted: bool,
    alignment: int,
    seed: int = 0,
    dtype: torch.dtype = torch.int64,
    output_dtype: torch.dtype = torch.float32,
    launch: Launch | None = None,
) -> None:
    buffers, placed, rows = placed_in_memory(tables, alignment)
    ids, offsets, weights = bags(len(tables), batch, seed, dtype)
    reads = [Read(table, key, pooling) for key, (table, pooling) in enumerate(zip(placed, poolings))]
    lookup = TritonTables(reads, buffers, output_dtype=output_dtype, launch=launch)
    bad, given_weights = lookup.new_counter(), weights.to(DEVICE) if weighted else None
    on_device = ids.to(DEVICE), offsets.to(DEVICE)
    if lookup.pooled:
        out = lookup(*on_device, given_weights, batch=batch, bad=bad)
        found = [out[:, first : first + dim] for first, (_, dim) in zip(lookup.starts, tables)]
    else:
        found = lookup.rows(*on_device, batch=batch, bad=bad, edges=offsets[::batch].tolist())
    assert not bad.any()
    for key, (kind, dim) in enumerate(tables):
        edges = offsets[key * batch : (key + 1) * batch + 1]
        mine = slice(int(edges[0]), int(edges[-1]))
        want = reference_lookup(
            rows[key], dim, kind, ids[mine], edges - edges[0], poolings[key], weights[mine] if weighted else None
        )
        rtol, atol = (1e-6, 1e-6) if output_dtype is torch.float32 else (1e-3, 1e-3)
        assert found[key].dtype == output_dtype
        torch.testing.assert_close(found[key].cpu().float(), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("data_type", "pooling", "dim"), by_pairs(PACKED_TYPES, [SUM, MEAN, NONE], DIMS))
def test_every_precision_pooling_and_width(data_type: DataType, pooling: PoolingType, dim: int) -> None:
    alignment = 16 if dim % 8 else 1
    check([(data_type, dim)], [pooling], batch=5, weighted=pooling is not NONE and dim % 16 == 0, alignment=alignment)


@pytest.mark.parametrize("data_type", PACKED_TYPES, ids=lambda t: t.value)
@pytest.mark.parametrize("pooling", [SUM, MEAN], ids=lambda p: p.value)
def test_ids_count_from_the_first_row_of_a_piece(data_type: DataType, pooling: PoolingType) -> None:
    """As FBGEMM's do: the rows that a rank has of a table, in two pieces of columns."""
    dim, first, column = 24, 15, 8
    rows = packed(data_type, dim, 1)[first:]
    rects = [Rect(1, first, ROWS, *cols, "t") for cols in ((0, column), (column, dim))]
    buffers, placed = allocate([Placed(rect, data_type) for rect in rects], DEVICE)
    for spot, rect in zip(placed, rects):
        buffers.write(spot, slice_packed_columns(rows, dim, data_type, rect.col_start, rect.col_stop))
    ids, offsets, weights = bags(1, 6, 3)
    ids %= len(rows)
    lookup = TritonTables([Read(p, 0, pooling) for p in placed], buffers)
    bad = lookup.new_counter()
    out = lookup(*(x.to(DEVICE) for x in (ids, offsets, weights)), batch=6, bad=bad)
    want = reference_lookup(rows, dim, data_type, ids, offsets, pooling, weights)
    torch.testing.assert_close(out.cpu(), want, rtol=1e-6, atol=1e-6)
    assert not bad.any()


def test_ids_out_of_range_give_zeros_and_are_counted() -> None:
    buffers, placed, rows = placed_in_memory([(DataType.INT8, 8), (DataType.INT4, 300)], 16)
    lookup = TritonTables([Read(table, key) for key, table in enumerate(placed)], buffers)
    ids = torch.tensor([3, -1, ROWS, 5, 2**40, 1], device=DEVICE)
    offsets = torch.tensor([0, 2, 3, 5, 6], device=DEVICE)
    bad = lookup.new_counter()
    out = lookup(ids, offsets, batch=2, bad=bad).cpu()
    assert bad.tolist() == [2, 1]
    first = reference_lookup(rows[0], 8, DataType.INT8, torch.tensor([3]), torch.tensor([0, 1, 1]))
    second = reference_lookup(rows[1], 300, DataType.INT4, torch.tensor([5, 1]), torch.tensor([0, 1, 2]))
    torch.testing.assert_close(out, torch.cat([first, second], dim=1), rtol=1e-6, atol=1e-6)
    lookup(ids, offsets, batch=2, bad=bad)
    assert bad.tolist() == [4, 2], "counts add up until the caller zeroes them"


def test_keys_may_come_in_any_order_and_be_read_twice() -> None:
    buffers, placed, rows = placed_in_memory([(DataType.INT8, 8), (DataType.FP16, 4), (DataType.INT2, 12)], 16)
    ids, offsets, _ = bags(3, 4, 5)
    on_device = ids.to(DEVICE), offsets.to(DEVICE)
    for pooling in (SUM, NONE):
        for keys in ([1, 1, 0], [2, 2, 1]):
            lookup = TritonTables([Read(table, key, pooling) for table, key in zip(placed, keys)], buffers)
            bad = lookup.new_counter()
            if lookup.pooled:
                found = list(lookup(*on_device, batch=4, bad=bad).split([8, 4, 12], dim=1))
            else:
                found = lookup.rows(*on_device, batch=4, bad=bad, edges=offsets[::4].tolist())
            for got, of_table, table, key in zip(found, rows, placed, keys):
                edges = offsets[key * 4 : key * 4 + 5]
                mine = slice(int(edges[0]), int(edges[-1]))
                want = reference_lookup(of_table, table.rect.cols, table.data_type, ids[mine], edges - edges[0], pooling)  # fmt: skip
                torch.testing.assert_close(got.cpu(), want, rtol=1e-6, atol=1e-6)


def test_unpooled_tables_of_all_widths_are_one_launch_without_padding() -> None:
    """Keys without ids too, and a lookup without any."""
    tables = [(DataType.INT8, 64), (DataType.INT4, 4), (DataType.FP32, 300), (DataType.INT2, 12), (DataType.FP16, 8)]
    buffers, placed, rows = placed_in_memory(tables, 16)
    lookup = TritonTables([Read(table, key, NONE) for key, table in enumerate(placed)], buffers)
    for lengths in ([3, 0, 2, 1, 4], [0, 5, 0, 0, 0], [0] * 5):
        edges = [0, *accumulate(lengths)]
        ids = torch.arange(edges[-1]) * 7 % ROWS
        offsets = torch.tensor(edges)
        bad = lookup.new_counter()
        found = lookup.rows(ids.to(DEVICE), offsets.to(DEVICE), batch=1, bad=bad, edges=edges)
        assert sum(part.numel() for part in found) == sum(n * dim for n, (_, dim) in zip(lengths, tables))
        for key, (kind, dim) in enumerate(tables):
            mine = ids[edges[key] : edges[key + 1]]
            want = reference_lookup(rows[key], dim, kind, mine, torch.tensor([0, len(mine)]), NONE)
            torch.testing.assert_close(found[key].cpu(), want.view(-1, dim), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pooling", [SUM, NONE], ids=lambda p: p.value)
def test_lookups_of_all_sizes_are_one_compiled_kernel(monkeypatch: pytest.MonkeyPatch, pooling: PoolingType) -> None:
    """Compiling takes a second, which no request shall wait."""
    buffers, placed, _ = placed_in_memory([(DataType.INT8, 64), (DataType.INT4, 32)], 16)
    lookup = TritonTables([Read(table, key, pooling) for key, table in enumerate(placed)], buffers)
    kernel, compiled = triton_lookup._lookup, set()

    class Noted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*given: object, **fixed: object) -> None:
                compiled.add(tuple(fixed.items()))
                kernel[grid](*given, **fixed)

            return launch

    monkeypatch.setattr(triton_lookup, "_lookup", Noted())
    for batch in (1, 2, 33, 300):
        ids, offsets, _ = bags(2, batch, batch)
        if pooling is SUM:
            lookup(ids.to(DEVICE), offsets.to(DEVICE), batch=batch, bad=lookup.new_counter())
        else:
            edges = offsets[::batch].tolist()
            lookup.rows(ids.to(DEVICE), offsets.to(DEVICE), batch=batch, bad=lookup.new_counter(), edges=edges)
    assert len(compiled) == 1


@pytest.mark.skipif(DEVICE.type == "cuda", reason="maps a sparse file into host memory")
def test_rows_beyond_two_gibibytes(tmp_path: Path) -> None:
    """A file of 6 GB that is one hole but for two rows: nothing reads the rest of it."""
    rows, dim = 45_000_000, 128  # of 132 bytes
    table = Placed(Rect(0, 0, rows, 0, dim, "t"), DataType.INT8)
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(table.bytes())
    buffer = torch.from_file(str(path), shared=True, size=table.bytes(), dtype=torch.uint8)
    two = packed(DataType.INT8, dim, 7, 2)
    ids = torch.tensor([20_000_000, rows - 1])
    for row, there in zip(two, ids.tolist()):
        buffer[there * 132 : there * 132 + 132] = row
    for dtype in (torch.int32, torch.int64):
        lookup = TritonTables([Read(table, 0, NONE)], Buffers(buffer))
        bad = lookup.new_counter()
        (out,) = lookup.rows(ids.to(dtype), torch.tensor([0, 1, 2]), batch=2, bad=bad, edges=[0, 2])
        want = reference_lookup(two, dim, DataType.INT8, torch.tensor([0, 1]), torch.arange(3), NONE)
        torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    assert path.stat().st_blocks * 512 < 1 << 20


def test_rows_in_the_second_buffer() -> None:
    _, placed, rows = placed_in_memory([(DataType.INT8, 8), (DataType.INT4, 8)], 16)
    near, far = allocate([placed[0]], DEVICE, 16)[0], allocate([placed[1]], torch.device("cpu"), 16)[0]
    pinned = far.near.pin_memory() if DEVICE.type == "cuda" else far.near
    buffers = Buffers(near.near, pinned, 16)
    tables = [placed[0], Placed(placed[1].rect, DataType.INT4, 0, "managed")]
    for table, packed_rows in zip(tables, rows):
        buffers.write(table, packed_rows)
    ids, offsets, _ = bags(2, 3, 2)
    lookup = TritonTables([Read(table, key) for key, table in enumerate(tables)], buffers)
    out = lookup(ids.to(DEVICE), offsets.to(DEVICE), batch=3, bad=lookup.new_counter()).cpu()
    for key in range(2):
        edges = offsets[key * 3 : key * 3 + 4]
        mine = ids[int(edges[0]) : int(edges[-1])]
        want = reference_lookup(rows[key], 8, tables[key].data_type, mine, edges - edges[0])
        torch.testing.assert_close(out[:, key * 8 : key * 8 + 8], want, rtol=1e-6, atol=1e-6)


def test_what_does_not_go_together_is_refused() -> None:
    buffers, placed, _ = placed_in_memory([(DataType.INT8, 8)], 16)
    with pytest.raises(ConfigError, match="pooled and unpooled"):
        TritonTables([Read(placed[0], 0, SUM), Read(placed[0], 0, NONE)], buffers)
    with pytest.raises(ConfigError, match=r"output_dtype: got torch\.float64"):
        TritonTables([Read(placed[0], 0)], buffers, output_dtype=torch.float64)
    with pytest.raises(ConfigError, match="expected at least one"):
        TritonTables([], buffers)


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from recinfer.quant import row_cache, triton_lookup

TYPES = {"rows_ptr": "u8", "ids_ptr": "i64", "offsets_ptr": "i64", "weights_ptr": "fp32", "out_ptr": "fp32", "starts_ptr": "i64",
         "bad_ptr": "i32", "chunks_ptr": "i64", "tags_ptr": "i64", "votes_ptr": "i32", "turns_ptr": "i32"}

def ptx(kernel, fixed):
    signature = {n: "constexpr" if n in fixed else "*" + TYPES[n] if n in TYPES else "i32" for n in kernel.arg_names}
    aligned = {(p.num,): [["tt.divisibility", 16]] for p in kernel.params if p.name in TYPES and not p.do_not_specialize_on_alignment}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(n),): v for n, v in fixed.items()}, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert len(made.asm["cubin"]) > 0
    return made.asm["ptx"]

for types, pooled, alignment, cached in ((8, True, 16, False), (4, True, 16, False), (16, True, 16, False), (62, False, 1, False),
                                         (8, True, 16, True), (4, True, 16, True)):
    code = ptx(triton_lookup._lookup, dict(
        TYPES=types, ALIGNMENT=alignment, POOLED=pooled, WEIGHTED=pooled, TILE=16, COLUMNS=128, UNIT=16,
        FIELDS=triton_lookup._FIELDS, CACHED=cached))
    print(types, alignment, "ld.global.b8" in code or "ld.global.u8" in code, "st.global.v4" in code)
code = ptx(row_cache._fill, dict(ALIGNMENT=16, FIELDS=triton_lookup._FIELDS, TILE=row_cache._TILE, BYTES=row_cache._COPY_BYTES))
print("fill", "ld.global.v4" in code, "st.global.v4" in code)
print(*(p.name for p in triton_lookup._lookup.params if p.do_not_specialize_on_alignment))

import torch
from recinfer.errors import ConfigError
from recinfer.layout.rect import Rect
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.buffers import Placed, allocate

buffers, (table,) = allocate([Placed(Rect(0, 0, 3, 0, 4, "t"), DataType.INT8)], torch.device("cpu"))
lookup = triton_lookup.TritonTables([triton_lookup.Read(table, 0)], buffers)
try:
    lookup(torch.tensor([1]), torch.tensor([0, 1]), batch=1, bad=lookup.new_counter())
except ConfigError as error:
    print(error)
"""


def test_the_kernels_compile_for_a_gpu_with_wide_loads_and_stores_and_no_cpu_runs_them() -> None:
    """Triton compiles without a GPU: for Hopper here. Aligned rows are read by words, not by bytes, and written by four; where ids
    begin in memory does not matter, so that no other place compiles the kernel anew."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    aligned = ["8 16 False True", "4 16 False True", "16 16 False True"]
    lines = [*aligned, "62 1 True True", *aligned[:2], "fill True True", "ids_ptr offsets_ptr weights_ptr"]
    *compiled, refused = done.stdout.splitlines()
    assert compiled == lines, "the last two read rows of a cache too"
    assert "start Python with TRITON_INTERPRET=1" in refused
