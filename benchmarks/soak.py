"""Soak test: a server under steady load while versions and deltas change; no request may fail, and memory must not
grow.

    python -m benchmarks.soak                       # ten minutes at 70 % of the server's capacity
    python -m benchmarks.soak --seconds 60 --every 1
    python -m benchmarks.soak --workers 2

A model store of two versions of one DLRM and a delta for each; the server is ``recinfer serve`` in its own process. An
open loop sends requests at a steady rate: 70 % of the rate of a closed loop, measured again every minute because other
load on the machine changes. Every response must match the version that it names, with or without its delta. Meanwhile
the other version is loaded and gets a tenth of the requests, then all; a delta is applied and undone; the change is
rolled back and repeated; and the old version is unloaded. Memory is the server's anonymous memory (without pages mapped
from files), once per second; its slope is that of a line through the averages of sixty parts of the second half of the
run, with the 95 % interval of that fit.

Before the load, bursts of calls that the server partly refuses bring memory to its highest level, since the allocator keeps what the
deepest queue needed. Without them a spell in which the machine is slow shows as a step. Failures of the bursts are not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import grpc.aio
import numpy as np
import torch

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["SoakResult", "build_store", "soak"]

NAME, VERSIONS = "soak", ("1", "2")
FEATURES, DENSE, DIM = 26, 13, 16
_CALLERS, _REQUESTS, _BATCH, _TIMEOUT_S = 16, 8, 8, 60.0
_PAUSE_S, _AFTER_PAUSE_S = 3.0, 10.0
_SAID = 40
_TICK_S, _MEASURE_S, _AGAIN_S = 0.005, 2.0, 60.0
_BURST = 3000  # calls at once; the server refuses some


@dataclass
class SoakResult:
    """The result of a run.

    Attributes:
        seconds: how long the load was on.
        rate: offered requests per second, on average; ``capacity``: rate of a closed loop, on average.
        answers: answers by version and state, ``"1"`` or ``"1+delta"``.
        errors: failed requests by gRPC code; ``paused``: those right after a pause of the whole machine.
        said: the first failures: message, second of the run, and count.
        wrong: answers that match no state of the version that they name.
        changes: changes of models that were made; ``rounds_mib``: anonymous memory after each round of them, when one version
            with its delta is loaded.
        p50_ms, p99_ms: latency.
        start_mib, end_mib: anonymous memory, averages of the first and the last tenth of the second half.
        slope_mib_per_min, slope_plus_minus: of the line through it, and half of its 95 % interval.
        pauses: (second of the run, seconds) of each moment at which the whole machine stood still.
    """

    seconds: float = 0.0
    rate: float = 0.0
    capacity: float = 0.0
    answers: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    paused: Counter[str] = field(default_factory=Counter)
    said: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    changes: int = 0
    rounds_mib: list[float] = field(default_factory=list)
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    start_mib: float = 0.0
    end_mib: float = 0.0
    slope_mib_per_min: float = 0.0
    slope_plus_minus: float = 0.0
    pauses: list[tuple[int, float]] = field(default_factory=list)


def build_store(folder: Path, rows: int = 20_000) -> Path:
    """A model store of two versions, each with a delta that changes a part of its rows and its dense part."""

    def model(device: str) -> DLRM:
        tables = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=DIM, name=f"t{i}", feature_names=[f"f{i}"])
            for i in range(FEATURES)
        ]
        collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        return DLRM(collection, DENSE, [64, DIM], [64, 1], dense_device=torch.device(device))

    plan = plan_inference(model("meta"), world_size=1, precision=DataType.INT8)
    store = folder / "store"
    (store / NAME).mkdir(parents=True)
    for version in VERSIONS:
        torch.manual_seed(int(version))
        own = model("cpu")
        reader = CheckpointReader(save_checkpoint(folder / version, own, model_name=NAME, model_version=version))
        out = store / NAME / version
        export_archive(model("meta"), reader, plan, out, name=NAME, version=version, progress=False)
        new = copy.deepcopy(own)
        with torch.no_grad():
            for parameter in new.parameters():
                changed = torch.rand(len(parameter)) < 0.1
                parameter[changed] += 0.5 * torch.randn_like(parameter[changed])
        later = CheckpointReader(save_checkpoint(folder / f"{version}d", new, model_name=NAME, model_version=version))
        make_delta(out, model("meta"), later, store / NAME / f"{version}.rqd", progress=False)
    return store


def make_requests(rows: int) -> list[tuple[torch.Tensor, KeyedJaggedTensor]]:
    """Requests with one id per feature and sample."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.ones(FEATURES * _BATCH, dtype=torch.int32)
    return [
        (
            torch.randn(_BATCH, DENSE, generator=random),
            KeyedJaggedTensor(
                [f"f{i}" for i in range(FEATURES)],
                torch.randint(0, rows, (FEATURES * _BATCH,), generator=random),
                lengths=lengths,
            ),
        )
        for _ in range(_REQUESTS)
    ]


