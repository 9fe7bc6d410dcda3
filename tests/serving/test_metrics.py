"""Prometheus text, the status page (in a browser: test_page.py), logs and traces of a server."""

from __future__ import annotations

import base64
import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from recinfer.errors import InputError
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.stages import Histogram
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.telemetry.observe import JsonLines, Observer
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import copy_with_missing
from tests.serving.conftest import ROWS, make_request
from tests.warm import run_program

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed (the serve extra)")


@pytest.fixture(scope="module")
def predictor(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """Of an archive whose requests may leave features out."""
    return load(copy_with_missing(archive, tmp_path_factory.mktemp("metrics") / "tiny.rqa", "empty"))


@pytest.fixture(scope="module")
def protocol(predictor: Predictor) -> Iterator[Server]:
    """The metrics port of a server that has answered a few requests."""
    with Server({"tiny": predictor}, metrics_port=0) as server, InferenceClient(server.target, timeout=60) as client:
        for seed in range(3):
            client.predict(*make_request(seed, 5))
        _, kjt = make_request(1, 2, keys=["user"])
        client.lookup(kjt)
        client.predict(torch.zeros(2, 3), kjt)  # the other features are missing
        with pytest.raises(InputError):
            client.lookup(KeyedJaggedTensor(["user"], torch.tensor([99]), lengths=torch.tensor([1])))
        yield server


def get(protocol: Server, path: str) -> tuple[bytes, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{protocol.metrics_port}{path}", timeout=60) as answer:
        return answer.read(), answer.headers


def test_prometheus_reads_the_metrics(protocol: Server, predictor: Predictor):
    text, headers = get(protocol, "/metrics")
    assert headers["Content-Type"].startswith("text/plain")
    found = {family.name: family for family in parser.text_string_to_metric_families(text.decode())}

    def value(family: str, name: str = "", **labels: str) -> float:
        own = [s for s in found[family].samples if s.name == (name or family) and labels.items() <= s.labels.items()]
        assert len(own) == 1, (family, labels, own)
        return own[0].value

    model = {"model": "tiny", "version": "3"}
    assert value("recinfer_requests", "recinfer_requests_total", method="Predict", code="OK", **model) == 4
    assert value("recinfer_stage_seconds", "recinfer_stage_seconds_count", stage="decode") >= 6
    assert value("recinfer_stage_seconds", "recinfer_stage_seconds_count", stage="dense") >= 4
    lookups = value("recinfer_stage_seconds", "recinfer_stage_seconds_count", stage="lookup")
    assert lookups >= 5
    assert value("recinfer_stage_seconds", "recinfer_stage_seconds_bucket", stage="lookup", le="+Inf") == lookups
    assert value("recinfer_queue_requests") == 0
    assert value("recinfer_memory_budget_bytes") == 256 << 20
    assert value("recinfer_memory_refused", "recinfer_memory_refused_total") == 0
    assert value("recinfer_memory_held_bytes") >= 0
    assert value("recinfer_run_requests", "recinfer_run_requests_total") >= 5
    assert value("recinfer_request_samples", "recinfer_request_samples_sum") >= 19
    assert value("recinfer_model_mapped_bytes", **model) == predictor.mapped_bytes > 0
    assert 0 <= value("recinfer_model_age_seconds", **model) < 3600
    assert value("recinfer_missing_features", "recinfer_missing_features_total", feature="shop", **model) >= 1
    assert value("recinfer_missing_features", "recinfer_missing_features_total", feature="user", **model) == 0
    assert value("recinfer_out_of_range_ids", "recinfer_out_of_range_ids_total", feature="user", **model) == 0


def test_status_holds_the_plan(protocol: Server):
    status = json.loads(get(protocol, "/status.json")[0])
    model = status["models"][0]
    assert (model["name"], model["version"], model["features"]) == ("tiny", "3", len(ROWS))
    assert (model["engine"], model["engine_reason"]) == ("onnxruntime", None)
    assert [table["name"] for table in model["tables"]] == ["t_user", "t_item", "t_shop"]
    assert [rank["rank"] for rank in model["ranks"]] == [0, 1]
    assert sum(rank["cells"] for rank in model["ranks"]) == (50 + 40 + 30) * 8


def test_page_sends_requests_to_its_own_server_only(protocol: Server):
    page, headers = get(protocol, "/")
    assert b"://" not in page.replace(b"http://www.w3.org/2000/svg", b"")
    assert "default-src 'none'" in headers["Content-Security-Policy"]


def test_a_server_with_a_token_asks_for_it_here_too(predictor: Predictor):
    token = "a-token-of-some-length"
    with Server({"tiny": predictor}, metrics_port=0, security=Security(token=token)) as server:
        for path in ("/", "/metrics", "/status.json"):
            url = f"http://127.0.0.1:{server.metrics_port}{path}"
            for wrong in (None, "Bearer nothing", "Basic !", "Basic " + base64.b64encode(b"me:nothing").decode()):
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(
                        urllib.request.Request(url, headers={"Authorization": wrong} if wrong else {})
                    )
                assert refused.value.code == 401 and "token" in json.load(refused.value)["error"]
            for right in (f"Bearer {token}", "Basic " + base64.b64encode(f"me:{token}".encode()).decode()):
                with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": right})) as answer:
                    assert answer.status == 200


def test_the_metrics_port_answers_as_the_http_port(protocol: Server):
    base = f"http://127.0.0.1:{protocol.metrics_port}"
    with urllib.request.urlopen(urllib.request.Request(f"{base}/metrics", method="HEAD")) as answer:
        assert answer.status == 200 and not answer.read()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{base}/metric")
    assert refused.value.code == 404 and "/metrics" in json.load(refused.value)["error"]


def test_each_model_has_its_health(protocol: Server):
    with grpc.insecure_channel(protocol.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "tiny", SERVICE_NAME):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=60)


def test_a_histogram_counts_between_its_bounds():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.5):
        histogram.add(value)
    state = histogram.state()
    assert (state.counts, state.total, state.count) == ((2, 1, 1), 5.5, 4)


