"""Measures a ranker with shard servers on loopback against one process with all tables, in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.scaleout                    # about a minute and a half on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.scaleout --dim 64           # wider tables: more bytes on the wire
    OMP_NUM_THREADS=1 python -m benchmarks.scaleout --sharding row_wise

A DLRM of 26 features (INT8, 13 dense columns) with random weights, sharded over two ranks. Four setups run at a time: a
single process, two shard servers, a ranker on both, and a ranker on one shard server with both ranks. The clients are
one more process with one channel each. All take turns; figures are medians over the turns.

The floor is gRPC's own cost: a bare server that calls two bare servers concurrently, with as many bytes as a ranker and
its shard servers send, and a bare server that calls no other. All use recinfer's event loop and scheduling.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc.aio
import torch

from benchmarks.serving import process
from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.plan import Plan, ShardRect, TablePlan, embedding_tables
from recinfer.inference.export import export_archive
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.server.tuning import tune_process
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import new_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES, DENSE, ROWS = 26, 13, 20_000
_ANY_LENGTH = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_GOAL_MS = 1.2
_BARE = "/bare.Bare/Call"


def build(folder: Path, dim: int, sharding: str) -> Path:
    """Build the archive, for two ranks."""
    torch.manual_seed(0)

    def model(device: str) -> DLRM:
        tables = [EmbeddingBagConfig(ROWS, dim, f"t{i}", feature_names=[f"f{i}"]) for i in range(FEATURES)]
        collection = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        return DLRM(collection, DENSE, [64, dim], [64, 1], dense_device=torch.device(device))

    checkpoint = save_checkpoint(folder / "checkpoint", model("cpu"), model_name="bench", model_version="1")
    tables = []
    for path, _, configs, _ in embedding_tables(model("meta")):
        for number, config in enumerate(configs):
            half = ROWS // 2
            whole = (ShardRect(number % 2, 0, ROWS, 0, dim),)
            rows = (ShardRect(0, 0, half, 0, dim), ShardRect(1, half, ROWS, 0, dim))
            shards = rows if sharding == "row_wise" else whole
            tables.append(TablePlan(path, config.name, sharding, "quant", DataType.INT8, ROWS, dim, shards))
    out = folder / "bench.rqa"
    export_archive(
        model("meta"),
        CheckpointReader(checkpoint),
        Plan(2, "cpu", tuple(tables)),
        out,
        name="bench",
        version="1",
        progress=False,
    )
    return out


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Serving(NamedTuple):
    """A server that runs."""

    port: int
    pid: int


@contextmanager
def serving(*arguments: object) -> Iterator[Serving]:
    """``recinfer serve`` with some arguments."""
    port = free_port()
    command = [sys.executable, "-m", "recinfer", "serve", *map(str, arguments), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield Serving(port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def request(batch: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Dense columns, and one id per bag."""
    random = torch.Generator().manual_seed(batch)
    names = [f"f{i}" for i in range(FEATURES)]
    ids = torch.randint(0, ROWS, (FEATURES * batch,), generator=random)
    lengths = torch.ones(FEATURES * batch, dtype=torch.int32)
    return torch.randn(batch, DENSE, generator=random), KeyedJaggedTensor(names, ids, lengths=lengths)


