"""What HTTP refuses before any route sees it: in JSON, logged, counted, with stated limits; and answers while a server stops."""

from __future__ import annotations

import http.client
import json
import logging
import select
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recinfer.inference.predictor import Predictor
from recinfer.serving.server.server import Server
from tests.serving.test_batching import hold
from tests.waiting import until
from tests.warm import RECINFER, Program

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")
from recinfer.serving.server.http_site import MOST_HEAD_BYTES, MOST_HEADS_BYTES

LIVE = "/v2/health/live"
_USER = {"name": "user", "datatype": "INT64", "shape": [2], "data": [3, 7]}
LOOKUP = json.dumps({"inputs": [_USER], "outputs": [{"name": "user.embedding"}]}).encode()
SECRET = b"a-token-that-no-log-may-have"


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Server]:
    with Server({"tiny": predictor}, http_port=0, metrics_port=0) as running:
        yield running


def counted(server: Server) -> Counter[tuple[str, str]]:
    """Requests by call and code, from the server's metrics."""
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics_port or 0, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    found: Counter[tuple[str, str]] = Counter()
    for line in lines:
        if line.startswith("recinfer_requests_total{"):
            labels, _, number = line.partition("{")[2].partition("} ")
            pairs = dict(pair.split("=") for pair in labels.split(","))
            found[pairs["method"].strip('"'), pairs["code"].strip('"')] += int(float(number))
    return found


def answer_of(port: int | None, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to ``data``, after which the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port or 0), timeout=60) as connection:
        connection.sendall(data)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        body = answer.read()
        assert answer.will_close and connection.recv(1) == b""
        return answer.status, dict(answer.getheaders()), body


def request(head: bytes = b"", method: bytes = b"GET", path: bytes = LIVE.encode(), version: bytes = b"1.1") -> bytes:
    """A request without a body, with ``head`` among its headers."""
    return b"%s %s HTTP/%s\r\nHost: x\r\nConnection: close\r\n%s\r\n" % (method, path, version, head)


def long_path(size: int) -> bytes:
    return LIVE.encode() + b"?" + b"a" * (size - len(LIVE) - 1)


@pytest.mark.parametrize("what", ["header", "path"])
def test_up_to_the_limit_a_head_is_taken_and_a_byte_more_is_an_error(server: Server, what: str):
    def asked(size: int) -> tuple[int, dict[str, str], bytes]:
        if what == "path":
            return answer_of(server.http_port, request(path=long_path(size)))
        return answer_of(server.http_port, request(b"X-Long: %s\r\n" % (b"a" * size)))

    assert MOST_HEAD_BYTES == 32 << 10  # as docs/reference/rest.md says
    assert [asked(size)[0] for size in (15_000, MOST_HEAD_BYTES)] == [200, 200]
    status, _, body = asked(MOST_HEAD_BYTES + 1)
    assert (status, f"at most {MOST_HEAD_BYTES} bytes each" in json.loads(body)["error"]) == (431, True)


