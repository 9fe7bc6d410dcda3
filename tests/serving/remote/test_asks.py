"""What rankers ask over sockets and streams: the answers and errors of calls, and calls wherever neither will do."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.server.grpc_stream import AskStream
from recinfer.serving.server.serial_connection import Way
from recinfer.serving.shards import connections as module
from recinfer.serving.shards.connections import Asks
from recinfer.serving.shards.messages import _FAILED
from recinfer.serving.shards.server import ShardServer
from recinfer.serving.shards.transport import AskSocket
from recinfer.serving.wire.proto import shards_pb2 as pb
from tests.ports import free_port
from tests.serving.remote.fleet import shard, until
from tests.serving.remote.test_direct import make_archive

LONG = 60.0
End = tuple["bytes | None", str, str]


@pytest.fixture(params=["socket", "stream"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use(way: str, asks: Asks, server: ShardServer) -> None:
    """Have ``asks`` ask over one of the two."""
    assert server._sockets is not None
    opened = functools.partial(AskSocket, "127.0.0.1", server.socket_port, server._sockets.server_id, None)
    asks.use_socket(opened if way == "socket" else None)


@contextmanager
def asking(
    tmp_path: Path, find: Callable[[bytes], bytes] | None = None, way: str = "stream"
) -> Iterator[tuple[ShardServer, Asks]]:
    with shard(make_archive(tmp_path, "row_wise"), (0, 1, 2)) as server:
        if find is not None:
            server.tables.find = lambda data, limits: find(data)  # type: ignore[method-assign]
        asks = Asks(CoreChannel(server.target, ()))
        use(way, asks, server)
        try:
            yield server, asks
        finally:
            asks.close()


def begin(asks: Asks, question: bytes, seconds: float = LONG) -> tuple[queue.SimpleQueue[End], Any]:
    ends: queue.SimpleQueue[End] = queue.SimpleQueue()
    cancel = asks.ask(question, time.monotonic() + seconds, lambda *end: ends.put(end))
    return ends, cancel


def ask(asks: Asks, question: bytes) -> End:
    return begin(asks, question)[0].get(timeout=LONG)


def streaming(asks: Asks) -> None:
    """Returns once there is a socket or a stream."""
    ask(asks, b"")
    until(lambda: any(way.is_open for way in asks._ways))


def test_errors_are_those_of_calls(tmp_path: Path, way: str):
    with asking(tmp_path, way=way) as (server, asks):
        (key,) = server.tables.keys()
        questions = [
            b"no message",
            pb.ShardRequest(version="nobody has it", batch_size=1).SerializeToString(),
            pb.ShardRequest(version=key, batch_size=0).SerializeToString(),
            pb.ShardRequest(version=key, batch_size=1, parts=[pb.ShardPart(rank=7)]).SerializeToString(),
        ]
        calls = []
        for question in questions:
            asks._again = time.monotonic() + LONG  # none opens
            calls.append(ask(asks, question))
        assert not asks._ways
        asks._again = 0.0
        streaming(asks)
        assert [ask(asks, question) for question in questions] == calls
        assert all(stream.is_open for stream in asks._ways), "no error ended it"
        assert {code for _, code, _ in calls} == {"INVALID_ARGUMENT", "FAILED_PRECONDITION"}
        counts = server.stats.requests()
        assert counts["Find", "INVALID_ARGUMENT"] == 2 * 3 + 1 and counts["Find", "FAILED_PRECONDITION"] == 2


def test_an_overloaded_shard_says_so(tmp_path: Path, way: str):
    with asking(tmp_path, lambda data: b"", way) as (server, asks):
        streaming(asks)
        server._running = server._max_running
        assert ask(asks, b"x")[1] == "RESOURCE_EXHAUSTED"
        assert server.status()["held"]["refused"] == 1
        server._running = 0
        assert ask(asks, b"x") == (b"", "OK", "")


def test_what_comes_at_once_waits_for_nothing(tmp_path: Path, way: str):
    """Calls while they are busy, further ones up to a bound, and all questions answered."""
    with asking(tmp_path, lambda data: data * 2, way) as (_, asks):
        streaming(asks)
        for _ in range(20):
            ends = [begin(asks, bytes([number]))[0] for number in range(48)]  # their answers are no messages
            for number, end in enumerate(ends):
                assert end.get(timeout=LONG) == (bytes([number]) * 2, "OK", "")
        assert 1 < len(asks._ways) <= 32


def test_an_answer_that_cannot_be_read_is_told_too(tmp_path: Path, way: str):
    """It begins as a failure does. Who asked finds it out; to be told nothing would be to wait for ever."""
    with asking(tmp_path, lambda data: _FAILED + b"\xff", way) as (_, asks):
        streaming(asks)
        assert ask(asks, b"x") == (_FAILED + b"\xff", "OK", "")


def test_long_questions_hold_up_nobody_and_very_long_ones_are_calls(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
):
    threads: list[str] = []

    def find(data: bytes) -> bytes:
        threads.append(threading.current_thread().name)
        return data[:1]

    with asking(tmp_path, find, way) as (_, asks):
        streaming(asks)
        (stream,) = asks._ways
        asked: list[int] = []

        def ask_too(question: bytes, *args: Any) -> bool:
            asked.append(len(question))
            return Way.ask(stream, question, *args)

        monkeypatch.setattr(stream, "ask", ask_too)
        for length in (32 << 10, (32 << 10) + 1, 512 << 10, (512 << 10) + 1):
            assert ask(asks, bytes(length)) == (b"\0", "OK", "")
        assert asked == [32 << 10, (32 << 10) + 1, 512 << 10]
        in_pool = [thread.startswith("recinfer-shard") for thread in threads[-4:]]
        assert in_pool == [False, True, True, True], "others do not wait behind long ones"


def test_servers_of_before_are_asked_long_questions_by_calls(tmp_path: Path):
    """They end a connection on which one comes, and do not say how long it may be."""
    with asking(tmp_path, lambda data: data[:1], "socket") as (_, asks):
        streaming(asks)
        asks.use_socket(asks._socket, 32 << 10)
        assert ask(asks, b"x") == (b"x", "OK", "")
        streaming(asks)
        ways = asks._ways
        assert ask(asks, bytes((32 << 10) + 1)) == (b"\0", "OK", "")
        assert asks._ways == ways


def test_a_server_without_the_method_is_asked_by_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "FIND_EACH", b"/recinfer.v1.Shards/FromTomorrow")
    with asking(tmp_path, lambda data: data) as (server, asks):
        assert ask(asks, b"x") == (b"x", "OK", "")
        (first,) = asks._ways
        until(lambda: first.is_over)
        assert [ask(asks, b"x") for _ in range(10)] == [(b"x", "OK", "")] * 10
        assert first.code == "UNIMPLEMENTED" and not asks._ways
        assert server.stats.requests() == {("Find", "OK"): 11}


def test_nobody_waits_past_a_deadline(tmp_path: Path, way: str):
    go_on = threading.Event()

    def find(data: bytes) -> bytes:
        assert data != b"wait" or go_on.wait(LONG)
        return data

    with asking(tmp_path, find, way) as (_, asks):
        streaming(asks)
        ends, _ = begin(asks, b"wait", 0.1)
        cancelled, cancel = begin(asks, b"wait")
        cancel()
        asks.expire()
        assert ends.empty()
        until(lambda: asks.expire() or not ends.empty())
        assert ends.get(timeout=LONG)[:2] == (None, "DEADLINE_EXCEEDED")
        go_on.set()
        assert ask(asks, b"x") == (b"x", "OK", "")
        assert ends.empty()
        assert cancelled.empty() or cancelled.get()[1] == "CANCELLED"


def test_old_streams_are_replaced_without_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with asking(tmp_path, lambda data: data) as (_, asks):
        streaming(asks)
        (old,) = asks._ways
        monkeypatch.setattr(AskStream, "lasts_s", 0.0)
        assert ask(asks, b"x") == (b"x", "OK", "")
        monkeypatch.setattr(AskStream, "lasts_s", 300.0)
        until(lambda: old.is_over)
        assert old.code == "OK" and old not in asks._ways
        streaming(asks)
        assert ask(asks, b"x") == (b"x", "OK", "")


def test_a_server_that_comes_back_is_asked_the_same_way_again(tmp_path: Path, way: str):
    archive = make_archive(tmp_path, "row_wise")
    with shard(archive, (0, 1, 2)) as server:
        asks = Asks(CoreChannel(server.target, [("grpc.initial_reconnect_backoff_ms", 100)]))
        use(way, asks, server)
        streaming(asks)
        port = server.port
    (lost,) = asks._ways
    until(lambda: lost.is_over)
    assert ask(asks, b"")[1] == "UNAVAILABLE"
    back = ShardServer(server.tables, port=port)
    with back:
        use(way, asks, back)
        until(lambda: ask(asks, b"")[1] == "INVALID_ARGUMENT" and any(s.is_open for s in asks._ways))
        assert isinstance(asks._ways[-1], AskSocket if way == "socket" else AskStream)
        asks.close()
        until(lambda: all(s.is_over for s in asks._ways))


def test_a_socket_that_cannot_be_reached_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with asking(tmp_path, lambda data: data) as (server, asks):
        assert server._sockets is not None
        here = functools.partial(AskSocket, "127.0.0.1", server.socket_port, server._sockets.server_id, None)
        asks.use_socket(functools.partial(AskSocket, "127.0.0.1", free_port(), server._sockets.server_id, None))
        assert ask(asks, b"x") == (b"x", "OK", "")
        (first,) = asks._ways
        until(lambda: first.is_over)
        streaming(asks)
        assert [type(each) for each in asks._ways] == [AskStream]
        assert ask(asks, b"x") == (b"x", "OK", "")
        asks.use_socket(here)  # its server has said where it is now
        monkeypatch.setattr(AskStream, "lasts_s", 0.0)
        streaming(asks)
        until(lambda: ask(asks, b"x") == (b"x", "OK", "") and [type(each) for each in asks._ways] == [AskSocket])
