"""Measures the client's own cost: encoding a request of 26 features from plain lists, compared with json.dumps of the
same dict.

    python -m benchmarks.client

Each line is the least of several rounds, in microseconds, and the ratio to json.dumps in the same process: on a busy
machine only the ratios are meaningful. ``process``: CPU seconds of an interpreter that imports recinfer and makes one
call (``--target``).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from recinfer.serving.wire.arrays import encode_lookup_request, encode_predict_request

FEATURES, ROUNDS, ROUND_S = 26, 15, 0.05


def least(function: Callable[[], Any]) -> float:
    """Seconds per call in the fastest of several rounds."""
    start = time.perf_counter()
    function()
    count = max(1, int(ROUND_S / max(1e-6, time.perf_counter() - start)))
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(count):
            function()
        best = min(best, (time.perf_counter() - start) / count)
    return best


def requests() -> dict[str, dict[str, Any]]:
    """Requests as dicts from feature to ids, by description."""
    draw = random.Random(0)

    def ids() -> int:
        return draw.randrange(10**6)

    names = [f"C{number}" for number in range(1, FEATURES + 1)]
    return {
        "1 sample, an id each": {name: [ids()] for name in names},
        "1 sample, lists": {name: [[ids()]] for name in names},
        "256 samples, an id each": {name: [ids() for _ in range(256)] for name in names},
        "256 samples, lists": {name: [[ids()] for _ in range(256)] for name in names},
    }


def process_seconds(target: str) -> float:
    """CPU seconds of a process that imports recinfer and sends ``target`` one request, without torch."""
    code = f"""
import recinfer
with recinfer.InferenceClient({target!r}, tensors=False) as client:
    model = client.get_model()
    client.lookup({{model.features[0].name.split("@")[0]: [0]}})
"""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="HOST:PORT of a running server, for the line `process`")
    options = parser.parse_args()
    print(f"{'request of 26 features':<32} {'encoded us':>11} {'json.dumps us':>14} {'ratio':>6}")
    for name, features in requests().items():
        mine, text = least(partial(encode_lookup_request, features)), least(partial(json.dumps, features))
        print(f"{name:<32} {mine * 1e6:>11.1f} {text * 1e6:>14.1f} {mine / text:>6.2f}")
    one, dense = next(iter(requests().values())), [[0.5] * 13]
    body = {"features": one, "dense": dense}
    mine, text = least(partial(encode_predict_request, dense, one)), least(partial(json.dumps, body))
    print(f"{'1 sample, with 13 numbers':<32} {mine * 1e6:>11.1f} {text * 1e6:>14.1f} {mine / text:>6.2f}")
    if options.target:
        seconds = sorted(process_seconds(options.target) for _ in range(5))
        print(
            f"process: import recinfer and one call: {seconds[0]:.2f} CPU seconds (least of 5; median {seconds[2]:.2f})"
        )


if __name__ == "__main__":
    main()
