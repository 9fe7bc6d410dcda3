"""Compares planned with measured milliseconds of quantized collections on this CPU: ``python -m benchmarks.planner
--calibrated``.

There are two sets of cases: those used to fit the estimator, and others with different row counts, widths, precisions,
bag lengths and batches. Both are measured in interleaved rounds. Each rank's lookups are a separate module, ids are
uniform, and every call has a new request.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "calibrated"]


@dataclass(frozen=True)
class Case:
    """Random tables: rows log-uniform, pooling factors log-normal, seeded by the numbers here."""

    tables: int
    ranks: int
    precision: str
    batch: int = 512
    rows: tuple[float, float] = (2.0, 6.0)  # powers of ten
    dims: tuple[int, ...] = (16, 32, 64, 128)
    pooling: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 50.0)  # mean and deviation of the log, least, most
    held_out: bool = False

    @property
    def name(self) -> str:
        """Short description of the case."""
        return f"{self.tables} {self.precision} batch {self.batch}"

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, dims, pooling factors)."""
        random = np.random.default_rng([self.tables, self.batch, len(self.precision), int(10 * self.rows[1])])
        rows = (10 ** random.uniform(*self.rows, self.tables)).astype(int)
        dims = random.choice(self.dims, self.tables)
        mean, deviation, least, most = self.pooling
        pooling = np.round(np.exp(random.normal(mean, deviation, self.tables)).clip(least, most), 1)
        return rows, dims, pooling


CASES = (
    Case(26, 4, "INT8"),
    Case(26, 4, "INT4"),
    Case(60, 4, "FP16"),
    Case(40, 4, "INT8", held_out=True, batch=128, rows=(3.0, 6.5), dims=(24, 48, 96)),
    Case(16, 4, "INT8", held_out=True, batch=2048, rows=(2.0, 5.0), dims=(64,), pooling=(0.0, 0.0, 1.0, 1.0)),
    Case(12, 4, "INT4", held_out=True, batch=256, rows=(4.0, 7.0), dims=(80, 160), pooling=(3.0, 0.7, 5.0, 150.0)),
    Case(30, 3, "INT2", held_out=True, batch=512, rows=(2.0, 6.0), dims=(32, 128, 256)),
    Case(20, 4, "FP32", held_out=True, batch=300, rows=(1.5, 5.5), dims=(16, 40, 64), pooling=(1.5, 1.0, 0.5, 60.0)),
    Case(80, 4, "INT8", held_out=True, batch=32, rows=(2.0, 6.0)),
    Case(8, 4, "FP16", held_out=True, batch=1024, rows=(5.0, 6.5), dims=(128, 192), pooling=(2.0, 0.5, 2.0, 30.0)),
)


_SETTLE = 0.15
_SECONDS = 0.02  # of measuring a rank, between any two rounds of the calibration, so that both see the same load of the machine


def calibrated(hardware_out: Path | None = None) -> list[dict[str, Any]]:
    """Calibrate and measure every rank of every case in turn, and compare; prints and returns the figures."""
    import torch

    from recinfer.distributed.quant.measure import calibrate
    from recinfer.distributed.quant.timings import Timings

    torch.set_num_threads(1)
    placed = {case: _plan(case) for case in CASES}
    calls = {(case, rank): _call(case, placed[case], rank) for case in CASES for rank in range(case.ranks)}
    timings = Timings()

    def measure(line: str) -> None:
        print(f"calibrating and measuring: {line}", flush=True)
        timings.add(calls, _SECONDS, settle=_SETTLE)

    hardware = calibrate(progress=measure)
    if hardware_out is not None:
        hardware.save(hardware_out)
    found = []
    for case in CASES:
        planned = _plan(case, hardware=hardware, pinned=placed[case]).estimates["predicted_ms_per_rank"]
        for rank in range(case.ranks):
            figures = {"planned_ms": planned[rank], "measured_ms": timings.ms((case, rank))}
            print(_line(case, rank, **figures), flush=True)
            found.append({"case": case.name, "rank": rank, "held_out": case.held_out, **figures})
    for held_out, title in ((False, "looked at while fitting"), (True, "held out")):
        ratios = np.array([f["planned_ms"] / f["measured_ms"] for f in found if f["held_out"] is held_out])
        inside = int((np.abs(ratios - 1) <= 0.25).sum())
        print(
            f"{title}: {inside} of {ratios.size} ranks within 25 %; planned / measured {ratios.min():.2f} to "
            f"{ratios.max():.2f}, median {np.median(ratios):.2f}"
        )
    return found


def _plan(case: Case, **kwargs: Any) -> Any:
    """A table-wise plan, so that each rank's lookups are a module of whole tables."""
    from recinfer.distributed.planner import ParameterConstraints, plan_inference
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    rows, dims, pooling = case.draw()
    names = [f"t{i}" for i in range(case.tables)]
    configs = [
        EmbeddingBagConfig(num_embeddings=int(rows[i]), embedding_dim=int(dims[i]), name=name, feature_names=[f"f{i}"])
        for i, name in enumerate(names)
    ]
    limits = {
        name: ParameterConstraints(pooling_factors=[float(pooling[i])], sharding_types=["table_wise"])
        for i, name in enumerate(names)
    }
    return plan_inference(
        EmbeddingBagCollection(tables=configs, device="meta"),
        world_size=case.ranks,
        precision=DataType[case.precision],
        constraints=limits,
        batch_size=case.batch,
        **kwargs,
    )


def _call(case: Case, plan: Any, rank: int) -> Any:
    from recinfer.distributed.quant.measure import random_module, random_request
    from recinfer.modules.embedding_configs import DataType

    rows, dims, pooling = case.draw()
    mine = [i for i in range(case.tables) if plan.tables[i].ranks == (rank,)]
    module = random_module([(int(rows[i]), int(dims[i])) for i in mine], DataType[case.precision])
    return module, lambda seed: random_request(rows[mine], pooling[mine], case.batch, seed=seed)


def _line(case: Case, rank: int, planned_ms: float, measured_ms: float) -> str:
    ratio = planned_ms / measured_ms
    held, mark = "held out" if case.held_out else "", "" if abs(ratio - 1) <= 0.25 else "  outside"
    figures = f"{planned_ms:>9.3f} ms planned{measured_ms:>9.3f} ms measured{ratio:>8.2f}{mark}"
    return f"{case.name:<22}rank {rank} {held:<10}{figures}"
