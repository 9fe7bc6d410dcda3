"""Measures recinfer's V1 REST protocol against FastAPI on uvicorn with the same predictor, in one run.

    pip install fastapi 'uvicorn[standard]'          # only this comparison needs them
    OMP_NUM_THREADS=1 python -m benchmarks.rest      # about a minute on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.rest --seconds 2 --batches 1 --concurrency 32

A DLRM of 26 features (INT8, width 16, 13 dense columns) with random weights; one id per feature and sample; bodies are
``{"instances": [...]}``, and both servers answer ``{"predictions": [...]}`` with the same numbers, which is checked first.
Each server has its own process, and the clients another: C connections with one request in flight each. Servers take
turns; a figure is the median over the turns. FastAPI's application follows its documentation: a pydantic model of the
body, ids and numbers collected by comprehensions, the predictor called in the route (``async def``, which is faster
here than a thread of its pool: ``--threads`` measures that form too), uvloop and httptools under uvicorn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.serving import DENSE, FEATURES, build, request
from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from recinfer.serving.server.tuning import tune_process
from recinfer.serving.wire.loop import new_loop
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

_TURNS, _WARM_UP_S = 5, 0.2
_NEEDED = "benchmarks.rest compares with FastAPI: pip install fastapi 'uvicorn[standard]'"
_NAMES = [f"f{i}" for i in range(FEATURES)]


def serve_ours(archive: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    predictor = load(archive)
    tune_process()  # as recinfer.serving.server.run.serve does
    with Server({"bench": predictor}, http_port=0) as server:
        pipe.send(server.http_port)
        pipe.recv()


def serve_fastapi(archive: str, in_threads: bool, pipe: Any) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    torch.set_num_threads(1)
    predictor = load(archive)
    app = FastAPI()

    class Body(BaseModel):
        instances: list[dict[str, Any]]

    def answer(rows: list[dict[str, Any]]) -> dict[str, Any]:
        cells = [row[name] for name in _NAMES for row in rows]
        lengths = torch.tensor([len(cell) for cell in cells], dtype=torch.int32)
        features = KeyedJaggedTensor(_NAMES, torch.tensor([i for cell in cells for i in cell]), lengths=lengths)
        dense = torch.tensor([row["dense"] for row in rows], dtype=torch.float32)
        return {"predictions": predictor.predict(dense, features)["output"].tolist()}

    def in_a_thread(body: Body) -> dict[str, Any]:
        return answer(body.instances)

    async def on_the_loop(body: Body) -> dict[str, Any]:
        return answer(body.instances)

    route = in_a_thread if in_threads else on_the_loop
    route.__annotations__["body"] = Body  # FastAPI looks names up in the module, and pydantic is not imported there
    app.post("/v1/models/bench:predict", response_model=None)(route)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_level="error", access_log=False, loop="uvloop", http="httptools")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        pipe.send(listener.getsockname()[1])
        pipe.recv()
        server.should_exit = True
        thread.join()


class Caller(asyncio.Protocol):
    """One connection with one request in flight; records responses and their latency while ``counts``."""

    def __init__(self, message: bytes) -> None:
        self._message, self._got, self._left = message, b"", -1
        self.seconds: list[float] = []
        self.body = b""
        self.stops = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._start = time.perf_counter()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if self._left < 0:
            head, found, rest = self._got.partition(b"\r\n\r\n")
            if not found:
                return
            if not head.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(self._got[:500])
            at = head.lower().index(b"content-length:") + 15
            self._left, self._got = int(head[at:].split(b"\r\n", 1)[0]), rest
        if len(self._got) < self._left:
            return
        self.seconds.append(time.perf_counter() - self._start)
        self.body, self._got, self._left = self._got, b"", -1
        if self.stops:
            self._transport.close()
        else:
            self._send()


async def load_of(port: int, message: bytes, callers: int, seconds: float) -> tuple[float, float, bytes]:
    """Responses per second, median latency in seconds, and the last body."""
    loop = asyncio.get_running_loop()
    connections = [await loop.create_connection(lambda: Caller(message), "127.0.0.1", port) for _ in range(callers)]
    protocols = [protocol for _, protocol in connections]
    await asyncio.sleep(_WARM_UP_S)
    for protocol in protocols:
        protocol.seconds.clear()
    start = time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - start
    found = [one for protocol in protocols for one in protocol.seconds]
    for protocol in protocols:
        protocol.stops = True
    await asyncio.sleep(0.1)
    for transport, _ in connections:
        transport.abort()
    if not found:
        raise RuntimeError("no answers")
    return len(found) / took, statistics.median(found), protocols[0].body


def message_of(batch: int) -> bytes:
    dense, features = request(batch)
    columns = {name: [[i] for i in one.values().tolist()] for name, one in features.to_dict().items()}
    columns["dense"] = [[round(x, 4) for x in row] for row in dense.tolist()]
    body = json.dumps({"instances": [dict(zip(columns, row)) for row in zip(*columns.values())]}).encode()
    assert len(columns) == FEATURES + 1 and len(columns["dense"][0]) == DENSE
    head = f"POST /v1/models/bench:predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


@contextmanager
def started(target: Any, *args: Any) -> Any:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=target, args=(*args, other))
    process.start()
    try:
        yield pipe.recv()
        pipe.send("stop")
    finally:
        process.join(10)
        process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per server and cell, over all turns")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32])
    parser.add_argument(
        "--threads", action="store_true", help="also measure FastAPI with a plain function as its route"
    )
    options = parser.parse_args()
    try:
        import fastapi  # noqa: F401
        import httptools  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        sys.exit(_NEEDED)
    with ExitStack() as stack, asyncio.Runner(loop_factory=new_loop) as runner:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        archive = str(build(folder, [64, 1]))
        servers = {
            "recinfer": stack.enter_context(started(serve_ours, archive)),
            "FastAPI": stack.enter_context(started(serve_fastapi, archive, False)),
        }
        if options.threads:
            servers["FastAPI, threads"] = stack.enter_context(started(serve_fastapi, archive, True))
        print(f"{'batch':>5} {'callers':>7} {'server':>16} {'answers/s':>10} {'p50 ms':>8} {'recinfer is':>12}")
        for batch in options.batches:
            message = message_of(batch)
            for callers in options.concurrency:
                cell(runner, servers, message, batch, callers, options.seconds)


def cell(
    runner: asyncio.Runner, servers: dict[str, int], message: bytes, batch: int, callers: int, seconds: float
) -> None:
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    bodies: dict[str, Any] = {}
    for _ in range(_TURNS):
        for name, port in servers.items():
            rate, p50, body = runner.run(load_of(port, message, callers, seconds / _TURNS))
            turns[name].append((rate, p50))
            bodies[name] = torch.tensor(json.loads(body)["predictions"])
    for name, found in bodies.items():
        torch.testing.assert_close(found, bodies["recinfer"], rtol=0, atol=1e-6, msg=f"{name} has other numbers")
    rates = {name: statistics.median(rate for rate, _ in found) for name, found in turns.items()}
    for name, found in turns.items():
        p50 = statistics.median(p50 for _, p50 in found) * 1e3
        ratio = "" if name == "recinfer" else f"{rates['recinfer'] / rates[name]:10.2f} x"
        print(f"{batch:5} {callers:7} {name:>16} {rates[name]:10.0f} {p50:8.3f} {ratio:>12}", flush=True)


if __name__ == "__main__":
    main()
