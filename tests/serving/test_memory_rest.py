"""HTTP bodies and answers under the memory budget: what counts, what is refused, and that all of it is freed."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from recinfer.inference.predictor import Predictor
from recinfer.serving.engine.memory_budget import SMALL_BYTES, Ticket
from recinfer.serving.server import http_server
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from tests.serving.conftest import ROWS
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")

MIB = 1 << 20
BUDGET = 32 * MIB
PATH = "/v2/models/tiny/infer"


@pytest.fixture
def server(predictor: Predictor) -> Iterator[Server]:
    """A server whose budget is of 32 MiB; all of it is free again at the end of each test."""
    limits = Limits(max_message_bytes=64 * MIB, memory_budget_bytes=BUDGET)
    with Server({"tiny": predictor}, limits=limits, http_port=0) as running:
        yield running
        until(lambda: running.budget.held == 0)


def lookup(samples: int = 1, features: Sequence[str] = ("user",)) -> bytes:
    tensors = [{"name": name, "datatype": "INT64", "shape": [samples], "data": [3] * samples} for name in features]
    return json.dumps({"inputs": tensors, "parameters": {"method": "lookup"}}).encode()


def ask(server: Server, body: bytes, **headers: str) -> tuple[int, dict[str, str], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port or 0, timeout=60)
    try:
        connection.request("POST", PATH, body, headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), json.loads(answer.read())
    finally:
        connection.close()


def begin(stack: ExitStack, server: Server, head: str, body: bytes) -> socket.socket:
    """A connection on which a request has begun."""
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.http_port or 0), timeout=60))
    connection.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\n{head}\r\n\r\n".encode() + body)
    return connection


def head_of(connection: socket.socket) -> bytes:
    """The response that arrives before the body is sent."""
    found = b""
    while b"\r\n\r\n" not in found and (more := connection.recv(4096)):
        found += more
    return found


def test_a_body_has_its_bytes_before_they_are_here(server: Server):
    with ExitStack() as stack:
        first = begin(stack, server, f"Content-Length: {20 * MIB}", b"{")
        until(lambda: server.budget.held == 20 * MIB)
        second = begin(stack, server, f"Content-Length: {9 * MIB}", b"{")
        said = head_of(second)
        assert said.startswith(b"HTTP/1.1 429 ") and b"\r\nRetry-After: 1\r\n" in said
        assert (server.budget.refused, server.stats.requests()["ModelInfer", "RESOURCE_EXHAUSTED"]) == (1, 1)
        assert ask(server, lookup())[0] == 200  # small ones have room
        first.close()
        until(lambda: server.budget.held == 0)


def test_a_body_of_unknown_length_is_counted_as_it_comes(server: Server):
    with ExitStack() as stack:
        begin(stack, server, f"Content-Length: {24 * MIB}", b"{")
        until(lambda: server.budget.held == 24 * MIB)
        piece = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)
        chunked = begin(stack, server, "Transfer-Encoding: chunked", piece)
        until(lambda: server.budget.held == 25 * MIB)
        for _ in range(4):
            chunked.sendall(piece)
        assert head_of(chunked).startswith(b"HTTP/1.1 429 ")


def test_a_body_beyond_the_limit_is_refused_before_it_is_read(server: Server):
    with ExitStack() as stack:
        said = head_of(begin(stack, server, f"Content-Length: {65 * MIB}", b"{"))
        assert said.startswith(b"HTTP/1.1 413 ")


def test_a_compressed_body_counts_as_what_it_may_unpack_to(server: Server):
    packed = gzip.compress(lookup() + b" " * MIB)
    assert len(packed) < SMALL_BYTES < BUDGET // 8
    with ExitStack() as stack:
        begin(stack, server, f"Content-Length: {24 * MIB}", b"{")
        until(lambda: server.budget.held == 24 * MIB)
        code, headers, answer = ask(server, packed, **{"Content-Encoding": "gzip"})
        assert (code, headers["Retry-After"]) == (429, "1") and "memory budget" in answer["error"]
    until(lambda: server.budget.held == 0)
    assert ask(server, packed, **{"Content-Encoding": "gzip"})[0] == 200


@pytest.mark.parametrize("samples", [1, 10_000])
def test_an_answer_is_held_until_it_was_sent(server: Server, samples: int, monkeypatch: pytest.MonkeyPatch):
    held: list[int] = []
    send = http_server._send

    async def looking(request: Any, answer: Any) -> None:
        held.append(server.budget.held - len(answer.body))
        await send(request, answer)
        assert server.budget.held == len(answer.body)

    monkeypatch.setattr(http_server, "_send", looking)
    assert ask(server, lookup(samples))[0] == 200
    assert held == [0]


def test_caller_that_does_not_read_loses_its_connection_and_memory(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "_SENT_S", 0.2)
    with ExitStack() as stack:
        body = lookup(16_000, list(ROWS))  # its answer of 10 MB is more than the socket buffers hold
        deaf = stack.enter_context(socket.socket())
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(60)
        deaf.connect(("127.0.0.1", server.http_port or 0))
        deaf.sendall(f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: server.stats.requests().get(("ModelInfer", "CANCELLED")) == 1)
        until(lambda: server.budget.held == 0)
        with suppress(ConnectionResetError):  # the bytes in the socket buffers still arrive
            while deaf.recv(MIB):
                pass


@pytest.mark.parametrize("grow", [1, 2, 3, 4, 5])
def test_request_that_outgrows_the_budget_frees_its_memory(server: Server, monkeypatch: pytest.MonkeyPatch, grow: int):
    """At each place where a request grows."""
    resize, calls = Ticket.resize, 0

    def failing(self: Ticket, num_bytes: int, may_exceed: bool = False) -> None:
        nonlocal calls
        calls += 1
        resize(self, BUDGET * 100 if calls == grow else num_bytes, may_exceed)

    with ExitStack() as stack:
        begin(stack, server, f"Content-Length: {2 * MIB}", b"{")  # with another large call, none may exceed the budget
        until(lambda: server.budget.held == 2 * MIB)
        monkeypatch.setattr(Ticket, "resize", failing)
        assert ask(server, lookup())[0] == 429
        until(lambda: server.budget.held == 2 * MIB)
