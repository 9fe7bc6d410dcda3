"""Measures what a call costs on this machine around its lookup: a real server in a process of its own, under known loads."""

from __future__ import annotations

import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.errors import UnavailableError
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving import codec
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.limits import Limits
from recinfer.serving.registry import ModelRegistry
from recinfer.serving.service import InferenceService, Message
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.clock import Points, at_sleep
from recinfer.sizing.costs import READ, TAKEN, DirectCosts, EndCosts, FanCosts, RunCosts, ServingCosts
from recinfer.sizing.probe import Load, ServerProcess, closed_loop, open_loop
from recinfer.sizing.stalls import StallRecorder, can_record, work_of
from recinfer.sizing.stints import StintRecorder, can_record_switches
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["LOOKUP", "lookup_requests", "measure_serving", "write_sample_archive"]

LOOKUP = "/recinfer.v1.Inference/Lookup"
_FEATURES, _DIM, _ROWS, _DENSE = 26, 16, 20_000, 13
_MERGED = 0.95  # runs a request, below which requests count as merged
_SMALL, _LARGE = 1, 256  # samples a request
_FEW, _MANY = 16, 32  # requests of a merged run in process; callers that keep a server busy
_BUSY_LARGE = 8
_UNMERGED = BatchConfig(max_batch=1, max_delay_us=0)
_TURNS, _WARM_UP_S = 5, 0.4
_PARTS = 400
_SOON, _RARE = -1, 0  # one caller that waits between two calls
_PAUSES_S = {_SOON: 1e-3, _RARE: 5e-3}  # after 1 ms half of what was in the caches is others', after 5 ms all of it
_LONE = (1, _SOON, _RARE)
_FOUR, _ON_TIME = 4, -2  # callers, and one that sends at random moments, at so much of their rate
_OF_FOUR = 0.7
_NO_SLEEP_S = 1e-6
_ASKED = 0.5  # of a lone request's time at a ranker's caller, in which that waits for the shard
_WAKES = 4  # on the way of a lone call past the queue: of who reads it and who answers it, and the same at the caller's
_STALL = 3.0  # times the median: a lone call that takes longer was held up


