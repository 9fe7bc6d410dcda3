"""Measures what a call costs on this machine around its lookup: a real server in a process of its own, under known loads."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from recinfer.errors import UnavailableError
from recinfer.inference.predictor import load
from recinfer.serving.batcher import BatchConfig
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.costs import ServingCosts
from recinfer.sizing.fit import fit_serving
from recinfer.sizing.in_process import InProcess
from recinfer.sizing.loads import (
    BUSY_LARGE,
    FOUR,
    LARGE,
    LONE,
    MANY,
    ON_TIME,
    PARTS,
    RARE,
    SMALL,
    SOON,
    Kind,
    Means,
    at_one_pace,
)
from recinfer.sizing.probe import Load, ServerProcess, closed_loop, open_loop, quick_collections
from recinfer.sizing.sample import LOOKUP, lookup_requests, write_sample_archive
from recinfer.sizing.stalls import Look, StallRecorder, can_record, looks_between, pace_of
from recinfer.sizing.stints import StintRecorder, can_record_switches

__all__ = ["measure_serving"]

_UNMERGED = BatchConfig(max_batch=1, max_delay_us=0)
_TURNS, _WARM_UP_S = 15, 0.4
_PAUSES_S = {SOON: 1e-3, RARE: 5e-3}  # after 1 ms half of what was in the caches is others', after 5 ms all of it
_OF_FOUR = 0.7


def measure_serving(*, seconds: float = 0.3, progress: Callable[[str, int, int], None] | None = None) -> ServingCosts:
    """Measure servers of a sample model over loopback: alone and busy, with small and large requests, and with shards.

    With one caller every thread sleeps between calls; with many, none does, and what a run costs is shared by those that
    are merged into it. Run it with nothing else running.

    Args:
        seconds: of each of some 400 stretches of load.
        progress: called with what is done, how many stretches have been, and how many there are.

    Raises:
        UnavailableError: a server did not start, or did not answer.
    """
    say = progress or (lambda what, done, total: None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        say("making a sample model", 0, 1)
        archive = write_sample_archive(folder, world_size=2)
        predictor = load(archive)
        requests = {batch: lookup_requests(predictor, batch) for batch in (SMALL, LARGE)}
        say("runs in process", 0, 1)
        in_process = InProcess(predictor, requests)
        bench = _Bench(archive, requests, seconds, say)
        recorder = StallRecorder() if can_record() else None
        others = StintRecorder() if can_record_switches() else None
        with ExitStack() as stack:
            # Lookups that pass by the queue, and then the queue's costs: those of merged predictions, contexts and rankers.
            lone = tuple((SMALL, callers) for callers in LONE)
            server = stack.enter_context(ServerProcess(archive))
            bench.add("direct", server, (SMALL, MANY), (LARGE, 1), *lone, (SMALL, FOUR), (SMALL, ON_TIME))
            server = stack.enter_context(ServerProcess(archive, direct=False))
            bench.add("whole", server, (SMALL, MANY), (LARGE, 1), (LARGE, BUSY_LARGE), *lone)
            # The same without merging: what each request costs that is run by itself while others wait.
            server = stack.enter_context(ServerProcess(archive, _UNMERGED, direct=False))
            bench.add("single", server, (SMALL, MANY))
            for ranks in bench.start_shards(stack):
                bench.add_rankers(stack, folder, ranks)
            say("servers start", 0, 1)
            stack.enter_context(quick_collections())
            bench.warm_up()
            with others or nullcontext(), recorder or nullcontext():  # not while servers start
                bench.measure()
    looks = () if recorder is None else recorder.looks
    means: dict[Kind, Means] = {}
    paces: dict[str, list[float]] = {}
    for kind, turns in bench.loads.items():
        steady, pace_s = at_one_pace(turns, looks)
        means[kind] = Means(steady)
        paces.setdefault(kind[0], []).append(pace_s)
    costs = fit_serving(means, in_process)
    if others is not None and others.stints:
        lengths = np.sort([stint.seconds for stint in others.stints])
        parts = tuple(float(part.mean()) for part in np.array_split(lengths, min(PARTS, lengths.size)))
        often = lengths.size / others.seconds / others.cores
        costs = replace(costs, stints_per_s=often, stint_s=parts)
    if recorder is None:
        return costs
    found = sorted((stall.seconds * stall.lost, stall.seconds, stall.lost) for stall in recorder.stalls)
    some = [found[i] for i in np.linspace(0, len(found) - 1, min(PARTS, len(found))).astype(int)]
    often = len(found) / recorder.seconds / recorder.cores
    stall_s, lost = (tuple(each[at] for each in some) for at in (1, 2))
    rounds = bench.paces(looks)
    return replace(
        costs,
        stalls_per_s=often,
        stall_s=stall_s,
        stall_lost=lost,
        paces={name: statistics.fmean(its) for name, its in paces.items()},
        notes=costs.notes | {"pace_us": {"least": round(min(rounds) * 1e6, 1), "most": round(max(rounds) * 1e6, 1)}},
    )


class _Bench:
    """Stretches of load on servers of one archive, in turns."""

    def __init__(
        self, archive: Path, requests: dict[int, list[bytes]], seconds: float, say: Callable[[str, int, int], None]
    ) -> None:
        self._archive, self._requests, self._seconds, self._say = archive, requests, seconds, say
        self._servers: list[tuple[str, ServerProcess, tuple[tuple[int, int], ...], Sequence[ServerProcess]]] = []
        self.loads: dict[Kind, list[Load]] = {}
        self.rounds: list[float] = []  # when each began, and when the last one ended

    def add(
        self, name: str, server: ServerProcess, *kinds: tuple[int, int], beside: Sequence[ServerProcess] = ()
    ) -> None:
        """Have ``server`` measured under each kind of load; ``beside`` are what its own CPU is told of."""
        self._servers.append((name, server, kinds, beside))

    def warm_up(self) -> None:
        """A moment of each load, once all servers are there."""
        for _, server, *_ in self._servers:
            server.wait()
        for _, server, kinds, _ in self._servers:
            for batch, callers in kinds:
                warm_up = min(_WARM_UP_S, self._seconds)
                closed_loop(server, LOOKUP, self._requests[batch], max(callers, 1), warm_up)

    def measure(self) -> None:
        """Each kind of load of each server in turn, some times: a machine is another one within minutes, and costs are
        differences of loads.
        """
        each = sum(len(kinds) for _, _, kinds, _ in self._servers)
        done = 0
        for turn in range(_TURNS):
            self.rounds.append(time.perf_counter())
            for name, server, kinds, beside in self._servers:
                for batch, callers in kinds:
                    self._say(f"calls, round {turn + 1} of {_TURNS}", done, each * _TURNS)
                    self._load(name, server, batch, callers, beside)
                    done += 1
        self.rounds.append(time.perf_counter())

    def paces(self, looks: Sequence[Sequence[Look]]) -> list[float]:
        """Seconds that the recorder's work took in each round."""
        rounds = pairwise(self.rounds)
        return [statistics.fmean(pace_of(looks_between(its, *each)) for its in looks) for each in rounds]

    def _load(
        self, name: str, server: ServerProcess, batch: int, callers: int, beside: Sequence[ServerProcess]
    ) -> None:
        before = [shard.spent() for shard in beside]
        requests, pause = self._requests[batch], _PAUSES_S.get(callers, 0.0)
        if callers == ON_TIME:
            four = self.loads[name, batch, FOUR][-1]
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

    def start_shards(self, stack: ExitStack) -> list[list[ServerProcess]]:
        """One shard server with both ranks of the archive, and one for each of them."""
        return [
            [stack.enter_context(ServerProcess(self._archive, ranks=ranks)) for ranks in each]
            for each in (((0, 1),), ((0,), (1,)))
        ]

    def add_rankers(self, stack: ExitStack, folder: Path, shards: Sequence[ServerProcess]) -> None:
        """Rankers that ask these shard servers for the two ranks."""
        num = len(shards)
        listed = {str(rank): [shards[min(rank, num - 1)].target] for rank in (0, 1)}
        path = folder / f"shards-{num}.json"
        path.write_text(json.dumps({"format": "recinfer.shards", "version": 1, "ranks": listed}))
        lone = tuple((SMALL, callers) for callers in LONE)
        ranker = stack.enter_context(ServerProcess(self._archive, shards=path))
        kinds = ((SMALL, MANY), (LARGE, 1), *lone, (SMALL, FOUR)) if num == 1 else ((SMALL, 1),)
        self.add(f"ranker of {num}", ranker, *kinds, beside=shards[:1])
        if num == 1:  # lone ones by way of its event loop: what that costs once it has slept
            ranker = stack.enter_context(ServerProcess(self._archive, shards=path, direct=False))
            self.add("ranker of 1, queued", ranker, *lone)
        ranker = stack.enter_context(ServerProcess(self._archive, _UNMERGED, shards=path))
        self.add(f"ranker of {num}, single", ranker, (SMALL, MANY))
