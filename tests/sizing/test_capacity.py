"""The search for the knee of a simulated queue; the capacity file; a real server under load."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from recinfer.errors import ConfigError, InputError, NotFoundError, UnavailableError
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.server.server import Server
from recinfer.sizing.arrivals import Trace, poisson
from recinfer.sizing.capacity import Measured, find_knee, this_machine
from recinfer.sizing.load import Driver, Measurement, encode_requests
from tests.sizing.simulated import QueueDriver

ARRIVALS = poisson(1000.0, 5000)


def measured(driver: QueueDriver, p99_s: float, *, max_qps: float = 1e5, what: str = "server") -> Measured:
    found = find_knee(driver, ARRIVALS, p99_s, max_qps=max_qps)  # type: ignore[arg-type]
    return Measured(what, "m", "1", "lookup", 1.0, 1.0, p99_s, machine=this_machine(), **found)


def test_the_knee_of_a_queue_is_found() -> None:
    # An M/M/1 queue's latency is exponential: its p99 is ln(100) / (1 / service - rate).
    service_s, p99_s = 1e-3, 20e-3
    expected = 1 / service_s - math.log(100) / p99_s  # 770 requests per second
    found = measured(QueueDriver(service_s, 0.0), p99_s)
    assert found.knee_qps == pytest.approx(expected, rel=0.12)
    assert not found.at_least
    assert all(point.kept == (point.qps <= found.knee_qps * 1.001) or abs(point.qps / expected - 1) < 0.15 for point in found.points)  # fmt: skip
    assert np.mean(found.service_s) == pytest.approx(service_s, rel=0.1)


def test_no_rate_meets_an_objective_that_a_lone_request_misses() -> None:
    driver = QueueDriver(1e-4, 5e-3)
    found = measured(driver, 4e-3)
    assert found.knee_qps == 0
    assert found.cpu_s == {}
    assert max(driver.rates[:-1]) < 100, "it went on loading a server that was too slow for one request"


def test_server_that_meets_the_objective_at_the_highest_rate_has_at_least_that_knee() -> None:
    found = measured(QueueDriver(1e-5, 1e-3), 50e-3, max_qps=500.0)
    assert (found.knee_qps, found.at_least, found.service_s) == (500.0, True, ())


def test_a_server_that_answers_nothing_is_no_knee() -> None:
    with pytest.raises(UnavailableError, match=r"answered none of .* requests: full"):
        measured(QueueDriver(1e-3, 0.0, refuses=True), 0.02)


def test_latency_counts_requests_without_an_answer() -> None:
    latency_s = np.array([0.001] * 98 + [math.inf] * 2)
    measurement = Measurement(10.0, np.zeros(100), latency_s, np.arange(98.0), {"OverloadedError": 2})
    assert measurement.percentile(98) == 0.001
    assert measurement.percentile(99) == math.inf
    assert measurement.share_within(0.01) == 0.98


def test_written_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "capacity.json"
    found = measured(QueueDriver(1e-3, 1e-3), 20e-3)
    found.save(path)
    assert Measured.load(path) == found
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nonsense", "cannot be read"),
        ("[]", "expected a file that recinfer bench capacity --out wrote"),
        ('{"format": "recinfer.capacity", "version": 9}', "version 1"),
        ('{"format": "recinfer.capacity", "version": 1, "measured": {"what": "server"}}', "measure again"),
    ],
)
def test_file_that_is_not_a_capacity_file(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "capacity.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        Measured.load(path)
    with pytest.raises(NotFoundError, match="recinfer bench capacity"):
        Measured.load(tmp_path / "none.json")


# --------------------------------------------------------------------------------------------------- a real server


@pytest.mark.parametrize("call", ["lookup", "predict"])
def test_each_request_that_is_due_is_sent_and_answered(server: Server, call: str) -> None:
    target = f"127.0.0.1:{server.port}"
    with InferenceClient(target, timeout=60) as client:
        model = client.get_model()
    trace = poisson(2000.0, 200, batch=3, ids_per_sample=5.0)
    requests = encode_requests(model, call, trace)  # type: ignore[arg-type]
    with Driver(target, call, requests, timeout=30.0) as driver:  # type: ignore[arg-type]
        found = driver.run(trace.times)
    assert found.errors == {}
    assert np.isfinite(found.latency_s).all()
    assert (found.sent_s >= 0).all(), "sent before it was due"
    assert (found.latency_s >= found.sent_s).all(), "answered before it was sent"
    assert found.done_s.size == 200


def test_refused_requests_are_counted_by_reason(server: Server) -> None:
    target = f"127.0.0.1:{server.port}"
    with InferenceClient(target, timeout=60) as client:
        model = client.get_model()
    good = encode_requests(model, "lookup", poisson(2000.0, 1))
    bad = encode_requests(model, "lookup", poisson(2000.0, 1), name="other")
    with Driver(target, "lookup", [*good, *bad], timeout=30.0) as driver:
        found = driver.run(np.arange(10) * 1e-3)
    assert found.errors == {"NotFoundError": 5}
    assert "other" in found.reason
    assert np.isfinite(found.latency_s).sum() == 5


def test_requests_have_the_sizes_of_the_trace(server: Server) -> None:
    with InferenceClient(f"127.0.0.1:{server.port}", timeout=60) as client:
        model = client.get_model()
    names = [feature.name for feature in model.features]
    trace = Trace(np.array([0.0, 1.0]), np.array([2, 4]), np.array([12, 0]), {names[0]: 3.0, names[1]: 1.0})
    requests = encode_requests(model, "lookup", trace)
    from recinfer.serving.wire import codec
    from recinfer.serving.wire.proto import inference_pb2 as pb

    first, second = (codec.parse(pb.LookupRequest, each) for each in requests)
    assert len(first.features.lengths) == 4 * 2 * len(names)  # int32
    assert len(first.features.values) == 8 * 12  # int64
    assert len(second.features.values) == 0
    lengths = np.frombuffer(first.features.lengths, "<i4").reshape(len(first.features.keys), 2)
    by_key = dict(zip(first.features.keys, lengths.sum(1).tolist()))
    assert by_key[names[0]] == 9
    assert by_key[names[1]] == 3
    with pytest.raises(InputError, match="no feature colour"):
        encode_requests(model, "lookup", Trace(np.zeros(1), np.ones(1, int), np.ones(1, int), {"colour": 1.0}))