def measure_serving(*, seconds: float = 0.6, progress: Callable[[str], None] | None = None) -> ServingCosts:
    """Measure servers of a sample model over loopback: alone and busy, with small and large requests, and with shards.

    With one caller every thread sleeps between calls; with many, none does, and what a run costs is shared by those that
    are merged into it. Run it with nothing else running.

    Args:
        seconds: of each of some 130 stretches of load.
        progress: told what is done.

    Raises:
        UnavailableError: a server did not start, or did not answer.
    """
    say = progress or (lambda text: None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("making a sample model")
        archive = write_sample_archive(folder, world_size=2)
        predictor = load(archive)
        requests = {batch: lookup_requests(predictor, batch) for batch in (_SMALL, _LARGE)}
        say("runs in process")
        in_process = _InProcess(predictor, requests)
        bench = _Bench(archive, requests, seconds, say)
        recorder = StallRecorder() if can_record() else None
        others = StintRecorder() if can_record_switches() else None
        with ExitStack() as stack:
            # Lookups that pass by the queue, and then the queue's costs: those of merged predictions, contexts and rankers.
            lone = tuple((_SMALL, callers) for callers in _LONE)
            if in_process.direct:
                server = stack.enter_context(ServerProcess(archive))
                kinds = ((_SMALL, _MANY), (_LARGE, 1), *lone, (_SMALL, _FOUR), (_SMALL, _ON_TIME))
                bench.add("direct", server, *kinds)
            server = stack.enter_context(ServerProcess(archive, direct=False))
            bench.add("whole", server, (_SMALL, _MANY), (_LARGE, 1), (_LARGE, _BUSY_LARGE), *lone)
            # The same without merging: what each request costs that is run by itself while others wait.
            server = stack.enter_context(ServerProcess(archive, _UNMERGED, direct=False))
            bench.add("single", server, (_SMALL, _MANY))
            for shards in (1, 2):
                bench.add_rankers(stack, folder, shards)
            bench.warm_up()
            with others or nullcontext(), recorder or nullcontext():  # not while servers start
                bench.measure()
    means = {kind: _Means(turns) for kind, turns in bench.loads.items()}
    costs = _fit(means, in_process)
    if others is not None and others.stints:
        say(f"{len(others.stints)} stints of other programs and the kernel in {others.seconds:.0f} s")
        lengths = np.sort([stint.seconds for stint in others.stints])
        parts = tuple(float(part.mean()) for part in np.array_split(lengths, min(_PARTS, lengths.size)))
        often = lengths.size / others.seconds / others.cores
        costs = replace(costs, stints_per_s=often, stint_s=parts)
    if recorder is None:
        return costs
    say(f"{len(recorder.stalls)} stalls of a core in {recorder.seconds:.0f} s")
    found = sorted((stall.seconds * stall.lost, stall.seconds, stall.lost) for stall in recorder.stalls)
    some = [found[i] for i in np.linspace(0, len(found) - 1, min(_PARTS, len(found))).astype(int)]
    often = len(found) / recorder.seconds / recorder.cores
    stall_s, lost = (tuple(each[at] for each in some) for at in (1, 2))
    return replace(
        costs,
        stalls_per_s=often,
        stall_s=stall_s,
        stall_lost=lost,
        work_s=statistics.fmean(map(work_of, recorder.looks)),
    )


Kind = tuple[str, int, int]
"""Which server, samples a request, callers."""


class _Bench:
    """Stretches of load on servers of one archive, in turns."""

    def __init__(
        self, archive: Path, requests: dict[int, list[bytes]], seconds: float, say: Callable[[str], None]
    ) -> None:
        self._archive, self._requests, self._seconds, self._say = archive, requests, seconds, say
        self._servers: list[tuple[str, ServerProcess, tuple[tuple[int, int], ...], Sequence[ServerProcess]]] = []
        self.loads: dict[Kind, list[Load]] = {}

    def add(
        self, name: str, server: ServerProcess, *kinds: tuple[int, int], beside: Sequence[ServerProcess] = ()
    ) -> None:
        """Have ``server`` measured under each kind of load; ``beside`` are what its own CPU is told of."""
        self._servers.append((name, server, kinds, beside))

    def warm_up(self) -> None:
        """A moment of each load."""
        for _, server, kinds, _ in self._servers:
            for batch, callers in kinds:
                warm_up = min(_WARM_UP_S, self._seconds)
                closed_loop(server, LOOKUP, self._requests[batch], max(callers, 1), warm_up)

    def measure(self) -> None:
        """Each kind of load of each server in turn, some times: a machine is another one within minutes, and costs are
        differences of loads.
        """
        for turn in range(_TURNS):
            for name, server, kinds, beside in self._servers:
                for batch, callers in kinds:
                    self._say(f"{name}, round {turn + 1} of {_TURNS}: requests of {batch}, {callers} at a time")
                    self._load(name, server, batch, callers, beside)

    def _load(
        self, name: str, server: ServerProcess, batch: int, callers: int, beside: Sequence[ServerProcess]
    ) -> None:
        before = [shard.spent() for shard in beside]
        requests, pause = self._requests[batch], _PAUSES_S.get(callers, 0.0)
        if callers == _ON_TIME:
            four = self.loads[name, batch, _FOUR][-1]
            rate = _OF_FOUR * four.answered / four.seconds
            due = poisson(rate, max(int(rate * self._seconds), 2), seed=len(self.loads)).times.tolist()
            load_ = open_loop(server, LOOKUP, requests, due)
        else:
            load_ = closed_loop(server, LOOKUP, requests, max(callers, 1), self._seconds, pause)
        if not load_.answered:
            raise UnavailableError("the measured server answered no request; see stderr")
        self.loads.setdefault((name, batch, callers), []).append(load_)
        for shard, (spent, runs, handled) in zip(beside, before):
            after, runs_after, handled_after = shard.spent()
            mine = replace(load_, server=after - spent, runs=runs_after - runs, handled=handled_after - handled)
            self.loads.setdefault((f"{name}'s shard", batch, callers), []).append(mine)

    def add_rankers(self, stack: ExitStack, folder: Path, num: int) -> None:
        """Rankers that ask ``num`` shard servers for the two ranks of the archive."""
        ranks = [(0, 1)] if num == 1 else [(0,), (1,)]
        shards = [stack.enter_context(ServerProcess(self._archive, ranks=mine)) for mine in ranks]
        listed = {str(rank): [shards[min(rank, num - 1)].target] for rank in (0, 1)}
        path = folder / f"shards-{num}.json"
        path.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}))
        lone = tuple((_SMALL, callers) for callers in _LONE)
        ranker = stack.enter_context(ServerProcess(self._archive, shards=path))
        kinds = ((_SMALL, _MANY), (_LARGE, 1), *lone) if num == 1 else ((_SMALL, 1),)
        self.add(f"ranker of {num}", ranker, *kinds, beside=shards[:1])
        if num == 1:  # lone ones by way of its event loop: what that costs once it has slept
            ranker = stack.enter_context(ServerProcess(self._archive, shards=path, direct=False))
            self.add("ranker of 1, queued", ranker, *lone)
        ranker = stack.enter_context(ServerProcess(self._archive, _UNMERGED, shards=path))
        self.add(f"ranker of {num}, single", ranker, (_SMALL, _MANY))


