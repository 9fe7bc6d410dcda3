"""Serving costs from measured loads: each from differences of two or more of them; docs/sizing.md has the reasoning."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from recinfer.sizing.clock import Points, at_sleep
from recinfer.sizing.costs import READ, TAKEN, DirectCosts, EndCosts, FanCosts, RunCosts, ServingCosts
from recinfer.sizing.in_process import InProcess
from recinfer.sizing.loads import BUSY_LARGE, FEW, FOUR, LARGE, LONE, MANY, ON_TIME, SMALL, Kind, Means

__all__ = ["fit_serving"]

_MERGED = 0.95  # runs a request, below which requests count as merged
_NO_SLEEP_S = 1e-6
_ASKED = 0.5  # of a lone request's time at a ranker's caller, in which that waits for the shard
_PAST_IO = 0.25  # of what threads of gRPC take for an answer: what takes less is not read by them
_WAKES = 4  # on the way of a lone call past the queue: of who reads it and who answers it, and the same at the caller's


def fit_serving(loads: dict[Kind, Means], run: InProcess) -> ServingCosts:
    """Costs from measured means; docs/sizing.md has the reasoning."""
    alone, busy = loads["whole", SMALL, 1], loads["whole", SMALL, MANY]
    large_alone, large_busy = loads["whole", LARGE, 1], loads["whole", LARGE, BUSY_LARGE]
    more_bytes = run.bytes[LARGE] - run.bytes[SMALL]
    lone = [loads["whole", SMALL, callers] for callers in LONE]

    # Of many requests one more in a run takes what it takes in a tight loop; what a run takes by itself, with the visits of
    # the loop that it slows down, follows from the same load merged and not merged: two equations.
    request_s = max((run.few - run.op_few) - (run.one - run.op_one), 0.0) / (FEW - 1)
    single = loads["single", SMALL, MANY]
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
    timer_s = _on_time(loads)
    client = _client(lone, busy, large_busy, more_bytes, timer_s)
    run_costs = RunCosts(max(run_s - run.op_one, 0.0), request_s, byte_s)
    direct = _fit_direct(loads, run, client, timer_s)
    shard, shard_end, fan = _fit_remote(loads, run, direct.server, server, client, run_costs)
    lone = [loads["direct", SMALL, callers] for callers in LONE]
    first = lone[0]
    ends = first.all + first.client_loop + first.client_grpc + first.client_io
    on_the_way = ends - (1 - TAKEN) * direct.server.grpc_s - (1 - READ) * (first.io + first.client_io)
    wakes = _ascending([(means.cycle - means.grpc, means.wake) for means in lone if means.wake])
    woken = _WAKES * at_sleep(wakes[:1], math.inf)
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
    lone: Sequence[Means],
    busy: Means,
    large: Means,
    more_bytes: float,
    timer_s: float,
    four: Means | None = None,
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


def _cold(lone: Sequence[Means], thread: str, hot: float) -> Cold:
    """What a thread takes more than ``hot`` seconds once it has slept: of a lone caller's loads, from which it sleeps once a
    call.
    """
    took = [getattr(means, thread) for means in lone]
    return _curve([(means.cycle - seconds, seconds - hot) for means, seconds in zip(lone, took)])


def _of_two_wakes(
    lone: Sequence[Means], thread: str, hot: float, share: float, first: int, timer_s: float = 0.0
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


def _fit_direct(loads: dict[Kind, Means], run: InProcess, caller: EndCosts, timer_s: float) -> DirectCosts:
    """Of lookups past the queue: runs as in a tight loop; the rest is the call's."""
    alone, busy, large = (loads["direct", *kind] for kind in ((SMALL, 1), (SMALL, MANY), (LARGE, 1)))
    lone, four = [loads["direct", SMALL, callers] for callers in LONE], loads["direct", SMALL, FOUR]
    more_bytes = run.bytes[LARGE] - run.bytes[SMALL]
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


def _on_time(loads: dict[Kind, Means]) -> float:
    """What a caller's loop takes more for a request that it sends at a moment of its own, a timer and a task, than for one
    that it sends when another one is answered: of loads in which it sleeps about as often and as long.
    """
    four, on_time = (loads["direct", SMALL, callers] for callers in (FOUR, ON_TIME))
    return max(on_time.client_loop - four.client_loop, 0.0)


