"""Compares the planner's placements with those of a mixed-integer solver over the same options, with nearly full
memory.

    pip install scipy                                                    # HiGHS; not a dependency of recinfer
    python -m benchmarks.planner_milp                                    # 98 and 99.5 % full, ten cases each, seven minutes
    python -m benchmarks.planner_milp --full 98 --cases 3 --limit 5

A case is 20 tables of 100 to 10 million rows, INT8, on 4 CPU ranks whose total memory is slightly more than the minimum
that the tables need. The solver has --limit seconds. The ratio is the busiest rank's time in recinfer's plan divided by
that in the solver's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np

from recinfer.distributed.planner import ParameterConstraints, Topology
from recinfer.distributed.planner.model.estimates import inference_estimate
from recinfer.distributed.planner.model.tables import inference_tables
from recinfer.distributed.planner.solve.problem import FIXED, FREE, Problem, make_problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.space import build_space
from recinfer.distributed.types.tiers import DDR, TIERS
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection

_DIMS, _SHARES = [16, 32, 64, 128, 256, 512], [0.1, 0.15, 0.3, 0.25, 0.15, 0.05]
_ROOMY = 1 << 50
_DDR = TIERS.index(DDR)


def problem_of(seed: int, num_tables: int, world_size: int, ddr_cap: int) -> Problem:
    """A problem with random tables on ranks with ``ddr_cap`` bytes each."""
    random = np.random.default_rng(seed)
    rows = (10 ** random.uniform(2, 7, num_tables)).astype(int).tolist()
    dims = random.choice(_DIMS, num_tables, p=_SHARES).tolist()
    pooling = np.clip(np.exp(random.normal(1.0, 1.2, num_tables)), 1, 200).tolist()
    tables = [
        EmbeddingBagConfig(num_embeddings=n, embedding_dim=d, name=f"t{i}", feature_names=[f"f{i}"])
        for i, (n, d) in enumerate(zip(rows, dims))
    ]
    limits = {f"t{i}": ParameterConstraints(pooling_factors=[each]) for i, each in enumerate(pooling)}
    module = EmbeddingBagCollection(tables, device="meta")
    facts = inference_tables(module, compute_device="cpu", precision=DataType.INT8, constraints=limits)
    topology = Topology(world_size, "cpu", ddr_cap=ddr_cap)
    estimate = inference_estimate(topology)
    return make_problem(build_space(facts, topology, estimate), topology)


def full_problem(seed: int, share: float, num_tables: int, world_size: int) -> Problem:
    """A problem whose tables need at least ``share`` of the memory."""
    roomy = problem_of(seed, num_tables, world_size, _ROOMY)
    least = np.minimum.reduceat(roomy.option_bytes[_DDR], roomy.unit_ptr[:-1]).sum()
    return problem_of(seed, num_tables, world_size, int(least / world_size / share))


def solve(problem: Problem, limit_s: float) -> float | None:
    """Time of the busiest rank in HiGHS' solution; None if it found no placement."""
    import scipy.sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    world, scale = problem.world_size, float(problem.perf.max())
    upper: list[float] = [np.inf]  # of the variables; the first is the busiest rank's time
    cells: list[tuple[int, int, float]] = []  # row, variable, factor
    low: list[float] = []
    high: list[float] = []
    load: list[list[tuple[int, int]]] = [
        [] for _ in range(world)
    ]  # of each rank: variables, and shards that they put there

    def variable(most: float) -> int:
        upper.append(most)
        return len(upper) - 1

    def row(factors: list[tuple[int, float]], at_least: float, at_most: float) -> None:
        cells.extend((len(low), v, factor) for v, factor in factors)
        low.append(at_least)
        high.append(at_most)

    chosen: list[list[int]] = [[] for _ in range(problem.num_units)]
    for option in np.flatnonzero(problem.possible).tolist():
        shards, mode = problem.shards_of(option), int(problem.mode[option])
        unit, count = int(problem.option_unit[option]), shards.stop - shards.start
        if mode == FREE and count == 1:
            for rank in range(world):
                one = variable(1)
                chosen[unit].append(one)
                load[rank].append((one, shards.start))
            continue
        taken = variable(1)
        chosen[unit].append(taken)
        if mode == FIXED:
            for shard in range(shards.start, shards.stop):
                load[int(problem.fixed_rank[shard])].append((taken, shard))
        elif mode == FREE:  # its shards are equal: how many each rank has
            counts = [variable(count) for _ in range(world)]
            for rank, one in enumerate(counts):
                load[rank].append((one, shards.start))
            row([*((one, 1.0) for one in counts), (taken, -float(count))], 0, 0)
        else:
            raise SystemExit("options of whole hosts are not among these cases")
    for variables in chosen:
        row([(one, 1.0) for one in variables], 1, 1)
    for rank, placed in enumerate(load):
        row([*((one, float(problem.perf[shard]) / scale) for one, shard in placed), (0, -1.0)], -np.inf, 0)
        cap = max(float(problem.caps[_DDR, rank]), 1.0)
        row(
            [(one, float(problem.bytes[_DDR, shard]) / cap) for one, shard in placed],
            -np.inf,
            float(problem.caps[_DDR, rank]) / cap,
        )
    at, which, factors = zip(*cells)
    matrix = scipy.sparse.csc_matrix((factors, (at, which)), shape=(len(low), len(upper)))
    aim, whole = np.zeros(len(upper)), np.ones(len(upper))
    aim[0], whole[0] = 1, 0
    found: Any = milp(
        aim,
        constraints=LinearConstraint(matrix, low, high),
        integrality=whole,
        bounds=Bounds(np.zeros(len(upper)), np.array(upper)),
        options={"time_limit": limit_s},
    )
    return None if found.x is None else float(found.fun) * scale


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", type=float, nargs="+", default=[98.0, 99.5], help="used memory in percent")
    parser.add_argument("--cases", type=int, default=10, help="of each")
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--limit", type=float, default=20.0, help="time limit of the solver per case, in seconds")
    options = parser.parse_args()
    for full in options.full:
        ratios, refused, spent = [], 0, []
        for seed in range(options.cases):
            problem = full_problem(seed, full / 100, options.tables, options.ranks)
            begun = time.process_time()
            ours, report = search(problem)
            spent.append(time.process_time() - begun)
            best = solve(problem, options.limit)
            if best is not None and ours is None:
                refused += 1
            elif best is not None:
                ratios.append(report.max_perf / best)
            shown = f"{ratios[-1]:.4f}" if best is not None and ours is not None else "-"
            print(f"{full} % full, case {seed}: {shown}, {spent[-1]:.3f} s", flush=True)
        worst = f"median {statistics.median(ratios):.4f}, worst {max(ratios):.4f}" if ratios else "no case has a plan"
        print(f"{full} % full: {worst}, {refused} refused that have a plan, CPU {statistics.median(spent):.3f} s")


if __name__ == "__main__":
    main()
