"""Our gRPC server beside a bare gRPC echo server that sends answers of the same size, in the same run.

    OMP_NUM_THREADS=1 python -m benchmarks.serving                     # everything, about three minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.serving --seconds 1 --batches 1 --concurrency 1 32
    OMP_NUM_THREADS=1 python -m benchmarks.serving --context           # what looking up the context once saves

A DLRM of 26 features (INT8, width 16, 13 dense columns) with random weights. Each server has its own process, and the
clients another: one asyncio channel, C requests in flight. "in process" is the same call on the predictor itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from recinfer.serving import codec
from recinfer.serving.batcher import BatchConfig
from recinfer.serving.server import SERVICE_NAME, Server
from recinfer.serving.tuning import tune_process
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

FEATURES, DENSE, DIM, ROWS = 26, 13, 16, 20_000


def build(folder: Path, over: list[int]) -> Path:
    """The archive to serve."""
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
        num_dense=DENSE,
        progress=False,
    )
    return out


def request(batch: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """One id a feature and sample."""
    random = torch.Generator().manual_seed(batch)
    lengths = torch.ones(FEATURES * batch, dtype=torch.int32)
    ids = torch.randint(0, ROWS, (FEATURES * batch,), generator=random)
    return torch.randn(batch, DENSE, generator=random), KeyedJaggedTensor(
        [f"f{i}" for i in range(FEATURES)], ids, lengths=lengths
    )


def serve_ours(archive: str, batching: BatchConfig, pipe: Any) -> None:
    torch.set_num_threads(1)
    tune_process()
    with Server({"bench": load(archive)}, batching=batching) as server:
        pipe.send(server.port)
        pipe.recv()
        pipe.send(server.batcher.state if server.batcher else None)


def serve_echo(pipe: Any) -> None:
    """Answers with as many bytes as the request's metadata-free first eight bytes say."""

    async def main() -> None:
        async def echo(data: bytes, _: grpc.aio.ServicerContext) -> bytes:
            return bytes(int.from_bytes(data[:8], "little"))

        server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(echo)  # type: ignore[arg-type]
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo.Echo", {"Echo": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(port)
        await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
        await server.stop(0)
        pipe.send(None)

    asyncio.run(main())


@contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """A server in a process of its own: its port, and after the block what it said at the end under "state"."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    child = context.Process(target=target, args=(*arguments, there))
    child.start()
    said: dict[str, Any] = {}
    try:
        yield here.recv(), said
    finally:
        here.send("stop")
        said["state"] = here.recv()
        child.join()


async def drive(port: int, path: str, data: bytes, concurrency: int, seconds: float) -> dict[str, float]:
    """Requests one behind another on ``concurrency`` tasks: p50 and p99 in microseconds, requests a second."""
    times: list[float] = []
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    ) as channel:
        call = channel.unary_unary(path)
        for _ in range(20):
            await call(data)
        end = time.perf_counter() + seconds

        async def caller() -> None:
            while (start := time.perf_counter()) < end:
                await call(data)
                times.append(time.perf_counter() - start)

        begun = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(concurrency)))
        spent = time.perf_counter() - begun
    times.sort()
    return {
        "p50_us": times[len(times) // 2] * 1e6,
        "p99_us": times[int(len(times) * 0.99)] * 1e6,
        "rps": len(times) / spent,
    }


def in_process(call: Callable[[], object], seconds: float = 0.3) -> float:
    """Median microseconds of a call."""
    times, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


def compare(
    archive: Path, batches: list[int], concurrency: list[int], seconds: float, batching: BatchConfig
) -> list[dict]:
    """Every call, batch and concurrency: echo and ours in turn."""
    predictor, rows = load(archive), []
    with process(serve_echo) as (echo_port, _), process(serve_ours, str(archive), batching) as (port, said):
        for batch in batches:
            dense, kjt = request(batch)
            lookup = predictor.lookup(kjt)
            calls = {
                "Lookup": (
                    codec.encode_lookup_request(kjt),
                    len(codec.encode_lookup_response(lookup.pooled, {}, batch, "1")),
                    lambda k=kjt: predictor.lookup(k),
                ),
                "Predict": (
                    codec.encode_predict_request(dense, kjt),
                    len(codec.encode_predict_response(predictor.predict(dense, kjt), "1")),
                    lambda d=dense, k=kjt: predictor.predict(d, k),
                ),
            }
            for name, (data, size, alone) in calls.items():
                local = in_process(alone)
                echo_data = size.to_bytes(8, "little") + bytes(max(0, len(data) - 8))
                for tasks in concurrency:
                    echo = asyncio.run(drive(echo_port, "/echo.Echo/Echo", echo_data, tasks, seconds))
                    ours = asyncio.run(drive(port, f"/{SERVICE_NAME}/{name}", data, tasks, seconds))
                    row = {"call": name, "batch": batch, "concurrency": tasks, "in_process_us": local}
                    rows.append(row | {"echo": echo, "ours": ours})
                    print(
                        f"{name:8} batch {batch:4} c {tasks:3}: in process {local:6.0f} us | echo p50 {echo['p50_us']:7.0f} us"
                        f" {echo['rps']:6.0f}/s | ours p50 {ours['p50_us']:7.0f} p99 {ours['p99_us']:7.0f} us"
                        f" {ours['rps']:6.0f}/s | {ours['rps'] / echo['rps']:.0%} of echo",
                        flush=True,
                    )
    state = said["state"]
    print(f"{state.requests} requests in {state.runs} runs")
    return rows


def compare_context(predictor: Predictor) -> None:
    """Half of the features are the user's: sent for every candidate, or once as the context."""
    for batch in (32, 256, 1024):
        dense, kjt = request(batch)
        keys = kjt.keys()
        user, item = keys[: FEATURES // 2], keys[FEATURES // 2 :]
        once = KeyedJaggedTensor.from_jt_dict({k: request(1)[1][k] for k in user})
        candidates = KeyedJaggedTensor.from_jt_dict({k: kjt[k] for k in item})
        ids = torch.cat([*(once[k].values().repeat(batch) for k in user), *(kjt[k].values() for k in item)])
        whole = KeyedJaggedTensor(keys, ids, lengths=kjt.lengths())
        same = predictor.predict(dense, whole)["output"] - predictor.predict(dense, candidates, once)["output"]
        spelled = len(codec.encode_predict_request(dense, whole))
        short = len(codec.encode_predict_request(dense, candidates, context=once))
        a = in_process(lambda d=dense, w=whole: predictor.predict(d, w))
        b = in_process(lambda d=dense, c=candidates, o=once: predictor.predict(d, c, o))
        print(
            f"context, batch {batch:4}: every candidate {a:6.0f} us, {spelled:7} bytes; once {b:6.0f} us, {short:7} bytes; "
            f"largest difference {float(same.abs().max()):.1e}"
        )


def main() -> None:
    """Run and print; ``--out`` also writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--max-batch", type=int, default=1024, help="1: no merging")
    parser.add_argument("--max-delay-us", type=int, default=0)
    parser.add_argument("--over", type=int, nargs="+", default=[64, 1], help="layer sizes of the over arch")
    parser.add_argument("--context", action="store_true", help="only the saving of a context")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    batching = BatchConfig(max_batch=options.max_batch, max_delay_us=options.max_delay_us)
    with tempfile.TemporaryDirectory() as folder:
        archive = build(Path(folder), options.over)
        compare_context(load(archive))
        if options.context:
            return
        rows = compare(archive, options.batches, options.concurrency, options.seconds, batching)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
