"""Admission: calls that the queue has no place for are refused before their message is read, all others pass."""

from __future__ import annotations

import json
import math
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2

from recinfer.errors import OverloadedError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.engine import scheduler
from recinfer.serving.engine.registry import RequestStats
from recinfer.serving.server.grpc_core import Admission, CoreServer
from recinfer.serving.server.open_inference_grpc import SERVICE_NAME as OPEN_INFERENCE
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.telemetry.observe import Observer
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import BatchConfig
from tests.serving.conftest import make_request
from tests.waiting import until

PREDICT, LOOKUP = f"/{SERVICE_NAME}/Predict", f"/{SERVICE_NAME}/Lookup"
LONG = 60.0


class Held:
    """A server of one thread whose merged runs wait until the test lets them go on; its queue takes two requests."""

    def __init__(self, server: Server, channel: grpc.Channel, begun: threading.Event, go_on: threading.Event) -> None:
        self.server, self.begun, self.go_on = server, begun, go_on
        self.call = {path: channel.unary_unary(path) for path in (PREDICT, LOOKUP)}
        self.channel = channel

    def fill(self) -> list[grpc.Future]:
        """Send requests until the worker and the queue are full."""
        futures = [self.call[PREDICT].future(small(), timeout=LONG)]
        assert self.begun.wait(LONG)
        futures += [self.call[PREDICT].future(small(), timeout=LONG) for _ in range(2)]
        until(lambda: self.server.scheduler is not None and self.server.scheduler.state.waiting == 2)
        return futures


def small() -> bytes:
    return codec.encode_predict_request(*make_request(1, 2))


