"""The client's side of recinfer.serving.server.grpc_core: calls of one message in and out, whose ends gRPC's own thread tells, and what
streams (recinfer.serving.server.grpc_stream) are made of.

A thread waits for the events of all calls of a channel, and whoever asked is called there; no event loop has to wake up.
See recinfer.serving.server.grpc_binding for what it is made of.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from recinfer.serving.server.grpc_binding import cygrpc
from recinfer.serving.server.serial_connection import Asked

__all__ = ["CoreChannel"]

_log = logging.getLogger("recinfer.serving.server")
_STOP_S = 5.0  # until the thread of a channel that is closed has ended

Batches = tuple[tuple[tuple[Any, ...], Callable[[Any], None]], ...]
"""Operations, and who is told of the event when they are done."""


class CoreChannel:
    """A connection to one server. Any thread may use it.

    Args:
        target: ``host:port``.
        options: of the channel.
        credentials: TLS; None: none.
    """

    def __init__(
        self, target: str, options: Sequence[tuple[str, Any]], credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._target = target
        inner = None if credentials is None else credentials._credentials
        self._channel = cygrpc.Channel(target.encode(), tuple(options), inner)
        self._lock = threading.Lock()
        self._under_way = 0
        self._closes = False
        self._thread: threading.Thread | None = None

    def ask(
        self,
        path: bytes,
        data: bytes,
        deadline: float,
        metadata: Sequence[tuple[str, str]],
        done: Asked,
    ) -> Callable[[], None] | None:
        """Begin a call; what is returned cancels it. None: the channel is closed, and ``done`` is not called.

        Args:
            path: "/package.Service/Method".
            deadline: ``time.monotonic()``.
            done: told of its end, once.
        """
        operations = (
            cygrpc.SendInitialMetadataOperation(metadata, 0),
            cygrpc.SendMessageOperation(data, 0),
            cygrpc.SendCloseFromClientOperation(0),
            cygrpc.ReceiveInitialMetadataOperation(0),
            cygrpc.ReceiveMessageOperation(0),
            cygrpc.ReceiveStatusOnClientOperation(0),
        )
        told = functools.partial(_end, done)
        call = self._begin(path, time.time() + deadline - time.monotonic(), ((operations, told),))
        return None if call is None else functools.partial(_cancel, call)

    def open(self, path: bytes, batches: Batches) -> Any:
        """Begin a call that has no deadline and goes on, see :meth:`go_on`; None: the channel is closed."""
        return self._begin(path, None, batches)

    def go_on(self, call: Any, operations: tuple[Any, ...], told: Callable[[Any], None]) -> bool:
        """More operations of a call of :meth:`open`. False: it has ended, and ``told`` is not called."""
        with self._lock:
            if self._closes:
                return False
            self._under_way += 1
        begun = False
        try:
            begun = bool(call.operate(operations, told))
        finally:
            if not begun:  # its thread is still there: a call that has ended was told so, or will be
                with self._lock:
                    self._under_way -= 1
        return begun

    @staticmethod
    def code_of(status: Any) -> str:
        """Name of the ``grpc.StatusCode`` of an operation that took a call's status."""
        return _NAMES.get(status.code(), "UNKNOWN")

    def _begin(self, path: bytes, deadline: float | None, batches: Batches, last: bool = False) -> Any:
        with self._lock:
            if self._closes and not last:
                return None
            call = self._channel.integrated_call(0, path, None, deadline, None, None, batches, None)
            self._under_way += len(batches)
            if self._thread is None:
                name = f"recinfer-asks-{self._target}"
                self._thread = threading.Thread(target=self._take_events, name=name, daemon=True)
                self._thread.start()
            return call

    def close(self) -> None:
        """Cancel what is under way and end; returns when the thread has. Not on the channel's own thread."""
        with self._lock:
            if self._closes:
                return
            self._closes = True
            thread, idle = self._thread, not self._under_way
        if thread is not None and idle:
            # Nothing may wait for events of a channel that is closed. One more brings the thread back, and is its last.
            operations = (cygrpc.SendInitialMetadataOperation(None, 0), cygrpc.ReceiveStatusOnClientOperation(0))
            self._begin(b"/", time.time() - 1.0, ((operations, _nothing),), last=True)
            thread.join(_STOP_S)
        self._channel.close(cygrpc.StatusCode.cancelled, "the connection was closed")
        if thread is not None:
            thread.join(_STOP_S)

    def _take_events(self) -> None:
        timed_out, next_event = cygrpc.CompletionType.queue_timeout, self._channel.next_call_event
        while True:
            event = next_event()
            if event.completion_type == timed_out:
                continue
            try:
                event.tag(event)
            except Exception:
                _log.exception("what %s answered was lost", self._target)
            event = None  # it holds its call
            with self._lock:
                self._under_way -= 1
                if self._closes and not self._under_way:
                    return


def _end(done: Asked, event: Any) -> None:
    *_, message, status = event.batch_operations
    code = CoreChannel.code_of(status)
    done(message.message() if code == "OK" else None, code, status.details() or "")


def _cancel(call: Any) -> None:
    call.cancel(cygrpc.StatusCode.cancelled, "nobody waits for it")


def _nothing(event: Any) -> None:
    """The event was asked for to have one."""


_NAMES = {getattr(cygrpc.StatusCode, code.name.lower()): code.name for code in grpc.StatusCode}
