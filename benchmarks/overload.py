"""Goodput of our server at several times the load it can take, with clients on cores of their own.

    OMP_NUM_THREADS=1 python -m benchmarks.overload                                  # 2.5 ms a prediction, 3 times the peak
    OMP_NUM_THREADS=1 python -m benchmarks.overload --over 1024 1024 1 --batch 64    # another model and request
    OMP_NUM_THREADS=1 python -m benchmarks.overload --times 1 3 10 --turns 3

First the number of callers, one request behind another, that get the most answers. Then turns: the peak, which is what so
many callers get, and right after it the overload, requests at a fixed rate, whatever becomes of them. Goodput is what is
answered in time, behind the first quarter of the overload; the result is the median of the turns' ratios, since both of
each are of the same seconds. All requests have the same deadline.

Server and clients have half of the machine's cores each, since what clients take of the server's cores is no matter of
the server's. "clients" is the share of their cores that they used: near 1 it is they who are measured. What the server's
threads take is said too: runs (the model), events (gRPC's events: refusals, arrivals), loop (what is answered), and gRPC's.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import grpc.aio
import torch

from benchmarks.serving import build, process, requests_of
from recinfer.inference.predictor import load
from recinfer.serving.batcher import BatchConfig, BatcherState
from recinfer.serving.server import SERVICE_NAME, Server
from recinfer.serving.tuning import tune_process

_CALLERS = (4, 16, 64, 256, 512)
_TICK_S, _PAUSE_S, _IDLE_S = 2e-3, 10e-3, 5e-3
_LEAD = 0.25  # of what is measured, which is not counted
_ANY_LENGTH = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_THREADS = {"recinfer-request": "runs", "recinfer-grpc": "events", "recinfer-serving": "loop"}


@dataclass(frozen=True)
class Said:
    """What the server says: what its batcher did, and the names of its Python threads by their ids."""

    state: BatcherState
    threads: dict[int, str]


def serve_on(cores: set[int], archive: str, batching: BatchConfig, pipe: Any) -> None:
    """Our server on some of the machine's cores."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(1)
    predictor = load(archive)
    tune_process()  # as recinfer.serving.server.serve does
    with Server({"bench": predictor}, batching=batching) as server:
        pipe.send(server.port)
        asked = ""
        while asked != "stop":
            asked = pipe.recv()
            assert server.batcher is not None
            threads = {thread.native_id: thread.name for thread in threading.enumerate() if thread.native_id}
            pipe.send(Said(server.batcher.state, threads))