def _fit_remote(
    loads: dict[Kind, Means],
    run: InProcess,
    at_once: EndCosts,
    server: EndCosts,
    client: EndCosts,
    whole: RunCosts,
) -> tuple[RunCosts, EndCosts, FanCosts]:
    """Of shard servers and rankers: what is left when the ends of the calls and the run are taken off. Of many callers'
    requests, which share runs, what a run of a ranker takes; of lone ones, what one takes that passes by the queue.
    """
    more_bytes = run.bytes[LARGE] - run.bytes[SMALL]
    small, large = loads["ranker of 1's shard", SMALL, MANY], loads["ranker of 1's shard", LARGE, 1]
    one, many, wide = (loads["ranker of 1", *kind] for kind in ((SMALL, 1), (SMALL, MANY), (LARGE, 1)))
    two = loads["ranker of 2", SMALL, 1]
    single, two_single = (loads[f"ranker of {num}, single", SMALL, MANY] for num in (1, 2))
    op_many = run.op_one + (run.op_few - run.op_one) / (FEW - 1) * (1 / many.runs - 1)
    saved_s = max(run.op_one - run.direct_one, 0.0)
    # Its ranker is busy, but a shard sleeps between two runs of that.
    taken = small.grpc / many.runs
    base_s = max(taken - at_once.grpc_s - _woken(at_once, many.cycle / many.runs - taken) - op_many + saved_s, 0.0)
    known = at_once.grpc_byte_s + at_once.io_byte_s
    rest = large.all - run.op_large - (loads["ranker of 1's shard", SMALL, 1].all - run.op_one)
    shard = RunCosts(base_s, 0.0, max(rest / more_bytes - known, 0.0))
    # It does another thing than a server that holds all tables does, so what sleep costs it is another thing too.
    lone_shard = [loads["ranker of 1's shard", SMALL, callers] for callers in LONE]
    # Where it is asked over sockets, gRPC's own threads have nothing to do with it.
    hot = {
        "grpc": at_once.grpc_s + base_s + max(run.op_one - saved_s, 0.0),
        "io": min(at_once.io_s, lone_shard[0].io),
    }
    ends = _named({kind: _cold(lone_shard, kind, seconds) for kind, seconds in hot.items()})
    shard_end = replace(at_once, io_s=hot["io"], **ends)
    # What a run takes by itself, its own and the client's end and asking, and what each of its requests does: of the same
    # load merged and not merged, as for a server without shards. Of runs of one, what another shard adds.
    of_run = single.ours - server.loop_s - whole.request_s
    if many.runs < _MERGED * single.runs:
        of_run = (single.ours - many.ours) / (single.runs - many.runs)
    request_s = max(many.ours - many.runs * of_run - server.loop_s - whole.request_s, 0.0)
    call_s = max(two_single.ours - single.ours - client.loop_s, 0.0)
    run_s = max(of_run - whole.base_s - client.loop_s - call_s, 0.0)
    # Lone ones: the thread that takes the request wakes up, and one for each answer. How long ago other threads of the
    # interpreter ran counts too, so that each of them has what it takes by its own sleep; of four at a time, by short ones.
    few = [loads["ranker of 1", SMALL, callers] for callers in (FOUR, *LONE)]
    ask_s = max(two.grpc - one.grpc, 0.0)
    woken = _woken(at_once, one.cycle - one.grpc)
    away_s = max(one.grpc - at_once.grpc_s - woken - ask_s, 0.0)
    quick_s = at_once.grpc_s + at_once.grpc_cold_s + away_s + ask_s
    grpc_cooled = _all_of(_curve(_of_two_wakes(few, "grpc", quick_s, _ASKED, 2)))
    asks_s, asks_cooled = _cold(few, "asks", 0.0)
    io_s = 0.0 if two.io - one.io < _PAST_IO * client.io_s else None
    io_cooled = () if io_s is None else _all_of(_cold(few, "io", at_once.io_s + at_once.io_cold_s))
    told_s = min(max(two.asks - one.asks, 0.0), asks_s)
    queued = [loads["ranker of 1, queued", SMALL, callers] for callers in LONE]
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
            heard_s=max(two_single.asks / (2 * two_single.runs), 0.0),
            io_s=io_s,
            io_cooled=io_cooled,
        ),
    )


def _all_of(cold: Cold) -> Points:
    """What sleep costs where what the shortest costs is not charged elsewhere."""
    least, points = cold
    return ((_NO_SLEEP_S, least), *((slept, least + seconds) for slept, seconds in points if slept > _NO_SLEEP_S))


def _woken(end: EndCosts, slept: float) -> float:
    """What the thread that takes gRPC's events takes more after so many seconds of sleep."""
    return end.grpc_cold_s + at_sleep(end.cooled("grpc"), max(slept, 0.0))


def _told(loads: dict[Kind, Means], run: InProcess) -> dict[str, Any]:
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
