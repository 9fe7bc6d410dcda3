"""Two processes that ask each other things over a pair of pipes: one JSON object a line, either end asks, the other answers."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import IO, Any

from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.wire.status import error_of, status_of

__all__ = ["Pipe"]

Answer = Callable[[str, dict[str, Any]], Any]


class Pipe:
    """One end. ``run`` reads until the other end is gone; everything else may be called from any thread.

    Args:
        read, write: text streams; lines that are no JSON object are passed over, so that a stray print does no harm.
        answer: (what, arguments) -> what the other end asked for, JSON or a Future of it; an exception reaches the
            other end as the error of ours with the same meaning. It must not block.
    """

    def __init__(self, read: IO[str], write: IO[str], answer: Answer) -> None:
        self._read, self._write, self._answer = read, write, answer
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self._closed = False

    def ask(self, what: str, **arguments: Any) -> Future[Any]:
        """Ask the other end; the Future fails with UnavailableError when it goes away first."""
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            gone = self._closed
            if not gone:
                self._asked[number] = future
        if gone or not self._send({"ask": number, "what": what, "with": arguments}):
            self._asked.pop(number, None)
            _settle(future, UnavailableError("the process at the other end has gone"))
        return future

    def run(self) -> None:
        """Answer, and take answers, until the other end closes."""
        try:
            for line in self._read:
                try:
                    message = json.loads(line)
                except ValueError:
                    continue
                if isinstance(message, dict):
                    self._take(message)
        finally:
            with self._lock:
                self._closed = True
                left = list(self._asked.values())
                self._asked.clear()
            for future in left:
                _settle(future, UnavailableError("the process at the other end has gone"))

    def _take(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            self._reply(message["ask"], message["what"], message["with"])
        elif "to" in message and (future := self._asked.pop(message["to"], None)) is not None:
            failed = message.get("failed")
            _settle(future, message.get("is") if failed is None else error_of(failed["code"], failed["message"]))

    def _reply(self, number: int, what: str, arguments: dict[str, Any]) -> None:
        try:
            found = self._answer(what, arguments)
        except Exception as error:
            self._send({"to": number, "failed": _plain(error)})
            return
        if not isinstance(found, Future):
            self._send({"to": number, "is": found})
            return

        def done(future: Future[Any]) -> None:
            error = future.exception()
            self._send(
                {"to": number, "is": future.result()} if error is None else {"to": number, "failed": _plain(error)}
            )

        found.add_done_callback(done)

    def _send(self, message: dict[str, Any]) -> bool:
        line = json.dumps(message) + "\n"
        with self._lock, suppress(OSError, ValueError):  # the other end, or our own, is closed
            self._write.write(line)
            self._write.flush()
            return True
        return False


def _plain(error: BaseException) -> dict[str, str]:
    status = status_of(error)
    return {"code": status.code, "message": status.message}


def _settle(future: Future[Any], found: Any) -> None:
    with suppress(InvalidStateError):  # who asked does not wait any more
        if isinstance(found, RecinferError):
            future.set_exception(found)
        else:
            future.set_result(found)
