"""The simulation of `recinfer size` beside servers that run here, and how long it takes for a thousand hosts.

    OMP_NUM_THREADS=1 python -m benchmarks.sizing                      # about twenty minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.sizing --costs serving.json # without measuring the costs first
    OMP_NUM_THREADS=1 python -m benchmarks.sizing --hosts 1000         # the simulation of many hosts alone

Costs are measured on one model (26 tables of width 16, one id); the check is made on another (10 tables of width 64, four
ids, two ranks): on one server, whose small lookups pass by its queue, on one where they may not, and on a ranker with one and with
two shard servers, all processes and the caller on this machine.
The caller sends at random times, as many requests at each rate; what it measured is compared with a simulation of the very
arrivals. What the machine does besides is recorded during the turn and played back: which cores other programs and the kernel
had, by the kernel's own record; when cores stood still or were slow, each four milliseconds, and how fast they were on average
beside when the costs were measured, by sleepers on each core (as root: else they also see other work), which are simulated as
others too. Capacity is what four
callers get that each wait for their answer. Medians over turns, of which each round has one of each rate. Left out are those in
which others used more than 3 % of the machine, or the hypervisor took more than 1 % of it, by the kernel's count, whatever came of
them.
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
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from recinfer.archive.reader import open_archive
from recinfer.inference.predictor import load
from recinfer.sizing.arrivals import Trace, poisson
from recinfer.sizing.costs import ServingCosts
from recinfer.sizing.measure import measure_serving
from recinfer.sizing.probe import Load, ServerProcess, closed_loop, open_loop
from recinfer.sizing.sample import LOOKUP, lookup_requests, write_sample_archive
from recinfer.sizing.simulate import Deployment, Outcome, simulate
from recinfer.sizing.stalls import Stall, StallRecorder, looks_between, pace_of, slowness_of
from recinfer.sizing.stints import Stint, StintRecorder, can_record_switches
from recinfer.sizing.typical import TYPICAL_COSTS
from recinfer.sizing.workload import Model, Shards, shards_of

_TABLES, _IDS, _WARM_UP = ((50_000, 64),) * 10, 4, 0.1
_OTHERS, _STOLEN = 0.03, 0.01  # of the machine that others may use, and the hypervisor take, in a turn that counts


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
            for kind, like, direct in (("one server", "direct", True), ("one, queued", "whole", False)):
                if (direct and costs.direct is None) or not kind.startswith(options.only):
                    continue
                its = costs if direct else replace(costs, direct=None)
                with ServerProcess(archive, direct=direct) as server:
                    rows += compare(kind, like, server, requests, batch, one, model, shards_of(model, 1), its, options)
            for num in (1, 2):
                plan, kind = shards_of(model, num), f"ranker, {num} shard{'s'[: num - 1]}"
                if not kind.startswith(options.only):
                    continue
                with ExitStack() as stack:
                    those, ranker = Deployment(num, 1, 1, cores, co_located=True), start_ranker(stack, archive, num)
                    rows += compare(
                        kind, f"ranker of {num}", ranker, requests, batch, those, model, plan, costs, options
                    )
    return rows


def start_ranker(stack: ExitStack, archive: Path, num: int) -> ServerProcess:
    """A ranker and so many shard servers of an archive of two ranks."""
    ranks = [(0, 1)] if num == 1 else [(0,), (1,)]
    shards = [stack.enter_context(ServerProcess(archive, ranks=mine)) for mine in ranks]
    listed = {str(rank): [shards[min(rank, num - 1)].target] for rank in (0, 1)}
    path = archive.with_suffix(f".{num}.json")
    path.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}))
    return stack.enter_context(ServerProcess(archive, shards=path))


def compare(
    name: str,
    like: str,
    server: ServerProcess,
    requests: Sequence[bytes],
    batch: int,
    deployment: Deployment,
    model: Model,
    shards: Shards,
    costs: ServingCosts,
    options: argparse.Namespace,
) -> list[dict]:
    """Measured and simulated p50 and p99 at each share of the capacity; ``like``: the server of the costs that it is one of."""
    closed_loop(server, LOOKUP, requests, 16, 0.5)
    capacity = statistics.median(
        full.answered / full.seconds for full in (closed_loop(server, LOOKUP, requests, 4, 1.0) for _ in range(3))
    )
    turns = measured(server, requests, capacity, costs.paces.get(like, 0.0), options)

    def simulated(turn: Turn, seed: int) -> Outcome:
        trace = trace_of(turn.load, batch, model)
        recorded = {"stalls": turn.stalls, "stints": turn.stints, "speed": turn.speed}
        return simulate(deployment, trace, model, shards, costs, warm_up=_WARM_UP, seed=seed, **recorded)  # type: ignore[arg-type]

    rows = []
    for share, of_share in turns.items():
        row = {"deployment": name, "batch": batch, "share": share, "rate": share * capacity}
        row |= summary([(turn, simulated(turn, seed)) for seed, turn in enumerate(of_share) if turn.counts])
        row |= {f"all {key}": [getattr(turn, key) for turn in of_share] for key in ("others", "stolen")}
        rows.append(row)
        say(row, len(of_share))
    return rows


@dataclass(frozen=True)
class Turn:
    """A measured load, and what the machine did besides.

    Attributes:
        others, stolen: share of the machine that other programs and the kernel's threads had; and that the hypervisor took.
        stalls, stints: in seconds since the first request; the recorder's own looks are among the stints. None: this system does
            not tell.
        speed: of the machine when it was fastest, seconds of measured work a second; the rest are stalls.
        pace_s: what the recorder's small work took.
    """

    load: Load
    others: float
    stolen: float
    stalls: list[Stall]
    stints: list[Stint] | None
    speed: float
    pace_s: float

    @property
    def counts(self) -> bool:
        """Whether nobody else disturbed it; nothing of what came of it is asked."""
        return self.others <= _OTHERS and self.stolen <= _STOLEN


def measured(
    server: ServerProcess, requests: Sequence[bytes], capacity: float, then_s: float, options: argparse.Namespace
) -> dict[float, list[Turn]]:
    """Turns of each share of the capacity. In each round another one is first: what changes on the machine in minutes is of
    all alike. ``then_s``: what the recorder's small work took when the costs were measured; 0: unknown.
    """
    shares, tells, cores = options.shares, can_record_switches(), len(os.sched_getaffinity(0))
    loads: list[tuple[float, Load, float, float, tuple[Stint, ...]]] = []
    with StallRecorder() as recorder:
        for at in range(options.turns):
            for share in (*shares[at % len(shares) :], *shares[: at % len(shares)]):
                due = poisson(share * capacity, options.each, seed=options.seed + at).times.tolist()
                stints = StintRecorder(strangers=recorder.pids)
                before = other_work()
                with stints if tells else nullcontext():
                    load_ = open_loop(server, LOOKUP, requests, due)
                others, stolen = ((now - was) / load_.seconds / cores for now, was in zip(other_work(), before))
                if tells:  # to the microsecond
                    had = sum(stint.seconds for stint in stints.stints if stint.pid not in recorder.pids)
                    others = had / stints.seconds / cores
                loads.append((share, load_, others, stolen, stints.stints))
    found: dict[float, list[Turn]] = {share: [] for share in shares}
    for share, load_, others, stolen, of_others in loads:
        begin, end = load_.begin + load_.arrivals[0], load_.begin + load_.seconds
        looks = [looks_between(its, begin - 0.1, end) for its in recorder.looks]
        stalls, slower = slowness_of(looks)
        pace_s = statistics.fmean(map(pace_of, looks))
        seen = [replace(stint, begin=stint.begin - begin) for stint in of_others if begin <= stint.begin < end]
        since = [replace(stall, begin=stall.begin - begin) for stall in stalls]
        speed = slower * (then_s / pace_s if then_s and pace_s else 1.0)
        found[share].append(Turn(load_, others, stolen, since, seen if tells else None, speed, pace_s))
    return found


def summary(turns: Sequence[tuple[Turn, Outcome]]) -> dict[str, Any]:
    """Medians over turns, and each turn's p50 and p99."""
    found: dict[str, list[float]] = {}
    for turn, outcome in turns:
        load_, cores = turn.load, len(os.sched_getaffinity(0))
        its = {
            "stalled": sum(stall.seconds * stall.lost for stall in turn.stalls) / load_.seconds / cores,
            "other work": turn.others,
            "measured shared": load_.answered / max(load_.runs, 1),
            "simulated shared": outcome.runs,
            "pace us": turn.pace_s * 1e6,
            "measured busy": _busy(load_, cores),
            "simulated busy": outcome.busy["host"],
        }
        mine = load_.latencies[outcome.counted]
        for percent in (50, 99):
            its[f"measured p{percent}"] = float(np.nanpercentile(mine, percent)) * 1e3
            its[f"simulated p{percent}"] = outcome.percentile(percent) * 1e3
        its |= {f"us {name}": 1e6 * spent / load_.answered for name, spent in _by_thread(load_).items()}
        its |= {
            f"simulated us {side} {name}": 1e6 * spent / load_.answered
            for side, threads in outcome.spent.items()
            for name, spent in threads.items()
        }
        for key, value in its.items():
            found.setdefault(key, []).append(value)
    medians: dict[str, Any] = {key: statistics.median(values) for key, values in found.items()}
    return medians | {f"all {key}": values for key, values in found.items() if " p" in key} | {"turns": len(turns)}