POST = {"method": b"POST", "path": b"/v2/models/tiny/infer"}
UNREADABLE: dict[str, tuple[bytes, int, str]] = {
    "long header": (request(b"Cookie: %s%s\r\n" % (SECRET, b"a" * MOST_HEAD_BYTES)), 431, "too long"),
    "long headers": (request(b"".join(b"X-%d: %s\r\n" % (n, b"a" * 30_000) for n in range(5))), 431, "bytes in all"),
    "long path": (request(path=long_path(MOST_HEAD_BYTES + 1)), 431, "too long"),
    "many headers": (request(b"".join(b"X-%d: a\r\n" % n for n in range(200))), 400, "Too many headers"),
    "no length": (request(b"Content-Length: x\r\n", **POST), 400, "Content-Length"),
    "negative length": (request(b"Content-Length: -1\r\n", **POST), 400, "Content-Length"),
    "two lengths": (request(b"Content-Length: 5\r\nContent-Length: 6\r\n", **POST), 400, "Content-Length"),
    "huge length": (request(b"Content-Length: 99999999999999999999999\r\n", **POST), 400, "Content-Length"),
    "length and chunks": (
        request(b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", **POST),
        400,
        "Transfer-Encoding",
    ),
    "no chunk": (request(b"Transfer-Encoding: chunked\r\n", **POST) + b"zz\r\n", 400, "chunk"),
    "expects": (request(b"Expect: cookies\r\nContent-Length: 0\r\n", **POST), 417, "Expect: got 'cookies'"),
    "a GET expects": (request(b"Expect: cookies\r\n"), 417, "Expect: got 'cookies'"),
    "expects where there is nothing": (request(b"Expect: cookies\r\n", path=b"/v2/nothing"), 417, "Expect"),
    "expects of another method": (request(b"Expect: cookies\r\n", method=b"DELETE"), 417, "Expect"),
    "gRPC": (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        400,
        "got HTTP/2, expected HTTP/1.1; gRPC calls go to the port of --port",
    ),
    "another method": (request(method=b"FOO"), 400, "(Invalid method encountered), expected a request such as GET"),
    "no method": (b"junk\r\n\r\n", 400, "method"),
    "no path": (b"GET\r\n\r\n", 400, "method"),
    "no version": (request(version=b"9.1"), 400, "HTTP version"),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400, "Host"),
    "no header": (request(b"bad header\r\n"), 400, "header"),
    "a header with a zero": (request(b"Authorization: Bearer %s\0\r\n" % SECRET), 400, "header"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100), 400, "got TLS (https), expected plain HTTP"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_what_no_route_sees_is_an_error_in_json_that_is_logged_and_counted(
    case: str, server: Server, caplog: pytest.LogCaptureFixture
):
    data, expected, words = UNREADABLE[case]
    before = counted(server)
    with caplog.at_level(logging.INFO):
        status, headers, body = answer_of(server.http_port, data)
    why = json.loads(body)["error"]
    assert (status, words in why) == (expected, True), why
    assert headers["Content-Type"].startswith("application/json")
    assert counted(server) - before == {("Http", "INVALID_ARGUMENT"): 1}
    said = [record.getMessage() for record in caplog.records if record.name == "recinfer.serving.server.http_server"]
    assert said == [f"a request over HTTP was refused with {status}: {why}"]
    assert SECRET.decode() not in caplog.text and SECRET not in body
    assert all(record.exc_info is None for record in caplog.records)


def test_a_header_that_never_ends_is_answered_before_it_fills_the_memory(server: Server):
    """The memory budget counts no header, since a call has a ticket only once its header is complete."""
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        sent = 0
        while not select.select([connection], [], [], 0)[0]:
            sent += connection.send(b"X-%d: %s\r\n" % (sent, b"a" * 4000))
            assert sent < 64 * MOST_HEADS_BYTES
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert answer.status == 431 and f"at most {MOST_HEADS_BYTES} bytes in all" in json.loads(answer.read())["error"]


def test_each_request_of_a_connection_may_have_large_headers_and_a_body(server: Server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    large = {f"X-{n}": "a" * 30_000 for n in range(4)}
    for _ in range(3):
        connection.request("GET", LIVE, headers=large)
        assert connection.getresponse().read() is not None
        connection.request("POST", "/v2/models/tiny/infer", body=b" " * 400_000, headers=large)
        assert connection.getresponse().read()
    connection.close()


def test_the_metrics_port_has_the_same_limits(server: Server):
    status, _, body = answer_of(server.metrics_port, request(b"X-Long: %s\r\n" % (b"a" * (MOST_HEAD_BYTES + 1))))
    assert (status, "too long" in json.loads(body)["error"]) == (431, True)


# -- a stop ------------------------------------------------------------------------------------------------------------


def is_closed_to_new(port: int | None) -> bool:
    """Whether the port accepts no connection any more, which is so from the moment that a stop has begun."""
    try:
        socket.create_connection(("127.0.0.1", port or 0), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


def kept(port: int | None) -> http.client.HTTPConnection:
    """A connection on which one request was answered, and which the server keeps for more."""
    connection = http.client.HTTPConnection("127.0.0.1", port or 0, timeout=120)
    connection.request("GET", LIVE)
    answer = connection.getresponse()
    answer.read()
    assert (answer.status, answer.getheader("Connection"), answer.will_close) == (200, None, False)
    return connection


def test_answers_say_close_once_a_stop_has_begun(predictor: Predictor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.server.http_site._LINGER_S", 120.0)
    begun, go_on = hold(predictor, monkeypatch)
    with Server({"tiny": predictor}, http_port=0) as server, ThreadPoolExecutor(1) as pool:
        idle, wrong, running = (kept(server.http_port) for _ in range(3))
        running.request("POST", "/v2/models/tiny/infer", LOOKUP)
        assert begun.wait(60)
        stopped = pool.submit(server.stop, 120.0)
        until(lambda: is_closed_to_new(server.http_port))
        go_on.set()
        idle.request("POST", "/v2/models/tiny/infer", LOOKUP)
        wrong.request("GET", "/v2/nothing")
        for connection, expected in ((running, 200), (idle, 200), (wrong, 404)):
            answer = connection.getresponse()
            body = answer.read()
            assert (answer.status, answer.getheader("Connection"), answer.will_close) == (expected, "close", True), body
        stopped.result(60)


_LINGERING = f"from recinfer.serving.server import http_site; http_site._LINGER_S = 120.0\n{RECINFER}"


def test_a_busy_connection_loses_no_request_to_sigterm(archive: Path):
    answered: list[int] = []

    def ask(connection: http.client.HTTPConnection) -> None:
        """Ask until the server says that it closes."""
        closes = False
        while not closes:
            connection.request("POST", "/v2/models/tiny/infer", LOOKUP)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == 200
            answered.append(answer.status)
            closes = answer.will_close

    arguments = ["serve", archive, "--port", 0, "--http-port", 0, "--json"]
    # The process ends before the threads are waited for: where the test fails, they end too.
    with ThreadPoolExecutor(4) as pool, Program(_LINGERING, *arguments) as process:
        port = json.loads(process.stdout.readline())["http_port"]
        asking = [pool.submit(ask, kept(port)) for _ in range(4)]
        until(lambda: len(answered) > 40 or any(each.done() for each in asking))
        process.send_signal(signal.SIGTERM)
        for each in asking:
            each.result(120)
        assert process.wait(60) == 0
