"""Measures recinfer's goodput at several times its peak load, with clients on separate cores.

    OMP_NUM_THREADS=1 python -m benchmarks.overload                                  # 2.5 ms a prediction, 3 times the peak
    OMP_NUM_THREADS=1 python -m benchmarks.overload --over 1024 1024 1 --batch 64    # another model and request
    OMP_NUM_THREADS=1 python -m benchmarks.overload --times 1 3 10 --turns 3 --clients ours

First it finds the number of callers, in a closed loop, that gets the most responses. Then each turn measures the peak
(the rate of that closed loop) and, right after it, open loops at fixed rates. Goodput is the rate of responses within
the deadline, without the first quarter of the time. The result is the median of the turns' ratios, since the
measurements of a turn share the machine's state. A closed loop sends in bursts when a run ends, an open loop one by
one, which costs the server more per call. The last of --times is therefore also compared with the best of the others,
the peak of goodput by offered rate (--times 0.7 0.8 0.9 1 3 gives that curve). All requests have the same deadline.
Plain clients send every request; recinfer's clients (recinfer.serving.client.client, without retries) hold back
requests that a full server would reject.

Server and clients have half of the machine's cores each, so that clients do not take CPU time from the server. The
clients' cores are kept busy with idle-priority work (SCHED_IDLE): the cores of a virtual machine are often two
hyperthreads of one core, and more client load would otherwise slow the server down. "cores" shows the cores in use: by
clients (if they use all of theirs, the clients are the bottleneck), runs (the model), events (gRPC's event thread,
which rejects requests), loop (which sends responses) and gRPC's own threads.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import grpc.aio
import torch

from benchmarks.serving import build, process, requests_of
from recinfer.errors import RecinferError
from recinfer.inference.predictor import load
from recinfer.serving.client.client import AsyncInferenceClient
from recinfer.serving.engine.scheduler import BatchConfig, SchedulerState
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.tuning import tune_process

_CALLERS, _ROUNDS = (16, 64, 128, 256, 384), 3
_TICK_S, _PAUSE_S, _IDLE_S = 2e-3, 10e-3, 5e-3
_LEAD = 0.25  # share of a measurement that is a warm-up
_ANY_LENGTH = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_THREADS = {"recinfer-work": "runs", "recinfer-grpc": "events", "recinfer-serving": "loop"}


@dataclass(frozen=True)
class Said:
    """Statistics from the server: its batcher's counts, and the names of its Python threads by id."""

    state: SchedulerState
    threads: dict[int, str]


