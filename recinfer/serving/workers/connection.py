"""The connection between a supervisor and a worker: either end sends requests, the other answers; messages are JSON."""

from __future__ import annotations

import itertools
import json
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.engine.state import ServedState, Spread
from recinfer.serving.wire.status import error_of, status_of

__all__ = ["MadeChange", "PeerConnection"]

_log = logging.getLogger(__name__)

Answer = Callable[[str, dict[str, Any]], Any]


@dataclass(frozen=True)
class MadeChange:
    """A worker's answer to an admin call.

    Attributes:
        answer: the serialized answer for the client, in base64.
        before: the spread of each model before the change, with which the change is taken back.
        served_before: whether the call loaded a version that the worker served already.
        state: the worker's models after the change.
    """

    answer: str
    before: dict[str, Spread]
    served_before: bool
    state: ServedState


class PeerConnection:
    """One end of the connection. A thread reads and calls ``answer``; another sends, so that no caller waits for a slow peer.

    Args:
        connection: an end of a multiprocessing.Pipe; closed here once the peer has gone. No message is pickled.
        answer: (what, arguments) -> the answer, JSON or a Future of it; an exception reaches the peer as the
            RecinferError of the same status. Called on the reading thread, so it must not block.
        on_gone: called on the reading thread once the peer has closed its end or ended, for any reason.
    """

    def __init__(self, connection: Connection, answer: Answer, *, on_gone: Callable[[], None] = lambda: None) -> None:
        self._connection = connection
        self._answer = answer
        self._on_gone = on_gone
        self._lock = threading.Lock()  # guards the next three attributes
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._closed = False
        self._unsent: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="recinfer-peer-send", daemon=True)
        self._reader = threading.Thread(target=self._read_all, name="recinfer-peer-read", daemon=True)
        self._sender.start()
        self._reader.start()

    @property
    def closed(self) -> bool:
        """Whether the peer has gone."""
        return self._closed

    def request(self, what: str, **arguments: Any) -> Future[Any]:
        """Send the peer a request, from any thread; the Future fails with UnavailableError when the peer goes first."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                future.set_exception(_gone())
                return future
            number = next(self._numbers)
            self._pending[number] = future
        self._unsent.put({"request": number, "what": what, "with": arguments})
        return future

    def join(self, timeout: float) -> None:
        """Wait at most ``timeout`` seconds until the peer has gone and all its messages are read."""
        self._reader.join(timeout)

    def _send_all(self) -> None:
        while (message := self._unsent.get()) is not None:
            try:
                self._connection.send_bytes(json.dumps(message).encode())
            except OSError:  # the peer has gone; the reading thread fails the pending requests
                return

    def _read_all(self) -> None:
        try:
            while True:
                self._take(json.loads(self._connection.recv_bytes()))
        except (EOFError, OSError):
            pass
        finally:
            with self._lock:
                self._closed = True
                left = list(self._pending.values())
                self._pending.clear()
            for future in left:
                _settle(future, _gone())
            self._on_gone()
            self._unsent.put(None)
            self._sender.join()  # the sending thread fails at once, as the peer has gone
            self._connection.close()

    def _take(self, message: dict[str, Any]) -> None:
        if "request" in message:
            self._reply(message["request"], message["what"], message["with"])
            return
        with self._lock:
            future = self._pending.pop(message["to"])
        failed = message.get("failed")
        _settle(future, message.get("is") if failed is None else error_of(failed["code"], failed["message"]))

    def _reply(self, number: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            found = self._answer(what, arguments)
        except Exception as error:
            self._unsent.put({"to": number, "failed": _plain(what, error)})
            return
        if not isinstance(found, Future):
            self._unsent.put({"to": number, "is": found})
            return

        def done(future: Future[Any]) -> None:
            error = future.exception()
            answer = {"is": future.result()} if error is None else {"failed": _plain(what, error)}
            self._unsent.put({"to": number, **answer})

        found.add_done_callback(done)


def _gone() -> UnavailableError:
    return UnavailableError("the process at the other end has gone")


def _plain(what: str, error: BaseException) -> dict[str, str]:
    status = status_of(error)
    if status.code == "INTERNAL":  # the peer gets only this message
        _log.error("%s failed", what, exc_info=error)
    return {"code": status.code, "message": status.message}


def _settle(future: Future[Any], found: Any) -> None:
    with suppress(InvalidStateError):  # the caller no longer waits
        if isinstance(found, RecinferError):
            future.set_exception(found)
        else:
            future.set_result(found)