@contextmanager
def held(
    predictor: Predictor,
    monkeypatch: pytest.MonkeyPatch,
    security: Security | None = None,
    http_port: int | None = None,
) -> Iterator[Held]:
    begun, go_on = threading.Event(), threading.Event()
    ordinary = type(predictor).run_engine_arrays

    def slow(*args: object, **how: object) -> object:
        begun.set()
        assert go_on.wait(LONG)
        return ordinary(*args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(type(predictor), "run_engine_arrays", slow)
    config = BatchConfig(max_queue=2)
    with (
        Server({"tiny": predictor}, threads=1, batching=config, security=security, http_port=http_port) as server,
        grpc.insecure_channel(server.target) as channel,
    ):
        server.service.registry.get().run_cost.learn(1, LONG)  # its runs are long: they are for the one worker
        try:
            yield Held(server, channel, begun, go_on)
        finally:
            go_on.set()


def refused(call: grpc.UnaryUnaryMultiCallable, data: bytes, **how: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(data, timeout=LONG, **how)
    return caught.value


def test_full_queue_refuses_before_the_message_is_read(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        read: list[str] = []
        engine = server.server._dispatcher
        ordinary = engine.dispatch
        monkeypatch.setattr(engine, "dispatch", lambda request: read.append(request.call) or ordinary(request))
        error = refused(server.call[PREDICT], b"no message at all")
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details().startswith("the server has 2 requests waiting, its limit; try again in ")
        trailing = dict(error.trailing_metadata())
        assert int(trailing["grpc-retry-pushback-ms"]) > 0
        assert b"google.rpc.RetryInfo" in trailing["grpc-status-details-bin"]
        assert not read
        assert server.server.stats.requests()["Predict", "RESOURCE_EXHAUSTED"] == 1
        assert "Predict" not in server.server.stats.latency()  # nothing was answered yet
        assert server.server.scheduler.state.refused == 1
        del futures


def test_over_http_a_header_says_when_to_try_again(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
    inputs = [
        {"name": key, "datatype": "INT64", "shape": [1], "data": [1]} for key in ("user", "item", "history", "shop")
    ]
    inputs.append({"name": "dense", "datatype": "FP32", "shape": [1, 3], "data": [0.0, 0.0, 0.0]})
    body = json.dumps({"inputs": inputs}).encode()

    def ask() -> tuple[int, str | None, dict[str, object]]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/tiny/infer", body, timeout=LONG) as answer:
                return answer.status, answer.headers["Retry-After"], json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, error.headers["Retry-After"], json.loads(error.read())

    with held(predictor, monkeypatch, http_port=0) as server:
        port, waiting = server.server.http_port, server.server.scheduler.queue
        futures = server.fill()
        for seconds_a_request, said in ((1e-3, "1"), (0.5, "1"), (1.2, "3")):
            waiting._seconds_a_request, waiting._last = seconds_a_request, scheduler._NONE_YET  # two wait
            status, header, answer = ask()
            assert (status, header) == (429, said), answer
            assert "try again in" in str(answer["error"])
        server.go_on.set()
        for future in futures:
            future.result()
        assert ask()[:2] == (200, None)


def test_calls_that_do_not_wait_are_admitted(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        lookup = codec.encode_lookup_request(make_request(1, 2)[1])
        assert server.call[LOOKUP](lookup, timeout=LONG)
        health = server.channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = health(health_pb2.HealthCheckRequest().SerializeToString(), timeout=LONG)
        assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING
        assert server.channel.unary_unary(f"/{SERVICE_NAME}/GetModel")(b"", timeout=LONG)
        assert server.channel.unary_unary(f"/{OPEN_INFERENCE}/ServerLive")(b"", timeout=LONG)
        assert refused(server.channel.unary_unary("/no.Such/Method"), b"").code() is grpc.StatusCode.UNIMPLEMENTED
        del futures


def test_admitted_requests_are_answered_and_free_their_places(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        for _ in range(20):
            assert refused(server.call[PREDICT], small()).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        futures.pop().cancel()
        until(lambda: server.server.scheduler.state.waiting == 1)
        futures.append(server.call[PREDICT].future(small(), timeout=LONG))
        until(lambda: server.server.scheduler.state.waiting == 2)
        server.go_on.set()
        answers = [future.result(LONG) for future in futures]
    assert len(answers) == 3 and all(answers)


def test_missing_token_is_reported_before_a_full_queue(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    with held(predictor, monkeypatch, Security(token="secret-of-sixteen")) as server:
        right = (("authorization", "Bearer secret-of-sixteen"),)
        for path in (PREDICT, LOOKUP):
            call = server.channel.unary_unary(path)
            server.call[path] = _with(call, right)  # type: ignore[assignment]
        futures = server.fill()
        bare = server.channel.unary_unary(PREDICT)
        assert refused(bare, small()).code() is grpc.StatusCode.UNAUTHENTICATED
        assert refused(bare, small(), metadata=right).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        del futures


class _with:
    """A call that always sends the same metadata."""

    def __init__(self, call: grpc.UnaryUnaryMultiCallable, metadata: tuple[tuple[str, str], ...]) -> None:
        self._call, self._metadata = call, metadata

    def future(self, data: bytes, timeout: float) -> grpc.Future:
        return self._call.future(data, timeout=timeout, metadata=self._metadata)


def test_client_retries_after_the_time_that_the_server_says(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    with held(predictor, monkeypatch) as server:
        futures = server.fill()
        with InferenceClient(server.server.target, timeout=LONG, retries=10_000) as client:
            answers: list[object] = []
            asking = threading.Thread(target=lambda: answers.append(client.predict(*make_request(2, 1))))
            asking.start()
            until(lambda: server.server.scheduler.state.refused >= 2)
            futures.pop().cancel()
            futures.pop().cancel()
            until(lambda: server.server.scheduler.state.waiting == 1)  # its second try, or a later one
            assert not answers
            server.go_on.set()
            asking.join(LONG)
            assert len(answers) == 1


class _Queue:
    """Admits only requests without a deadline."""

    def refused(self, deadline: float) -> OverloadedError | None:
        return None if deadline == math.inf else OverloadedError("full", retry_after=0.25)


def test_only_methods_that_would_wait_are_refused_for_a_full_queue():
    async def main() -> list[object]:
        server = CoreServer([], Admission(Security(), Observer(RequestStats()), _Queue(), {"/a.B/C": "C"}).admit)

        async def echo(data: bytes, _: object) -> bytes:
            return data

        method = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", {"C": method, "D": method}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        found: list[object] = []
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for path, timeout in (("/a.B/C", None), ("/a.B/D", LONG), ("/a.B/C", LONG)):
                try:
                    found.append(await channel.unary_unary(path)(b"x", timeout=timeout))
                except grpc.aio.AioRpcError as error:
                    found.append((error.code().name, error.details()))
        await server.stop(None)
        return found

    from recinfer.serving.wire.loop import run_on_loop

    answers = run_on_loop(main(), timeout=LONG)
    assert answers == [b"x", b"x", ("RESOURCE_EXHAUSTED", "full")]
