"""Measures recinfer's gRPC server against a bare gRPC echo server with responses of the same size, in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.serving                     # everything, about five minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.serving --seconds 2 --batches 1 --concurrency 1 32
    OMP_NUM_THREADS=1 python -m benchmarks.serving --tuned             # and echo servers on recinfer's loop, on gRPC's core
    OMP_NUM_THREADS=1 python -m benchmarks.serving --torchserve        # and TorchServe on the same archive
    OMP_NUM_THREADS=1 python -m benchmarks.serving --unbatched --over 2048 2048 1 --batches 1 --concurrency 32
    OMP_NUM_THREADS=1 python -m benchmarks.serving --context           # what looking up the context once saves

A DLRM of 26 features (INT8, width 16, 13 dense columns) with random weights. Each server has its own process, and the
clients another: one asyncio channel, C requests in flight. All take turns of a fifth of the time, after a warm-up of a
fifth of a second; figures are medians over the turns. "in process" is the same call on the predictor itself, "CPU" the
CPU time of the server's process per call. "tuned echo" is grpc.aio's server on recinfer's event loop and scheduling,
"core echo" is recinfer's own server (recinfer.serving.server.grpc_core) without a model.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc
import grpc.aio
import torch

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.engine.scheduler import BatchConfig
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.server.grpc_methods import connection_options
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.tuning import tune_process
from recinfer.serving.wire import codec
from recinfer.serving.wire.arrays import bytes_field
from recinfer.serving.wire.loop import new_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES, DENSE, DIM, ROWS = 26, 13, 16, 20_000
_TURNS, _WARM_UP_S = 5, 0.2
PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
_ECHO = "/echo.Echo/Echo"
_ANY_LENGTH = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def build(folder: Path, over: list[int]) -> Path:
    """Build the archive to serve."""
    torch.manual_seed(0)

    def model(device: str) -> DLRM:
        tables = [
            EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t{i}", feature_names=[f"f{i}"])
            for i in range(FEATURES)
        ]
        collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        return DLRM(collection, DENSE, [64, DIM], over, dense_device=torch.device(device))

    checkpoint = save_checkpoint(folder / "checkpoint", model("cpu"), model_name="bench", model_version="1")
    plan = plan_inference(model("meta"), world_size=1, precision=DataType.INT8)
    out = folder / "bench.rqa"
    export_archive(
        model("meta"),
        CheckpointReader(checkpoint),
        plan,
        out,
        name="bench",
        version="1",
        progress=False,
    )
    return out


def request(batch: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """A request with one id per feature and sample."""
    random = torch.Generator().manual_seed(batch)
    lengths = torch.ones(FEATURES * batch, dtype=torch.int32)
    ids = torch.randint(0, ROWS, (FEATURES * batch,), generator=random)
    return torch.randn(batch, DENSE, generator=random), KeyedJaggedTensor(
        [f"f{i}" for i in range(FEATURES)], ids, lengths=lengths
    )


def serve_ours(archive: str, batching: BatchConfig, pipe: Any) -> None:
    torch.set_num_threads(1)
    predictor = load(archive)
    tune_process()  # as recinfer.serving.server.run.serve does
    with Server({"bench": predictor}, batching=batching) as server:
        pipe.send(server.port)
        while server.scheduler is not None:
            asked = pipe.recv()
            pipe.send(server.scheduler.state)
            if asked == "stop":
                return


def serve_echo(kind: str, pipe: Any) -> None:
    """Run a server that responds with the number of bytes given by the request's first eight bytes.

    ``kind``: "plain" or "tuned", grpc.aio's server without and with our loop and scheduling; "core", our own server.
    """

    def answer(data: bytes) -> bytes:
        return bytes(int.from_bytes(data[:8], "little"))

    async def main() -> None:
        async def echo(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
            return answer(data)

        dispatch = {_ECHO: lambda data, until, call: call.answer(answer(data))}
        server = CoreServer(connection_options(), dispatch=dispatch) if kind == "core" else grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(echo)  # type: ignore[arg-type]
        service, _, name = _ECHO[1:].partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(0)
        pipe.send(None)

    if kind != "plain":
        tune_process()
    with asyncio.Runner(loop_factory=None if kind == "plain" else new_loop) as runner:
        runner.run(main())


@contextmanager
def torchserve(archive: Path, folder: Path) -> Iterator[tuple[int, str]]:
    """Run TorchServe with the archive and one worker; yields its gRPC port and its inference key."""
    from recinfer.serving.mar import pack
    from tests.torchserve.instance import TorchServe

    entry = pack(archive, folder / "store", model_name="bench", archive_format="no-archive")
    running = TorchServe(folder / "run", folder / "store")
    try:
        reply = running.register(entry.name)
        if reply.code != 200:
            raise SystemExit(f"TorchServe: {reply}")
        yield int(running.grpc_target.rpartition(":")[2]), running.inference_key
    finally:
        running.stop()


def predictions_request(call: str, data: bytes) -> bytes:
    """TorchServe's PredictionsRequest."""
    inputs = {"method": call.lower().encode(), "body": data}
    entries = [bytes_field(3, *bytes_field(1, key.encode()), *bytes_field(2, value)) for key, value in inputs.items()]
    return b"".join([*bytes_field(1, b"bench"), *(part for entry in entries for part in entry)])


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run a server in a separate process; yields its port and a dict with "pid", "ask" (a function that reads its
    statistics) and, after the block, "state" (the last statistics)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(*arguments, there))
    child.start()

    def ask() -> Any:
        here.send("state")
        return here.recv()

    said: dict[str, Any] = {"pid": child.pid, "ask": ask}
    try:
        yield here.recv(), said
    finally:
        here.send("stop")
        said["state"] = here.recv()
        child.join()


