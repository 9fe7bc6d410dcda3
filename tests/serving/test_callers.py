"""What browsers, proxies and tools expect of the ports: CORS, request ids, gzip, reflection v1, a Unix socket, the root path."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection_pb2

from recinfer.errors import ConfigError, UnavailableError
from recinfer.inference.predictor import Predictor
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.config import AddressConfig, ModelsConfig, RoleConfig, ServeConfig
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import SERVICE_NAME, Server
from recinfer.serving.server.telemetry.observe import RequestIds
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.wire.unix_socket import SocketFile
from tests.serving.conftest import make_request
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
from recinfer.serving.server.compression import accepts_gzip

TOKEN = "a-token-of-some-length"
SHOP, OTHER = "https://shop.example", "https://other.example"
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def server(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With a token, one allowed origin and a Unix socket."""
    with Server(
        {"tiny": predictor},
        http_port=0,
        metrics_port=0,
        security=Security(token=TOKEN),
        cors_origins=(SHOP,),
        unix_socket=tmp_path_factory.mktemp("socket") / "grpc.sock",
    ) as running:
        yield running


def ask(
    server: Server, method: str, path: str, body: bytes | None = None, port: int | None = None, **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of one request; underscores in the names of headers are hyphens."""
    connection = http.client.HTTPConnection("127.0.0.1", port or server.http_port, timeout=60)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def infer(samples: int) -> bytes:
    """A lookup of one feature."""
    user = {"name": "user", "datatype": "INT64", "shape": [samples], "data": [1] * samples}
    return json.dumps({"inputs": [user], "parameters": {"method": "lookup"}}).encode()


INFER = "/v2/models/tiny/infer"


# -- CORS


def test_a_preflight_needs_no_token(server: Server):
    wanted = {"Access_Control_Request_Method": "POST", "Access_Control_Request_Headers": "authorization, content-type"}
    status, headers, body = ask(server, "OPTIONS", INFER, Origin=SHOP, **wanted)
    assert (status, body, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (204, b"", SHOP, "Origin")
    assert headers["Access-Control-Allow-Methods"] == "POST"
    assert headers["Access-Control-Allow-Headers"] == "authorization, content-type"
    assert "GET" in ask(server, "OPTIONS", "/v1/models", Origin=SHOP, **wanted)[1]["Access-Control-Allow-Methods"]
    status, headers, body = ask(server, "OPTIONS", INFER, Origin=OTHER, **wanted)
    assert (status, headers["Access-Control-Allow-Origin"]) == (403, None) and b"--cors-origin" in body
    assert ask(server, "OPTIONS", "/nothing", Origin=SHOP, **wanted)[0] == 404
    assert ask(server, "OPTIONS", INFER, Origin=SHOP)[0] == 405  # no preflight


def test_answers_and_errors_name_the_allowed_origin(server: Server):
    for status, headers, _ in (
        ask(server, "POST", INFER, infer(1), Origin=SHOP, **BEARER),
        ask(server, "POST", INFER, b"{", Origin=SHOP, **BEARER),
        ask(server, "POST", INFER, infer(1), Origin=SHOP),
        ask(server, "GET", "/nothing", Origin=SHOP),
    ):
        assert headers["Access-Control-Allow-Origin"] == SHOP, status
        assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]
    assert "Access-Control-Allow-Origin" not in ask(server, "POST", INFER, infer(1), Origin=OTHER, **BEARER)[1]


def test_cors_is_off_by_default_and_may_be_open_to_all(predictor: Predictor):
    wanted = {"Access_Control_Request_Method": "POST"}
    for origins, preflight, allowed in (((), 405, None), (("*",), 204, "*")):
        with Server({"tiny": predictor}, http_port=0, cors_origins=origins) as server:
            assert ask(server, "OPTIONS", INFER, Origin=OTHER, **wanted)[0] == preflight
            headers = ask(server, "POST", INFER, infer(1), Origin=OTHER)[1]
            assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (allowed, None)


@pytest.mark.parametrize("origin", ["shop.example", "https://shop.example/", "https://a b", "null", ""])
def test_an_origin_has_a_scheme_and_no_path(origin: str):
    with pytest.raises(ConfigError, match=r"--cors-origin: got .*expected an origin such as"):
        AddressConfig(http_port=0, cors_origins=(origin,))


def test_settings_that_do_not_go_together(tmp_path: Path):
    assert AddressConfig(http_port=0, cors_origins=("HTTPS://Shop.example",)).cors_origins == (SHOP,)
    with pytest.raises(ConfigError, match=r"--cors-origin .* give --http-port too"):
        AddressConfig(cors_origins=(SHOP,))
    at = AddressConfig(unix_socket=tmp_path / "a.sock")
    with pytest.raises(ConfigError, match="--unix-socket with --workers 2"):
        ServeConfig(address=at, models=ModelsConfig(workers=2))
    with pytest.raises(ConfigError, match="--unix-socket with --ranks"):
        ServeConfig(address=at, role=RoleConfig(ranks=(0,)))
    with pytest.raises(ConfigError, match=r"--unix-socket: got a path of .* bytes, expected at most"):
        AddressConfig(unix_socket=tmp_path / ("a" * 120))
    for options in ({"drain_seconds": -1.0}, {"idle_seconds": 0.0}, {"drain_seconds": float("nan")}):
        with pytest.raises(ConfigError, match="-seconds: got"):
            AddressConfig(**options)
    assert ServeConfig.from_json(ServeConfig(address=at).to_json()).address == at


# -- ids of requests


def metadata_of(server: Server, call: str, data: bytes = b"", **sent: str) -> dict[str, str]:
    """The trailing metadata of one call's answer or error."""
    with grpc.insecure_channel(server.target) as channel:
        metadata = [(key.replace("_", "-"), value) for key, value in sent.items()]
        try:
            _, done = channel.unary_unary(call).with_call(data, metadata=metadata, timeout=60)
        except grpc.RpcError as error:
            done = error
        return dict(done.trailing_metadata())


@pytest.mark.parametrize("given", ["abc-1", "a" * 128])
def test_grpc_returns_the_callers_id(server: Server, given: str):
    calls = [(f"/{SERVICE_NAME}/{call}", data) for call in ("GetModel", "Lookup") for data in (b"", b"\xff")]
    calls += [(f"/{SERVICE_NAME}/Nothing", b""), ("/grpc.health.v1.Health/Check", b"")]
    for call, data in calls:
        for token in ({"authorization": f"Bearer {TOKEN}"}, {}):
            assert metadata_of(server, call, data, x_request_id=given, **token)["x-request-id"] == given, call


def test_an_answer_without_a_sound_id_gets_a_new_one(server: Server):
    new = [
        metadata_of(server, f"/{SERVICE_NAME}/GetModel", **sent)["x-request-id"]
        for sent in ({}, {"x_request_id": "a" * 129})
    ]
    new += [ask(server, "GET", "/v1/models", **sent)[1]["X-Request-Id"] for sent in ({}, {"x_request_id": "a" * 129})]
    assert {len(found) for found in new} == {32} and len(set(new)) == 4


def test_http_returns_the_callers_id(server: Server):
    for method, path, body, headers in (
        ("POST", INFER, infer(1), BEARER),
        ("POST", INFER, b"{", BEARER),
        ("POST", INFER, infer(1), {}),
        ("GET", INFER, None, {}),
        ("GET", "/nothing", None, {}),
        ("GET", "/", None, {}),
        ("POST", INFER, b"", {"Expect": "200-ok"}),
    ):
        assert ask(server, method, path, body, x_request_id="abc-1", **headers)[1]["X-Request-Id"] == "abc-1", path


def test_a_request_that_cannot_be_read_gets_an_id_too(server: Server):
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(b"nothing\r\n\r\n")
        assert b"x-request-id: " in connection.recv(1 << 16).lower()


def test_ids_that_no_header_can_hold_are_replaced():
    ids = RequestIds()
    assert ids.of("a b") == "a b"
    for given in (None, "", b"abc", "a" * 129, "ä", "a\n", " a"):
        assert len(ids.of(given)) == 32
    assert ids.in_metadata([("a", "b")])[1][1][0] == "x-request-id"


# -- gzip


def test_large_answers_are_packed_where_the_caller_accepts_that(server: Server):
    plain = ask(server, "POST", INFER, infer(500), **BEARER)
    status, headers, body = ask(server, "POST", INFER, infer(500), Accept_Encoding="br, gzip;q=0.5", **BEARER)
    assert (status, headers["Content-Encoding"], headers["Content-Type"]) == (200, "gzip", plain[1]["Content-Type"])
    assert len(body) < len(plain[2]) / 2 and gzip.decompress(body) == plain[2]
    assert plain[1]["Content-Encoding"] is None and "Accept-Encoding" in plain[1].get_all("Vary")
    assert ask(server, "POST", INFER, infer(1), Accept_Encoding="gzip", **BEARER)[1]["Content-Encoding"] is None
    metrics = ask(server, "GET", "/metrics", port=server.metrics_port, Accept_Encoding="gzip", **BEARER)
    assert metrics[1]["Content-Encoding"] == "gzip" and b"recinfer_workers 1" in gzip.decompress(metrics[2])


def test_accept_encoding_is_read_as_http_says():
    taken = ["gzip", "GZIP", "br, gzip", "gzip;q=0.1", "*", "identity;q=0, *", "x-gzip"]
    refused = ["", "br", "gzip;q=0", "gzip;q=0.0, *", "*;q=0", "gzip;q=0..1", "identity"]
    assert [accepts_gzip(header) for header in taken + refused] == [True] * len(taken) + [False] * len(refused)


# -- the root path


def test_the_root_says_alive_and_sends_browsers_to_the_docs(server: Server):
    status, _, body = ask(server, "GET", "/", Accept="*/*")
    assert (status, json.loads(body)) == (200, {"status": "alive"})
    status, headers, _ = ask(server, "GET", "/", Accept="text/html,application/xhtml+xml;q=0.9,*/*;q=0.8")
    assert (status, headers["Location"]) == (302, "docs")
    assert ask(server, "HEAD", "/")[0] == 200


# -- reflection


def test_reflection_v1_lists_and_describes_itself(server: Server):
    v1 = "grpc.reflection.v1.ServerReflection"
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(reflection_pb2.ServerReflectionRequest(file_containing_symbol=name) for name in (v1, SERVICE_NAME)),
    ]
    with grpc.insecure_channel(server.target) as channel:
        answers = channel.stream_stream(f"/{v1}/ServerReflectionInfo")(
            iter([one.SerializeToString() for one in asked]),
            metadata=[("authorization", f"Bearer {TOKEN}")],
            timeout=60,
        )
        listed, itself, inference = map(reflection_pb2.ServerReflectionResponse.FromString, answers)
    names = {service.name for service in listed.list_services_response.service}
    assert {v1, v1.replace("v1", "v1alpha"), SERVICE_NAME} <= names
    file = FileDescriptorProto.FromString(itself.file_descriptor_response.file_descriptor_proto[0])
    assert (file.name, file.package) == ("grpc/reflection/v1/reflection.proto", "grpc.reflection.v1")
    assert file.service[0].method[0].input_type == ".grpc.reflection.v1.ServerReflectionRequest"
    assert "v1alpha" not in str(file)
    assert inference.file_descriptor_response.file_descriptor_proto


