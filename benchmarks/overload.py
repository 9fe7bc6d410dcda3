"""Goodput of our server at several times the load it can take, with clients on cores of their own.

    OMP_NUM_THREADS=1 python -m benchmarks.overload                                  # 3 ms a prediction, 3 times the peak
    OMP_NUM_THREADS=1 python -m benchmarks.overload --over 512 512 1 --batch 256     # another model and request
    OMP_NUM_THREADS=1 python -m benchmarks.overload --times 1 3 10

The peak is the most that 16 to 512 callers one behind another get. Then requests come at a fixed rate, whatever becomes
of them, each with a deadline; goodput is what is answered in time, behind the first quarter of the run. Server and
clients have half of the machine's cores each, since what clients take of the server's cores is no matter of the
server's. "clients" is the share of their cores that they used: near 1 it is they who are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import grpc.aio
import torch

from benchmarks.serving import Contender, build, drive, process, requests_of, serve_ours
from recinfer.inference.predictor import load
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.server import SERVICE_NAME

_CALLERS = (16, 64, 256, 512)
_TICK_S = 2e-3


def serve_on(cores: set[int], archive: str, batching: BatchConfig, pipe: Any) -> None:
    """Our server on some of the machine's cores, telling the seconds of processor it took when asked."""
    os.sched_setaffinity(0, cores)
    serve_ours(archive, batching, pipe)


def halves() -> tuple[set[int], set[int]]:
    """Cores of the server, cores of its clients; the same where there is one."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores[: (len(cores) + 1) // 2]), set(cores[len(cores) // 2 :])


class Load:
    """Requests at a fixed rate.

    Args:
        who, data: whom to ask, and what.
        timeout: seconds until a caller gives up.
    """

    def __init__(self, who: Contender, data: bytes, timeout: float) -> None:
        self._who, self._data, self._timeout = who, data, timeout
        self.done: dict[str, list[tuple[float, float]]] = {}  # code -> (when it came, seconds it took)
        self.sent = 0

    async def run(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests a second for ``seconds``."""
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self._who.port}") as channel:
            call = channel.unary_unary(self._who.path)

            async def ask(begun: float) -> None:
                start, code = time.perf_counter(), "OK"
                try:
                    await call(self._data, timeout=self._timeout)
                except grpc.aio.AioRpcError as error:
                    code = error.code().name
                end = time.perf_counter()
                self.done.setdefault(code, []).append((end - begun, end - start))

            begun = time.perf_counter()
            tasks: set[asyncio.Task[None]] = set()
            while (now := time.perf_counter() - begun) < seconds:
                for _ in range(int(now * rate) - self.sent):
                    task = asyncio.create_task(ask(begun))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    self.sent += 1
                await asyncio.sleep(_TICK_S)
            await asyncio.gather(*tasks)

    def goodput(self, since: float, until: float) -> float:
        """Answers a second between two times."""
        return sum(since <= at < until for at, _ in self.done.get("OK", ())) / (until - since)


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def peak_of(who: Contender, data: bytes, seconds: float) -> float:
    """The most requests a second that closed loops get."""
    return max([(await drive(who, data, callers, seconds))["rps"] for callers in _CALLERS])


async def overload(who: Contender, data: bytes, peak: float, times: float, options: argparse.Namespace) -> None:
    """Print what is answered of ``times`` the peak."""
    load_, pid, cores = Load(who, data, options.timeout), options.pid, len(os.sched_getaffinity(0))
    start, ours, theirs, before = time.perf_counter(), time.process_time(), cpu_seconds(pid), options.ask()
    await load_.run(times * peak, options.seconds)
    spent = time.perf_counter() - start
    clients = (time.process_time() - ours) / spent / cores
    after = options.ask()
    goodput = load_.goodput(options.seconds / 4, options.seconds)
    print(
        f"{times:g} times the peak: sent {load_.sent / options.seconds:.0f}/s, answered {goodput:.0f}/s in time, "
        f"{goodput / peak:.2f} of the peak; "
        f"server {(cpu_seconds(pid) - theirs) / spent:.2f} cores, clients {clients:.2f}"
    )
    requests = after.requests - before.requests
    print(f"    {requests} requests in {after.runs - before.runs} runs, {after.refused - before.refused} refused")
    for code, found in load_.done.items():
        took = sorted(seconds for _, seconds in found)
        p50, p99 = took[len(took) // 2] * 1e3, took[int(len(took) * 0.99)] * 1e3
        print(f"    {code:18} {len(took):6} of {load_.sent}: p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)


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
    parser.add_argument("--seconds", type=float, default=6.0, help="of each overload; a third of it for each peak")
    options = parser.parse_args()
    torch.set_num_threads(1)
    server_cores, client_cores = halves()
    batching = BatchConfig(max_batch=options.max_batch, max_queue=options.max_queue)
    with tempfile.TemporaryDirectory() as folder:
        archive = build(Path(folder), options.over)
        data = requests_of(load(archive), options.batch)[options.call][0]
        with process(functools.partial(serve_on, server_cores), str(archive), batching) as (port, said):
            options.pid, options.ask = said["pid"], said["ask"]
            os.sched_setaffinity(0, client_cores)
            who = Contender(port, f"/{SERVICE_NAME}/{options.call}", lambda data, _: data)
            peak = asyncio.run(peak_of(who, data, options.seconds / 3))
            state = options.ask()
            print(
                f"{options.call} of batch {options.batch}, over {options.over}: "
                f"peak {peak:.0f}/s, {state.requests / state.runs:.1f} a run",
                flush=True,
            )
            for times in options.times:
                asyncio.run(overload(who, data, peak, times, options))


if __name__ == "__main__":
    main()