class _Means:
    """Seconds a request: medians over turns."""

    def __init__(self, turns: Sequence[Load]) -> None:
        def median(of: Callable[[Load], float]) -> float:
            return statistics.median(of(turn) for turn in turns)

        self.loop = median(lambda t: t.server.loop / t.answered)
        self.grpc = median(lambda t: t.server.grpc / t.answered)
        self.asks = median(lambda t: t.server.asks / t.answered)
        self.run = median(lambda t: t.server.runs / t.answered)
        self.io = median(lambda t: t.server.other / t.answered)
        self.client_loop = median(lambda t: t.client.loop / t.answered)
        self.client_grpc = median(lambda t: t.client.grpc / t.answered)
        self.client_io = median(lambda t: t.client.other / t.answered)
        self.runs = median(lambda t: t.runs / t.answered)
        self.cycle = median(lambda t: t.seconds / t.answered)
        self.ours = self.loop + self.run
        self.all = self.ours + self.grpc + self.asks + self.io
        self.latency = median(lambda t: float(np.nanmedian(t.latencies)))
        all_of = np.sort(np.concatenate([t.latencies[np.isfinite(t.latencies)] for t in turns]))
        usual = all_of[all_of <= _STALL * np.median(all_of)]
        self.spread = tuple(float(p.mean() / usual.mean()) for p in np.array_split(usual, min(_PARTS, usual.size)))
        self.stalls = tuple(float(s) for s in all_of[usual.size :] - np.median(all_of))
        self.seconds = sum(t.seconds for t in turns)
        self.usual = float(usual.mean())
        self.wake = median(lambda t: (t.client.waited + t.server.waited) / max(t.client.turns + t.server.turns, 1.0))


class _InProcess:
    """Thread seconds of runs in a tight loop, and of the op alone in them."""

    def __init__(self, predictor: Predictor, requests: dict[int, list[bytes]]) -> None:
        service = InferenceService(ModelRegistry({"model": predictor}), Limits())
        self.direct = service.direct.available
        small, large = requests[_SMALL], requests[_LARGE]
        self.direct_one = self.direct_large = 0.0
        if self.direct:
            self.direct_one, self.direct_large = (
                _seconds(lambda turn, data=data: service.direct.lookup(data[turn % len(data)]))  # type: ignore[misc]
                for data in (small, large)
            )
        service.direct.available = False  # as in the servers that are measured

        def run_of(data: Sequence[bytes]) -> Callable[[int], object]:
            return lambda turn: service.run([Message("Lookup", data[(turn + i) % len(data)]) for i in range(len(data))])

        answer = service.run([Message("Lookup", small[0])])[0], service.run([Message("Lookup", large[0])])[0]
        self.bytes = {
            batch: len(requests[batch][0]) + len(found)  # type: ignore[arg-type]
            for batch, found in zip((_SMALL, _LARGE), answer)
        }
        self.one = _seconds(lambda turn: service.run([Message("Lookup", small[turn % len(small)])]))
        self.few = _seconds(run_of(small[:_FEW]))
        self.large = _seconds(lambda turn: service.run([Message("Lookup", large[turn % len(large)])]))
        self.op_one, self.op_few, self.op_large = (_op_seconds(predictor, n) for n in (_SMALL, _FEW, _LARGE))


def _seconds(call: Callable[[int], object], least: float = 0.3) -> float:
    times: list[float] = []
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(times) < 20:
        begin = time.thread_time()
        call(len(times))
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def _op_seconds(predictor: Predictor, batch: int) -> float:
    """Of the lookup op alone, as the planner's calibration measures it, on tables of the same shape."""
    from recinfer.distributed.calibrate import random_module, random_request

    tables = predictor.manifest.tables
    module = random_module([(t.rows, t.dim) for t in tables], tables[0].data_type)
    asked = [random_request([t.rows for t in tables], [1.0] * len(tables), batch, seed=i) for i in range(32)]
    return _seconds(lambda turn: module(asked[turn % len(asked)]))