@dataclass(frozen=True)
class Contender:
    """A server that handles ``path`` on ``port``; ``send`` makes its request from recinfer's request and the response
    size. ``pid``: its process, if known."""

    port: int
    path: str
    send: Callable[[bytes, int], bytes]
    metadata: tuple[tuple[str, str], ...] = ()
    pid: int = 0

    def cpu(self) -> float:
        """CPU seconds of its process so far; nan if unknown."""
        if not self.pid:
            return math.nan
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def drive(who: Contender, data: bytes, concurrency: int, seconds: float) -> dict[str, float]:
    """Send requests one after another on ``concurrency`` tasks; returns p50 and p99 in microseconds, requests per second,
    and the server's CPU microseconds per request."""
    times: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{who.port}", options=_ANY_LENGTH) as channel:
        call = channel.unary_unary(who.path)

        async def caller(end: float) -> None:
            while (start := time.perf_counter()) < end:
                await call(data, metadata=who.metadata)
                times.append(time.perf_counter() - start)

        async def callers(seconds: float) -> float:
            begun = time.perf_counter()
            await asyncio.gather(*(caller(begun + seconds) for _ in range(concurrency)))
            return time.perf_counter() - begun

        await callers(_WARM_UP_S)
        times.clear()
        before = who.cpu()
        spent = await callers(seconds)
        cpu = who.cpu() - before
    times.sort()
    return {
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[int(len(times) * 0.99)] * 1e6,
        "rps": len(times) / spent,
        "cpu_us": cpu / len(times) * 1e6,
    }


def in_process(call: Callable[[], object], seconds: float = 0.3) -> float:
    """Median microseconds of a call in this process."""
    times, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def requests_of(predictor: Predictor, batch: int) -> dict[str, tuple[bytes, int, Callable[[], object]]]:
    """By kind of call: the request's bytes, the response's size, and the same call in this process."""
    dense, kjt = request(batch)
    lookup, outputs = predictor.lookup(kjt), predictor.predict(dense, kjt)
    return {
        "Lookup": (
            codec.encode_lookup_request(kjt),
            len(codec.encode_lookup_response(lookup.pooled, {}, batch, "1")),
            lambda: predictor.lookup(kjt),
        ),
        "Predict": (
            codec.encode_predict_request(dense, kjt),
            len(codec.encode_predict_response(outputs, "1")),
            lambda: predictor.predict(dense, kjt),
        ),
    }


def compare(predictor: Predictor, of: Callable[[str], dict[str, Contender]], options: argparse.Namespace) -> list[dict]:
    """Measure all contenders in turn, for every kind of call, batch and concurrency."""
    rows = []
    for batch in options.batches:
        for name, (data, size, alone) in requests_of(predictor, batch).items():
            local = in_process(alone)
            for tasks in options.concurrency:
                contenders = of(name)
                turns: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
                for _ in range(_TURNS):
                    for who, contender in contenders.items():
                        sent = contender.send(data, size)
                        turns[who].append(asyncio.run(drive(contender, sent, tasks, options.seconds / _TURNS)))
                row = {"call": name, "batch": batch, "concurrency": tasks, "in_process_us": local}
                rows.append(row | {who: _medians(each, turns["echo"]) for who, each in turns.items()})
                _print(rows[-1], list(contenders))
    return rows


def _medians(turns: list[dict[str, float]], echo: list[dict[str, float]]) -> dict[str, float]:
    found = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
    return found | {"of_echo": statistics.median(a["rps"] / b["rps"] for a, b in zip(turns, echo, strict=True))}


def _print(row: dict[str, Any], contenders: list[str]) -> None:
    print(f"{row['call']} batch {row['batch']}, c {row['concurrency']}: in process {row['in_process_us']:.0f} us")
    for who in contenders:
        found = row[who]
        cpu = "" if math.isnan(found["cpu_us"]) else f", CPU {found['cpu_us']:5.0f} us"
        print(
            f"    {who:10} p50 {found['p50_us']:7.0f} us, p99 {found['p99_us']:7.0f} us, {found['rps']:6.0f}/s,"
            f" {found['of_echo']:.0%} of the echo{cpu}",
            flush=True,
        )


