"""A real server on loopback: the numbers of the predictor in this process, and errors that say what is wrong."""

from __future__ import annotations

import gc
import http.client
import json
import logging
import re
import signal
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from recinfer.errors import ConfigError, InputError, NotFoundError, RecinferError, UnavailableError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine.request import Request
from recinfer.serving.server.grpc_call import CoreCall
from recinfer.serving.server.open_inference_described import model_metadata
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.proto import open_inference_pb2
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import copy_with_missing
from tests.ports import free_port
from tests.serving.conftest import DIM, NUM_DENSE, ROWS, make_request
from tests.serving.stubs import inference_stub
from tests.serving.v1 import columns_of
from tests.waiting import until
from tests.warm import Program, run_program

BATCHES = [1, 2, 33]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_lookup_equals_the_predictor(client: InferenceClient, predictor: Predictor, batch: int, dtype: torch.dtype):
    _, kjt = make_request(batch, batch, dtype=dtype)
    got, expected = client.lookup(kjt), predictor.lookup(kjt)
    assert got.model_version == "3"
    assert got.pooled is not None
    assert got.pooled.keys() == expected.pooled.keys() == ["user", "item", "history", "shop"]
    assert got.pooled.length_per_key() == [DIM] * 4
    assert torch.equal(got.pooled.values(), expected.pooled.values())
    assert torch.equal(got["shop"], expected.pooled["shop"])


def test_lookup_of_some_features_gives_those_in_the_models_order(client: InferenceClient, predictor: Predictor):
    _, kjt = make_request(5, 4, keys=["shop", "item"])
    got = client.lookup(kjt)
    assert got.keys() == ["item", "shop"]
    _, whole = make_request(6, 4)
    assert torch.equal(got.pooled.values(), predictor.lookup(kjt).pooled.values())
    assert client.lookup(whole).keys() == list(ROWS)


@pytest.mark.parametrize("batch", BATCHES)
def test_predict_equals_the_predictor(client: InferenceClient, predictor: Predictor, batch: int):
    dense, kjt = make_request(batch, batch)
    got, expected = client.predict(dense, kjt), predictor.predict(dense, kjt)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].shape == tensor.shape
        assert torch.equal(got[name], tensor)


def test_large_requests_take_another_path_to_the_same_numbers(client: InferenceClient, predictor: Predictor):
    dense, kjt = make_request(1, 4000)
    assert len(codec.encode_predict_request(dense, kjt)) > 32 << 10
    assert torch.equal(client.lookup(kjt).pooled.values(), predictor.lookup(kjt).pooled.values())
    for name, tensor in predictor.predict(dense, kjt).items():
        assert torch.equal(client.predict(dense, kjt)[name], tensor)


def test_get_model(client: InferenceClient, predictor: Predictor):
    model = client.get_model()
    assert (model.name, model.version, model.num_dense) == ("tiny", "3", NUM_DENSE)
    assert (model.precision, model.plan_hash) == ("int8", predictor.manifest.plan_hash)
    assert {f.name: f.rows for f in model.features} == ROWS
    assert {f.name: f.table for f in model.features}["history"] == "t_item"
    assert all((f.dim, f.pooled, f.missing) == (DIM, True, "reject") for f in model.features)


@pytest.mark.parametrize("missing", ["reject", "empty", 7])
def test_a_model_says_which_features_a_prediction_may_leave_out(archive: Path, tmp_path: Path, missing: str | int):
    predictor = load(copy_with_missing(archive, tmp_path / "tiny.rqa", missing))
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        model = client.get_model()
        assert {f.missing for f in model.features} == {f.missing for f in predictor.features} == {missing}
        with grpc.insecure_channel(server.target) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelMetadata")
            data = call(open_inference_pb2.ModelMetadataRequest(name="tiny").SerializeToString(), timeout=60)
        said = open_inference_pb2.ModelMetadataResponse.FromString(data)
    expected = {} if missing == "reject" else {"missing": str(missing)}
    registry = server.service.registry
    plain = {tensor["name"]: tensor for tensor in model_metadata(registry.get("tiny"), registry)["inputs"]}
    for tensor in said.inputs:
        wanted = {} if tensor.name == "dense" else expected
        assert {name: value.string_param for name, value in tensor.parameters.items()} == wanted
        assert plain[tensor.name].get("parameters", {}) == wanted