def _fit(loads: dict[Kind, _Means], run: _InProcess) -> ServingCosts:
    """Costs from measured means; docs/sizing.md has the reasoning."""
    alone, busy = loads["whole", _SMALL, 1], loads["whole", _SMALL, _MANY]
    large_alone, large_busy = loads["whole", _LARGE, 1], loads["whole", _LARGE, _BUSY_LARGE]
    more_bytes = run.bytes[_LARGE] - run.bytes[_SMALL]
    lone = [loads["whole", _SMALL, callers] for callers in _LONE]

    # Of many requests one more in a run takes what it takes in a tight loop; what a run takes by itself, with the visits of
    # the loop that it slows down, follows from the same load merged and not merged: two equations.
    request_s = max((run.few - run.op_few) - (run.one - run.op_one), 0.0) / (_FEW - 1)
    single = loads["single", _SMALL, _MANY]
    run_s = 0.0
    if busy.runs < _MERGED * single.runs:
        run_s = (single.ours - busy.ours) / (single.runs - busy.runs)
    # Hardly any request shared a run, as in a very short measurement: there is no second equation.
    run_s = max(run_s, run.one - request_s, 0.0)
    loop_s = max(busy.ours - busy.runs * run_s - request_s, 0.0)
    byte_s = max((large_alone.run - run.op_large) - (run_s + request_s - run.op_one), 0.0) / more_bytes
    cold = {"loop": _cold(lone, "ours", loop_s + run_s + request_s)}
    cold |= {kind: _cold(lone, kind, getattr(busy, kind)) for kind in ("grpc", "io")}
    server = EndCosts(
        loop_s=loop_s,
        grpc_s=busy.grpc,
        io_s=busy.io,
        **_named(cold),
        loop_byte_s=max(large_busy.loop - loop_s, 0.0) / more_bytes,
        grpc_byte_s=max(large_busy.grpc - busy.grpc, 0.0) / more_bytes,
        io_byte_s=max(large_busy.io - busy.io, 0.0) / more_bytes,
    )
    timer_s = _on_time(loads) if run.direct else 0.0
    client = _client(lone, busy, large_busy, more_bytes, timer_s)
    run_costs = RunCosts(max(run_s - run.op_one, 0.0), request_s, byte_s)
    direct = _fit_direct(loads, run, client, timer_s) if run.direct else None
    shard, shard_end, fan = _fit_remote(loads, run, direct.server if direct else server, server, client, run_costs)
    name, its = ("direct", direct.server) if direct else ("whole", server)
    lone = [loads[name, _SMALL, callers] for callers in _LONE]
    first = lone[0]
    ends = first.all + first.client_loop + first.client_grpc + first.client_io
    on_the_way = ends - (1 - TAKEN) * its.grpc_s - (1 - READ) * (first.io + first.client_io)
    wakes = _ascending([(means.cycle - means.grpc, means.wake) for means in lone if means.wake])
    woken = (_WAKES if direct else _WAKES + 1) * at_sleep(wakes[:1], math.inf)
    return ServingCosts(
        server=server,
        client=client,
        run=run_costs,
        shard=shard,
        fan=fan,
        wire_s=max(first.usual - on_the_way - woken, 0.0),
        wakes=wakes,
        shard_end=shard_end,
        caller_s=timer_s,
        spread=alone.spread,
        stalls_per_s=len(alone.stalls) / alone.seconds,
        stall_s=alone.stalls,
        stall_lost=(1.0,) * len(alone.stalls),
        direct=direct,
        notes={"machine": platform.machine(), "torch": torch.__version__, "measured": _told(loads, run)},
    )


