"""gRPC calls under the memory budget: half a message, answers that nobody reads, health without a token, large requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from recinfer.cli.serve_options import LimitOptions
from recinfer.errors import ConfigError, OverloadedError
from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.memory_budget import SMALL_BYTES, Ticket
from recinfer.serving.server import grpc_call, grpc_core
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.shard_server import ShardServer
from recinfer.serving.shards.messages import SERVICE_NAME as SHARD_SERVICE
from recinfer.serving.shards.tables import ShardTables
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import open_inference_pb2 as pb
from tests.serving.conftest import make_request
from tests.serving.raw_http2 import RawHttp2, message
from tests.waiting import until

MIB = 1 << 20
BUDGET, MOST = 32 * MIB, 8 * MIB
LARGE = BUDGET - BUDGET // 8  # what large calls may hold
LOOKUP, PREDICT = f"/{SERVICE_NAME}/Lookup", f"/{SERVICE_NAME}/Predict"
CHECK = "/grpc.health.v1.Health/Check"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
INFER = "/inference.GRPCInferenceService/ModelInfer"
TOKEN = "a-token-of-24-characters"
HALF = message(bytes(1000), MOST)


@pytest.fixture
def server(predictor: Predictor) -> Iterator[Server]:
    """A server whose budget is of 32 MiB; all of it is free again at the end of each test."""
    with Server({"tiny": predictor}, limits=Limits(max_message_bytes=MOST, memory_budget_bytes=BUDGET)) as running:
        yield running
        until(lambda: running.budget.held == 0)


def lookup(samples: int = 1) -> bytes:
    return codec.encode_lookup_request(make_request(0, samples)[1])


def ask(server: Server, data: bytes, path: str = LOOKUP, **more: Any) -> bytes:
    with grpc.insecure_channel(server.target) as channel:
        answer: bytes = channel.unary_unary(path)(data, timeout=60, **more)
        return answer


def count(server: Server, code: str, call: str = "Lookup") -> int:
    return server.stats.requests().get((call, code), 0)


def test_half_messages_count_as_the_largest_and_no_more_of_them_fit(server: Server):
    with RawHttp2(server.port) as raw:
        for _ in range(5):
            raw.call(LOOKUP, HALF)
        raw.until_ended(5 - LARGE // MOST)
        assert server.budget.held == LARGE // MOST * MOST
        assert count(server, "RESOURCE_EXHAUSTED") == len(raw.ended) == 2
        assert ask(server, lookup())  # others are answered
        raw.call(LOOKUP, message(lookup()), end=True)  # on the same connection too
        raw.until_ended(3)


def test_half_message_is_answered_once_it_is_complete(server: Server):
    data = message(lookup())
    with RawHttp2(server.port) as raw:
        stream = raw.call(LOOKUP, data[:-1])
        until(lambda: server.budget.held == MOST)
        raw.send(stream, data[-1:], end=True)
        raw.until_ended(1)
        assert raw.received[stream] > 100
    assert count(server, "OK") == 1


def test_a_message_that_never_comes_is_given_up(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_core, "_RECEIVE_S", 0.2)
    with Server({"tiny": predictor}) as server, RawHttp2(server.port) as raw:
        raw.call(LOOKUP, HALF)
        raw.call(LOOKUP)
        raw.until_ended(2)
        assert count(server, "DEADLINE_EXCEEDED") == 2
        until(lambda: server.budget.held == 0)


def test_half_sent_health_calls_are_ended_and_others_are_answered(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grpc_core, "_OPEN_RECEIVE_S", 1e9)
    with Server({"tiny": predictor}, security=Security(token=TOKEN)) as server, RawHttp2(server.port) as raw:
        for _ in range(40):
            raw.call(CHECK, message(bytes(1000), 64 * MIB))
        raw.until_ended(38)
        assert server.budget.held == 0  # callers with a token have the whole budget
        with grpc.insecure_channel(server.target) as channel:
            found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
            assert found.status == health_pb2.HealthCheckResponse.SERVING
        assert len(raw.ended) == 38


def test_a_health_call_without_a_message_is_given_up(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_core, "_OPEN_RECEIVE_S", 0.2)
    with Server({"tiny": predictor}) as server, RawHttp2(server.port) as raw:
        raw.call(CHECK, HALF)
        raw.call(REFLECTION)
        raw.until_ended(2)


@pytest.mark.parametrize("path", [CHECK, REFLECTION])
def test_health_and_reflection_take_small_messages(server: Server, path: str):
    with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as refused:
        list(channel.stream_stream(path)(iter([bytes(65 << 10)]), timeout=60))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "expected at most 65536" in refused.value.details()


def describe() -> bytes:
    """Asks reflection for a file of some kilobytes."""
    return reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME).SerializeToString()


def test_open_reflection_calls_are_bounded_in_number(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_core, "_MOST_STREAMS", 4, raising=False)
    with RawHttp2(server.port, window=0) as raw:
        for _ in range(10):
            raw.call(REFLECTION, message(describe()), end=True)
        raw.until_ended(6)
        raw.settle()
        assert len(raw.ended) == 6  # four answers that nobody reads are held, and no more
        assert ask(server, b"", CHECK) == b"\x08\x01"
        assert count(server, "RESOURCE_EXHAUSTED", "other") == 6
        monkeypatch.setattr(grpc_call, "_SENT_S", 0.0)
        raw.until_ended(10)


def test_a_stream_of_answers_that_nobody_reads_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc_call, "_SENT_S", 0.2)
    with RawHttp2(server.port, window=0) as raw:
        raw.call(REFLECTION, 100 * message(describe()))  # more than gRPC takes before it waits for its caller
        raw.until_ended(1)


@pytest.mark.parametrize("path", [LOOKUP, CHECK])
def test_compressed_messages_are_refused_and_the_error_says_so(server: Server, path: str):
    with pytest.raises(grpc.RpcError) as refused:
        ask(server, bytes(1000), path, compression=grpc.Compression.Gzip)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "gzip" in refused.value.details()


def test_answers_that_nobody_reads_are_bounded_and_given_up(server: Server, monkeypatch: pytest.MonkeyPatch):
    data = lookup(16_000)
    size = len(ask(server, data))
    assert SMALL_BYTES < size < 4 * MIB
    with RawHttp2(server.port, window=0) as raw:
        for _ in range(40):
            raw.call(LOOKUP, message(data), end=True)
            assert server.budget.held <= BUDGET + 3 * len(data) + 2 * size  # one call may exceed the budget
        until(lambda: count(server, "OK") + count(server, "RESOURCE_EXHAUSTED") == 41)
        held = count(server, "OK") - 1
        assert 2 <= held <= LARGE // size + 1
        until(lambda: server.budget.held == held * size)  # what was refused is let go when gRPC has sent its status
        raw.until_ended(40 - held)
        assert ask(server, lookup())
        monkeypatch.setattr(grpc_call, "_SENT_S", 0.0)
        raw.until_ended(40)  # the connection stays open for other calls
        until(lambda: server.budget.held == 0)


def test_an_answer_counts_until_it_was_taken(server: Server):
    data = lookup(16_000)
    size = len(ask(server, data))
    with RawHttp2(server.port, window=0) as raw:
        stream = raw.call(LOOKUP, message(data), end=True)
        until(lambda: count(server, "OK") == 2)
        assert server.budget.held == size
        raw.grant(stream, size + 100)
        raw.until_ended(1)
        assert raw.received[stream] == size + 5


def test_disconnected_caller_frees_its_memory_budget(server: Server):
    data = lookup(16_000)
    with RawHttp2(server.port, window=0) as raw:
        raw.call(LOOKUP, message(data), end=True)
        raw.call(LOOKUP, HALF)
        until(lambda: server.budget.held > MOST)
    until(lambda: server.budget.held == 0)


@pytest.mark.parametrize("method", ["Lookup", "ModelInfer"])
def test_refused_call_gets_a_time_to_retry(server: Server, method: str, monkeypatch: pytest.MonkeyPatch):
    path = LOOKUP if method == "Lookup" else INFER
    with RawHttp2(server.port) as raw:
        for _ in range(LARGE // MOST):
            raw.call(LOOKUP, HALF)
        until(lambda: server.budget.held == LARGE // MOST * MOST)
        with pytest.raises(grpc.RpcError) as refused:
            ask(server, bytes(5 * MIB), path)
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "memory budget" in refused.value.details()
    assert "grpc-retry-pushback-ms" in dict(refused.value.trailing_metadata())
    until(lambda: count(server, "RESOURCE_EXHAUSTED", method) == 1)


def infer() -> bytes:
    """A ModelInferRequest with typed contents."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="user", datatype="INT64", shape=[10_000])
    tensor.contents.int64_contents.extend([3] * 10_000)
    method = pb.InferParameter(string_param="lookup")
    return pb.ModelInferRequest(model_name="tiny", inputs=[tensor], parameters={"method": method}).SerializeToString()