def test_requests_are_logged_as_json_with_their_id():
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("recinfer.requests")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        observer = Observer(RequestStats(), trace=False)
        observer.answered("Predict", "OK", 0.0021, headers=(("X-Request-Id", "abc"),), num_bytes=12)
        observer.answered("Predict", "NOT_FOUND", 0.001, headers=lambda: None)
        observer.answered("Predict", "RESOURCE_EXHAUSTED", None, headers=(("x-request-id", "def"),))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    first, second, third = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "recinfer.requests",
        "message": "Predict OK",
        "request_id": "abc",
        "call": "Predict",
        "code": "OK",
        "ms": 2.1,
        "bytes": 12,
        "protocol": "grpc",
        "model": "",
        "version": "",
    }
    assert len(second["request_id"]) == 32
    assert (third["request_id"], third["code"], third["ms"]) == ("def", "RESOURCE_EXHAUSTED", 0.0)
    assert observer.stats.requests() == {("Predict", code): 1 for code in ("OK", "NOT_FOUND", "RESOURCE_EXHAUSTED")}
    assert observer.stats.latency()["Predict"].count == 2


TRACED = """
import json, sys, urllib.request
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
import grpc, recinfer
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.server.server import SERVICE_NAME, Server

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
with Server({"tiny": recinfer.load(sys.argv[1])}, http_port=0) as server:
    with grpc.insecure_channel(server.target) as channel:
        call = channel.unary_unary(f"/{SERVICE_NAME}/GetModel")
        call(b"", metadata=(("traceparent", parent), ("x-request-id", "abc")))
        try:
            call(pb.GetModelRequest(model="nobody").SerializeToString())
        except grpc.RpcError:
            pass
    url = f"http://127.0.0.1:{server.http_port}/v2/models/tiny"
    urllib.request.urlopen(urllib.request.Request(url, headers={"traceparent": parent})).close()
for span in exporter.get_finished_spans():
    print(json.dumps([
        span.name, span.kind.name, span.status.status_code.name, span.end_time - span.start_time, dict(span.attributes),
        f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}" if span.parent else None,
    ]))
"""


def test_spans_have_the_caller_as_their_parent(archive: Path):
    """The real SDK with an exporter in memory, in a process of its own: a provider is set once a process."""
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (the dev extra)")
    code, out, err = run_program(TRACED, archive)
    assert code == 0, err
    spans = [json.loads(line) for line in out.splitlines()]
    # Not by their end times: a refusal is recorded when it is sent, and the next request may have begun by then.
    model, refused, http = sorted(spans, key=lambda span: (span[0] != "recinfer/GetModel", span[2] == "ERROR"))
    assert model[:3] == ["recinfer/GetModel", "SERVER", "UNSET"]
    assert 0 < model[3] < 60e9
    assert model[4] == {
        "rpc.method": "GetModel",
        "rpc.grpc.status": "OK",
        "recinfer.request_id": "abc",
        "recinfer.model": "tiny",
        "recinfer.version": "3",
    }
    assert model[5:] == ["0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"]
    assert (refused[2], refused[4]["rpc.grpc.status"], refused[6]) == ("ERROR", "NOT_FOUND", None)
    assert (http[0], http[5:]) == ("recinfer/ModelMetadata", model[5:])


def test_without_a_provider_no_span_is_made():
    assert Observer(RequestStats())._tracer is None
