"""What a ranker asks one shard server without the event loop: over sockets or streams, and what is very long as calls."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from recinfer.errors import RecinferError
from recinfer.serving.server.grpc_channel import CoreChannel
from recinfer.serving.server.grpc_stream import AskStream
from recinfer.serving.server.serial_connection import Asked, Way
from recinfer.serving.shards.messages import decode_failure
from recinfer.serving.wire.proto import shards_pb2 as pb

__all__ = ["FIND", "FIND_EACH", "MOST_BYTES", "SERVICE_NAME", "SMALL_BYTES", "Asks"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Shards"].full_name
FIND = f"/{SERVICE_NAME}/Find".encode()
"""The method that looks up."""
FIND_EACH = f"/{SERVICE_NAME}/FindEach".encode()
"""The same for requests of which one follows another."""

SMALL_BYTES = 32 << 10
"""Shard servers answer a question of no more on the thread that reads: behind a larger one, others would wait."""
MOST_BYTES = 512 << 10
"""Of a question that is no call of its own."""
_MOST_WAYS = 32
_AGAIN_S, _NOT_KNOWN_S, _NOT_REACHED_S = 0.5, 60.0, 30.0


class Asks:
    """Any thread may use it.

    A question goes over a connection that waits for nothing: a socket of recinfer.serving.shards.transport where the server has
    told of one that can be reached, or a stream. Where there is none it goes as a call, and meanwhile one is opened, up to
    thirty-two of them. So nothing waits for one, neither at first nor with a server that has neither.

    Args:
        channel: to the server.
        metadata: of every call.
    """

    def __init__(self, channel: CoreChannel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._channel, self._metadata = channel, tuple(metadata)
        self._ways: tuple[Way, ...] = ()
        self._lock = threading.Lock()  # of changes to them
        self._again = 0.0
        self._socket: Callable[[], Way] | None = None
        self._most = MOST_BYTES
        self._socket_again = 0.0

    def use_socket(self, opened: Callable[[], Way] | None, most: int = MOST_BYTES) -> None:
        """Ask over what ``opened`` gives from now on, where that can be had; None: over streams. Who was asked so before is gone.

        Args:
            most: bytes of a question that goes neither way, but as a call.
        """
        with self._lock:
            self._most = min(most, MOST_BYTES)
            self._socket, self._socket_again = opened, 0.0
            gone = [way for way in self._ways if not isinstance(way, AskStream)]
            self._ways = tuple(way for way in self._ways if way not in gone)
        for way in gone:
            way.close(at_once=True)

    def ask(self, question: bytes, until: float, done: Asked) -> Callable[[], None] | None:
        """Ask for a ``ShardRequest``; what is returned cancels it. None: the channel is closed, and ``done`` is not called.

        Args:
            until: ``time.monotonic()`` after which nobody waits.
            done: told of its end, at most once: not where it is cancelled.
        """
        if len(question) <= self._most:
            reply = functools.partial(_reply, done)
            for way in self._ways:
                if not way.is_old and way.ask(question, until, reply):
                    return functools.partial(way.forget, reply)
            now = time.monotonic()
            if now >= self._again:
                self._open(now)
        return self._channel.ask(FIND, question, until, self._metadata, done)

    def expire(self) -> None:
        """Tell those who have waited too long; to be called now and then."""
        now = time.monotonic()
        for way in self._ways:
            way.expire(now)

    def close(self) -> None:
        """See CoreChannel.close."""
        with self._lock:
            self._again, ways = math.inf, self._ways
        for way in ways:
            way.close(at_once=True)
        self._channel.close()

    def _open(self, now: float) -> None:
        """One more, in place of one that has ended or is old; none while one opens, or after one that could not."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            kept: list[Way] = []
            for way in self._ways:
                if not way.is_over:
                    if not (way.is_old and way.close()):
                        kept.append(way)
                elif isinstance(way, AskStream):
                    self._again = max(self._again, now + (_NOT_KNOWN_S if way.code == "UNIMPLEMENTED" else _AGAIN_S))
                else:
                    self._socket_again = max(self._socket_again, now + (_AGAIN_S if way.was_open else _NOT_REACHED_S))
            opening = any(not (way.is_open or way.is_old) for way in kept)
            if not opening and len(kept) < _MOST_WAYS and now >= self._again:
                kept.append(self._new(now))
            self._ways = tuple(kept)
        finally:
            self._lock.release()

    def _new(self, now: float) -> Way:
        if self._socket is not None and now >= self._socket_again:
            return self._socket()
        return AskStream(self._channel, FIND_EACH, self._metadata)


def _reply(done: Asked, message: bytes | None, code: str, details: str) -> None:
    failed = None
    if message is not None:
        with suppress(RecinferError):  # what is no message is found out by who reads it, as that of a call is
            failed = decode_failure(message)
    if failed is not None:
        done(None, failed.code, failed.message)
    else:
        done(message, code, details)