def test_the_generated_stub_speaks_to_it(server: Server):
    with grpc.insecure_channel(server.target) as channel:
        stub = inference_stub(channel)
        assert stub.GetModel(pb.GetModelRequest(model="tiny", version="3")).num_dense == NUM_DENSE


def test_many_callers_at_once_get_their_own_answers(client: InferenceClient, predictor: Predictor):
    requests = [make_request(seed, 1 + seed % 7) for seed in range(64)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda request: client.predict(*request), requests))
    for request, answer in zip(requests, answers):
        for name, tensor in predictor.predict(*request).items():
            assert torch.allclose(answer[name], tensor, rtol=0, atol=1e-6)


def one(feature: str, *ids: int) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([feature], torch.tensor(ids), lengths=torch.tensor([len(ids)]))


def test_bad_input_is_named_and_the_server_keeps_running(server: Server, client: InferenceClient):
    dense, kjt = make_request(3, 2)
    not_a_number = dense.clone()
    not_a_number[1, 2] = float("nan")
    calls = {
        r"'colour'": lambda: client.lookup(one("colour", 1)),
        r"'user', sample 0: id 50 .*rows 0 to 49": lambda: client.lookup(one("user", 3, 50)),
        r"'user', sample 0: id -7": lambda: client.lookup(one("user", -7)),
        r"dense: sample 1, column 2 is nan": lambda: client.predict(not_a_number, kjt),
        r"dense: got 32 bytes .*expected 24 bytes": lambda: client.predict(torch.zeros(2, 4), kjt),
        r"batch_size: got 16385, expected 1 to 16384: send fewer samples per request": lambda: client.lookup(
            make_request(0, 16385)[1]
        ),
    }
    for words, call in calls.items():
        with pytest.raises(InputError, match=re.compile(words, re.DOTALL)) as caught:
            call()
        assert "Traceback" not in str(caught.value)
    assert client.lookup(one("user", 3)).keys() == ["user"]


def test_unknown_model_and_version(server: Server):
    with (
        InferenceClient(server.target, model="huge", timeout=60) as client,
        pytest.raises(NotFoundError, match=r"'huge'.*'tiny'"),
    ):
        client.lookup(one("user", 1))
    with (
        InferenceClient(server.target, version="9", timeout=60) as client,
        pytest.raises(NotFoundError, match=r"'9'.*'3'"),
    ):
        client.get_model()


