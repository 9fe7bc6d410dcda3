"""Measures plans made with and without ``recinfer calibrate`` on this CPU: ``python -m benchmarks.planner --calibrated``.

The figure of a plan is the measured time of its busiest rank: with ranks on different hosts, lookups take that long and
that host is full first. Each rank's shards are a separate module. Calls of all plans take turns, ids are uniform, and
every call has a new request; the lower quartile of a rank's calls counts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["CASES", "Case", "calibrated"]


@dataclass(frozen=True)
class Case:
    """Random tables, seeded by the numbers here: rows log-uniform from 100, one id per bag or log-normal numbers."""

    tables: int
    ranks: int
    batch: int
    precision: str = "INT8"
    most_rows: float = 6.3  # power of ten
    one_id: bool = False

    @property
    def name(self) -> str:
        """Short description of the case."""
        ids = ", one id per bag" if self.one_id else ""
        return f"{self.tables} tables, {self.ranks} ranks, batch {self.batch}, {self.precision}{ids}"

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(rows, dims, pooling factors)."""
        random = np.random.default_rng([self.tables, self.ranks, self.batch])
        rows = (10 ** random.uniform(2, self.most_rows, self.tables)).astype(int)
        dims = random.choice([16, 32, 64, 128, 256], self.tables, p=[0.1, 0.2, 0.35, 0.25, 0.1])
        pooling = np.clip(np.round(np.exp(random.normal(1.0, 1.2, self.tables)), 2), 1, 200)
        return rows, dims, np.ones(self.tables) if self.one_id else pooling


CASES = (
    Case(26, 4, 16),
    Case(26, 4, 64),
    Case(60, 4, 64),
    Case(100, 8, 128, one_id=True),
    Case(40, 4, 256, "FP16", 6.0),
    Case(26, 4, 512),
    Case(60, 8, 512, "INT4"),
    Case(30, 8, 1024),
    Case(26, 4, 2048, one_id=True),
)
_ROUNDS = 12
_SAMPLES = 6_000  # samples of a rank's calls in one round


def calibrated(profile: Path | None = None) -> list[dict[str, Any]]:
    """Calibrate, or read ``profile``, then plan and measure every case; prints and returns the figures."""
    import torch

    from recinfer.distributed.planner.model.hardware import HardwareProfile
    from recinfer.distributed.quant.measure import calibrate

    torch.set_num_threads(1)
    hardware = calibrate(progress=print) if profile is None else HardwareProfile.load(profile)
    print(f"the rounds of the calibration disagree by a factor of {hardware.notes.get('disagreement', 1.0):.2f}")
    found = []
    for case in CASES:
        without, with_profile = _busiest_ms(case, [_plan(case), _plan(case, hardware=hardware)])
        print(
            f"{case.name:<52}{without:>9.3f} ms without{with_profile:>9.3f} ms with{without / with_profile:>7.2f}",
            flush=True,
        )
        found.append({"case": case.name, "without_ms": without, "with_ms": with_profile})
    ratios = np.array([f["without_ms"] / f["with_ms"] for f in found])
    print(
        f"without / with: {ratios.min():.2f} to {ratios.max():.2f}, geometric mean {np.exp(np.log(ratios).mean()):.2f}"
    )
    return found


def _plan(case: Case, **kwargs: Any) -> Any:
    from recinfer.distributed.planner import ParameterConstraints, plan_inference
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    rows, dims, pooling = case.draw()
    configs = [
        EmbeddingBagConfig(
            num_embeddings=int(rows[i]), embedding_dim=int(dims[i]), name=f"t{i}", feature_names=[f"f{i}"]
        )
        for i in range(case.tables)
    ]
    return plan_inference(
        EmbeddingBagCollection(tables=configs, device="meta"),
        world_size=case.ranks,
        precision=DataType[case.precision],
        constraints={f"t{i}": ParameterConstraints(pooling_factors=[float(pooling[i])]) for i in range(case.tables)},
        batch_size=case.batch,
        **kwargs,
    )


def _busiest_ms(case: Case, plans: list[Any]) -> list[float]:
    """Milliseconds of CPU time of each plan's busiest rank."""
    calls = {(i, rank): _call(case, plan, rank) for i, plan in enumerate(plans) for rank in range(case.ranks)}
    times: dict[tuple[int, int], list[float]] = {key: [] for key in calls}
    for turn in range(_ROUNDS):
        for key, (run, make) in calls.items():
            run(make(turn))
            for number in range(max(4, min(40, _SAMPLES // case.batch))):
                request = make(1_000 * (turn + 1) + number)
                begin = time.thread_time()
                output = run(request)
                times[key].append((time.thread_time() - begin) * 1e3)
                del request, output
    ms = {key: float(np.quantile(taken, 0.25)) for key, taken in times.items()}
    return [max(ms[i, rank] for rank in range(case.ranks)) for i in range(len(plans))]


def _call(case: Case, plan: Any, rank: int) -> Any:
    """The lookups of one rank, and a function that makes request number n. A piece of rows gets its share of the ids."""
    from recinfer.distributed.quant.measure import random_module, random_request
    from recinfer.modules.embedding_configs import DataType

    rows, _, pooling = case.draw()
    shards = [(i, s) for i, t in enumerate(plan.tables) for s in t.shards if s.rank == rank and s.rows]
    module = random_module([(s.rows, s.cols) for _, s in shards], DataType[case.precision])
    ids = [float(pooling[i]) * s.rows / int(rows[i]) for i, s in shards]
    return module, lambda seed: random_request([s.rows for _, s in shards], ids, case.batch, seed=seed)
