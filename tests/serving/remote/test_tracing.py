"""One trace from client to ranker to shard servers, and one request id in all logs."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from recinfer.serving.shards._ranks import read_find

from recinfer.errors import InputError
from recinfer.serving.client import InferenceClient, request_id
from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.shards.messages import join_request, trace_field, trace_headers
from recinfer.serving.shards.rank_structs import PlainFind
from tests.serving.remote.test_direct import make_archive
from tests.warm import run_program

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

_PROGRAM = """
import io, json, logging, sys
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

traced, archive, folder = sys.argv[1] == "traced", Path(sys.argv[2]), Path(sys.argv[3])
exporter = InMemorySpanExporter()
if traced:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

import torch
from recinfer.serving.client import InferenceClient, request_id
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.server.server import Server
from recinfer.serving.server.telemetry.observe import JsonLines
from recinfer.inference.predictor import load
from recinfer.serving.shards.lookups import MakeLookups
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.remote.test_direct import NUM_DENSE, make_request

lines = io.StringIO()
handler = logging.StreamHandler(lines)
handler.setFormatter(JsonLines())
log = logging.getLogger("recinfer.requests")
log.addHandler(handler)
log.setLevel(logging.INFO)

with shard(archive, (0,)) as one, shard(archive, (1, 2)) as other:
    path = write_shards(folder / "shards.json", {0: [one.target], 1: [other.target], 2: [other.target]})
    with asking(path) as fan_out:
        predictor = load(archive, lookups=MakeLookups(fan_out))
        exporter.clear()
        lines.truncate(0)
        with Server({"pooled": predictor}, shards=fan_out) as server, InferenceClient(server.target, timeout=60) as client:
            with request_id("checkout-17"):
                client.predict(torch.zeros(2, NUM_DENSE), make_request(2, 1, longest=1))
                client.lookup(make_request(2, 1, longest=1))
spans = [
    {
        "name": span.name,
        "trace_id": f"{span.context.trace_id:032x}",
        "span_id": f"{span.context.span_id:016x}",
        "parent_id": None if span.parent is None else f"{span.parent.span_id:016x}",
        "kind": span.kind.name,
        "attributes": dict(span.attributes),
    }
    for span in exporter.get_finished_spans()
]
logged = [json.loads(line) for line in lines.getvalue().replace("\\0", "").splitlines()]
print(json.dumps({"spans": spans, "logged": logged}))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of three ranks."""
    return make_archive(tmp_path_factory.mktemp("traced"), "row_wise")


def run(how: str, archive: Path, folder: Path) -> Any:
    code, out, err = run_program(_PROGRAM, how, archive, folder)
    assert code == 0, err
    return json.loads(out.splitlines()[-1])


def test_client_ranker_and_shards_are_one_tree(archive: Path, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed (the dev extra)")
    found = run("traced", archive, tmp_path)
    for call in ("Predict", "Lookup"):
        (root,) = [span for span in found["spans"] if span["name"] == f"recinfer.client/{call}"]
        tree = [span for span in found["spans"] if span["trace_id"] == root["trace_id"]]
        assert root["parent_id"] is None and root["kind"] == "CLIENT"
        (ranker,) = [span for span in tree if span["parent_id"] == root["span_id"]]
        assert ranker["name"] == f"recinfer/{call}"
        shards = [span for span in tree if span["parent_id"] == ranker["span_id"]]
        assert [span["name"] for span in shards] == ["recinfer/Find"] * 2
        assert len(tree) == 4
        ids = {span["attributes"]["recinfer.request_id"] for span in tree}
        assert ids == {"checkout-17"}
    assert ranker["attributes"]["recinfer.model"] == "pooled"


def test_an_id_is_in_all_logs_without_a_tracer(archive: Path, tmp_path: Path) -> None:
    found = run("untraced", archive, tmp_path)
    assert found["spans"] == []
    ids = [
        (line["call"], line["request_id"]) for line in found["logged"] if line["call"] in ("Predict", "Lookup", "Find")
    ]
    assert sorted(ids) == sorted(
        [("Predict", "checkout-17"), ("Lookup", "checkout-17"), *[("Find", "checkout-17")] * 4]
    )


def test_a_ranker_sends_on_what_a_log_or_a_trace_needs(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer(RequestStats(), trace=False, sends_on=True)
    plain = (("x-request-id", "r"),)
    traced = (*plain, ("traceparent", PARENT))
    with caplog.at_level(logging.WARNING, logger="recinfer.requests"):
        assert observer.begin("Predict", lambda: plain) is None
        found = observer.begin("Predict", lambda: traced)
        assert found is not None and found() == dict(traced)
    with caplog.at_level(logging.INFO, logger="recinfer.requests"):
        logged = observer.begin("Predict", lambda: plain)
        assert logged is not None and logged() == dict(plain)
    assert Observer(RequestStats(), trace=False).begin("Predict", lambda: traced) is None  # no ranker


def test_a_message_with_a_trace_is_plain() -> None:
    headers = {"x-request-id": "r", "traceparent": PARENT, "tracestate": "a=b", "other": "x"}
    message = join_request("version", 3, [], trace=trace_field(headers))
    assert PlainFind._make(read_find(message)).version == "version"
    assert trace_headers(message) == {key: headers[key] for key in ("x-request-id", "traceparent", "tracestate")}
    assert trace_field({}) == b"" and trace_headers(join_request("version", 3, [])) == {}
    assert trace_headers(b"\xff\xff") == {}


@pytest.mark.parametrize("given", ["", "a" * 129, "a\nb", "ä"])
def test_an_id_that_no_header_can_hold_is_refused(given: str) -> None:
    with pytest.raises(InputError, match="request_id: got"), request_id(given):
        pass
    with InferenceClient("127.0.0.1:1") as client:  # the block above left no id behind
        assert not client.is_ready(timeout=0.2)
