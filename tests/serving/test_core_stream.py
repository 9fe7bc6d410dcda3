"""Streams of one question after another: answers, what ends them, and that who asked is always told, once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from recinfer.serving.server import grpc_core as core
from recinfer.serving.server.grpc_call import Ending
from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.server.grpc_stream import AskStream
from recinfer.serving.server.loop import run_on_loop
from tests.ports import free_port
from tests.serving.asked import LONG, Answers, ask, into
from tests.serving.remote.fleet import until

ASK = b"/a.B/Ask"


@contextmanager
def served(admit: core.Admit | None = None, port: int = 0) -> Iterator[tuple[Answers, CoreServer, CoreChannel]]:
    answers = Answers()

    async def start() -> tuple[CoreServer, int]:
        server = CoreServer([], *([admit] if admit else []), streams={ASK.decode(): answers.each})
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, bound

    server, bound = run_on_loop(start())
    channel = CoreChannel(f"127.0.0.1:{bound}", ())
    try:
        yield answers, server, channel
    finally:
        answers.go_on.set()
        channel.close()
        run_on_loop(server.stop(0), timeout=LONG)


def opened(channel: CoreChannel, path: bytes = ASK) -> AskStream:
    stream = AskStream(channel, path, (("a", "b"),))
    until(lambda: stream.is_open or stream.is_over)
    return stream


def test_one_question_after_another():
    with served() as (_, server, channel):
        stream = opened(channel)
        assert stream.is_open
        for question in (b"x", b"", b"y" * 300_000):
            assert ask(stream, question) == (question * 2, "OK", "")
        assert len(server.open) == 1
        assert stream.close()
        until(lambda: stream.is_over and not server.open)
        assert stream.code == "OK"
        assert not stream.ask(b"x", time.monotonic() + LONG, into()[1])


def test_grpcs_own_clients_may_use_it():
    with served() as (_, _, channel), grpc.insecure_channel(channel._target) as plain:
        call = plain.stream_stream(ASK.decode())
        assert list(call(iter([b"1", b"2", b"3"]), timeout=LONG)) == [b"11", b"22", b"33"]


def test_a_failure_ends_the_stream_and_tells_who_asked_no_secret():
    with served() as (_, server, channel):
        stream = opened(channel)
        found = ask(stream, b"fail")
        assert found[:2] == (None, "UNKNOWN") and "secret" not in found[2]
        until(lambda: stream.is_over and not server.open)
        assert ask(opened(channel), b"x") == (b"xx", "OK", "")


def test_a_stream_that_is_not_there_is_never_open(monkeypatch: pytest.MonkeyPatch):
    """Nor between gRPC's word that the headers have come, which it says though there are none, and the status."""
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    begun, status = AskStream._begun, AskStream._status

    def tell_begun(stream: AskStream, event: Any) -> None:
        begun(stream, event)
        events.put(None)

    monkeypatch.setattr(AskStream, "_begun", tell_begun)
    monkeypatch.setattr(AskStream, "_status", lambda stream, event: events.put(event))
    with served() as (_, _, channel):
        stream = AskStream(channel, b"/a.B/Nothing", ())
        found = [events.get(timeout=LONG), events.get(timeout=LONG)]
        assert None in found
        assert not stream.was_open and not stream.ask(b"x", time.monotonic() + LONG, into()[1])
        status(stream, next(event for event in found if event is not None))
        assert stream.code == "UNIMPLEMENTED"


def test_streams_that_are_not_there_or_not_admitted_end_at_once():
    with served() as (_, server, channel):
        assert opened(channel, b"/a.B/Nothing").code == "UNIMPLEMENTED"
        until(lambda: not server.open)
    with served(lambda path, deadline, metadata: Ending("UNAUTHENTICATED", "no")) as (_, server, channel):
        assert opened(channel).code == "UNAUTHENTICATED"
        until(lambda: not server.open)
    channel = CoreChannel(f"127.0.0.1:{free_port()}", ())
    assert opened(channel).code == "UNAVAILABLE"
    channel.close()


@pytest.mark.parametrize("grace", [None, 0.2])
def test_a_server_that_stops_ends_its_streams(grace: float | None):
    with served() as (answers, server, channel):
        idle, busy = opened(channel), opened(channel)
        ends, reply = into()
        assert busy.ask(b"wait", time.monotonic() + LONG, reply)
        assert answers.asked.get(timeout=LONG) == b"wait"
        threading.Timer(0.1, answers.go_on.set).start()
        run_on_loop(server.stop(grace), timeout=LONG)
        assert ends.get(timeout=LONG)[1] in ("OK", "UNAVAILABLE", "CANCELLED")
        until(lambda: idle.is_over and busy.is_over)
        assert not server.open


def test_a_channel_that_is_closed_tells_who_waits():
    with served() as (answers, server, channel):
        opened(channel)
        busy = opened(channel)
        ends, reply = into()
        assert busy.ask(b"wait", time.monotonic() + LONG, reply)
        assert answers.asked.get(timeout=LONG) == b"wait"
        channel.close()
        assert ends.get(timeout=LONG)[:2] == (None, "CANCELLED")
        assert channel._thread is not None and not channel._thread.is_alive()
        late = AskStream(channel, ASK, ())
        assert late.is_over and not late.ask(b"x", time.monotonic() + LONG, into()[1])
        answers.go_on.set()
        until(lambda: not server.open)
