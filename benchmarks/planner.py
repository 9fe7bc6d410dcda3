"""Measures plans of growing size: time, peak memory, busiest rank, lower bound and gap, also for TorchRec if installed.

    python -m benchmarks.planner                                  # the table of sizes
    python -m benchmarks.planner --torchrec-python PATH           # and TorchRec's planner, run by that interpreter
    python -m benchmarks.planner --cases 26x8,200x16 --timeout 60 --out planner.json
    python -m benchmarks.planner --modes train,greedy,easyrec     # the default search against proposers
    python -m benchmarks.planner --calibrated                     # plans with and without a profile, measured on CPU

80 GiB per rank, batch 512, synthetic tables that depend only on their number. Each case runs in a separate process, so
that its peak memory is measured alone. Both planners' plans are rated with one estimator, recinfer's (which agrees with
TorchRec's option by option: ``python -m benchmarks.planner_parity``); the bound is recinfer's too: no plan with these
options is below it (recinfer.distributed.planner.solve.problem.lower_bound). A gap of 1 proves a plan optimal.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

BATCH = 512
CAP = 80 * 1024**3
SIZES = ((26, 8), (200, 16), (1000, 64), (4000, 128))
BARS = {
    (26, 8, "inference"): (0.2, 1.02),
    (26, 8, "train"): (0.2, 1.02),
    (200, 16, "inference"): (1.0, 1.05),
    (200, 16, "train"): (1.0, 1.03),
    (1000, 64, "inference"): (5.0, 1.05),
    (1000, 64, "train"): (10.0, 1.05),
    (4000, 128, "inference"): (30.0, 1.05),
}


def synthetic_tables(num: int) -> list[dict[str, Any]]:
    """Rows from 100 to 50 million (log-uniform), dims from 16 to 512, log-normal pooling factors from 1 to 200."""
    random = np.random.default_rng(num)
    rows = np.clip(10 ** random.uniform(2, 7.7, num), 100, 5e7).astype(int)
    dims = random.choice([16, 32, 64, 128, 256, 512], num, p=[0.1, 0.15, 0.3, 0.25, 0.15, 0.05])
    pooling = np.clip(np.round(np.exp(random.normal(1.0, 1.2, num)), 2), 1, 200)
    return [
        {"name": f"t{i}", "rows": int(rows[i]), "dim": int(dims[i]), "pooling": [float(pooling[i])]} for i in range(num)
    ]


def _topology(world_size: int) -> dict[str, Any]:
    return {
        "world_size": world_size,
        "local_world_size": min(8, world_size),
        "compute_device": "cuda",
        "hbm_cap": CAP,
    }


def _setup(num: int, world_size: int, mode: str) -> tuple[Any, Any, Any, Any]:
    """(module, sharders, topology, constraints)."""
    from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from recinfer.distributed.planner import ParameterConstraints, Topology
    from recinfer.modules.embedding_configs import EmbeddingBagConfig
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    tables = synthetic_tables(num)
    configs = [
        EmbeddingBagConfig(
            num_embeddings=t["rows"], embedding_dim=t["dim"], name=t["name"], feature_names=[f"{t['name']}_f0"]
        )
        for t in tables
    ]
    constraints = {t["name"]: ParameterConstraints(pooling_factors=t["pooling"]) for t in tables}
    module = EmbeddingBagCollection(tables=configs, device="meta")
    return module, [EmbeddingBagCollectionSharder()], Topology(**_topology(world_size)), constraints


def _plug_ins(mode: str) -> dict[str, Any]:
    """Arguments of the planner for the modes that plan for training."""
    from recinfer.distributed.planner.proposers import DynamicProgrammingProposer, GreedyProposer, UniformProposer

    proposers = {
        "train": None,
        "greedy": [GreedyProposer()],
        "uniform": [UniformProposer()],
        "easyrec": [DynamicProgrammingProposer(), UniformProposer()],  # TorchEasyRec's
    }
    return {"proposer": proposers[mode]}


def run_case(num: int, world_size: int, mode: str) -> dict[str, Any]:
    """Plan once in this process."""
    from recinfer.distributed.planner import EmbeddingShardingPlanner, plan_inference
    from recinfer.distributed.planner.stats import NoopEmbeddingStats

    module, sharders, topology, constraints = _setup(num, world_size, mode)
    begin, begin_cpu = time.monotonic(), time.process_time()
    if mode == "inference":
        plan = plan_inference(
            module,
            world_size=world_size,
            compute_device="cuda",
            topology=topology,
            constraints=constraints,
            batch_size=BATCH,
        )
        e = plan.estimates
    else:
        planner = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=BATCH,
            constraints=constraints,
            stats=NoopEmbeddingStats(),
            **_plug_ins(mode),
        )
        planner.plan(module, sharders)
        assert planner.report is not None
        plan, report = planner.last_plan, planner.report  # no plan as data from a proposer
        e = {"max_perf_ms": report.max_perf, "lower_bound_ms": report.lower_bound, "gap": report.gap}
    seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - begin_cpu
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "max_perf_ms": e["max_perf_ms"],
        "lower_bound_ms": e["lower_bound_ms"],
        "gap": e["gap"],
        "hash": plan.hash if plan is not None else "",
    }


def shared_space(num: int, world_size: int, mode: str) -> tuple[Any, Any]:
    """(search space, problem) with the options that TorchRec plans with: float kernels, its wall-time model.

    ``train`` is forward and backward; ``forward`` is what TorchRec calls inference: the forward alone, no buffers.
    """
    from recinfer.distributed.planner.enumerators import EmbeddingEnumerator
    from recinfer.distributed.planner.model.estimates import storage_bytes, training_time
    from recinfer.distributed.planner.model.tables import model_tables
    from recinfer.distributed.planner.solve.problem import make_problem
    from recinfer.distributed.planner.solve.space import build_space
    from recinfer.distributed.planner.storage_reservations import HeuristicalStorageReservation

    module, sharders, topology, constraints = _setup(num, world_size, mode)
    reserved = HeuristicalStorageReservation(0.15).reserve(topology, BATCH, module, sharders, constraints)
    if mode == "train":
        space = EmbeddingEnumerator(topology, BATCH, constraints).space(module, sharders)
        assert space is not None
    else:
        tables = model_tables(module, sharders, topology, BATCH, constraints)

        def estimate(arrays: Any) -> Any:
            return training_time(arrays, topology, forward_only=True), storage_bytes(arrays, topology)

        space = build_space(tables, topology, estimate)
    return space, make_problem(space, reserved)


def run_forward(num: int, world_size: int) -> dict[str, Any]:
    """Run recinfer's search over TorchRec's options and estimates for inference."""
    from recinfer.distributed.planner.solve.search import search

    begin, begin_cpu = time.monotonic(), time.process_time()
    _, problem = shared_space(num, world_size, "forward")
    _, report = search(problem)
    seconds, cpu_seconds = time.monotonic() - begin, time.process_time() - begin_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"max_perf_ms": report.max_perf, "lower_bound_ms": report.lower_bound, "gap": report.gap}
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": peak, **figures}


def rate_theirs(num: int, world_size: int, mode: str, tables: dict[str, Any]) -> dict[str, float]:
    """The busiest rank of TorchRec's plan by the estimator that rates both sides, and the lower bound."""
    from recinfer.distributed.planner.model.estimates import KERNEL_CODES, TYPE_CODES
    from recinfer.distributed.planner.solve.problem import lower_bound

    space, problem = shared_space(num, world_size, mode)
    load = np.zeros(world_size)
    for t, table in enumerate(space.tables):
        theirs = tables[table.name]
        label = (TYPE_CODES[theirs["type"]], KERNEL_CODES[theirs["kernel"]])
        option = next(o for o in space.options_of(t) if (space.option_type[o], space.option_kernel[o]) == label)
        np.add.at(load, np.array(theirs["ranks"]), space.total[space.shards_of(option)])
    return {"max_perf_ms": float(load.max()), "lower_bound_ms": lower_bound(problem).value}


