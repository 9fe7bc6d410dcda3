"""Measures the cost of lookups on this machine, by precision, row size, bag length and size of the tables."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from recinfer.distributed.planner.model.estimates import row_alignment
from recinfer.distributed.planner.model.hardware import HardwareProfile, LookupGrid
from recinfer.distributed.quant.timings import Call, Timings
from recinfer.errors import ConfigError, UnavailableError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.quant.buffers import SLACK_BYTES, Buffers, whole_table
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.formats.registry import row_format
from recinfer.quant.lookup import PooledLookup
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["calibrate", "random_module", "random_request"]

logger = logging.getLogger(__name__)

# Widths come in pairs, a width whose rows just fill memory lines and the next width: the op prefetches whole lines of a
# row from its start, so costs rise towards full lines and fall behind them. INT4's widths are one step below full
# lines, because rows of exactly 64 bytes never lie across two lines and would make all widths around them look cheap.
_DIMS = (16, 32, 56, 64, 120, 128, 248, 256, 512)
_DIMS_OF = {DataType.INT4: (16, 32, 48, 64, 112, 128, 240, 256, 512)}
_SET_BYTES = (1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30)
_PRECISIONS = (DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32)
# Bags have two random lengths, because a model's lengths are not predictable. Long bags are few, because other work on
# the machine disturbs fewer short calls.
_IDS_AND_BAGS = ((0.0, 512), (0.5, 512), (1.0, 512), (1.5, 512), (4.5, 512), (16.5, 128), (64.5, 32))
_FEATURES = 8  # features per call: enough to make the cost of the call small, and few enough for small outputs
_ROUNDS = 4
_AGREEMENT = 1.25  # largest factor between the rounds' figures on an idle machine
_FILL = 0x3C  # a byte that decodes to a finite number in every precision


def random_module(
    shapes: Sequence[tuple[int, int]], precision: DataType, device: torch.device | str = "cpu"
) -> EmbeddingBagCollection:
    """A quantized collection of (rows, dim) tables with constant codes and finite scales, tables t0, t1 ..., features
    f0, f1 ..."""
    module = EmbeddingBagCollection(
        [_config(f"t{i}", rows, dim, precision, [f"f{i}"]) for i, (rows, dim) in enumerate(shapes)],
        False,
        device=device,
    )
    lead_bytes = row_format(precision).lead_bytes
    for i in range(len(shapes)):
        table = module.packed_table(f"t{i}")
        table.fill_(1)
        if lead_bytes:  # a scale and a bias
            table[:, :lead_bytes] = torch.tensor([0.01, -1.0], dtype=torch.float16).view(torch.uint8).to(table.device)
    return module


def _config(name: str, rows: int, dim: int, precision: DataType, features: list[str]) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=rows, embedding_dim=dim, name=name, data_type=precision, feature_names=features
    )


def random_request(
    rows: Sequence[int], pooling: Sequence[float], batch: int, device: torch.device | str = "cpu", seed: int = 0
) -> KeyedJaggedTensor:
    """Uniform ids: bags of about ``pooling[i]`` ids in feature f<i>."""
    generator = torch.Generator().manual_seed(seed)
    lengths, values = [], []
    for n, p in zip(rows, pooling):
        lengths.append(_lengths(p, batch, generator))
        values.append(torch.randint(n, (int(lengths[-1].sum()),), generator=generator))
    return KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(len(rows))],
        values=torch.cat(values).to(device),
        lengths=torch.cat(lengths).to(device),
    )


def calibrate(
    device: str = "cpu",
    *,
    seconds_per_point: float = 0.005,
    precisions: Sequence[DataType] = _PRECISIONS,
    max_set_bytes: int = _SET_BYTES[-1],
    threads: int = 1,
    progress: Callable[[str], None] | None = None,
) -> HardwareProfile:
    """Measure this machine.

    A warning is logged when the rounds disagree, for example because another program was running.

    The figures are those of a bag by precision, row size, ids per bag and the set of memory that rows come from, of a
    feature and of a call. :meth:`HardwareProfile.lookup_ms` computes a table's lookups from them.
    Everything is measured in several rounds, so that a short disturbance does not change a figure.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        seconds_per_point: seconds of measuring per figure.
        precisions: precisions to measure.
        max_set_bytes: largest set of rows; it is allocated once.
        threads: threads of a lookup. With one thread, lookups are timed by its CPU clock, which other programs disturb
            least.
        progress: called with a line before each round.

    Raises:
        UnavailableError: the machine has no such device.
        ConfigError: fewer than one thread.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UnavailableError(
            "this machine has no CUDA device to calibrate; use --device cpu, or run this on a machine with GPUs"
        )
    if threads < 1:
        raise ConfigError(f"threads {threads}; expected 1 or more")
    sets = tuple(s for s in _SET_BYTES if s <= max(max_set_bytes, _SET_BYTES[1]))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _calibrated(device, seconds_per_point, precisions, sets, progress)
    finally:
        torch.set_num_threads(before)


