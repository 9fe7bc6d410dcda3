"""Checks a measured knee: two minutes of load at 70 % of it, and MLPerf LoadGen's verdict on rates near it.

    OMP_NUM_THREADS=1 python -m benchmarks.capacity                       # Predict of 1, p99 within 10 ms
    OMP_NUM_THREADS=1 python -m benchmarks.capacity --call lookup --p99-ms 5
    OMP_NUM_THREADS=1 python -m benchmarks.capacity --sharded
    OMP_NUM_THREADS=1 python -m benchmarks.capacity --batch 128 --over 512 256 1 --p99-ms 20   # for LoadGen on two cores

The server is ``recinfer serve`` in a separate process; it shares the machine with the load. LoadGen
(``pip install mlcommons-loadgen``) sends requests of its own Poisson process in its Server scenario and calls a run VALID if
99 % of them were answered within the given latency. Without LoadGen that part is skipped. LoadGen's
requests are sent from Python: on the server's own two cores it cannot send thousands per second without delaying them, so
its verdict needs large requests or a second machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import grpc

from benchmarks.serving import build
from recinfer.archive.reader import open_archive
from recinfer.cli.bench_capacity import show_measured
from recinfer.cli.console import Output
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.server_process import ServerProcess, ranker_and_shard
from recinfer.sizing.arrivals import poisson
from recinfer.sizing.capacity import OBJECTIVE_SHARE, Measured, find_knee, this_machine
from recinfer.sizing.load import Driver, encode_requests


def loadgen_verdict(target: str, call: str, requests: list[bytes], qps: float, p99_s: float, seconds: float) -> str:
    """``"VALID"`` or ``"INVALID"``: LoadGen's Server scenario at ``qps`` requests per second."""
    import mlperf_loadgen as lg

    settings = lg.TestSettings()
    settings.scenario, settings.mode = lg.TestScenario.Server, lg.TestMode.PerformanceOnly
    settings.server_target_qps = qps
    settings.server_target_latency_ns = int(p99_s * 1e9)
    settings.server_target_latency_percentile = OBJECTIVE_SHARE
    settings.min_duration_ms = int(seconds * 1e3)
    settings.min_query_count = 100
    channel = grpc.insecure_channel(target)
    method = channel.unary_unary(f"/{SERVICE_NAME}/{call.capitalize()}")
    left, idle = [0], threading.Event()
    lock = threading.Lock()

    def issue(samples: list[Any]) -> None:
        for sample in samples:
            with lock:
                left[0] += 1
                idle.clear()
            future = method.future(requests[sample.index % len(requests)], timeout=10.0)
            future.add_done_callback(lambda _, at=sample.id: done(at))

    def done(at: int) -> None:
        lg.QuerySamplesComplete([lg.QuerySampleResponse(at, 0, 0)])
        with lock:
            left[0] -= 1
            if not left[0]:
                idle.set()

    sut = lg.ConstructSUT(issue, lambda: idle.wait(10.0))
    library = lg.ConstructQSL(len(requests), len(requests), lambda _: None, lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        logs = lg.LogSettings()
        logs.log_output.outdir = folder
        logs.log_output.copy_summary_to_stdout = False
        lg.StartTestWithLogSettings(sut, library, settings, logs)
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
    lg.DestroyQSL(library)
    lg.DestroySUT(sut)
    channel.close()
    found = next(line for line in summary.splitlines() if line.startswith("Result is"))
    p99 = next((line for line in summary.splitlines() if "99.00 percentile latency (ns)" in line), "")
    return f"{found.split(':')[1].strip()} (p99 {int(p99.split(':')[1]) / 1e6:.2f} ms)" if p99 else found


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=["lookup", "predict"], default="predict")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--p99-ms", type=float, default=10.0)
    parser.add_argument("--sharded", action="store_true")
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of load per rate in the search")
    parser.add_argument("--check-seconds", type=float, default=120.0, help="seconds of load at 70 % of the knee")
    parser.add_argument("--over", type=int, nargs="+", default=[64, 1], help="layer sizes of the top MLP")
    options = parser.parse_args()
    p99_s, output = options.p99_ms / 1e3, Output(False)
    with tempfile.TemporaryDirectory() as folder:
        archive = build(Path(folder), options.over)
        world_size = open_archive(archive, ranks=()).manifest.world_size
        servers = ranker_and_shard(archive, world_size) if options.sharded else ServerProcess(archive, "--port", "0")
        with servers as started:
            target = started[0].target if isinstance(started, list) else started.target
            with InferenceClient(target) as client:
                client.wait_until_ready(60)
                model = client.get_model()
            trace = poisson(1000.0, 20_000, batch=options.batch, ids_per_sample=len(model.features), spread_ids=False)
            requests = encode_requests(model, options.call, trace)
            with Driver(target, options.call, requests, timeout=max(1.0, 100 * p99_s)) as driver, output.bar("") as bar:
                found = find_knee(driver, trace, p99_s, seconds=options.seconds, progress=bar)
                what = "ranker and shard" if options.sharded else "server"
                knee = Measured(
                    what, "bench", "1", options.call, options.batch, trace.ids_per_sample, p99_s,
                    machine=this_machine(), **found,
                )  # fmt: skip
                show_measured(output, knee)
                if not knee.knee_qps:
                    return
                rate = 0.7 * knee.knee_qps
                check = driver.run(trace.at_rate(rate, int(rate * options.check_seconds), seed=1).times)
            within, p99_ms = check.share_within(p99_s), check.percentile(99) * 1e3
            print(
                f"{options.check_seconds:g} s at {rate:.0f}/s, 70 % of the knee: {within:.3%} within "
                f"{options.p99_ms:g} ms, "
                f"p99 {p99_ms:.2f} ms, errors {check.errors}: {'met' if within >= OBJECTIVE_SHARE else 'MISSED'}"
            )
            try:
                import mlperf_loadgen  # noqa: F401
            except ImportError:
                print("MLPerf LoadGen: not installed (pip install mlcommons-loadgen)")
                return
            for share in (0.7, 0.9, 1.0, 1.3):
                verdict = loadgen_verdict(target, options.call, requests, share * knee.knee_qps, p99_s, 20.0)
                print(f"MLPerf LoadGen, Server scenario, {share:.0%} of the knee: {verdict}")


if __name__ == "__main__":
    main()