@contextlib.contextmanager
def serving(store: Path, workers: int) -> Iterator[tuple[str, list[int]]]:
    """``recinfer serve`` on version 1 of ``store``: its target, and its serving processes."""
    command = [sys.executable, "-m", "recinfer", "serve", "--model-store", str(store), "--admin", "--port", "0"]
    process = subprocess.Popen([*command, "--workers", str(workers), "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        ready = json.loads(process.stdout.readline())
        target = f"127.0.0.1:{ready['port']}"
        yield target, [process.pid] if workers == 1 else _children(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def anonymous_mib(pids: list[int]) -> float:
    """Anonymous memory of the processes, in MiB."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            total += int(line.split()[1]) if line.startswith("RssAnon") else 0
    return total / 1024


class _Load:
    """Sends requests to one server and checks the responses."""

    def __init__(self, channel: grpc.aio.Channel, store: Path, rows: int, result: SoakResult) -> None:
        self.result, self.latencies = result, []
        self._predict = channel.unary_unary(f"/{SERVICE_NAME}/Predict")
        requests = make_requests(rows)
        self._data = [codec.encode_predict_request(*request) for request in requests]
        self._expected: dict[str, list[dict[str, torch.Tensor]]] = {}
        for version in VERSIONS:
            predictor = load(store / NAME / version)
            states = {version: predictor} | {f"{version}+delta": predictor}
            self._expected[version] = [{} for _ in requests]
            for state in states:
                if state != version:
                    predictor.apply_delta(store / NAME / f"{version}.rqd")
                for known, request in zip(self._expected[version], requests):
                    known[state] = predictor.predict(*request)["output"]
        self.paused_until, self.begun, self.number = 0.0, time.monotonic(), 0

    async def ask(self, number: int) -> None:
        """Send one request and record its response and latency."""
        at, start = number % len(self._data), time.perf_counter()
        try:
            answer = await self._predict(self._data[at], timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            paused = time.monotonic() < self.paused_until
            (self.result.paused if paused else self.result.errors)[error.code().name] += 1
            text = f"{time.monotonic() - self.begun:.0f} s: {error.code().name}: {(error.details() or '')[:100]}"
            if text in self.result.said or len(self.result.said) < _SAID:
                self.result.said[text] += 1
            return
        self.latencies.append(time.perf_counter() - start)
        outputs, version = codec.decode_predict_response(answer)
        for state, expected in self._expected[version][at].items():
            if torch.allclose(outputs["output"], expected, rtol=0, atol=1e-5):
                self.result.answers[state] += 1
                return
        self.result.wrong += 1

    async def capacity(self, seconds: float) -> float:
        """Responses per second in a closed loop."""
        end, start = time.perf_counter() + seconds, len(self.latencies)

        async def caller(number: int) -> None:
            while time.perf_counter() < end:
                await self.ask(number)

        await asyncio.gather(*(caller(number) for number in range(_CALLERS)))
        return (len(self.latencies) - start) / seconds

    async def bursts(self, seconds: float) -> None:
        """Send bursts of calls at once, one after another, for ``seconds``; their responses and failures are not recorded."""

        async def call(number: int) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._predict(self._data[number % len(self._data)], timeout=_TIMEOUT_S)

        end = time.monotonic() + seconds
        while time.monotonic() < end:
            await asyncio.gather(*(call(number) for number in range(_BURST)))

    async def steady(self, share: float, most: float, seconds: float, until: asyncio.Task[None]) -> None:
        """Load at ``share`` of the capacity for at least ``seconds`` and until ``until`` is done. The capacity is
        measured again every minute, because other load on the machine changes."""
        end, rates, capacities = time.monotonic() + seconds, [], []
        while (left := end - time.monotonic()) > 0 or not until.done():
            capacities.append(await self.capacity(min(_MEASURE_S, max(left, 1.0) / 5)))
            rates.append(min(most, share * capacities[-1]))
            await self._at(rates[-1], min(_AGAIN_S, max(end - time.monotonic(), 1.0)))
        self.result.rate, self.result.capacity = float(np.mean(rates)), float(np.mean(capacities))

    async def _at(self, rate: float, seconds: float) -> None:
        """Send ``rate`` requests per second regardless of responses; after a pause of the machine continue at the same
        rate."""
        tasks: set[asyncio.Task[None]] = set()
        begun = last = time.monotonic()
        end, asked = begun + seconds, 0
        while (now := time.monotonic()) < end:
            if now - last > _PAUSE_S:
                self.result.pauses.append((round(last - self.begun), round(now - last, 1)))
                self.paused_until = now + _AFTER_PAUSE_S
                begun += now - last
            last = now
            while asked < (now - begun) * rate:
                task = asyncio.create_task(self.ask(self.number))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                asked, self.number = asked + 1, self.number + 1
            await asyncio.sleep(_TICK_S)
        await asyncio.gather(*tasks)


async def _change(target: str, pids: list[int], every: float, end: float, rounds: int, load_: _Load) -> None:
    """Change versions and deltas in turn, one step every ``every`` seconds, until ``end`` and for at least ``rounds``
    rounds; ends with one version loaded. A request follows each step, so that every state is tested on a slow machine
    too."""
    result = load_.result
    with AdminClient(target) as admin:
        first = next(iter(admin.list_models()[NAME]))
        now, other = first, VERSIONS[1 - VERSIONS.index(first)]
        while len(result.rounds_mib) < rounds or time.monotonic() < end:
            steps = [
                (admin.load, NAME, other),
                (admin.set_weights, NAME, {now: 90, other: 10}),
                (admin.apply_delta, NAME, f"{other}.rqd", other),
                (admin.set_default, NAME, other),
                (admin.rollback, NAME),
                (admin.set_default, NAME, other),
                (admin.unload, NAME, now),
                (admin.undo_delta, NAME, other),
                (admin.apply_delta, NAME, f"{other}.rqd", other),
            ]
            for step, *arguments in steps:
                await asyncio.to_thread(step, *arguments)
                result.changes += 1
                await load_.ask(result.changes)
                await asyncio.sleep(every)
            now, other = other, now
            result.rounds_mib.append(anonymous_mib(pids))


async def _run(
    target: str,
    pids: list[int],
    store: Path,
    rows: int,
    seconds: float,
    share: float,
    every: float,
    most: float,
    rounds: int,
) -> SoakResult:
    result = SoakResult()
    async with grpc.aio.insecure_channel(target) as channel:
        load_ = _Load(channel, store, rows, result)
        await load_.bursts(seconds / 5)
        load_.begun = time.monotonic()
        memory: list[tuple[float, float]] = []
        begun = time.monotonic()
        changing = asyncio.create_task(_change(target, pids, every, begun + seconds - 10 * every, rounds, load_))

        async def look() -> None:
            while (now := time.monotonic()) < begun + seconds or not changing.done():
                memory.append((now - begun, anonymous_mib(pids)))
                await asyncio.sleep(min(1.0, seconds / 100))

        await asyncio.gather(load_.steady(share, most, seconds, changing), changing, look())
        result.seconds = time.monotonic() - begun
    latencies = np.array(load_.latencies) * 1e3
    result.p50_ms, result.p99_ms = (float(np.percentile(latencies, share)) for share in (50, 99))
    _slope(np.array(memory), result)
    return result


def _slope(memory: np.ndarray, result: SoakResult) -> None:
    """Fit a line to the memory of the second half of a run ``[n, 2]`` (seconds, MiB)."""
    half = memory[len(memory) // 2 :]
    parts = np.array([part.mean(axis=0) for part in np.array_split(half, min(60, len(half))) if len(part)])
    minutes, mib = parts[:, 0] / 60, parts[:, 1]
    spread = minutes - minutes.mean()
    slope = float((spread * mib).sum() / (spread**2).sum())
    left = mib - mib.mean() - slope * spread
    error = float(np.sqrt((left**2).sum() / max(1, len(parts) - 2) / (spread**2).sum()))
    tenth = max(1, len(half) // 10)
    result.start_mib, result.end_mib = float(half[:tenth, 1].mean()), float(half[-tenth:, 1].mean())
    result.slope_mib_per_min, result.slope_plus_minus = slope, 2.0 * error


def soak(
    store: Path,
    *,
    rows: int,
    seconds: float,
    share: float = 0.7,
    every: float = 2.0,
    workers: int = 1,
    most: float = float("inf"),
    rounds: int = 1,
) -> SoakResult:
    """Run the soak test on a store from :func:`build_store`.

    Args:
        rows: of each table in the store.
        seconds: how long the load is on.
        share: offered load as a share of the capacity.
        every: seconds between changes of the models.
        workers: processes that serve.
        most: upper limit of the requests per second.
        rounds: rounds of changes at least; it goes on after ``seconds`` until they are done.
    """
    with serving(store, workers) as (target, pids):
        return asyncio.run(_run(target, pids, store, rows, seconds, share, every, most, rounds))


def main() -> int:
    """Run and print; returns 1 if a request failed or had a wrong response."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--share", type=float, default=0.7, help="load as a share of the capacity")
    parser.add_argument("--every", type=float, default=2.0, help="seconds between changes")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each of the 26 tables")
    parser.add_argument("--most", type=float, default=float("inf"), help="most requests per second")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = build_store(Path(folder), options.rows)
        result = soak(
            store,
            rows=options.rows,
            seconds=options.seconds,
            share=options.share,
            every=options.every,
            workers=options.workers,
            most=options.most,
        )
    print(json.dumps(vars(result)))
    print(
        f"{sum(result.answers.values())} answers in {result.seconds:.0f} s at {result.rate:.0f}/s of {result.capacity:.0f}/s, "
        f"{result.changes} changes, p50 {result.p50_ms:.1f} ms, p99 {result.p99_ms:.1f} ms; errors {dict(result.errors)}, "
        f"wrong {result.wrong}; memory {result.start_mib:.1f} -> {result.end_mib:.1f} MiB, "
        f"slope {result.slope_mib_per_min:+.2f} +- {result.slope_plus_minus:.2f} MiB/min"
    )
    return 1 if result.errors or result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
