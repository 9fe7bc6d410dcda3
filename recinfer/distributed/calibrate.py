"""Measures this machine for the planner: lookups by precision, row size and table size, memory and copy bandwidths."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from recinfer.distributed.planner.calibration import TABLES_IN_COMPANY, HardwareProfile, LookupGrid
from recinfer.distributed.planner.estimates import packed_row_bytes
from recinfer.distributed.planner.inference import row_alignment
from recinfer.errors import UnavailableError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["calibrate", "random_module", "random_request"]

_DIMS = (16, 64, 128, 256)
_TABLE_BYTES = (1 << 13, 1 << 16, 1 << 19, 1 << 22, 1 << 25)
_PRECISIONS = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32)
_BATCH = 512
_POOLING = 16


def random_module(
    shapes: Sequence[tuple[int, int]], precision: DataType, device: torch.device | str = "cpu"
) -> EmbeddingBagCollection:
    """A quantized collection of (rows, dim) tables of one code and sane scales, tables t0, t1 ..., features f0, f1 ..."""
    configs = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"], data_type=precision
        )
        for i, (rows, dim) in enumerate(shapes)
    ]
    module = EmbeddingBagCollection(configs, False, device=device)
    for config in configs:
        table = module.packed_table(config.name)
        table.fill_(1)
        if precision.bits < 16:
            table[:, :4] = torch.tensor([0.01, -1.0], dtype=torch.float16).view(torch.uint8).to(table.device)
    return module


def random_request(
    rows: Sequence[int], pooling: Sequence[float], batch: int, device: torch.device | str = "cpu", seed: int = 0
) -> KeyedJaggedTensor:
    """Uniform ids: bags of about ``pooling[i]`` ids in feature f<i>."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for n, p in zip(rows, pooling):
        low = int(p)
        length = torch.full((batch,), low, dtype=torch.int32)
        length += (torch.rand(batch, generator=generator) < p - low).int()
        lengths.append(length)
        values.append(torch.randint(n, (int(length.sum()),), generator=generator))
    return KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(len(rows))],
        values=torch.cat(values).to(device),
        lengths=torch.cat(lengths).to(device),
    )


def typical_ms(call: Callable[[], object], seconds: float, synchronize: Callable[[], None]) -> float:
    """The lower quartile of a call's milliseconds: other work on the machine only ever adds."""
    call()
    synchronize()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 200):
        begin = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.quantiles(times, n=4)[0]


def calibrate(
    device: str = "cpu",
    *,
    seconds_per_point: float = 0.03,
    precisions: Sequence[DataType] = _PRECISIONS,
    max_table_bytes: int = _TABLE_BYTES[-1],
    progress: Callable[[str], None] | None = None,
) -> HardwareProfile:
    """Measure this machine, with the threads torch uses now.

    A point is eight tables of a row size and a table size, looked up at two pooling factors, which separates the cost of
    a row from that of a bag; requests change from call to call, so that tables larger than the cache are read from memory.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        seconds_per_point: how long each figure is measured.
        precisions: element types to measure.
        max_table_bytes: largest table (eight of them are held at once); less is quicker.
        progress: called with a line for each precision.

    Raises:
        UnavailableError: no such device here.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError("no CUDA device here to calibrate; use --device cpu, or run this where the GPUs are")
    synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    call_ms, feature_ms = _overheads(device, seconds_per_point * 3, synchronize)
    sizes = tuple(s for s in _TABLE_BYTES if s <= max_table_bytes)
    grids = {}
    for precision in precisions:
        if progress is not None:
            progress(f"lookups of {str(precision).lower()} rows")
        grids[precision.bits] = _grid(precision, sizes, device, seconds_per_point, synchronize, call_ms + feature_ms)
    copies = _copies(device, synchronize)
    return HardwareProfile(
        device=device,
        name=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        call_ms=call_ms,
        feature_ms=feature_ms,
        grids=grids,
        memory_bytes_per_ms=_memory_bandwidth(torch.device("cpu"), lambda: None),
        device_memory_bytes_per_ms=_memory_bandwidth(torch.device(device), synchronize) if device == "cuda" else 0.0,
        host_to_device_bytes_per_ms=copies[0],
        device_to_device_bytes_per_ms=copies[1],
        notes={"batch": _BATCH, "torch": torch.__version__},
    )


def _overheads(device: str, seconds: float, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(ms a call, ms a feature), from a batch of one on 1 and on 33 tiny tables."""
    times = []
    for num in (1, 33):
        module = random_module([(16, 16)] * num, DataType.INT8, device)
        request = random_request([16] * num, [1.0] * num, 1, device)
        times.append(typical_ms(lambda m=module, r=request: m(r), seconds, synchronize))  # type: ignore[misc]
    feature = max((times[1] - times[0]) / 32, 0.0)
    return max(times[0] - feature, 0.0), feature