def _calibrated(
    device: str,
    seconds_per_point: float,
    precisions: Sequence[DataType],
    sets: tuple[int, ...],
    progress: Callable[[str], None] | None,
) -> HardwareProfile:
    measure = _Measure(device, sets)
    for turn in range(_ROUNDS):
        if progress is not None:
            progress(f"round {turn + 1} of {_ROUNDS}")
        measure.round(precisions, seconds_per_point / _ROUNDS)
    disagreement = measure.disagreement()
    if disagreement > _AGREEMENT:
        logger.warning(
            "the rounds of this calibration disagree by a factor of %.2f (median over the figures); plans from it "
            "may be off by as much: stop other programs on this machine, use one thread (this run used %d), and "
            "calibrate again",
            disagreement,
            torch.get_num_threads(),
        )
    on_cpu = device == "cpu"
    copies = _copies_per_ms(device, measure.synchronize)
    call_ms, feature_ms = measure.overheads()
    return HardwareProfile(
        device=device,
        name=torch.cuda.get_device_name() if device == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        call_ms=call_ms,
        feature_ms=feature_ms,
        grids={row_format(p).element_bits: measure.grid(p) for p in precisions},
        memory_bytes_per_ms=_memory_per_ms(torch.device("cpu"), lambda: None),
        device_memory_bytes_per_ms=0.0 if on_cpu else _memory_per_ms(torch.device(device), measure.synchronize),
        host_to_device_bytes_per_ms=copies[0],
        device_to_device_bytes_per_ms=copies[1],
        notes={"torch": torch.__version__, "disagreement": disagreement},
    )