def serve_on(cores: set[int], archive: str, batching: BatchConfig, pipe: Any) -> None:
    """Run recinfer's server on some of the machine's cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    predictor = load(archive)
    tune_process()  # as recinfer.serving.server.run.serve does
    with Server({"bench": predictor}, batching=batching) as server:
        pipe.send(server.port)
        asked = ""
        while asked != "stop":
            asked = pipe.recv()
            assert server.scheduler is not None
            threads = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
            pipe.send(Said(server.scheduler.state, threads))


def halves() -> tuple[set[int], set[int]]:
    """The cores of the server and of its clients; the same core if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[: (len(cores) + 1) // 2]), set(cores[len(cores) // 2 :])


@contextmanager
def busy(cores: set[int]) -> Iterator[None]:
    """Keep some cores busy with low priority."""

    def spin(core: int) -> None:
        os.sched_setaffinity(0, {core})
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        numbers = dict.fromkeys(range(1000), 1)
        while True:
            sum(numbers.values())

    processes = [multiprocessing.get_context("fork").Process(target=spin, args=(core,), daemon=True) for core in cores]
    for each in processes:
        each.start()
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.join()


class Load:
    """Requests to one server and their results.

    Args:
        call: makes a request; raises grpc.aio.AioRpcError or RecinferError.
    """

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._begun = time.perf_counter()
        self.done: dict[str, list[tuple[float, float]]] = {}  # code -> (when it came, seconds it took)

    async def callers(self, number: int, seconds: float) -> None:
        """A closed loop: each of ``count`` callers sends its next request when it receives a response."""

        async def ask_again() -> None:
            while True:
                if not await self._ask():
                    await asyncio.sleep(_PAUSE_S)

        tasks = [asyncio.create_task(ask_again()) for _ in range(number)]
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def at_rate(self, rate: float, seconds: float) -> int:
        """An open loop: send ``rate`` requests per second regardless of responses; returns their number."""
        tasks, sent = set(), 0
        while (now := time.perf_counter() - self._begun) < seconds:
            for _ in range(int(now * rate) - sent):
                task = asyncio.create_task(self._ask())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                sent += 1
            await asyncio.sleep(_TICK_S)
        await asyncio.gather(*tasks)
        return sent

    def answered(self, since: float, until: float) -> float:
        """Responses per second between two times."""
        return sum(since <= at < until for at, _ in self.done.get("OK", ())) / (until - since)

    async def _ask(self) -> bool:
        start, code = time.perf_counter(), "OK"
        try:
            await self._call()
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        except RecinferError as error:
            code = "held back" if "was not sent" in str(error) else type(error).__name__
        end = time.perf_counter()
        self.done.setdefault(code, []).append((end - self._begun, end - start))
        return code == "OK"


@dataclass(frozen=True)
class Found:
    """The result of one load.

    Attributes:
        answered: responses per second in time, after the warm-up.
        cores: of the server, by kind of thread, and of the clients.
        requests, runs, refused, expired: as the server counts them.
        done: code -> seconds that each took, ascending.
    """

    answered: float
    cores: dict[str, float]
    requests: int
    runs: int
    refused: int
    expired: int
    done: dict[str, list[float]]

    def __str__(self) -> str:
        threads = " ".join(f"{kind} {share:.3f}" for kind, share in sorted(self.cores.items()) if share >= 5e-4)
        late = f", {self.expired} too late to run" if self.expired else ""
        return f"{self.answered:.0f}/s; {self.requests / max(self.runs, 1):.1f} a run, {self.refused} refused{late}; cores: {threads}"


class Bench:
    """A server with loads on it.

    Args:
        port: its port.
        said: see benchmarks.serving.process.
        call: path of the method.
        data: request.
        timeout: seconds until a caller gives up.
        ours: send as recinfer.serving.client.client does.
    """

    def __init__(self, port: int, said: dict[str, Any], call: str, data: bytes, timeout: float, *, ours: bool) -> None:
        self._target, self._pid, self._ask = f"127.0.0.1:{port}", said["pid"], said["ask"]
        self._call, self._data, self._timeout, self._ours = call, data, timeout, ours

    async def peak(self, callers: int, seconds: float) -> Found:
        """Measure the rate of ``callers`` callers for ``seconds`` after a warm-up."""
        lead = seconds * _LEAD
        return await self._found(lambda load_: load_.callers(callers, lead + seconds), lead, lead + seconds)

    async def overload(self, rate: float, seconds: float) -> Found:
        """Measure the responses to ``rate`` requests per second; the warm-up is part of ``seconds``."""
        return await self._found(lambda load_: load_.at_rate(rate, seconds), seconds * _LEAD, seconds)

    async def _found(self, work: Callable[[Load], Awaitable[object]], since: float, until: float) -> Found:
        before, threads = self._ask().state, self._cpu()
        ours, start = time.process_time(), time.perf_counter()
        async with AsyncExitStack() as stack:
            load_ = Load(await self._asking(stack))
            await work(load_)
        spent = time.perf_counter() - start
        cores = {kind: (took - threads.get(kind, 0.0)) / spent for kind, took in self._cpu().items()}
        cores["clients"] = (time.process_time() - ours) / spent
        after = await self._idle()
        names = ("requests", "runs", "refused", "expired")
        changes = {name: getattr(after, name) - getattr(before, name) for name in names}
        done = {code: sorted(took for _, took in found) for code, found in load_.done.items()}
        return Found(load_.answered(since, until), cores, **changes, done=done)

    async def _asking(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """A function that sends a request; ``stack`` closes its connection."""
        if self._ours:  # without the encoding of requests, which costs the same everywhere
            client = await stack.enter_async_context(AsyncInferenceClient(self._target, retries=0))
            return functools.partial(client._call, self._call, self._data, self._timeout)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(self._target, options=_ANY_LENGTH))
        call = channel.unary_unary(f"/{SERVICE_NAME}/{self._call}")
        return functools.partial(call, self._data, timeout=self._timeout)

    async def _idle(self) -> SchedulerState:
        while (state := self._ask().state).waiting or state.running:
            await asyncio.sleep(_IDLE_S)
        return state

    def _cpu(self) -> dict[str, float]:
        """CPU seconds of the server so far, by kind of thread."""
        names: dict[int, str] = self._ask().threads
        found: dict[str, float] = defaultdict(float)
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            name = names.get(int(task.name), "gRPC's")
            kind = next((kind for start, kind in _THREADS.items() if name.startswith(start)), name)
            found[kind] += int((task / "schedstat").read_text().split()[0]) / 1e9
        return found


async def most_callers(bench: Bench, seconds: float) -> int:
    """The number of callers with the highest median rate over several rounds."""
    await bench.peak(_CALLERS[0], seconds)  # to warm up
    rounds = [{callers: (await bench.peak(callers, seconds)).answered for callers in _CALLERS} for _ in range(_ROUNDS)]
    found = {callers: statistics.median(rates[callers] for rates in rounds) for callers in _CALLERS}
    print("answers a second by callers: " + ", ".join(f"{n}: {rate:.0f}" for n, rate in found.items()), flush=True)
    return max(found, key=lambda callers: found[callers])


async def compare(benches: dict[str, Bench], options: argparse.Namespace) -> None:
    """Find the best number of callers, measure in turns and print the results; ``benches`` are by kind of client."""
    callers = options.callers or await most_callers(next(iter(benches.values())), options.seconds / 4)
    found: dict[tuple[str, float], list[float]] = defaultdict(list)
    for _ in range(options.turns):
        for kind, bench in benches.items():
            peak = await bench.peak(callers, options.seconds / 2)
            print(f"  {kind} clients, {callers} callers: {peak}")
            for times in options.times:
                over = await bench.overload(times * peak.answered, options.seconds)
                found[kind, times].append(over.answered / peak.answered)
                print(f"  {times:g} times as many at a fixed rate: {over}: {found[kind, times][-1]:.2f}")
                for code, took in over.done.items():
                    p50, p99 = took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3
                    print(f"      {code:18} {len(took):6}: p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)
    for (kind, times), ratios in found.items():
        print(f"goodput at {times:g} times the peak, {kind} clients: {shown(ratios)} of it")
    for kind in benches:
        *others, last = options.times
        if not others:
            continue
        # The best of a turn over all rates would pick outliers, so the peak is the rate with the best median.
        best = max(others, key=lambda times: statistics.median(found[kind, times]))
        ratios = [over / most for over, most in zip(found[kind, last], found[kind, best], strict=True)]
        print(f"at {last:g} beside {best:g} times the peak, the best of these rates, {kind} clients: {shown(ratios)}")


def shown(ratios: Sequence[float]) -> str:
    """The median and all values, as text."""
    return f"{statistics.median(ratios):.2f} (turns: {', '.join(f'{ratio:.2f}' for ratio in ratios)})"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--over", type=int, nargs="+", default=[6144, 6144, 6144, 1], help="layer sizes of the top MLP")
    parser.add_argument("--call", choices=["Lookup", "Predict"], default="Predict")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument(
        "--max-batch", type=int, default=BatchConfig.max_batch, help="most samples per run; 1 disables merging"
    )
    parser.add_argument("--max-queue", type=int, default=BatchConfig.max_queue)
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--timeout", type=float, default=1.0, help="timeout of a request in seconds")
    parser.add_argument("--clients", choices=["plain", "ours"], nargs="+", default=["plain", "ours"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--callers", type=int, help="callers that measure the peak; default: the best of several numbers"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds per overload; half of that for its peak")
    options = parser.parse_args()
    torch.set_num_threads(1)
    server_cores, client_cores = halves()
    batching = BatchConfig(max_batch=options.max_batch, max_queue=options.max_queue)
    with tempfile.TemporaryDirectory() as folder:
        archive = build(Path(folder), options.over)
        data = requests_of(load(archive), options.batch)[options.call][0]
        with process(functools.partial(serve_on, server_cores), str(archive), batching) as (port, said):
            os.sched_setaffinity(0, client_cores)
            print(f"{options.call} of batch {options.batch}, {len(data)} bytes, over {options.over}", flush=True)
            benches = {
                kind: Bench(port, said, options.call, data, options.timeout, ours=kind == "ours")
                for kind in options.clients
            }
            with busy(client_cores):
                asyncio.run(compare(benches, options))


if __name__ == "__main__":
    main()
