"""The simulation of `recinfer size` beside servers that run here, and how long it takes for a thousand hosts.

    OMP_NUM_THREADS=1 python -m benchmarks.sizing                      # about five minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.sizing --costs serving.json # without measuring the costs first
    OMP_NUM_THREADS=1 python -m benchmarks.sizing --hosts 1000         # the simulation of many hosts alone

Costs are measured on one model (26 tables of width 16, one id); the check is made on another (10 tables of width 64, four
ids, two ranks): on one server, whose small lookups pass by its queue, on one where they may not, and on a ranker with one and with
two shard servers, all processes and the caller on this machine.
The caller sends at random times; what it measured is compared with a simulation of the very arrivals. Cores stand still, or are
slow, for reasons of the machine: before each turn the same load runs once more beside a recorder of that (as root: else it also
sees other work), and what it noted is played back. Its own sleepers take the cores from who has them, so nothing is measured
beside them. Capacity is what four callers get that each wait for their answer. Medians over the turns in which others used at
most 3 % of the machine, or over the quietest one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from recinfer.archive.reader import open_archive
from recinfer.inference.predictor import load
from recinfer.sizing.arrivals import Trace, poisson
from recinfer.sizing.costs import ServingCosts
from recinfer.sizing.measure import LOOKUP, lookup_requests, measure_serving, write_sample_archive
from recinfer.sizing.probe import Load, ServerProcess, closed_loop, open_loop
from recinfer.sizing.simulate import Deployment, simulate
from recinfer.sizing.stalls import Stall, StallRecorder
from recinfer.sizing.typical import TYPICAL_COSTS
from recinfer.sizing.workload import Model, Shards, shards_of

_TABLES, _IDS, _WARM_UP = ((50_000, 64),) * 10, 4, 0.1
_OTHERS = 0.03  # of the machine that others may use in a turn that counts


def check(costs: ServingCosts, options: argparse.Namespace) -> list[dict]:
    """Both deployments at each share of their capacity and batch size."""
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        archive = write_sample_archive(folder, tables=_TABLES, world_size=2, name="checked")
        manifest = open_archive(archive).manifest
        model = Model.of(manifest, dict.fromkeys(manifest.feature_tables, float(_IDS)), None)
        cores = len(os.sched_getaffinity(0))
        for batch in options.batches:
            requests = lookup_requests(load(archive), batch, _IDS)
            one = Deployment(1, 1, 0, cores, co_located=True)
            for kind, direct in (("one server", True), ("one, queued", False)):
                if (direct and costs.direct is None) or not kind.startswith(options.only):
                    continue
                its = costs if direct else replace(costs, direct=None)
                with ServerProcess(archive, direct=direct) as server:
                    rows += compare(kind, server, requests, batch, one, model, shards_of(model, 1), its, options)
            for num in (1, 2):
                with ExitStack() as stack:
                    ranks = [(0, 1)] if num == 1 else [(0,), (1,)]
                    shards = [stack.enter_context(ServerProcess(archive, ranks=mine)) for mine in ranks]
                    listed = {str(rank): [shards[min(rank, num - 1)].target] for rank in (0, 1)}
                    path = folder / "shards.json"
                    path.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}))
                    ranker = stack.enter_context(ServerProcess(archive, shards=path))
                    those = Deployment(num, 1, 1, cores, co_located=True)
                    plan, kind = shards_of(model, num), f"ranker, {num} shard{'s'[: num - 1]}"
                    if kind.startswith(options.only):
                        rows += compare(kind, ranker, requests, batch, those, model, plan, costs, options)
    return rows


def compare(
    name: str,
    server: ServerProcess,
    requests: Sequence[bytes],
    batch: int,
    deployment: Deployment,
    model: Model,
    shards: Shards,
    costs: ServingCosts,
    options: argparse.Namespace,
) -> list[dict]:
    """Measured and simulated p50 and p99 at each share of the capacity."""
    closed_loop(server, LOOKUP, requests, 16, 0.5)
    full = closed_loop(server, LOOKUP, requests, 4, 1.0)
    capacity = full.answered / full.seconds
    rows = []
    for share in options.shares:
        rate = share * capacity
        loads, beside, stalls_of, others = [], [], [], OtherWork()
        for turn in range(options.turns):
            due = poisson(rate, max(int(rate * options.seconds), 100), seed=turn).times
            with StallRecorder() as recorder:
                beside_it = open_loop(server, LOOKUP, requests, due.tolist())
            stalls_of.append(recorded(recorder, beside_it))
            before = others.seconds()
            loads.append(open_loop(server, LOOKUP, requests, due.tolist()))
            beside.append((others.seconds() - before) / loads[-1].seconds / deployment.cores)
        found: dict[str, list[float]] = {}
        for turn, load_ in enumerate(loads):
            if beside[turn] > max(_OTHERS, min(beside)):
                continue  # somebody else used the machine
            trace, stalls = trace_of(load_, batch, model), stalls_of[turn]
            outcome = simulate(deployment, trace, model, shards, costs, warm_up=_WARM_UP, stalls=stalls, seed=turn)
            found.setdefault("stalled", []).append(_lost(stalls, load_) / deployment.cores)
            found.setdefault("measured shared", []).append(load_.answered / max(load_.runs, 1))
            found.setdefault("simulated shared", []).append(outcome.runs)
            found.setdefault("measured busy", []).append(_busy(load_, deployment.cores))
            found.setdefault("simulated busy", []).append(outcome.busy["host"])
            mine = load_.latencies[outcome.counted]
            for percent in (50, 99):
                found.setdefault(f"measured p{percent}", []).append(float(np.nanpercentile(mine, percent)) * 1e3)
                found.setdefault(f"simulated p{percent}", []).append(outcome.percentile(percent) * 1e3)
        row = {"deployment": name, "batch": batch, "share": share, "rate": rate}
        row |= {"others": min(beside), "turns": len(found["stalled"])}
        row |= {key: statistics.median(values) for key, values in found.items()}
        row |= {f"all {key}": found[key] for key in ("measured p99", "simulated p99")}
        rows.append(row)
        r50, r99 = (row[f"simulated p{p}"] / row[f"measured p{p}"] for p in (50, 99))
        print(
            f"{name:17} batch {batch:3}, {share:.0%} of {capacity:5.0f}/s: p50 {row['measured p50']:6.2f} ms, simulated "
            f"{row['simulated p50']:6.2f} ({r50:.2f});  p99 {row['measured p99']:7.2f} ms, simulated "
            f"{row['simulated p99']:7.2f} ({r99:.2f}), turns {_range(found['measured p99'])} and {_range(found['simulated p99'])}; "
            f"cores lost {row['stalled']:.1%}, "
            f"{row['turns']} turns, other work {row['others']:.1%}; requests a run {row['measured shared']:.2f}, "
            f"{row['simulated shared']:.2f}; caller and its server busy {row['measured busy']:.0%}, all {row['simulated busy']:.0%}",
            flush=True,
        )
    return rows


def recorded(recorder: StallRecorder, beside: Load) -> list[Stall]:
    """What a recorder noted while there was this load, in seconds since its first request."""
    begin, end = beside.begin + beside.arrivals[0], beside.begin + beside.seconds
    return [replace(stall, begin=stall.begin - begin) for stall in recorder.stalls if begin - 0.1 < stall.begin < end]


def _lost(stalls: Sequence[Stall], load_: Load) -> float:
    return sum(stall.seconds * stall.lost for stall in stalls) / load_.seconds


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def _busy(load_: Load, cores: int) -> float:
    """The share of the machine that the caller and the server it asks had."""
    spent = sum(sum(astuple(side)) for side in (load_.client, load_.server))
    return float(spent / load_.seconds / cores)


class OtherWork:
    """CPU seconds on this machine, so far, that neither this process nor one of its children took."""

    def seconds(self) -> float:
        """From /proc; in hundredths of a second."""
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, softirq = (int(x) for x in Path("/proc/stat").read_text().split()[1:8])
        mine = 0
        for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
            mine += sum(int(x) for x in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])
        return (user + nice + system + irq + softirq - mine) / tick


def trace_of(load_: Load, batch: int, model: Model) -> Trace:
    """The arrivals as they were."""
    count = load_.arrivals.size
    ids = np.full(count, int(batch * model.ids_per_sample))
    return Trace(load_.arrivals - load_.arrivals[0], np.full(count, batch), ids, {})


def many_hosts(costs: ServingCosts, hosts: int, requests: int) -> dict:
    """A model of 200 large tables on 16 shards, a third of all hosts being rankers, each host of 8 cores at half load."""
    with tempfile.TemporaryDirectory() as name:
        manifest = open_archive(write_sample_archive(Path(name), tables=((100, 64),) * 20)).manifest
    tables = tuple(
        replace(table, name=f"{table.name}_{i}", rows=20_000_000, features=(f"{table.features[0]}_{i}",))
        for i in range(10)
        for table in manifest.tables
    )
    names = tuple(table.name for table in tables)
    features = tuple(feature for table in tables for feature in table.features)
    module = replace(manifest.modules[0], tables=names, features=features, outputs=features)
    model = Model.of(replace(manifest, tables=tables, modules=(module,)), {}, None)
    begin = time.perf_counter()
    plan = shards_of(model, 16)
    planned = time.perf_counter() - begin
    replicas = hosts * 2 // 3 // 16
    deployment = Deployment(16, replicas, hosts - 16 * replicas, cores=8, workers=6)
    qps = 250.0 * deployment.rankers
    trace = poisson(qps, requests, batch=8, ids_per_sample=model.ids_per_sample)
    outcome = simulate(deployment, trace, model, plan, costs)
    print(
        f"{deployment.hosts} hosts ({plan.bytes / 2**30:.0f} GiB on 16 shards x {replicas}, {deployment.rankers} rankers), "
        f"{qps:,.0f} requests/s of 8 samples: p50 {outcome.percentile(50) * 1e3:.2f} ms, p99 "
        f"{outcome.percentile(99) * 1e3:.2f} ms; planned in {planned:.1f} s, {requests} requests in {outcome.seconds:.1f} s "
        f"({outcome.events:,} events, {outcome.events / outcome.seconds / 1e3:.0f} thousand a second), "
        f"{outcome.hedged / max(outcome.calls, 1):.1%} hedged"
    )
    return {"hosts": deployment.hosts, "seconds": outcome.seconds, "p99_ms": outcome.percentile(99) * 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", type=Path, help="measured before; else they are measured now")
    parser.add_argument("--save-costs", type=Path, help="write them here")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.85])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--only", default="", help="deployments whose name begins so: one, ranker, 'ranker, 1'")
    parser.add_argument("--hosts", type=int, help="only simulate so many hosts")
    parser.add_argument("--requests", type=int, default=10_000, help="with --hosts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.hosts is not None:
        costs = TYPICAL_COSTS if options.costs is None else ServingCosts.load(options.costs)
        result: object = many_hosts(costs, options.hosts, options.requests)
    else:
        costs = measure_serving() if options.costs is None else ServingCosts.load(options.costs)
        if options.save_costs is not None:
            costs.save(options.save_costs)
        result = check(costs, options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
