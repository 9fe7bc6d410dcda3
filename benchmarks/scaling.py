"""Measures whether ``recinfer_load`` crosses an autoscaler's target before the latency of a server doubles.

    OMP_NUM_THREADS=1 python -m benchmarks.scaling store/ctr/1 --batch 256
    OMP_NUM_THREADS=1 python -m benchmarks.scaling store/ctr/1 --batch 256 --sharded

Requests of a Poisson process are sent to ``recinfer serve`` at a rate that grows by 15 % (``--growth``) from step to step, until
the 99th percentile is four times that of the lightest rates. A step is as long as the window of the gauge. At its end
the metrics port is read, as Prometheus does. The line of the target and the line where the 99th percentile has doubled
are marked. The length of the queue is printed beside the load: an autoscaler that used it would act late.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from recinfer.deploy import LOAD_PERCENT
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server_process import START_S, ServerProcess
from recinfer.serving.shards.config import shards_json
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.load import Driver, encode_requests

_STEP_S = 11.0  # the gauge's window, and one second
_LIGHT = 3  # steps whose median is the latency of a server without load
_END, _DOUBLE = 4.0, 2.0


@dataclass(frozen=True)
class Step:
    """One rate: requests per second, seconds within which half and 99 % were answered, the gauge, queued requests."""

    qps: float
    p50_s: float
    p99_s: float
    load: float
    queued: float


def gauge(port: int, name: str) -> float:
    """The value of a gauge without labels at a metrics port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@contextmanager
def served(archive: Path, *, sharded: bool) -> Iterator[ServerProcess]:
    """A server of an archive, or with ``sharded`` a ranker and one shard server with all ranks."""
    if not sharded:
        with ServerProcess(archive, "--port", "0", "--metrics-port", "0", start_s=START_S) as server:
            yield server
        return
    ranks = json.loads((archive / "manifest.json").read_text())["world_size"]
    with (
        ServerProcess(archive, "--ranks", f"0-{ranks - 1}", "--port", "0", start_s=START_S) as shard,
        tempfile.TemporaryDirectory() as folder,
    ):
        listed = Path(folder, "shards.json")
        listed.write_text(shards_json({rank: [shard.target] for rank in range(ranks)}))
        more = ("--shards", listed, "--port", "0", "--metrics-port", "0")
        with ServerProcess(archive, *more, start_s=START_S) as ranker:
            yield ranker


def steps(server: ServerProcess, *, batch: int, first_qps: float, growth: float, most: int) -> Iterator[Step]:
    """Measure rates from ``first_qps`` up, each ``growth`` times the last one."""
    with InferenceClient(server.target, timeout=60) as client:
        client.wait_until_ready(START_S)
        model = client.get_model()
    call = "predict" if model.num_dense else "lookup"
    requests = encode_requests(model, call, poisson(1.0, 256, batch=batch, ids_per_sample=float(len(model.features))))
    light: list[float] = []
    with Driver(server.target, call, requests, timeout=10.0) as driver:
        driver.run(poisson(first_qps, max(2, int(2 * first_qps))).times)  # warm-up
        for number in range(most):
            qps = first_qps * growth**number
            found = driver.run(poisson(qps, int(qps * _STEP_S), seed=number).times)
            port = server.output["metrics_port"]
            load, queued = gauge(port, "recinfer_load"), gauge(port, "recinfer_queue_requests")
            step = Step(found.qps, found.percentile(50), found.percentile(99), load, queued)
            yield step
            light = [*light, step.p99_s][:_LIGHT]
            if step.p99_s > _END * statistics.median(light) and number >= _LIGHT:
                return


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 if the 99th percentile doubled before the load reached the target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--batch", type=int, default=64, help="samples of a request")
    parser.add_argument("--first-qps", type=float, default=20.0, help="the lightest rate")
    parser.add_argument("--growth", type=float, default=1.15, help="a rate over the one before it")
    parser.add_argument("--most", type=int, default=24, help="most rates, of 11 seconds each")
    parser.add_argument("--sharded", action="store_true", help="measure a ranker with a shard server")
    parser.add_argument("--out", type=Path, help="JSON file for the measured rates")
    options = parser.parse_args(arguments)
    target = LOAD_PERCENT / 100
    measured: list[Step] = []
    print(f"{'rate/s':>8} {'p50 ms':>8} {'p99 ms':>8} {'load':>6} {'queued':>6}")
    with served(options.archive, sharded=options.sharded) as server:
        for step in steps(
            server, batch=options.batch, first_qps=options.first_qps, growth=options.growth, most=options.most
        ):
            measured.append(step)
            light = statistics.median(each.p99_s for each in measured[:_LIGHT])
            marks = [f"load at the target of {target:g}"] if step.load >= target else []
            marks += [f"p99 {step.p99_s / light:.1f} times that of light load"] if step.p99_s >= _DOUBLE * light else []
            times = f"{1e3 * step.p50_s:8.2f} {1e3 * step.p99_s:8.2f}"
            print(f"{step.qps:8.0f} {times} {step.load:6.2f} {step.queued:6.0f}  {'; '.join(marks)}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(step) for step in measured], indent=1) + "\n")
    light = statistics.median(each.p99_s for each in measured[:_LIGHT])
    crossed = next((step.qps for step in measured if step.load >= target), None)
    # A single slow step is the machine's, not the server's: the rate from which p99 stays doubled.
    calm = [number for number, step in enumerate(measured) if step.p99_s < _DOUBLE * light]
    doubled = measured[calm[-1] + 1].qps if calm and calm[-1] + 1 < len(measured) else None
    print(
        f"load reaches {target:g} at {crossed and round(crossed)} per second; p99 doubles at {doubled and round(doubled)}"
    )
    return int(doubled is not None and (crossed is None or crossed > doubled))


if __name__ == "__main__":
    raise SystemExit(main())
