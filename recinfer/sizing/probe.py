"""A server in a process of its own, and load on it: what is measured of both, CPU time of their threads included."""

from __future__ import annotations

import asyncio
import functools
import gc
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import UnavailableError
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.busy import schedstat
from recinfer.serving.loop import run_on_loop

__all__ = ["Load", "ServerProcess", "Spent", "closed_loop", "open_loop", "quick_collections"]

_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_START_S = 120.0
_START = "spawn"  # servers begin with nothing of this process
# As recinfer.serving.loop, .core, .core_channel, .server and .remote.server name them.
_THREADS = (
    "recinfer-serving",
    "recinfer-grpc",
    "recinfer-asks",
    "recinfer-request",
    "recinfer-decode",
    "recinfer-shard",
)


@dataclass(frozen=True)
class Spent:
    """CPU seconds of a process.

    Attributes:
        loop: of the thread that its event loop runs on.
        grpc: of the thread that takes gRPC's events, and answers some of them at once; 0 where there is none.
        asks: of the threads that take the events of calls that it makes without the loop.
        runs: of the threads for what is too long for these.
        other: of all its other threads, most of it gRPC's own.
        waited: seconds that its threads waited for a core, having something to do; no CPU. 0 where the kernel does not tell.
        turns: how often they got one; no seconds.
    """

    loop: float
    grpc: float
    asks: float
    runs: float
    other: float
    waited: float = 0.0
    turns: float = 0.0

    @property
    def cpu(self) -> float:
        """Of all its threads."""
        return self.loop + self.grpc + self.asks + self.runs + self.other

    def __sub__(self, before: Spent) -> Spent:
        return Spent(*(after - was for after, was in zip(astuple(self), astuple(before))))

    def times(self, by: float) -> Spent:
        """With all seconds ``by`` times as long."""
        return replace(Spent(*(by * each for each in astuple(self))), turns=self.turns)


@dataclass(frozen=True)
class Load:
    """What one stretch of load gave.

    Attributes:
        seconds: how long it went on.
        begin: ``time.perf_counter()`` at its start.
        arrivals: seconds from its start at which requests became due, ascending.
        latencies: seconds of each request of ``arrivals``; nan where it was refused.
        client, server: CPU of all of it.
        runs: of the server, for all these requests; 0 where it has no batcher.
        handled: seconds that the server's handlers took for all of them, waiting for a run included.
    """

    seconds: float
    begin: float
    arrivals: NDArray[np.float64]
    latencies: NDArray[np.float64]
    client: Spent
    server: Spent
    runs: int
    handled: float

    @property
    def answered(self) -> int:
        """Requests that were answered."""
        return int(np.isfinite(self.latencies).sum())

    def times(self, by: float) -> Load:
        """With all that it took ``by`` times as long, as on a machine that is slower by that; the arrivals are as they were."""
        client, server = self.client.times(by), self.server.times(by)
        latencies, seconds, handled = by * self.latencies, by * self.seconds, by * self.handled
        return replace(self, seconds=seconds, latencies=latencies, client=client, server=server, handled=handled)

    def percentile(self, percent: float) -> float:
        """Seconds within which ``percent`` of the answered requests were answered."""
        return float(np.nanpercentile(self.latencies, percent))


def spent_here() -> Spent:
    """Of this process; its event loop is the one that recinfer's servers and clients share."""
    of = [0.0] * len(_THREADS)
    for thread in threading.enumerate():
        for at, name in enumerate(_THREADS):
            if thread.name.startswith(name) and thread.ident is not None:
                of[at] += time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    loop, grpc, asks, *runs = of
    return Spent(loop, grpc, asks, sum(runs), time.process_time() - sum(of), *_waited())


def _waited() -> tuple[float, float]:
    """Seconds that threads of this process waited for a core, and how often they got one."""
    found = [schedstat(task) for task in Path("/proc/self/task").glob("*")]
    return sum(waited for _, waited, _ in found), float(sum(turns for *_, turns in found))


class ServerProcess:
    """A server of an archive in a process of its own, set up as ``recinfer serve`` sets one up, on loopback.

    Args:
        ranks: it is a shard server of these ranks.
        shards: it is a ranker of this shards.json.
        direct: small requests may pass by its queue, as they do in every server of ours; False: none do.

    It starts as it is entered, and whoever wants something of it waits until it has; so several can start together.
    """

    def __init__(
        self,
        archive: Path,
        batching: BatchConfig | None = None,
        *,
        ranks: Sequence[int] = (),
        shards: Path | None = None,
        direct: bool = True,
    ) -> None:
        context: Any = multiprocessing.get_context(_START)
        self._pipe, there = context.Pipe()
        arguments = (archive, batching or BatchConfig(), tuple(ranks), shards, direct, there)
        self._child = context.Process(target=_serve, args=arguments, daemon=True)

    def __enter__(self) -> ServerProcess:
        self._child.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(OSError):  # it is gone already
            self._pipe.send("stop")
        self._child.join(10)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    @functools.cached_property
    def target(self) -> str:
        """``host:port``; see :meth:`wait`."""
        return f"127.0.0.1:{self._ask(None)}"

    def wait(self) -> None:
        """Return once it has started; raises UnavailableError where it did not."""
        _ = self.target

    def spent(self) -> tuple[Spent, int, float]:
        """CPU so far, runs of the batcher, and seconds in handlers."""
        self.wait()
        *of_threads, runs, handled = self._ask("spent")
        return Spent(*of_threads), runs, handled

    def _ask(self, what: str | None) -> Any:
        if what is not None:
            self._pipe.send(what)
        try:
            if not self._pipe.poll(_START_S):
                raise EOFError
            return self._pipe.recv()
        except (EOFError, OSError):
            raise UnavailableError("the server that was to be measured did not start or is gone; see stderr") from None