def say(row: dict[str, Any], turns: int) -> None:
    """One line of it."""
    begin = f"{row['deployment']:17} batch {row['batch']:3}, {row['share']:.0%}, {row['rate']:5.0f}/s: "
    if not row["turns"]:
        print(begin + f"others had the machine in all of {turns} turns", flush=True)
        return
    for percent in (50, 99):
        measured, simulated = (row[f"{how} p{percent}"] for how in ("measured", "simulated"))
        ranges = " and ".join(_range(row[f"all {how} p{percent}"]) for how in ("measured", "simulated"))
        begin += (
            f"p{percent} {measured:.2f} ms, simulated {simulated:.2f} ({simulated / measured:.2f}; turns {ranges}); "
        )
    print(
        begin
        + f"cores lost {row['stalled']:.1%}, others had {row['other work']:.1%}, {row['turns']} turns of {turns}; the "
        f"recorder's work {row['pace us']:.1f} us; requests a "
        f"run {row['measured shared']:.2f}, {row['simulated shared']:.2f}; caller and its server busy "
        f"{row['measured busy']:.0%}, all {row['simulated busy']:.0%}",
        flush=True,
    )


def _by_thread(load_: Load) -> dict[str, float]:
    sides = {"caller": load_.client, "server": load_.server}
    threads = ("loop", "grpc", "asks", "runs", "other", "waited")
    return {f"{side} {name}": getattr(spent, name) for side, spent in sides.items() for name in threads}


def _range(values: Sequence[float]) -> str:
    return f"{min(values):.1f} to {max(values):.1f}"


def _busy(load_: Load, cores: int) -> float:
    """The share of the machine that the caller and the server it asks had."""
    return (load_.client.cpu + load_.server.cpu) / load_.seconds / cores


def other_work() -> tuple[float, float]:
    """CPU seconds on this machine so far that neither this process nor one of its children took, and those that the hypervisor
    took; from /proc, in hundredths.
    """
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = (int(x) for x in Path("/proc/stat").read_text().split()[1:9])
    mine = 0
    for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        mine += sum(int(x) for x in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])
    return (user + nice + system + irq + softirq - mine) / tick, steal / tick


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
    parser.add_argument("--each", type=int, default=3000, help="requests of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the first turn; the next one's is one more")
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