def compare_context(predictor: Predictor, who: Contender, seconds: float) -> None:
    """Measure requests whose user features (half of all, with 1 to 50 ids) are sent for every candidate, or once as
    context."""
    print("context: Predict of N candidates, 13 of 26 features are the user's, one caller; every candidate / once")
    for batch, ids in [(batch, ids) for batch in (32, 256, 1024) for ids in (1, 20, 50)]:
        dense, kjt = request(batch)
        keys = kjt.keys()
        user, item = keys[: FEATURES // 2], keys[FEATURES // 2 :]
        lengths = torch.full((len(user),), ids, dtype=torch.int32)
        once = KeyedJaggedTensor(user, torch.randint(0, ROWS, (len(user) * ids,)), lengths=lengths)
        candidates = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in item})
        every = torch.cat([*(once[k].values().repeat(batch) for k in user), *(kjt[k].values() for k in item)])
        counts = torch.cat([lengths.repeat_interleave(batch), torch.ones(len(item) * batch, dtype=torch.int32)])
        whole = KeyedJaggedTensor(keys, every, lengths=counts)
        same = predictor.predict(dense, whole)["output"] - predictor.predict(dense, candidates, once)["output"]
        sent = (
            codec.encode_predict_request(dense, whole),
            codec.encode_predict_request(dense, candidates, context=once),
        )
        took: list[list[float]] = [[], []]
        for _ in range(_TURNS):
            for data, times in zip(sent, took):
                times.append(asyncio.run(drive(who, data, 1, seconds / _TURNS))["p50_us"])
        p50 = [statistics.median(times) for times in took]
        print(
            f"    {batch:4} candidates, {ids:2} ids: p50 {p50[0]:6.0f} / {p50[1]:6.0f} us ({p50[1] / p50[0]:.2f}), "
            f"{len(sent[0]):8} / {len(sent[1]):7} bytes ({len(sent[1]) / len(sent[0]):.2f}), "
            f"largest difference {float(same.abs().max()):.1e}",
            flush=True,
        )


def run(archive: Path, folder: Path, options: argparse.Namespace) -> list[dict]:
    """Start the servers and compare them."""
    batching = BatchConfig(max_batch=options.max_batch)
    found, states = [], {}
    with ExitStack() as stack:
        ports: dict[str, int] = {}

        def start(name: str, target: Callable[..., None], *arguments: Any) -> None:
            ports[name], states[name] = stack.enter_context(process(target, *arguments))

        start("echo", serve_echo, "plain")
        start("ours", serve_ours, str(archive), batching)
        if options.tuned:
            start("tuned echo", serve_echo, "tuned")
            start("core echo", serve_echo, "core")
        if options.unbatched:
            start("unbatched", serve_ours, str(archive), BatchConfig(max_batch=1))
        other = stack.enter_context(torchserve(archive, folder / "torchserve")) if options.torchserve else None

        def contenders(call: str) -> dict[str, Contender]:
            def payload(data: bytes, size: int) -> bytes:
                return size.to_bytes(8, "little") + bytes(max(0, len(data) - 8))

            def plain(data: bytes, _: int) -> bytes:
                return data

            found = {}
            for name, port in ports.items():
                path, send = (_ECHO, payload) if "echo" in name else (f"/{SERVICE_NAME}/{call}", plain)
                found[name] = Contender(port, path, send, pid=states[name]["pid"])
            if other is not None:
                key = (("protocol", "gRPC"), ("authorization", f"Bearer {other[1]}"))
                asked = functools.partial(predictions_request, call)
                found["torchserve"] = Contender(other[0], PREDICTIONS, lambda data, _: asked(data), key)
            return found

        predictor = load(archive)
        who = contenders("Predict")["ours"]
        if options.context:
            compare_context(predictor, who, options.seconds)
        else:
            found = compare(predictor, contenders, options)
    for name, said in states.items():
        if said["state"] is not None:
            print(f"{name}: {said['state'].requests} requests in {said['state'].runs} runs")
    return found


def main() -> None:
    """Run and print; ``--out`` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds per contender and line")
    parser.add_argument("--max-batch", type=int, default=1024, help="most samples per run; 1 disables merging")
    parser.add_argument("--over", type=int, nargs="+", default=[64, 1], help="layer sizes of the top MLP")
    parser.add_argument(
        "--tuned", action="store_true", help="also measure echo servers on recinfer's event loop and on gRPC's core"
    )
    parser.add_argument("--unbatched", action="store_true", help="also measure recinfer's server with --max-batch 1")
    parser.add_argument("--torchserve", action="store_true", help="also TorchServe")
    parser.add_argument("--context", action="store_true", help="measure only the saving of a context")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        archive = build(Path(folder), options.over)
        rows = run(archive, Path(folder), options)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