def predict() -> bytes:
    dense, features = make_request(0, 4000)
    return codec.encode_predict_request(dense, features)


UNKNOWN_FIELD = b"\xa0\x06\x01"  # with which a request is not plain
PLACES = {"plain": (PREDICT, 1), "decoded": (LOOKUP, 2), "Open Inference": (INFER, 5)}


@pytest.mark.parametrize(("kind", "place"), [(kind, n) for kind, (_, last) in PLACES.items() for n in range(last + 1)])
def test_wherever_a_request_grows_beyond_the_budget_it_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, kind: str, place: int
):
    """A refusal at each place where the request grows; place 0 is none of them, and then all places are passed."""
    path, last = PLACES[kind]
    data = {"plain": predict, "decoded": lambda: lookup(4000) + UNKNOWN_FIELD, "Open Inference": infer}[kind]()
    grow, met = Ticket.grow_to_answer, 0

    def failing(self: Ticket, num_bytes: int) -> None:
        nonlocal met
        met += 1
        if met == place:
            raise OverloadedError("full", retry_after=0.1)
        grow(self, num_bytes)

    monkeypatch.setattr(Ticket, "grow_to_answer", failing)
    if place:
        with pytest.raises(grpc.RpcError) as refused:
            ask(server, data, path)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    else:
        assert ask(server, data, path)
        assert met == last
    until(lambda: server.budget.held == 0)


def test_a_shard_server_has_a_budget_too():
    limits = Limits(max_message_bytes=MOST, memory_budget_bytes=BUDGET)
    with ShardServer(ShardTables([0]), limits=limits) as server, RawHttp2(server.port) as raw:
        for _ in range(5):
            raw.call(f"/{SHARD_SERVICE}/Prepare", HALF)
        raw.until_ended(2)
        assert server.status()["memory"] == {"budget": BUDGET, "held": LARGE // MOST * MOST, "refused": 2}
        raw.close()
        until(lambda: server.budget.held == 0)


def test_the_option_is_in_mebibytes():
    assert LimitOptions().config().memory_budget_bytes == Limits().memory_budget_bytes == 256 * MIB
    assert LimitOptions(memory_budget_mib=8192).config().memory_budget_bytes == 8 << 30
    with pytest.raises(ConfigError, match="memory_budget_bytes"):
        Limits(memory_budget_bytes=0)