def test_codes_on_the_wire(server: Server):
    with grpc.insecure_channel(server.target) as channel:
        lookup = channel.unary_unary(f"/{SERVICE_NAME}/Lookup")
        for request, code in (
            (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (b"", grpc.StatusCode.INVALID_ARGUMENT),
            (pb.LookupRequest(model="huge").SerializeToString(), grpc.StatusCode.NOT_FOUND),
            (codec.encode_lookup_request(one("user", 99)), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                lookup(request)
            assert caught.value.code() is code
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE_NAME}/Nothing")(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_watched_server_stops_at_once_and_says_so(predictor: Predictor):
    server = Server({"model": predictor}).start()
    heard: list[int] = []
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
        heard.append(next(watch).status)
        server.stop(
            3600.0
        )  # a Watch never ends by itself: it held the whole grace up, and pytest ends a test after 300 s
        heard += [answer.status for answer in watch]
    assert heard == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


def test_health_and_reflection(server: Server):
    with grpc.insecure_channel(server.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
        ]
        listed, described = reflection.ServerReflectionInfo(iter(requests))
        names = {service.name for service in listed.list_services_response.service}
        assert {SERVICE_NAME, "grpc.health.v1.Health"} <= names
        assert described.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


def test_a_bug_of_ours_is_logged_and_shows_nothing(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret of the server")

    monkeypatch.setattr(type(predictor), "run_engine", broken)
    monkeypatch.setattr(type(predictor), "run_engine_arrays", broken)
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        with caplog.at_level(logging.ERROR), pytest.raises(RecinferError) as caught:
            client.predict(*make_request(0, 1))
        assert str(caught.value) == "internal error; the server's log has the details"
        assert "secret of the server" in caplog.text
        assert client.lookup(one("user", 3)).keys() == ["user"]
        until(lambda: server.stats.requests() == {("Predict", "INTERNAL"): 1, ("Lookup", "OK"): 1})


def test_limits(predictor: Predictor):
    limits = Limits(max_batch=4, max_ids=6, max_keys=3, max_message_bytes=1000, max_response_bytes=100)
    with Server({"tiny": predictor}, limits=limits) as server, InferenceClient(server.target, timeout=60) as client:
        with pytest.raises(InputError, match="batch_size: got 5, expected 1 to 4"):
            client.lookup(make_request(0, 5, keys=["user"])[1])
        with pytest.raises(InputError, match="lengths: got 7 ids in all, expected at most 6"):
            client.lookup(one("user", *range(7)))
        with pytest.raises(InputError, match="keys: got 4, expected at most 3"):
            client.lookup(make_request(0, 1)[1])
        four = KeyedJaggedTensor(["user"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 1, 1]))
        with pytest.raises(InputError, match="take 128 bytes; expected at most 100"):
            client.lookup(four)
        with pytest.raises(InputError, match=r"request: got \d+ bytes, expected at most 1000 .*send fewer samples"):
            client.lookup(one("user", *([1] * 200)))
        assert client.lookup(one("user", 1)).keys() == ["user"]


def test_listens_on_loopback_and_refuses_a_taken_port(server: Server, predictor: Predictor):
    assert Server({"tiny": predictor}).host == "127.0.0.1"
    with pytest.raises(UnavailableError, match=f"127.0.0.1:{server.port}.*in use.*another port"):
        Server({"tiny": predictor}, port=server.port).start()
    with pytest.raises(UnavailableError, match=r"cannot listen on 192\.0\.2\.1"):
        Server({"tiny": predictor}, host="192.0.2.1", security=Security(insecure=True)).start()
    with pytest.raises(InputError, match="port: got 70000"):
        Server({"tiny": predictor}, port=70_000)
    with pytest.raises(ConfigError, match="at least one model"):
        Server({})


def test_client_error_when_no_server_listens():
    port = free_port()
    client = InferenceClient(f"127.0.0.1:{port}", timeout=60)
    with pytest.raises(UnavailableError, match=rf"127.0.0.1:{port}.*is the server running.*recinfer serve"):
        client.get_model()
    assert not client.is_ready()
    with pytest.raises(UnavailableError, match=r"not ready after 0.2 s"):
        client.wait_until_ready(0.2)
    client.close()
    with pytest.raises(UnavailableError, match="make a new client"):
        client.get_model()


def slowly(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Make lookups of the real predictor wait; returns (set when one has begun, set to let it go on)."""
    begun, go_on = threading.Event(), threading.Event()
    real = type(predictor).lookup_steps

    def lookup(self: Predictor, kjt: KeyedJaggedTensor) -> object:
        begun.set()
        assert go_on.wait(120)
        return real(self, kjt)

    monkeypatch.setattr(type(predictor), "lookup_steps", lookup)
    return begun, go_on


def test_a_call_is_given_up_in_time(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    _, go_on = slowly(predictor, monkeypatch)
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=0.3) as client:
        with pytest.raises(UnavailableError, match=r"did not answer within 0.3 s"):
            client.lookup(make_request(0, 4000)[1])
        assert client.is_ready(timeout=60)  # the loop is free while a large request runs
        go_on.set()


def test_stop_lets_running_requests_end_and_takes_no_new_ones(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    begun, go_on = slowly(predictor, monkeypatch)
    server = Server({"tiny": predictor}).start()
    with ThreadPoolExecutor(2) as pool, InferenceClient(server.target, timeout=120) as client:
        answer = pool.submit(client.lookup, make_request(0, 4000)[1])
        assert begun.wait(60)
        stopped = pool.submit(server.stop, 100.0)
        with InferenceClient(server.target, timeout=60, retries=0) as late:
            until(lambda: not late.is_ready())

            def refused() -> bool:
                try:
                    late.get_model()
                except UnavailableError:
                    return True
                return False

            until(refused)  # it reports NOT_SERVING just before
        assert not answer.done()
        go_on.set()
        assert answer.result(90).pooled.values().shape == (4000, 4 * DIM)
        stopped.result(90)
    server.stop()  # a second stop does nothing


@pytest.mark.parametrize("drain_s, grace", [(6.0, None), (1000.0, 0.0)])
def test_a_request_over_http_that_does_not_end_holds_no_stop_up(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch, drain_s: float, grace: float | None
):
    """aiohttp waits twice for such a request, each time as long as it was told."""
    pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
    begun, go_on = slowly(predictor, monkeypatch)
    server = Server({"tiny": predictor}, http_port=0, drain_s=drain_s).start()
    body = json.dumps({"inputs": columns_of(make_request(0, 4000)[1])}).encode()
    url = f"http://127.0.0.1:{server.http_port}/v1/models/tiny:lookup"

    def ask() -> None:
        with pytest.raises((OSError, http.client.HTTPException)):
            urllib.request.urlopen(url, body, timeout=300)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        assert begun.wait(60)
        try:
            server.stop(grace)  # raises TimeoutError, some seconds after its grace period
            asked.result(60)
        finally:
            go_on.set()


def test_a_server_that_stops_waits_until_its_last_answers_are_taken(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
):
    """If a server closes a connection with an unread answer, the rest of it is lost once the caller sends anything."""
    for _ in range(30):
        begun, go_on = slowly(predictor, monkeypatch)
        server = Server({"tiny": predictor}).start()
        with ThreadPoolExecutor(2) as pool, InferenceClient(server.target, timeout=60, retries=0) as client:
            answer = pool.submit(client.lookup, make_request(0, 4000)[1])
            assert begun.wait(60)
            core = server._server
            stopped = pool.submit(server.stop, 100.0)
            while core is not None and not core.is_stopping:
                time.sleep(0.01)
            time.sleep(0.02)
            go_on.set()
            assert answer.result(90).pooled.values().shape == (4000, 4 * DIM)
            stopped.result(90)
        monkeypatch.undo()


def test_calls_that_are_over_leave_nothing_to_the_garbage_collector(predictor: Predictor):
    """A request's memory is freed with its answer: a cycle of references would keep it until a garbage collection."""

    def left() -> int:
        return sum(isinstance(each, Request | CoreCall) for each in gc.get_objects())

    dense, features = make_request(1, 2)
    with Server({"tiny": predictor}) as server, InferenceClient(server.target, timeout=60) as client:
        gc.collect()
        gc.disable()
        before = left()  # of other tests' servers
        try:
            for _ in range(20):
                client.lookup(features)
                client.predict(dense, features)
                with pytest.raises(InputError):
                    client.predict(dense[:, :1].contiguous(), features)
            until(lambda: left() <= before + 3)  # gRPC's thread may still hold objects of the last call
        finally:
            gc.enable()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_serving_process(archive: Path, number: signal.Signals):
    script = (
        "import sys, recinfer; from recinfer.serving.server import Server, serve\n"
        "server = Server({'tiny': recinfer.load(sys.argv[1])})\n"
        "serve(server, on_ready=lambda: print(server.port, flush=True)); print('stopped', flush=True)"
    )
    with (
        Program(script, archive) as process,
        InferenceClient(f"127.0.0.1:{int(process.stdout.readline())}", timeout=60) as client,
    ):
        assert client.lookup(one("user", 3)).keys() == ["user"]
        process.send_signal(number)
        out, err = process.communicate(timeout=90)
    assert (process.returncode, out) == (0, "stopped\n"), err
    assert "Traceback" not in err


def test_a_signal_ends_serving_whatever_lock_this_thread_holds(archive: Path) -> None:
    """A handler runs between two steps of the thread that it interrupts: setting an Event there can deadlock."""
    code = (
        "import os, signal, sys, threading\n"
        "import recinfer\n"
        "from recinfer.serving.server import Server, serve\n"
        "class Interrupted(threading.Event):\n"
        "    def wait(self, timeout=None):\n"
        "        with self._cond:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n"
        "            return bool(sum(range(10**6)))\n"
        "def ready():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "serve(Server({'m': recinfer.load(sys.argv[1])}), on_ready=ready, stop=Interrupted())\n"
        "import gc\n"
        "print('stopped', gc.get_freeze_count())\n"
    )
    ended, out, err = run_program(code, archive)
    # Python frees no frozen object at its end, of which Triton's classes complain line by line.
    assert (ended, out.strip()) == (0, "stopped 0"), err