def _grid(
    precision: DataType,
    sizes: tuple[int, ...],
    device: str,
    seconds: float,
    synchronize: Callable[[], None],
    overhead_ms: float,
) -> LookupGrid:
    row_ns, bag_ns, row_sizes = [], [], []
    for dim in _DIMS:
        row_size = int(packed_row_bytes(dim, precision.bits, row_alignment(device)))
        rows_line, bags_line = [], []
        for size in sizes:
            row, bag = _point(precision, dim, max(size // row_size, 8), device, seconds, synchronize, overhead_ms)
            rows_line.append(row)
            bags_line.append(bag)
        row_sizes.append(float(row_size))
        row_ns.append(tuple(rows_line))
        bag_ns.append(tuple(bags_line))
    return LookupGrid(tuple(row_sizes), tuple(float(s) for s in sizes), tuple(row_ns), tuple(bag_ns))


def _point(
    precision: DataType,
    dim: int,
    rows: int,
    device: str,
    seconds: float,
    synchronize: Callable[[], None],
    overhead_ms: float,
) -> tuple[float, float]:
    """(ns a row, ns a bag) of a table among its like."""
    module = random_module([(rows, dim)] * TABLES_IN_COMPANY, precision, device)
    times = []
    for pooling in (1, _POOLING):
        requests = [
            random_request([rows] * TABLES_IN_COMPANY, [pooling] * TABLES_IN_COMPANY, _BATCH, device, seed)
            for seed in range(8)
        ]
        turn = iter(range(1 << 30))

        def call(requests: list[Any] = requests, turn: Any = turn) -> object:
            return module(requests[next(turn) % len(requests)])

        times.append(max(typical_ms(call, seconds, synchronize) - overhead_ms, 1e-6) / TABLES_IN_COMPANY)
    # Rows are dearer one by one than in long bags; the line through both points keeps the short bags right.
    row = max((times[1] - times[0]) / (_BATCH * (_POOLING - 1)) * 1e6, 0.0)
    row = min(row, times[0] / _BATCH * 1e6)
    return row, times[0] / _BATCH * 1e6 - row


def _memory_bandwidth(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Bytes per millisecond of reading a large tensor once."""
    data = torch.ones(1 << 25, dtype=torch.float32, device=device)
    return data.nbytes / typical_ms(data.sum, 0.2, synchronize)


def _copies(device: str, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(host to device, device to device) bytes per millisecond; 0 where there is nothing to measure."""
    if device != "cuda":
        return 0.0, 0.0
    host = torch.ones(1 << 24, dtype=torch.float32).pin_memory()
    there = host.to("cuda:0")
    up = host.nbytes / typical_ms(lambda: there.copy_(host, non_blocking=True), 0.2, synchronize)
    if torch.cuda.device_count() < 2:
        return up, 0.0
    other = torch.empty_like(there, device="cuda:1")
    return up, host.nbytes / typical_ms(lambda: other.copy_(there, non_blocking=True), 0.2, synchronize)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
