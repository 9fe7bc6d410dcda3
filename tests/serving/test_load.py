"""The share of a server's capacity in use: of its runs, its fan-outs and its threads, whichever is the largest."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recinfer.inference.predictor import load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.busy import Load
from recinfer.serving.engine.scheduler import Scheduler
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import BatchConfig
from tests.serving.conftest import make_request


@pytest.mark.parametrize(
    ("requests_s", "fan_outs_s", "expected"),
    [(0.0, 0.0, 0.0), (5.0, 0.0, 0.25), (5.0, 160.0, 0.5), (5.0, 20.0, 0.25), (200.0, 0.0, 1.0)],
)
def test_the_load_is_the_largest_share(requests_s: float, fan_outs_s: float, expected: float):
    """Of two runs at a time in ten seconds, and of 32 fan-outs; more in flight than that is full."""
    now, scheduler = [0.0], SimpleNamespace(occupied_s=(0.0, 0.0))
    served: Any = scheduler
    found = Load(served, most_runs=2, most_fan_outs=32, thread_ids=[None], clock=lambda: now[0])
    now[0], scheduler.occupied_s = 10.0, (requests_s, fan_outs_s)
    assert found.now() == pytest.approx(expected)


def test_a_server_that_starts_is_idle():
    now, scheduler = [0.0], SimpleNamespace(occupied_s=(0.0, 0.0))
    served: Any = scheduler
    found = Load(served, most_runs=1, most_fan_outs=32, thread_ids=[], clock=lambda: now[0])
    assert found.now() == 0.0
    now[0], scheduler.occupied_s = 1.0, (1.0, 0.0)
    assert found.now() == pytest.approx(0.1)


def test_operations_count_while_they_last():
    """A fan-out that does not end is load too."""
    scheduler = Scheduler(BatchConfig(), 1)
    before = time.monotonic()
    scheduler.begin()
    scheduler.begin()
    begun = time.monotonic()
    while (now := time.monotonic()) == begun:
        pass
    seconds = scheduler.occupied_s[1]
    assert 2 * (now - begun) <= seconds <= 2 * (time.monotonic() - before)
    scheduler.done(0, 0, 0.0)
    scheduler.done(0, 0, 0.0)
    ended = scheduler.occupied_s[1]
    assert scheduler.occupied_s[1] == ended >= seconds
    scheduler.close()


def test_a_server_has_the_gauge(archive: Path):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed (the serve extra)")
    with (
        Server({"tiny": load(archive)}, metrics_port=0) as server,
        InferenceClient(server.target, timeout=60) as client,
    ):
        client.predict(*make_request(1, 5))
        assert server.scheduler is not None
        while not server.scheduler.occupied_s[0]:  # counted after the answer is sent
            time.sleep(0.01)
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as answer:
            lines = answer.read().decode().splitlines()
    (value,) = (float(line.split()[1]) for line in lines if line.startswith("recinfer_load "))
    assert 0 <= value <= 1