class _Measure:
    """The timings of a calibration on one device, with one buffer that serves as tables of any shape."""

    def __init__(self, device: str, sets: tuple[int, ...]) -> None:
        self.device = device
        self.sets = sets
        self.synchronize: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
        rows = torch.full((max(sets) + SLACK_BYTES,), _FILL, dtype=torch.uint8, device=device)
        self._buffers = Buffers(rows, row_alignment=row_alignment(device))
        self._timings = Timings(self.synchronize, on_device=device != "cpu")

    def round(self, precisions: Sequence[DataType], seconds: float) -> None:
        """Time everything again."""
        # Tables of different widths, as a model has: each width has a separate kernel.
        for num in (1, 33):
            shapes = [(16, _DIMS[i % len(_DIMS)]) for i in range(num)]
            module = random_module(shapes, DataType.INT8, self.device)
            pooling = [1.0] * num
            make = lambda seed, n=num, p=pooling: random_request([16] * n, p, 1, self.device, seed)  # noqa: E731
            self._timings.add({("call", num): (module, make)}, 5 * seconds)
        for size in self.sets:  # outermost, so that all lookups of a set keep it in the cache level of steady traffic
            self._timings.add({"settle": self._call_of(64, precisions[0], size, *_IDS_AND_BAGS[-1])}, 0.0, settle=0.15)
            for precision in precisions:
                for dim in _dims(precision):
                    points = {
                        (precision, dim, size, ids): self._call_of(dim, precision, size, ids, bags)
                        for ids, bags in _IDS_AND_BAGS
                        if ids or size == self.sets[0]
                    }
                    self._timings.add(points, seconds)

    def disagreement(self) -> float:
        """Factor between the rounds' figures; median over the names."""
        return self._timings.disagreement()

    def overheads(self) -> tuple[float, float]:
        """(ms per call, ms per feature), from a batch of one on 1 and on 33 features of tiny tables."""
        one, many = self._timings.ms(("call", 1)), self._timings.ms(("call", 33))
        feature = max((many - one) / 32, 0.0)
        return max(one - feature, 0.0), feature

    def grid(self, precision: DataType) -> LookupGrid:
        """Bags over row sizes, sets and lengths."""
        call_ms, feature_ms = self.overheads()
        overhead_ms = call_ms + _FEATURES * feature_ms

        def ns(dim: int, size: int, ids: float, bags: int) -> float:
            took = self._timings.ms((precision, dim, size if ids else self.sets[0], ids))
            return max(took - overhead_ms, 1e-6) / (_FEATURES * bags) * 1e6

        figures = np.array([[[ns(d, s, *pair) for pair in _IDS_AND_BAGS] for s in self.sets] for d in _dims(precision)])
        for axis in (1, 2):  # costs grow with distance and bag length: lower figures are measurement errors
            figures = np.flip(np.minimum.accumulate(np.flip(figures, axis), axis), axis)
        return LookupGrid(
            row_bytes=tuple(float(self._row_size(dim, precision)) for dim in _dims(precision)),
            set_bytes=tuple(float(s) for s in self.sets),
            ids_per_bag=tuple(ids for ids, _ in _IDS_AND_BAGS),
            bag_ns=tuple(tuple(tuple(line) for line in of_row) for of_row in figures.tolist()),
        )

    def _row_size(self, dim: int, precision: DataType) -> int:
        return int(row_format(precision).row_bytes(dim, row_alignment(self.device)))

    def _call_of(self, dim: int, precision: DataType, size: int, ids: float, bags: int) -> Call:
        """A call with features of ``bags`` bags of ``ids`` uniform ids each, all from the first ``size`` bytes of the buffer."""
        rows = max(size // self._row_size(dim, precision), 8)
        features = [f"f{i}" for i in range(_FEATURES)]
        table = _config("t0", rows, dim, precision, features)
        lookup = PooledLookup([table], {"t0": [whole_table(table)]}, self._buffers)
        each = [rows] * _FEATURES, [ids] * _FEATURES, bags, self.device
        return lookup, lambda seed: random_request(*each, seed)


def _dims(precision: DataType) -> tuple[int, ...]:
    return _DIMS_OF.get(precision, _DIMS)


def _lengths(mean: float, num: int, generator: torch.Generator) -> torch.Tensor:
    """The two whole numbers around ``mean``, at random."""
    low = int(mean)
    lengths = torch.full((num,), low, dtype=torch.int32)
    return lengths if mean == low else lengths + (torch.rand(num, generator=generator) < mean - low).int()


def _fastest_ms(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


def _memory_per_ms(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Bytes per millisecond of reading a large tensor once."""
    data = torch.ones(1 << 25, dtype=torch.float32, device=device)
    return data.nbytes / _fastest_ms(data.sum, synchronize)


def _copies_per_ms(device: str, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(host to device, device to device) bytes per millisecond; 0 without a device to measure."""
    if device != "cuda":
        return 0.0, 0.0
    host = torch.ones(1 << 24, dtype=torch.float32).pin_memory()
    there = host.to("cuda:0")
    up = host.nbytes / _fastest_ms(lambda: there.copy_(host, non_blocking=True), synchronize)
    if torch.cuda.device_count() < 2:
        return up, 0.0
    other = torch.empty_like(there, device="cuda:1")
    return up, host.nbytes / _fastest_ms(lambda: other.copy_(there, non_blocking=True), synchronize)


def _processor() -> str:
    """Name of the processor, as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