def _torchrec(python: str, num: int, world_size: int, mode: str, timeout: float) -> dict[str, Any]:
    request = {
        "do": "plan",
        "tables": synthetic_tables(num),
        "topology": _topology(world_size),
        "batch_size": BATCH,
        "inference": mode == "forward",
        "timeout": int(timeout),
    }
    script = str(Path(__file__).with_name("planner_torchrec.py"))
    try:
        run = subprocess.run(
            [python, script],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout * 1.5,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no plan in {timeout * 1.5:.0f} s"}
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["failed"])[-1][:120]}
    made = json.loads(run.stdout.strip().splitlines()[-1])
    rated = rate_theirs(num, world_size, mode, made.pop("tables"))
    return {**made, **rated, "gap": rated["max_perf_ms"] / rated["lower_bound_ms"]}


def _in_process(num: int, world_size: int, mode: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner", "--one", f"{num}x{world_size}:{mode}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        raise SystemExit(run.stderr)
    return json.loads(run.stdout.strip().splitlines()[-1])


def _row(name: str, who: str, r: dict[str, Any], bar: tuple[float, float] | None) -> str:
    if "failed" in r:
        return f"{name:<24}{who:<10}{r['failed']}"
    asked = ""
    if bar is not None:  # CPU time, so that other work on the machine does not matter
        met = r["cpu_seconds"] <= bar[0] and r["gap"] <= bar[1]
        asked = (
            f"{bar[0]:>6.1f} s {bar[1]:.2f}  {'met' if met else 'MISSED'}{', optimal' if r['gap'] < 1 + 1e-9 else ''}"
        )
    figures = f"{r['seconds']:>8.2f} s{r['cpu_seconds']:>8.2f} s{r['peak_mb']:>8.0f} MB{r['max_perf_ms']:>12.4f}{r['lower_bound_ms']:>12.4f}{r['gap']:>9.4f}"
    return f"{name:<24}{who:<10}{figures}   {asked}"


def main(argv: list[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(f"{n}x{w}" for n, w in SIZES))
    parser.add_argument("--torchrec-python", help="interpreter that can import torchrec")
    parser.add_argument("--modes", help="modes of inference,train,greedy,uniform,easyrec,forward, separated by commas")
    parser.add_argument("--timeout", type=float, default=120, help="time limit of TorchRec per plan, in seconds")
    parser.add_argument(
        "--calibrated", action="store_true", help="measure plans with and without recinfer calibrate instead"
    )
    parser.add_argument("--hardware", type=Path, help="with --calibrated, a profile instead of a new calibration")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        size, _, mode = args.one.partition(":")
        num, world = (int(x) for x in size.split("x"))
        print(json.dumps(run_forward(num, world) if mode == "forward" else run_case(num, world, mode)))
        return 0
    if args.calibrated:
        from benchmarks.planner_calibrated import calibrated

        results: Any = calibrated(args.hardware)
    else:
        results = {}
        print(
            f"{'case':<24}{'planner':<10}{'time':>10}{'of CPU':>10}{'peak':>11}{'max ms':>12}{'bound ms':>12}{'gap':>9}   asked"
        )
        for case in args.cases.split(","):
            num, world = (int(x) for x in case.split("x"))
            # "forward" is there to compare: TorchRec's estimates for inference, with plans of both planners.
            modes = ["inference", "train", "forward"] if args.torchrec_python else ["inference", "train"]
            for mode in args.modes.split(",") if args.modes else modes:
                name = f"{num} x {world} {mode}"
                results[name] = _in_process(num, world, mode)
                print(_row(name, "recinfer", results[name], BARS.get((num, world, mode))), flush=True)
                if mode in ("train", "forward") and args.torchrec_python:
                    results[name + " torchrec"] = _torchrec(args.torchrec_python, num, world, mode, args.timeout)
                    print(_row(name, "TorchRec", results[name + " torchrec"], None), flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
