"""What a ranker asks one shard server without the event loop: small questions over streams, the others as calls."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence

from recinfer.serving.core_channel import Asked, CoreChannel
from recinfer.serving.core_stream import AskStream
from recinfer.serving.proto import shards_pb2 as pb
from recinfer.serving.remote.messages import decode_failure

__all__ = ["FIND", "FIND_EACH", "SERVICE_NAME", "Asks"]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Shards"].full_name
FIND = f"/{SERVICE_NAME}/Find".encode()
"""The method that looks up."""
FIND_EACH = f"/{SERVICE_NAME}/FindEach".encode()
"""The same for small requests, of which one follows another."""

_SMALL_BYTES = 32 << 10  # what shard servers answer on the thread that reads: behind a larger one, others would wait
_MOST_STREAMS = 4
_AGE_S = 300.0  # servers close connections of half an hour ten minutes later, and what is open on them
_AGAIN_S, _NOT_KNOWN_S = 0.5, 60.0


class Asks:
    """Any thread may use it.

    A question goes over a stream that waits for nothing; where there is none it goes as a call, and meanwhile a stream is
    opened, up to four of them. So nothing waits for a stream, neither at first nor with a server that has none.

    Args:
        channel: to the server.
        metadata: of every call.
    """

    def __init__(self, channel: CoreChannel, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self._channel, self._metadata = channel, tuple(metadata)
        self._streams: tuple[AskStream, ...] = ()
        self._lock = threading.Lock()  # of changes to them
        self._again = 0.0

    def ask(self, question: bytes, until: float, done: Asked) -> Callable[[], None] | None:
        """Ask for a ``ShardRequest``; what is returned cancels it. None: the channel is closed, and ``done`` is not called.

        Args:
            until: ``time.monotonic()`` after which nobody waits.
            done: told of its end, at most once: not where it is cancelled.
        """
        if len(question) <= _SMALL_BYTES:
            now = time.monotonic()
            reply = functools.partial(_reply, done)
            for stream in self._streams:
                if now - stream.since < _AGE_S and stream.ask(question, until, reply):
                    return functools.partial(stream.forget, reply)
            if now >= self._again:
                self._open(now)
        return self._channel.ask(FIND, question, until, self._metadata, done)

    def expire(self) -> None:
        """Tell those who have waited too long; to be called now and then."""
        now = time.monotonic()
        for stream in self._streams:
            stream.expire(now)

    def close(self) -> None:
        """See CoreChannel.close."""
        self._channel.close()

    def _open(self, now: float) -> None:
        """One more stream, in place of one that has ended or is old; none while one opens, or after one that could not."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            kept: list[AskStream] = []
            for stream in self._streams:
                if stream.is_over:
                    self._again = now + (_NOT_KNOWN_S if stream.code == "UNIMPLEMENTED" else _AGAIN_S)
                elif now - stream.since < _AGE_S or not stream.close():
                    kept.append(stream)
            opening = any(not (stream.is_open or now - stream.since > _AGE_S) for stream in kept)
            if not opening and len(kept) < _MOST_STREAMS and now >= self._again:
                kept.append(AskStream(self._channel, FIND_EACH, self._metadata))
            self._streams = tuple(kept)
        finally:
            self._lock.release()


def _reply(done: Asked, message: bytes | None, code: str, details: str) -> None:
    failed = None if message is None else decode_failure(message)
    if failed is not None:
        done(None, failed.code, failed.message)
    else:
        done(message, code, details)
