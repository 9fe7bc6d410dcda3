"""Counts, latency and log lines of requests by served version: a bad canary shows, and its series end with it."""

from __future__ import annotations

import io
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from recinfer.errors import InputError, NotFoundError, RecinferError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.registry import AnswerCounts, RequestStats, ServedModel
from recinfer.serving.server.server import Server
from recinfer.serving.server.telemetry.metrics import merge_statuses, only_counts, sum_ended
from recinfer.serving.server.telemetry.observe import JsonLines
from tests.serving.conftest import export, make_request, steep_model

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed (the serve extra)")

STEEP = 1e10  # a dense number that the good version can compute with, and the bad one cannot


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A version that overflows: its layers multiply by too much."""
    return load(export(steep_model(1e15), tmp_path_factory.mktemp("bad"), "tiny", "4"))


@pytest.fixture
def server(predictor: Predictor, bad: Predictor) -> Iterator[Server]:
    """Version 3 with 80 % of the requests, and the bad version 4."""
    models = [ServedModel.of("tiny", predictor, "3"), ServedModel.of("tiny", bad, "4")]
    with Server(models, http_port=0, metrics_port=0) as running:
        running.service.registry.set_weights("tiny", {"3": 80, "4": 20})
        yield running


Series = dict[tuple[str, str, str, str], float]


def series(server: Server, family: str = "recinfer_requests") -> Series:
    """The counts of /metrics by method, model, version and code (empty for a histogram)."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics", timeout=60) as answer:
        found = {each.name: each for each in parser.text_string_to_metric_families(answer.read().decode())}
    return {
        (s.labels["method"], s.labels["model"], s.labels["version"], s.labels.get("code", "")): s.value
        for s in found[family].samples
        if s.name.endswith(("_total", "_count"))
    }


def error_share(found: Series, version: str) -> float:
    """The share that the alert CanaryFails compares."""
    own = {code: count for (_, _, of, code), count in found.items() if of == version}
    return sum(count for code, count in own.items() if code not in ("OK", "CANCELLED")) / sum(own.values())


def test_a_bad_canary_shows_in_the_metrics(server: Server):
    dense, features = make_request(1, 2)
    dense[:] = STEEP
    failed = 0
    with InferenceClient(server.target, timeout=60) as client:
        for _ in range(200):
            try:
                client.predict(dense, features)
            except InputError:
                failed += 1
    found = series(server)
    assert failed and found["Predict", "tiny", "4", "INVALID_ARGUMENT"] == failed
    assert found["Predict", "tiny", "3", "OK"] == 200 - failed
    assert ("Predict", "", "", "OK") not in found
    assert error_share(found, "4") > 0.02 + 2 * error_share(found, "3")  # the alert's condition
    assert series(server, "recinfer_request_seconds")["Predict", "tiny", "4", ""] == failed


def test_every_protocol_and_path_counts_for_its_version(server: Server):
    base = f"http://127.0.0.1:{server.http_port}"
    dense, features = make_request(1, 2)
    with InferenceClient(server.target, version="3", timeout=60) as client:
        client.predict(dense, features)
        client.get_model()
        client.lookup(features)
        with pytest.raises(InputError):
            client.lookup({"user": [99]})
    with InferenceClient(server.target, version="5", timeout=60) as client, pytest.raises(NotFoundError):
        client.lookup(features)

    def ask(path: str, body: Any = None) -> int:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(base + path, data), timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code

    assert ask("/v1/models/tiny/versions/3:lookup", {"instances": [{"user": [1]}]}) == 200
    assert ask("/v1/models/tiny/versions/3:lookup", {"instances": [{"user": ["x"]}]}) == 400
    assert ask("/v1/models/tiny/versions/5:lookup", {"instances": [{"user": [1]}]}) == 404
    assert ask("/v1/models/tiny/versions/3/metadata") == 200
    assert ask("/v2/models/tiny/versions/3") == 200
    user = {"name": "user", "datatype": "INT64", "shape": [1], "data": [1]}
    assert ask("/v2/models/tiny/versions/3/infer", {"inputs": [user], "parameters": {"method": "lookup"}}) == 200
    assert ask("/v2/models/tiny/versions/3/infer", {"inputs": [user | {"shape": [2]}]}) == 400
    assert ask("/v2/models/tiny/versions/5/infer", {"inputs": [user]}) == 404
    found = series(server)
    own = {(method, code): count for (method, model, version, code), count in found.items() if version == "3"}
    assert own == {
        ("GetModel", "OK"): 1,
        ("Predict", "OK"): 1,
        ("Lookup", "OK"): 1,
        ("Lookup", "INVALID_ARGUMENT"): 1,
        ("V1Lookup", "OK"): 1,
        ("V1Lookup", "INVALID_ARGUMENT"): 1,
        ("V1Metadata", "OK"): 1,
        ("ModelMetadata", "OK"): 1,
        ("ModelInfer", "OK"): 1,
        ("ModelInfer", "INVALID_ARGUMENT"): 1,
    }
    unnamed = {(method, code): count for (method, model, version, code), count in found.items() if not version}
    assert unnamed == {(method, "NOT_FOUND"): 1 for method in ("Lookup", "V1Lookup", "ModelInfer")}


def test_series_end_when_a_version_is_unloaded_and_the_sums_stay(server: Server):
    _, features = make_request(1, 2)
    with InferenceClient(server.target, version="4", timeout=60) as client:
        client.lookup(features)
    assert series(server)["Lookup", "tiny", "4", "OK"] == 1
    server.service.registry.set_weights("tiny", {"3": 1})
    server.service.registry.remove("tiny", "4")
    assert not [key for key in series(server) if key[2] == "4"]
    assert server.stats.requests() == {("Lookup", "OK"): 1}
    assert server.stats.latency()["Lookup"].count == 1


def test_an_answer_after_the_unload_is_counted_once_in_the_sums():
    gone, stats = AnswerCounts(), RequestStats()
    for expected in (1, 2, 3):
        stats.add("Lookup", "OK", 0.1, gone)
        assert stats.requests() == {("Lookup", "OK"): expected} == {("Lookup", "OK"): stats.latency()["Lookup"].count}


def test_log_lines_name_the_version(server: Server):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    log = logging.getLogger("recinfer.requests")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        for version in ("3", "7"):
            with suppress(RecinferError), InferenceClient(server.target, version=version, timeout=60) as client:
                client.lookup(make_request(1, 2)[1])
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["model"], line["version"], line["code"]) for line in lines] == [
        ("tiny", "3", "OK"),
        ("", "", "NOT_FOUND"),
    ]


def test_workers_are_summed_by_version(server: Server):
    with InferenceClient(server.target, version="4", timeout=60) as client:
        client.lookup(make_request(1, 2)[1])
    status = json.loads(json.dumps(server.status()))
    ended = sum_ended(status, sum_ended(status, None))
    merged = merge_statuses([status, status], [ended])
    by_version = {model["version"]: model["requests"] for model in merged["models"]}
    assert by_version == {"3": [], "4": [{"method": "Lookup", "code": "OK", "count": 4}]}
    assert merged["requests"] == by_version["4"] and merged["unnamed"]["requests"] == []
    without = status | {"models": [model for model in status["models"] if model["version"] == "3"]}
    assert [model["version"] for model in merge_statuses([without], [only_counts(status)])["models"]] == ["3"]
    assert [model["version"] for model in sum_ended(without, ended)["models"]] == ["3"]
