"""Calls that the server has not yet taken from gRPC: each is answered, however many there are, also at a stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc
import pytest

from recinfer.serving.server.grpc_call import CoreCall
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.server.grpc_methods import connection_options
from recinfer.serving.wire.loop import run_on_loop
from tests.serving.raw_http2 import RawHttp2, message

PATH = "/a.B/C"
LONG = 60.0


class Held:
    """A server whose thread blocks after the message "hold" until ``go_on`` is set; it answers all calls."""

    def __init__(self) -> None:
        self.holds, self.go_on = threading.Event(), threading.Event()
        self.server, self.port = run_on_loop(self._start())

    async def _start(self) -> tuple[CoreServer, int]:
        server = CoreServer(connection_options(), dispatch={PATH: self._dispatch})
        methods = {"C": grpc.unary_unary_rpc_method_handler(lambda data, context: data)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.B", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        return server, port

    def _dispatch(self, data: bytes, until: float, call: CoreCall) -> None:
        if data == b"hold":
            self.holds.set()
            assert self.go_on.wait(LONG)
        call.answer(data)

    def hold(self, raw: RawHttp2) -> None:
        raw.call(PATH, message(b"hold"), end=True)
        assert self.holds.wait(LONG)


@pytest.fixture
def held() -> Iterator[Held]:
    """Stopped at the end."""
    found = Held()
    yield found
    found.go_on.set()
    run_on_loop(found.server.stop(0), timeout=LONG)


def test_thousands_of_calls_may_wait_and_none_is_dropped(held: Held):
    calls = 4000
    with RawHttp2(held.port) as first, RawHttp2(held.port) as second:
        held.hold(first)
        for raw in (first, second):
            for _ in range(calls // 2):
                raw.call(PATH, message(b"data"), end=True)
            raw.settle()
            assert not raw.ended  # gRPC has all of them, and has dropped none
        held.go_on.set()
        first.until_ended(calls // 2 + 1)
        second.until_ended(calls // 2)
        assert len(first.received) + len(second.received) == calls + 1


def test_calls_that_wait_when_the_server_stops_are_answered(held: Held):
    with RawHttp2(held.port) as raw:
        held.hold(raw)
        for _ in range(100):
            raw.call(PATH, message(b"data"), end=True)
        raw.settle()
        stopping = threading.Thread(target=lambda: run_on_loop(held.server.stop(LONG), timeout=2 * LONG))
        stopping.start()
        raw.settle()
        held.go_on.set()
        raw.until_ended(101)
        assert len(raw.received) == 101
        stopping.join()
