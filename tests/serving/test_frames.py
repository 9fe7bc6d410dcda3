"""Messages over sockets: whole in whatever pieces they come, bounded, and their end told once."""

from __future__ import annotations

import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from recinfer.serving.shards.frames import FrameLoop, Frames, frame, tune
from tests.serving.remote.fleet import until

LONG = 60.0
MOST = 8 << 20


@pytest.fixture
def loop() -> Iterator[FrameLoop]:
    loop = FrameLoop("test-frames")
    yield loop
    loop.close()
    assert not loop._thread.is_alive()


class End:
    """One end of a connection on a loop, and what it was told."""

    def __init__(self, loop: FrameLoop, sock: socket.socket, most: int = MOST) -> None:
        self.messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.frames = Frames(sock, most, self._took, lambda frames, why: self.ends.put(why))
        assert loop.add(self.frames)

    def _took(self, frames: Frames, message: bytes) -> None:
        if message == b"raise":
            raise RuntimeError("a bug")
        self.messages.put(message)

    def get(self) -> bytes:
        return self.messages.get(timeout=LONG)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for sock in (here, there):
        tune(sock)
    return here, there


def test_messages_of_any_size_both_ways(loop: FrameLoop):
    here, there = (End(loop, sock) for sock in pair())
    for size in (0, 1, 3, 4, 5, 66_000, (256 << 10) - 4, 256 << 10, 3_000_000):
        message = random.Random(size).randbytes(size)
        assert here.frames.send(message) and there.get() == message
        assert there.frames.send(message) and here.get() == message


def test_any_pieces(loop: FrameLoop):
    """Cut at any byte, several in a piece, and the beginning of a length by itself."""
    raw, sock = pair()
    end = End(loop, sock)
    draw = random.Random(0)
    messages = [draw.randbytes(draw.choice([0, 1, 2, 30, 3000])) for _ in range(200)]
    data = b"".join(map(frame, messages))
    with raw:
        at = 0
        while at < len(data):
            step = draw.choice([1, 2, 3, 5, 400, 9000])
            raw.sendall(data[at : at + step])
            at += step
            if step < 5 and draw.random() < 0.2:
                time.sleep(0.001)  # it is read by itself
        assert [end.get() for _ in messages] == messages
    assert end.ends.get(timeout=LONG) == "the other end closed it"
    assert not end.frames.send(b"x")


def test_who_reads_slowly_gets_all_in_the_end(loop: FrameLoop):
    raw, sock = pair()
    end = End(loop, sock)
    message = bytes(range(256)) * (1 << 15)
    assert end.frames.send(message) and end.frames.send(b"behind it")
    assert end.frames.is_sending
    expected, found = frame(message) + frame(b"behind it"), b""
    with raw:
        while len(found) < len(expected):
            found += raw.recv(1 << 20)
        assert found == expected
        until(lambda: not end.frames.is_sending)
        raw.sendall(frame(b"and back"))
        assert end.get() == b"and back"


def test_too_long_a_message_ends_it_and_costs_nothing(loop: FrameLoop):
    raw, sock = pair()
    end = End(loop, sock, most=100)
    with raw:
        raw.sendall(frame(bytes(100)) + b"\xff\xff\xff\xff")
        assert end.get() == bytes(100)
        assert "4294967295 bytes" in end.ends.get(timeout=LONG)
        assert raw.recv(1) == b""


def test_a_bug_ends_its_connection_alone(loop: FrameLoop):
    (here, there), (other, raw) = (End(loop, sock) for sock in pair()), pair()
    beside = End(loop, other)
    assert here.frames.send(b"raise")
    assert there.ends.get(timeout=LONG) == "this end failed"
    assert here.ends.get(timeout=LONG) == "the other end closed it"
    with raw:
        raw.sendall(frame(b"x"))
        assert beside.get() == b"x"


@pytest.mark.parametrize("how", ["end", "close", "reset"])
def test_its_end_is_told_once(loop: FrameLoop, how: str):
    raw, sock = pair()
    end = End(loop, sock)
    if how == "end":
        end.frames.end()
        end.frames.end()
    elif how == "close":
        raw.close()
    else:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        raw.close()
    end.ends.get(timeout=LONG)
    end.frames.end()
    assert not end.frames.send(b"x")
    raw.close()
    until(lambda: not loop._frames)
    # What was under way in the loop is over once something else has gone through it.
    here, there = (End(loop, sock) for sock in pair())
    assert here.frames.send(b"x") and there.get() == b"x"
    assert end.ends.empty()


def test_a_loop_that_ends_ends_its_connections():
    loop = FrameLoop("test-frames")
    here, there = (End(loop, sock) for sock in pair())
    came: list[Any] = []
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    loop.accept(listener, came.append)
    with socket.create_connection(address):
        until(lambda: bool(came))
    loop.close()
    loop.close()
    assert here.ends.get(timeout=LONG) == there.ends.get(timeout=LONG)
    with pytest.raises(OSError):
        socket.create_connection(address)
    raw, sock = pair()
    assert not loop.add(Frames(sock, MOST, lambda *_: None, lambda *_: None))
    for each in (raw, sock, *came):
        each.close()


def test_threads_may_send_at_the_same_time(loop: FrameLoop):
    here, there = (End(loop, sock) for sock in pair())

    def send(number: int) -> None:
        for size in range(200):
            assert here.frames.send(bytes([number]) * (size * 50))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    found = [there.get() for _ in range(4 * 200)]
    for thread in threads:
        thread.join()
    for number in range(4):
        mine = [len(message) for message in found if message[:1] == bytes([number])]
        assert mine == [size * 50 for size in range(1, 200)], "whole, and in the order they were sent"