def _client(
    lone: Sequence[_Means],
    busy: _Means,
    large: _Means,
    more_bytes: float,
    timer_s: float,
    four: _Means | None = None,
) -> EndCosts:
    """The caller's end: what it costs among many, what more when it has slept, and what more with large messages.

    Args:
        timer_s: is no sleep's: callers that pause need a timer for it.
        four: of so many callers, for sleeps that are shorter than a lone one's.
    """
    kinds = ("loop", "grpc", "io")
    hot, wide = ({kind: getattr(means, f"client_{kind}") for kind in kinds} for means in (busy, large))
    found: dict[str, Any] = {f"{kind}_s": hot[kind] for kind in kinds}
    short = [] if four is None else [four]
    cold = {kind: _cold([*short, *lone], f"client_{kind}", hot[kind]) for kind in ("grpc", "io")}
    points = [(means.cycle - means.client_loop, means.client_loop - hot["loop"]) for means in short]
    cold["loop"] = _curve([*points, *_of_two_wakes(lone, "client_loop", hot["loop"], 1.0, 1, timer_s)])
    found |= _named(cold)
    return EndCosts(**found, **{f"{kind}_byte_s": max(wide[kind] - hot[kind], 0.0) / more_bytes for kind in kinds})


Cold = tuple[float, Points]
"""What a thread takes more once it has slept for a moment, and beyond that by how long it has slept."""


def _cold(lone: Sequence[_Means], thread: str, hot: float) -> Cold:
    """What a thread takes more than ``hot`` seconds once it has slept: of a lone caller's loads, from which it sleeps once a
    call.
    """
    took = [getattr(means, thread) for means in lone]
    return _curve([(means.cycle - seconds, seconds - hot) for means, seconds in zip(lone, took)])


def _of_two_wakes(
    lone: Sequence[_Means], thread: str, hot: float, share: float, first: int, timer_s: float = 0.0
) -> Points:
    """What a thread takes more than ``hot`` seconds by how long it has slept, where it sleeps twice a call.

    Args:
        share: of a call's latency, that is one of the two sleeps; the other one is the rest of the time.
        first: wakes a call of the first load, 1 where nothing is between two of its calls.
        timer_s: of the other loads, what the second wake takes by itself.
    """
    found: list[tuple[float, float]] = []
    for means in lone:
        seconds, wakes = getattr(means, thread), 2 if found else first
        extra, asleep = seconds - hot - (timer_s if found else 0.0), means.cycle - seconds
        short = max(share * means.latency - seconds / 2, 0.0)
        if found and short <= found[-1][0]:
            found.append((asleep - short, extra - at_sleep(_ascending(found), short)))
        else:  # as far as is known the two are alike
            found.append((asleep / wakes, extra / wakes))
    return found


def _ascending(found: Points) -> Points:
    """The points without what noise has made of them: nobody slept less than no time, and no longer sleep costs less."""
    points: list[tuple[float, float]] = []
    for slept, seconds in sorted(found):
        most = points[-1][1] if points else 0.0
        if slept > (points[-1][0] if points else 0.0):
            points.append((slept, max(seconds, most)))
    return tuple(points)


def _curve(found: Points) -> Cold:
    """The line through the first two points says what the shortest sleep costs."""
    points = _ascending(found)
    if not points:
        return 0.0, ()
    (asleep, first), (then, second) = points[0], points[min(1, len(points) - 1)]
    slope = (second - first) / (then - asleep) if then > asleep else 0.0
    cold = max(first - slope * asleep, 0.0)
    return cold, tuple((slept, seconds - cold) for slept, seconds in points)


def _named(cold: dict[str, Cold]) -> dict[str, Any]:
    """As EndCosts calls them, by thread."""
    return {f"{kind}_cold_s": found[0] for kind, found in cold.items()} | {
        f"{kind}_cooled": found[1] for kind, found in cold.items()
    }


def _fit_direct(loads: dict[Kind, _Means], run: _InProcess, caller: EndCosts, timer_s: float) -> DirectCosts:
    """Of lookups past the queue: runs as in a tight loop; the rest is the call's."""
    alone, busy, large = (loads["direct", *kind] for kind in ((_SMALL, 1), (_SMALL, _MANY), (_LARGE, 1)))
    lone, four = [loads["direct", _SMALL, callers] for callers in _LONE], loads["direct", _SMALL, _FOUR]
    more_bytes = run.bytes[_LARGE] - run.bytes[_SMALL]
    run_s = min(run.direct_one, busy.grpc)
    more_run = (run.direct_large - run.op_large) - (run.direct_one - run.op_one)
    server = EndCosts(
        loop_s=0.0,
        grpc_s=busy.grpc - run_s,
        io_s=busy.io,
        loop_cold_s=0.0,
        **_named({kind: _cold([four, *lone], kind, getattr(busy, kind)) for kind in ("grpc", "io")}),
        loop_byte_s=0.0,
        grpc_byte_s=max((large.grpc - alone.grpc) - (run.direct_large - run.direct_one), 0.0) / more_bytes,
        io_byte_s=max(large.io - alone.io, 0.0) / more_bytes,
    )
    client = _client(lone, busy, busy, more_bytes, timer_s, four)
    large_client = {name: getattr(caller, name) for name in ("loop_byte_s", "grpc_byte_s", "io_byte_s")}
    costs = RunCosts(max(run_s - run.op_one, 0.0), 0.0, max(more_run, 0.0) / more_bytes)
    return DirectCosts(server, replace(client, **large_client), costs, max(run.op_one - run_s, 0.0))