def halves() -> tuple[set[int], set[int]]:
    """Cores of the server, cores of its clients; the same where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[: (len(cores) + 1) // 2]), set(cores[len(cores) // 2 :])


class Load:
    """Requests to one server, and what became of them.

    Args:
        call: makes a request; raises grpc.aio.AioRpcError.
    """

    def __init__(self, call: Callable[[], Awaitable[object]]) -> None:
        self._call = call
        self._begun = time.perf_counter()
        self.done: dict[str, list[tuple[float, float]]] = {}  # code -> (when it came, seconds it took)

    async def callers(self, number: int, seconds: float) -> None:
        """So many callers, each of whom asks again as soon as it is answered."""

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
        """``rate`` requests a second, whatever becomes of them; how many that were."""
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
        """Answers a second between two times."""
        return sum(since <= at < until for at, _ in self.done.get("OK", ())) / (until - since)

    async def _ask(self) -> bool:
        start, code = time.perf_counter(), "OK"
        try:
            await self._call()
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        end = time.perf_counter()
        self.done.setdefault(code, []).append((end - self._begun, end - start))
        return code == "OK"


@dataclass(frozen=True)
class Turn:
    """One overload.

    Attributes:
        peak, goodput, sent: a second.
        shares: of the server's cores, by kind of thread, and of the clients'.
        requests, runs, refused, expired: as the server counts them.
        done: code -> seconds that each took, ascending.
    """

    peak: float
    goodput: float
    sent: float
    shares: dict[str, float]
    requests: int
    runs: int
    refused: int
    expired: int
    done: dict[str, list[float]]


class Bench:
    """One server under loads.

    Args:
        port: its port.
        said: see benchmarks.serving.process.
        call: path of the method.
        data: request.
        timeout: seconds until a caller gives up.
    """

    def __init__(self, port: int, said: dict[str, Any], call: str, data: bytes, timeout: float) -> None:
        self._target, self._pid, self._said = f"127.0.0.1:{port}", said["pid"], said["ask"]
        self._path, self._data, self._timeout = f"/{SERVICE_NAME}/{call}", data, timeout

    async def peak(self, callers: int, seconds: float) -> float:
        """Answers a second that so many callers get in ``seconds``, behind a lead."""
        async with grpc.aio.insecure_channel(self._target, options=_ANY_LENGTH) as channel:
            load_ = self._load(channel)
            await load_.callers(callers, seconds * (1 + _LEAD))
        await self._idle()
        return load_.answered(seconds * _LEAD, seconds * (1 + _LEAD))

    async def turn(self, callers: int, times: float, seconds: float) -> Turn:
        """The peak for half of ``seconds``, then ``times`` as many requests for all of them."""
        peak = await self.peak(callers, seconds / 2)
        before, threads, clients, start = self._said(), self._cpu(), time.process_time(), time.perf_counter()
        async with grpc.aio.insecure_channel(self._target, options=_ANY_LENGTH) as channel:
            load_ = self._load(channel)
            sent = await load_.at_rate(times * peak, seconds)
        spent = time.perf_counter() - start
        clients = (time.process_time() - clients) / spent / len(os.sched_getaffinity(0))
        shares = {kind: (took - threads[kind]) / spent for kind, took in self._cpu().items()}
        await self._idle()
        after = self._said().state
        changes = {
            name: getattr(after, name) - getattr(before.state, name)
            for name in ("requests", "runs", "refused", "expired")
        }
        done = {code: sorted(took for _, took in found) for code, found in load_.done.items()}
        goodput = load_.answered(seconds * _LEAD, seconds)
        return Turn(peak, goodput, sent / seconds, shares | {"clients": clients}, **changes, done=done)

    def _load(self, channel: grpc.aio.Channel) -> Load:
        call = channel.unary_unary(self._path)
        return Load(functools.partial(call, self._data, timeout=self._timeout))

    async def _idle(self) -> None:
        while (state := self._said().state).waiting or state.running:
            await asyncio.sleep(_IDLE_S)

    def _cpu(self) -> Counter[str]:
        """Seconds of processor of the server so far, by kind of thread."""
        names, found = self._said().threads, Counter[str]()
        for task in Path(f"/proc/{self._pid}/task").iterdir():
            name = names.get(int(task.name), "gRPC's")
            kind = next((kind for start, kind in _THREADS.items() if name.startswith(start)), name)
            found[kind] += int((task / "schedstat").read_text().split()[0]) / 1e9
        return found


async def most_callers(bench: Bench, seconds: float) -> int:
    """How many callers get the most answers."""
    found: dict[int, float] = {}
    for callers in _CALLERS:
        found[callers] = await bench.peak(callers, seconds)
    print("answers a second by callers: " + ", ".join(f"{n}: {rate:.0f}" for n, rate in found.items()), flush=True)
    return max(found, key=lambda callers: found[callers])


def show(turn: Turn) -> None:
    """Print one turn."""
    total = sum(turn.shares.values()) - turn.shares["clients"]
    kinds = ", ".join(f"{kind} {share:.2f}" for kind, share in sorted(turn.shares.items()) if share >= 0.005)
    print(
        f"  {turn.goodput / turn.peak:.2f}: peak {turn.peak:.0f}/s, sent {turn.sent:.0f}/s, answered {turn.goodput:.0f}/s in "
        f"time; {turn.requests} requests in {turn.runs} runs, {turn.refused} refused, {turn.expired} too late to run\n"
        f"        cores {total:.2f}: {kinds}"
    )
    for code, took in turn.done.items():
        p50, p99 = took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3
        print(f"        {code:18} {len(took):6}: p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


async def compare(bench: Bench, options: argparse.Namespace) -> None:
    """Find the callers, take the turns, and print them."""
    callers = options.callers or await most_callers(bench, options.seconds / 4)
    for times in options.times:
        print(f"{times:g} times the peak of {callers} callers:")
        ratios = []
        for _ in range(options.turns):
            turn = await bench.turn(callers, times, options.seconds)
            ratios.append(turn.goodput / turn.peak)
            show(turn)
        listed = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(
            f"goodput at {times:g} times the peak: {statistics.median(ratios):.2f} of it (turns: {listed})", flush=True
        )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--over", type=int, nargs="+", default=[6144, 6144, 6144, 1], help="layer sizes of the over arch"
    )
    parser.add_argument("--call", choices=["Lookup", "Predict"], default="Predict")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--max-batch", type=int, default=BatchConfig.max_batch, help="1: no merging")
    parser.add_argument("--max-queue", type=int, default=BatchConfig.max_queue)
    parser.add_argument("--times", type=float, nargs="+", default=[3.0])
    parser.add_argument("--timeout", type=float, default=1.0, help="seconds that a caller waits")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--callers", type=int, help="that make the peak; without it the best of some numbers")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each overload; half of them for its peak")
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
            asyncio.run(compare(Bench(port, said, options.call, data, options.timeout), options))


if __name__ == "__main__":
    main()
