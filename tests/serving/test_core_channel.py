"""The client's side of gRPC's core: answers, errors, deadlines and cancels on its thread, and an end whatever is under way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.server.serial_connection import Asked
from tests.certificates import need_openssl, self_signed
from tests.ports import free_port
from tests.serving.test_core import LONG, Service, served

Ends = "queue.SimpleQueue[tuple[bytes | None, str, str]]"


@contextmanager
def asking() -> Iterator[tuple[Service, CoreChannel]]:
    with served() as (service, plain, _):
        target = plain._channel.target().decode()
        channel = CoreChannel(target, ())
        try:
            yield service, channel
        finally:
            channel.close()


def _into(ends: Ends) -> Asked:
    return lambda *end: ends.put(end)


def ask(channel: CoreChannel, path: bytes, data: bytes, seconds: float = LONG) -> tuple[bytes | None, str, str]:
    ends: Ends = queue.SimpleQueue()
    assert channel.ask(path, data, time.monotonic() + seconds, (("a", "b"),), _into(ends)) is not None
    return ends.get(timeout=LONG)


def test_answers_and_errors():
    with asking() as (service, channel):
        assert ask(channel, b"/a.B/Echo", b"x") == (b"x!?", "OK", "")
        left, metadata = service.seen[-1]  # gRPC rounds what is left up
        assert 0 < left <= LONG + 1 and metadata["a"] == "b"
        assert ask(channel, b"/a.B/Echo", b"now") == (b"at once", "OK", "")
        assert ask(channel, b"/a.B/Echo", b"end") == (None, "OUT_OF_RANGE", "too far")
        assert ask(channel, b"/a.B/Abort", b"") == (None, "DATA_LOSS", "gone")
        assert ask(channel, b"/a.B/Nothing", b"")[1] == "UNIMPLEMENTED"
        assert ask(channel, b"/a.B/Wait", b"", 0.1)[:2] == (None, "DEADLINE_EXCEEDED")
        assert ask(channel, b"/a.B/Echo", b"", -1.0)[:2] == (None, "DEADLINE_EXCEEDED")


def test_many_callers_share_a_channel():
    with asking() as (_, channel):
        answers: list[bytes | None] = []

        def caller(number: int) -> None:
            for each in range(100):
                data = b"%d %d" % (number, each)
                answer = ask(channel, b"/a.B/Echo", data)[0]
                answers.append(None if answer == data + b"!?" else data)

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [None] * 800


def test_an_error_of_who_is_told_loses_no_other_call(caplog: pytest.LogCaptureFixture):
    with asking() as (_, channel):
        channel.ask(b"/a.B/Echo", b"x", time.monotonic() + LONG, (), lambda *_: 1 / 0)
        assert ask(channel, b"/a.B/Echo", b"y")[0] == b"y!?"
    assert "ZeroDivisionError" in caplog.text


def test_a_call_that_is_cancelled_ends_at_once_and_its_handler_too():
    with asking() as (service, channel):
        ends: Ends = queue.SimpleQueue()
        cancel = channel.ask(b"/a.B/Wait", b"", time.monotonic() + LONG, (), _into(ends))
        assert cancel is not None and service.begun.wait(LONG)
        cancel()
        assert ends.get(timeout=LONG)[:2] == (None, "CANCELLED")
        assert service.left.wait(LONG)
        cancel()  # of a call that is over


def test_nobody_there():
    channel = CoreChannel(f"127.0.0.1:{free_port()}", ())
    assert ask(channel, b"/a.B/Echo", b"x")[1] == "UNAVAILABLE"
    channel.close()


@pytest.mark.parametrize("calls", [0, 1, 5])
def test_closing_ends_what_is_under_way_and_the_thread(calls: int):
    for _ in range(20):
        with asking() as (_, channel):
            assert ask(channel, b"/a.B/Echo", b"x")[0] == b"x!?"
            ends: Ends = queue.SimpleQueue()
            for _ in range(calls):
                channel.ask(b"/a.B/Wait", b"", time.monotonic() + LONG, (), _into(ends))
            channel.close()
            assert [ends.get(timeout=LONG)[1] for _ in range(calls)] == ["CANCELLED"] * calls
            assert channel.ask(b"/a.B/Echo", b"", time.monotonic() + LONG, (), lambda *_: None) is None
            assert channel._thread is not None and not channel._thread.is_alive()
            channel.close()  # again
    CoreChannel("127.0.0.1:1", ()).close()  # that was never used


def test_closing_while_others_ask():
    for _ in range(20):
        with asking() as (_, channel):
            ends: Ends = queue.SimpleQueue()
            begun = [0]

            def caller(channel: CoreChannel = channel, ends: Ends = ends, begun: list[int] = begun) -> None:
                while channel.ask(b"/a.B/Echo", b"x", time.monotonic() + LONG, (), _into(ends)) is not None:
                    begun[0] += 1

            thread = threading.Thread(target=caller)
            thread.start()
            assert ends.get(timeout=LONG)[1] == "OK"
            channel.close()
            thread.join(LONG)
            assert {ends.get(timeout=LONG)[1] for _ in range(begun[0] - 1)} <= {"OK", "CANCELLED"}
            assert ends.empty()


def test_tls(tmp_path: Path):
    need_openssl()
    self_signed(tmp_path, ("server",), "DNS:somewhere.example")
    chain, key = ((tmp_path / name).read_bytes() for name in ("server.pem", "server.key"))
    with served(credentials=grpc.ssl_server_credentials([(key, chain)])) as (_, plain, _):
        target = plain._channel.target().decode()
        named = [("grpc.ssl_target_name_override", "somewhere.example")]
        for options, code in ((named, "OK"), ([], "UNAVAILABLE")):
            channel = CoreChannel(target, options, grpc.ssl_channel_credentials(chain))
            assert ask(channel, b"/a.B/Echo", b"x")[1] == code
            channel.close()