def serve_bare(behind: Sequence[int], pipe: Any) -> None:
    """Run a server that responds with the number of bytes given by the request's first number, after the servers
    ``behind`` have responded.

    The other two numbers, of eight bytes each: the bytes that each of them is sent, and answers with.
    """

    async def main() -> None:
        channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_ANY_LENGTH) for port in behind]
        others = [channel.unary_unary(_BARE) for channel in channels]

        async def call(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
            size, sent, answered = (int.from_bytes(data[at : at + 8], "little") for at in (0, 8, 16))
            if others:
                message = answered.to_bytes(8, "little") + bytes(max(16, sent - 8))
                await asyncio.gather(*(other(message) for other in others))
            return bytes(size)

        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(call)  # type: ignore[arg-type]
        _, service, name = _BARE.split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(0)
        pipe.send(None)

    tune_process()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def bare_request(method: str, batch: int, dim: int, data: bytes) -> bytes:
    """A request for :func:`serve_bare`: as long as ``data``, with the sizes of the responses."""
    vectors, ids = 4 * batch * FEATURES * dim, 4 * batch * FEATURES
    numbers = (vectors if method == "Lookup" else 4 * batch, ids // 2 + 60, vectors // 2)
    head = b"".join(number.to_bytes(8, "little") for number in numbers)
    return head + bytes(max(0, len(data) - len(head)))


async def calls(port: int, method: str, data: bytes, seconds: float, callers: int) -> list[float]:
    """Seconds of each call in a closed loop of ``callers`` callers."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_ANY_LENGTH) as channel:
        call = channel.unary_unary(method)
        for _ in range(20):
            await call(data, timeout=10)
        end = time.perf_counter() + seconds
        found: list[float] = []

        async def caller() -> None:
            while (start := time.perf_counter()) < end:
                await call(data, timeout=10)
                found.append(time.perf_counter() - start)

        await asyncio.gather(*(caller() for _ in range(callers)))
        return found


def measure(ports: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over turns: p50 in ms with one caller, and responses per second with many."""
    loop = new_loop()
    result: dict[str, Any] = {"p50_ms": {}, "per_second": {}}
    for method in ("Predict", "Lookup"):
        for batch in options.batches:
            dense, features = request(batch)
            data = codec.encode_lookup_request(features)
            if method == "Predict":
                data = codec.encode_predict_request(dense, features)
            alone: dict[str, list[float]] = {name: [] for name in ports}
            bare = bare_request(method, batch, options.dim, data)
            for _ in range(options.turns):
                for name, port in ports.items():
                    path, sent = (_BARE, bare) if "bare" in name else (f"/{SERVICE_NAME}/{method}", data)
                    found = loop.run_until_complete(calls(port, path, sent, options.seconds, 1))
                    alone[name].append(statistics.median(found) * 1e3)
            result["p50_ms"][f"{method} {batch}"] = {name: statistics.median(p) for name, p in alone.items()}
    dense, features = request(32)
    data = codec.encode_predict_request(dense, features)
    many: dict[str, list[float]] = {name: [] for name in ports if "bare" not in name}
    for _ in range(options.turns):
        for name in many:
            path = f"/{SERVICE_NAME}/Predict"
            found = loop.run_until_complete(calls(ports[name], path, data, options.seconds, options.callers))
            many[name].append(len(found) / options.seconds)
    result["per_second"] = {name: statistics.median(rates) for name, rates in many.items()}
    return result


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the result as a table."""
    print(f"dim {options.dim}, {options.sharding}")
    print(
        f"{'p50, one caller':22s}{'single':>10s}{'2 shards':>10s}{'added':>10s}{'1 shard':>10s}{'added':>10s}"
        f"{'bare':>10s}{'bare + 2':>10s}{'floor':>10s}  ms"
    )
    for name, row in result["p50_ms"].items():
        single, two, one, bare, fan = (row[k] for k in ("single", "two shards", "one shard", "bare", "bare fan-out"))
        met = "met" if two - single < _GOAL_MS else "missed"
        print(
            f"{name:22s}{single:10.2f}{two:10.2f}{two - single:10.2f}{one:10.2f}{one - single:10.2f}"
            f"{bare:10.2f}{fan:10.2f}{fan - bare:10.2f}  goal {met}"
        )
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in result["per_second"].items())
    print(f"Predict of 32, {options.callers} callers, answers a second: {rates}")


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--sharding", choices=["table_wise", "row_wise"], default="table_wise")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--seconds", type=float, default=0.6, help="seconds per turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        archive = build(folder, options.dim, options.sharding)

        def shards(file: str, ranks: dict[int, int]) -> Path:
            listed = {str(rank): [f"127.0.0.1:{port}"] for rank, port in ranks.items()}
            document = {"format": "recinfer.shards", "version": 1, "ranks": listed}
            (folder / file).write_text(json.dumps(document))
            return folder / file

        first = stack.enter_context(serving(archive, "--ranks", "0")).port
        second = stack.enter_context(serving(archive, "--ranks", "1")).port
        both = stack.enter_context(serving(archive, "--ranks", "0,1")).port
        ports = {
            "single": stack.enter_context(serving(archive)).port,
            "two shards": stack.enter_context(
                serving(archive, "--shards", shards("two.json", {0: first, 1: second}))
            ).port,
            "one shard": stack.enter_context(serving(archive, "--shards", shards("one.json", {0: both, 1: both}))).port,
        }
        echoes = [stack.enter_context(process(serve_bare, ()))[0] for _ in range(2)]
        bare = {
            "bare": echoes[0],
            "bare fan-out": stack.enter_context(process(serve_bare, echoes))[0],
        }
        for port in ports.values():
            with InferenceClient(f"127.0.0.1:{port}") as client:
                client.wait_until_ready(60)
        result = measure({**ports, **bare}, options)
    print(json.dumps(result)) if options.json else show(result, options)


if __name__ == "__main__":
    main()