def _serve(
    archive: Path, batching: BatchConfig, ranks: Sequence[int], shards: Path | None, direct: bool, pipe: Connection
) -> None:
    import signal

    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends this process
    torch.set_num_threads(1)
    server = _shard_server(archive, ranks) if ranks else _server(archive, batching, shards, direct)
    pipe.send(server.port)
    try:
        while pipe.recv() == "spent":
            now = spent_here()
            batcher = getattr(server, "batcher", None)
            runs = batcher.state.runs if batcher else 0
            pipe.send((*astuple(now), runs, sum(server.stats.seconds().values())))
    except EOFError:  # the parent is gone
        pass
    server.stop()


def _shard_server(archive: Path, ranks: Sequence[int]) -> Any:
    from recinfer.serving.remote.server import ShardServer
    from recinfer.serving.remote.tables import ShardTables
    from recinfer.serving.tuning import tune_process

    tables = ShardTables(ranks)
    tables.add(archive)
    tune_process()
    return ShardServer(tables).start()


def _server(archive: Path, batching: BatchConfig, shards: Path | None, direct: bool) -> Any:
    from recinfer.inference.predictor import load
    from recinfer.serving.server import Server
    from recinfer.serving.tuning import tune_process

    if shards is None:
        predictor, fanout = load(archive), None
    else:
        from recinfer.archive.reader import open_archive
        from recinfer.inference.predictor import Predictor
        from recinfer.serving.remote.fanout import Fanout
        from recinfer.serving.remote.lookups import remote_lookups
        from recinfer.serving.remote.pool import ReplicaPool

        fanout = Fanout(ReplicaPool(shards))
        predictor = Predictor(open_archive(archive, ranks=()), lookups=remote_lookups(fanout, wait=False))
        lookups: Any = predictor.lookups
        run_on_loop(fanout.pool.wait_for(lookups.ranks, lookups.spec.key), timeout=_START_S)
        predictor.check_merging()
    tune_process()
    server = Server({predictor.manifest.model: predictor}, batching=batching, shards=fanout)
    if not direct:
        server.service.direct.enabled = False
    return server.start()


async def _ask(call: Any, data: bytes) -> float:
    """When it was answered, or nan."""
    import grpc

    try:
        await call(data, timeout=10.0)
    except grpc.aio.AioRpcError:
        return float("nan")
    return time.perf_counter()


@contextmanager
def quick_collections() -> Iterator[None]:
    """Collections of garbage pass over what is there already: one precedes each load, and would take longer than many do."""
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:  # else what somebody froze before would thaw with it
            gc.unfreeze()


@contextmanager
def _no_collection() -> Iterator[None]:
    """The caller collects no garbage meanwhile: all that this process has loaded would be gone through, for up to 10 ms."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _measured(server: ServerProcess, path: str, first: bytes, drive: Any) -> Load:
    """``first`` is sent before: what it takes to connect is no request's."""
    import grpc.aio

    async def run() -> Load:
        async with grpc.aio.insecure_channel(server.target, options=_OPTIONS) as channel:
            call = channel.unary_unary(path)
            await _ask(call, first)
            before_there, runs, handled = server.spent()
            before = spent_here()
            arrivals, ends, begin, end = await drive(call)
            here, (there, runs_after, handled_after) = spent_here() - before, server.spent()
        at = np.array(arrivals)
        return Load(
            end - begin,
            begin,
            at - begin,
            np.array(ends) - at,
            here,
            there - before_there,
            runs_after - runs,
            handled_after - handled,
        )

    with _no_collection():
        return run_on_loop(run())


def closed_loop(
    server: ServerProcess, path: str, requests: Sequence[bytes], callers: int, seconds: float, pause: float = 0.0
) -> Load:
    """``callers`` that each ask again as soon as they are answered, or ``pause`` seconds later, taking turns with ``requests``."""

    async def drive(call: Any) -> tuple[list[float], list[float], float, float]:
        found: list[tuple[float, float]] = []
        begin = time.perf_counter()

        async def caller(at: int) -> None:
            while (start := time.perf_counter()) < begin + seconds:
                found.append((start, await _ask(call, requests[at % len(requests)])))
                at += 1
                if pause:
                    await asyncio.sleep(pause)

        await asyncio.gather(*(caller(7 * i) for i in range(callers)))
        end = time.perf_counter()
        found.sort()
        return [a for a, _ in found], [b for _, b in found], begin, end

    return _measured(server, path, requests[0], drive)


def open_loop(server: ServerProcess, path: str, requests: Sequence[bytes], due: Sequence[float]) -> Load:
    """Requests at the times ``due`` (seconds, ascending), whatever becomes of those before.

    An event loop's timers are a millisecond apart. So a request counts from the moment the loop woke up for it, before
    anything was done for it, and these moments are what ``Load.arrivals`` says.
    """

    async def drive(call: Any) -> tuple[list[float], list[float], float, float]:
        ends = [float("nan")] * len(due)
        arrivals = [0.0] * len(due)
        tasks = []
        begin = time.perf_counter()

        async def ask(i: int) -> None:
            ends[i] = await _ask(call, requests[i % len(requests)])

        at = 0
        while at < len(due):
            now = time.perf_counter()
            while at < len(due) and begin + due[at] <= now:
                arrivals[at] = now
                tasks.append(asyncio.ensure_future(ask(at)))
                at += 1
            if at < len(due):
                await asyncio.sleep(max(0.0, begin + due[at] - time.perf_counter()))
        await asyncio.gather(*tasks)
        return arrivals, ends, begin, time.perf_counter()

    return _measured(server, path, requests[0], drive)