def _on_time(loads: dict[Kind, _Means]) -> float:
    """What a caller's loop takes more for a request that it sends at a moment of its own, a timer and a task, than for one
    that it sends when another one is answered: of loads in which it sleeps about as often and as long.
    """
    four, on_time = (loads["direct", _SMALL, callers] for callers in (_FOUR, _ON_TIME))
    return max(on_time.client_loop - four.client_loop, 0.0)


def _fit_remote(
    loads: dict[Kind, _Means],
    run: _InProcess,
    at_once: EndCosts,
    server: EndCosts,
    client: EndCosts,
    whole: RunCosts,
) -> tuple[RunCosts, EndCosts, FanCosts]:
    """Of shard servers and rankers: what is left when the ends of the calls and the run are taken off. Of many callers'
    requests, which share runs, what a run of a ranker takes; of lone ones, what one takes that passes by the queue.
    """
    more_bytes = run.bytes[_LARGE] - run.bytes[_SMALL]
    small, large = loads["ranker of 1's shard", _SMALL, _MANY], loads["ranker of 1's shard", _LARGE, 1]
    one, many, wide = (loads["ranker of 1", *kind] for kind in ((_SMALL, 1), (_SMALL, _MANY), (_LARGE, 1)))
    two = loads["ranker of 2", _SMALL, 1]
    single, two_single = (loads[f"ranker of {num}, single", _SMALL, _MANY] for num in (1, 2))
    op_many = run.op_one + (run.op_few - run.op_one) / (_FEW - 1) * (1 / many.runs - 1)
    saved_s = max(run.op_one - run.direct_one, 0.0) if run.direct else 0.0
    # Its ranker is busy, but a shard sleeps between two runs of that.
    taken = small.grpc / many.runs
    base_s = max(taken - at_once.grpc_s - _woken(at_once, many.cycle / many.runs - taken) - op_many + saved_s, 0.0)
    known = at_once.grpc_byte_s + at_once.io_byte_s
    rest = large.all - run.op_large - (loads["ranker of 1's shard", _SMALL, 1].all - run.op_one)
    shard = RunCosts(base_s, 0.0, max(rest / more_bytes - known, 0.0))
    # It does another thing than a server that holds all tables does, so what sleep costs it is another thing too.
    lone_shard = [loads["ranker of 1's shard", _SMALL, callers] for callers in _LONE]
    hot = {"grpc": at_once.grpc_s + base_s + max(run.op_one - saved_s, 0.0), "io": at_once.io_s}
    shard_end = replace(at_once, **_named({kind: _cold(lone_shard, kind, hot[kind]) for kind in hot}))
    # What a run takes by itself, its own and the client's end and asking, and what each of its requests does: of the same
    # load merged and not merged, as for a server without shards. Of runs of one, what another shard adds.
    of_run = single.ours - server.loop_s - whole.request_s
    if many.runs < _MERGED * single.runs:
        of_run = (single.ours - many.ours) / (single.runs - many.runs)
    request_s = max(many.ours - many.runs * of_run - server.loop_s - whole.request_s, 0.0)
    call_s = max(two_single.ours - single.ours - client.loop_s, 0.0)
    run_s = max(of_run - whole.base_s - client.loop_s - call_s, 0.0)
    # Lone ones: the thread that takes the request wakes up, and one for each answer. How long ago other threads of the
    # interpreter ran counts too, so that each of them has what it takes by its own sleep.
    lone = [loads["ranker of 1", _SMALL, callers] for callers in _LONE]
    ask_s = max(two.grpc - one.grpc, 0.0)
    woken = _woken(at_once, one.cycle - one.grpc)
    away_s = max(one.grpc - at_once.grpc_s - woken - ask_s, 0.0)
    quick_s = at_once.grpc_s + at_once.grpc_cold_s + away_s + ask_s
    grpc_cooled = _all_of(_curve(_of_two_wakes(lone, "grpc", quick_s, _ASKED, 2)))
    asks_s, asks_cooled = _cold(lone, "asks", 0.0)
    told_s = min(max(two.asks - one.asks, 0.0), asks_s)
    queued = [loads["ranker of 1, queued", _SMALL, callers] for callers in _LONE]
    queued_s = server.loop_s + server.loop_cold_s + whole.request_s + request_s + of_run + client.loop_cold_s
    more = (wide.all - one.all) / more_bytes
    known = at_once.grpc_byte_s + at_once.io_byte_s + client.io_byte_s + whole.byte_s
    return (
        shard,
        shard_end,
        FanCosts(
            run_s,
            call_s,
            max(more - known, 0.0),
            away_s,
            ask_s,
            told_s,
            asks_s - told_s,
            request_s,
            asks_cold_s=0.0,
            asks_cooled=asks_cooled,
            grpc_cooled=grpc_cooled,
            loop_cooled=_all_of(_curve(_of_two_wakes(queued, "ours", queued_s, _ASKED, 2))),
        ),
    )


