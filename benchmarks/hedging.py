"""Measures a ranker with and without hedged requests while two replicas stop in turn, and while none does.

    OMP_NUM_THREADS=1 python -m benchmarks.hedging                   # about two minutes on two cores
    OMP_NUM_THREADS=1 python -m benchmarks.hedging --pause-ms 10 --every-s 0.2

Two shard servers hold both ranks of the model of benchmarks.scaleout: two replicas. Two rankers call them: one hedges, the other
does not. A client sends requests at a fixed rate, whatever the answers take, to one ranker after the other. In each ``--every-s``
SIGSTOP and SIGCONT stop one shard server for ``--pause-ms``, now the one and now the other, as a neighbour or a page fault may stop a
real one. (A ranker avoids a replica that was slow: stops of the same one meet few requests.)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc.aio
import numpy as np

from benchmarks.scaleout import build, request, serving
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.wire import codec
from recinfer.serving.wire.loop import new_loop

_SHARES = (50, 95, 99, 99.5)
_METHOD = f"/{SERVICE_NAME}/Predict"


@contextmanager
def stopping(pids: Sequence[int], pause_s: float, every_s: float) -> Iterator[None]:
    """Stop one process for ``pause_s`` in each ``every_s``, in turn, while the block runs."""
    ended = threading.Event()

    def stop() -> None:
        for pid in itertools.cycle(pids):
            if ended.wait(every_s - pause_s):
                break
            os.kill(pid, signal.SIGSTOP)
            ended.wait(pause_s)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


async def latencies_ms(port: int, data: bytes, rate: float, seconds: float) -> list[float]:
    """Milliseconds from the moment a request is due to its answer, at a fixed rate."""
    found: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(_METHOD)
        for _ in range(50):
            await call(data, timeout=10)
        start = time.monotonic()

        async def send(due: float) -> None:
            await asyncio.sleep(due - time.monotonic())
            await call(data, timeout=10)
            found.append((time.monotonic() - due) * 1e3)

        await asyncio.gather(*(send(start + number / rate) for number in range(int(seconds * rate))))
    return found


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=100, help="requests a second")
    parser.add_argument("--pause-ms", type=float, default=50)
    parser.add_argument("--every-s", type=float, default=0.5)
    parser.add_argument("--seconds", type=float, default=5, help="seconds per turn")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    data = codec.encode_predict_request(*request(options.batch))
    loop = new_loop()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        archive = build(folder, 16, "table_wise")
        replicas = [stack.enter_context(serving(archive, "--ranks", "0,1")) for _ in range(2)]
        rankers = {}
        for hedge in (True, False):
            addresses = [f"127.0.0.1:{replica.port}" for replica in replicas]
            document: dict[str, Any] = {"format": "recinfer.shards", "version": 1}
            document |= {"ranks": {"0": addresses, "1": addresses}, "settings": {"hedge": hedge}}
            path = folder / f"{hedge}.json"
            path.write_text(json.dumps(document))
            rankers[hedge] = stack.enter_context(serving(archive, "--shards", path)).port
        for port in rankers.values():
            with InferenceClient(f"127.0.0.1:{port}") as client:
                client.wait_until_ready(60)
        # (whether a replica stops, whether the ranker hedges) -> milliseconds of each turn
        found: dict[tuple[bool, bool], list[list[float]]] = {
            (stops, hedge): [] for stops in (False, True) for hedge in rankers
        }
        for _ in range(options.turns):
            for (stops, hedge), taken in found.items():
                pauses = (
                    stopping([each.pid for each in replicas], options.pause_ms / 1e3, options.every_s)
                    if stops
                    else nullcontext()
                )
                with pauses:
                    one = latencies_ms(rankers[hedge], data, options.rate, options.seconds)
                    taken.append(loop.run_until_complete(one))
    rows = [
        {"stops": stops, "hedge": hedge, "requests": sum(map(len, taken))}
        | {f"p{share:g}_ms": round(float(np.median(np.percentile(taken, share, axis=1))), 2) for share in _SHARES}
        for (stops, hedge), taken in found.items()
    ]
    if options.json:
        print(json.dumps(rows))
        return
    print(f"{options.rate:g} requests a second, stops of {options.pause_ms:g} ms each {options.every_s:g} s")
    for row in rows:
        kind = "replicas stop" if row["stops"] else "no replica stops"
        times = "".join(f"{row[key]:10.2f}" for key in row if key.endswith("_ms"))
        print(
            f"{kind:20s}{'hedges' if row['hedge'] else 'no hedges':12s}{times}  p50, p95, p99, p99.5 in ms, medians of {options.turns} turns"
        )


if __name__ == "__main__":
    main()