# -- a Unix socket


def path_of(server: Server) -> Path:
    assert server._socket_file is not None
    return server._socket_file._path


def test_clients_call_the_unix_socket(server: Server):
    path = path_of(server)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660 and os.listdir(path.parent) == [path.name]
    _, features = make_request(1, 2)
    with InferenceClient(f"unix:{path}", token=TOKEN, timeout=60) as client:
        assert client.is_ready()
        found = client.lookup(features)
    with InferenceClient(server.target, token=TOKEN, timeout=60) as client:
        expected = client.lookup(features)
    assert found.keys() == expected.keys() and all((found[key] == expected[key]).all() for key in list(expected.keys()))

    async def without_token() -> None:
        async with AsyncInferenceClient(f"unix:{path}", timeout=60) as client:
            await client.lookup(features)

    with pytest.raises(Exception, match="needs a token"):
        run_on_loop(without_token(), timeout=60)


def test_a_live_socket_is_refused_and_a_stale_one_replaced(server: Server, predictor: Predictor, tmp_path: Path):
    with pytest.raises(UnavailableError, match="another server listens there"):
        Server({"tiny": predictor}, unix_socket=path_of(server)).start()
    assert path_of(server).exists()
    stale = tmp_path / "stale.sock"
    with socket.socket(socket.AF_UNIX) as ended:
        ended.bind(str(stale))
    with (
        Server({"tiny": predictor}, unix_socket=stale) as second,
        InferenceClient(f"unix:{stale}", timeout=60) as client,
    ):
        assert client.get_model().name == "tiny"
        assert second.port
    assert not stale.exists()
    (tmp_path / "file").write_text("kept")
    with pytest.raises(UnavailableError, match="the file is no socket"):
        SocketFile(tmp_path / "file").listen(lambda address: 1)
    with pytest.raises(UnavailableError, match="cannot listen on unix:"):
        Server({"tiny": predictor}, unix_socket=tmp_path / "nowhere" / "a.sock").start()