def _all_of(cold: Cold) -> Points:
    """What sleep costs where what the shortest costs is not charged elsewhere."""
    least, points = cold
    return ((_NO_SLEEP_S, least), *((slept, least + seconds) for slept, seconds in points if slept > _NO_SLEEP_S))


def _woken(end: EndCosts, slept: float) -> float:
    """What the thread that takes gRPC's events takes more after so many seconds of sleep."""
    return end.grpc_cold_s + at_sleep(end.cooled("grpc"), max(slept, 0.0))


def _told(loads: dict[Kind, _Means], run: _InProcess) -> dict[str, Any]:
    """What was measured, microseconds a request, for people."""
    names = ("latency", "cycle", "loop", "grpc", "asks", "run", "io", "client_loop", "client_grpc", "client_io", "wake")
    found: dict[str, Any] = {
        f"{name}, batch {batch}, {callers} callers": {each: round(getattr(means, each) * 1e6, 1) for each in names}
        | {"runs": round(means.runs, 3)}
        for (name, batch, callers), means in loads.items()
    }
    parts = ("one", "few", "large", "direct_one", "direct_large", "op_one", "op_few", "op_large")
    found["in process"] = {name: round(getattr(run, name) * 1e6, 1) for name in parts}
    return found


def lookup_requests(predictor: Predictor, batch: int, ids: int = 1, count: int = 64, seed: int = 0) -> list[bytes]:
    """Serialized LookupRequests of all features, ``ids`` uniform ids a feature and sample."""
    random = torch.Generator().manual_seed(seed)
    rows: dict[str, int] = {}
    for feature in predictor.features:
        name = feature.name.split("@")[0]
        rows[name] = min(feature.rows, rows.get(name, feature.rows))
    lengths = torch.full((len(rows) * batch,), ids, dtype=torch.int32)
    found = []
    for _ in range(count):
        values = torch.cat([torch.randint(limit, (batch * ids,), generator=random) for limit in rows.values()])
        found.append(codec.encode_lookup_request(KeyedJaggedTensor(list(rows), values, lengths=lengths)))
    return found


def write_sample_archive(
    folder: Path,
    *,
    tables: Sequence[tuple[int, int]] = ((_ROWS, _DIM),) * _FEATURES,
    world_size: int = 1,
    over: Sequence[int] = (64, 1),
    name: str = "sample",
) -> Path:
    """An archive of a DLRM with random weights, INT8 tables of (rows, dim) with a feature each; returns its folder."""
    dim = tables[0][1]

    def model(device: str) -> DLRM:
        configs = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=width, name=f"t{i}", feature_names=[f"f{i}"])
            for i, (rows, width) in enumerate(tables)
        ]
        collection = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        return DLRM(collection, _DENSE, [16, dim], list(over), dense_device=torch.device(device))

    checkpoint = save_checkpoint(folder / "checkpoint", model("cpu"), model_name=name, model_version="1")
    plan = plan_inference(model("meta"), world_size=world_size, precision=DataType.INT8)
    out = folder / f"{name}.rqa"
    reader = CheckpointReader(checkpoint)
    export_archive(model("meta"), reader, plan, out, name=name, version="1", num_dense=_DENSE, progress=False)
    return out