def test_a_socket_that_another_server_has_replaced_stays(tmp_path: Path):
    path, sockets = tmp_path / "a.sock", [socket.socket(socket.AF_UNIX) for _ in range(2)]
    files = []
    for own in sockets:
        file = SocketFile(path)
        file.listen(
            lambda address, own=own: own.bind(address.removeprefix("unix:")) or 1
        )  # bound, and not listening: stale
        files.append(file)
    files[0].remove()
    assert path.exists()
    files[1].remove()
    assert not path.exists()
    for own in sockets:
        own.close()


# -- draining and idle connections


def test_idle_connections_are_closed(predictor: Predictor):
    with Server({"tiny": predictor}, http_port=0, idle_s=0.2) as server:
        states: list[Any] = []
        seen = threading.Event()

        def changed(state: Any) -> None:
            states.append(state)
            if state is grpc.ChannelConnectivity.IDLE and grpc.ChannelConnectivity.READY in states:
                seen.set()

        with grpc.insecure_channel(server.target) as channel:
            channel.subscribe(changed)
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
            assert seen.wait(60)  # the server closed it
            channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)  # a new connection, unnoticed
        with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            while connection.recv(1 << 16):
                pass  # ends when the server closes the connection


def test_stop_drains_for_the_time_of_the_setting(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    given: list[float] = []
    server = Server({"tiny": predictor}, drain_s=3.5).start()
    stop = server._stop

    async def noted(grace: float) -> None:
        given.append(grace)
        await stop(grace)

    monkeypatch.setattr(server, "_stop", noted)
    server.stop()
    assert given == [3.5]
    until(lambda: server.is_ready() is False)
