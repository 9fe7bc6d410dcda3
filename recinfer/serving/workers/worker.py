"""A worker's end of the connection to its supervisor: its status, and changes of models, which go to all workers."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import os
import queue
import stat
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from recinfer.errors import ConfigError
from recinfer.serving.engine.state import ServedState, Spread
from recinfer.serving.engine.store import served_state
from recinfer.serving.wire import codec
from recinfer.serving.wire.admin_verbs import VERBS
from recinfer.serving.wire.loop import start_on_loop
from recinfer.serving.wire.proto import admin_pb2 as pb
from recinfer.serving.workers.connection import MadeChange, PeerConnection
from recinfer.strict_json import build

if TYPE_CHECKING:
    from recinfer.serving.engine.store import StoreManager
    from recinfer.serving.server.server import Server

__all__ = ["WorkerLink"]

_STDIN = 0


class WorkerLink:
    """Waits for the supervisor's first message on stdin, then answers its requests. All answers come from the event loop, so that an
    answer shows that the loop runs.

    Raises:
        ConfigError: there is no supervisor at the other end.

    Attributes:
        gone: set when the supervisor has closed the connection or ended, for any reason.
        restore: for a replacement, the state of a running worker; None for the first workers.
    """

    def __init__(self) -> None:
        self.gone = threading.Event()
        self._server: Server | None = None
        self._manager: StoreManager | None = None
        # (restore,), or an empty tuple where the supervisor went first.
        self._begun: queue.SimpleQueue[tuple[ServedState | None, ...]] = queue.SimpleQueue()
        self._peer = PeerConnection(_from_stdin(), self._answer, on_gone=self._end)
        begun = self._begun.get()
        if not begun:
            raise _no_supervisor()
        self.restore = begun[0]

    def attach(self, server: Server, manager: StoreManager | None) -> None:
        """Answer the supervisor's requests from now on with this server and its models."""
        self._server, self._manager = server, manager

    async def change(self, call: str, data: bytes) -> bytes:
        """An admin call, serialized, made in all workers; the serialized answer. Call on the serving loop."""
        if call in VERBS and not VERBS[call].changes:  # all workers have the same models
            assert self._server is not None
            return await self._server.admin_calls[call](data)
        if call == "Load" and self._manager is not None:
            request = codec.parse(pb.LoadRequest, data)
            if not request.version:  # all workers must load the version that is the newest now
                request.version = self._manager.newest_version(request.model)
                data = request.SerializeToString()
        future = self._peer.request("change", call=call, data=base64.b64encode(data).decode())
        return base64.b64decode(await asyncio.wrap_future(future))

    def _end(self) -> None:
        self.gone.set()
        self._begun.put(())

    def _answer(self, what: str, arguments: dict[str, Any]) -> Future[Any] | None:
        if what == "begin":
            state = arguments["restore"]
            self._begun.put((None if state is None else build(ServedState, state, "state"),))
            return None
        assert self._server is not None, "a supervisor sends requests once the worker is ready"
        return start_on_loop(self._on_loop(self._server, what, arguments))

    async def _on_loop(self, server: Server, what: str, arguments: dict[str, Any]) -> Any:
        if what == "beat":
            return {"status": server.status(), "event_s": server.event_s}
        if what == "state":
            return dataclasses.asdict(self._state(server))
        if what == "set_spreads":
            return server.service.registry.restore(build(dict[str, Spread], arguments["spreads"], "spreads"))
        assert what == "admin", what
        before, loaded = server.service.registry.spreads(), _loaded(server)
        answer = await server.admin_calls[arguments["call"]](base64.b64decode(arguments["data"]))
        change = MadeChange(
            answer=base64.b64encode(answer).decode(),
            before=before,
            served_before=arguments["call"] == "Load" and _loaded(server) == loaded,
            state=self._state(server),
        )
        return dataclasses.asdict(change)

    def _state(self, server: Server) -> ServedState:
        # No load holds the manager's lock now: the supervisor has one change made at a time.
        return served_state(server.service.registry) if self._manager is None else self._manager.state()


def _loaded(server: Server) -> dict[str, list[str]]:
    registry = server.service.registry
    return {name: list(registry.versions(name)) for name in registry.names()}


def _from_stdin() -> Connection:
    try:
        if stat.S_ISSOCK(os.fstat(_STDIN).st_mode):
            return Connection(os.dup(_STDIN))
    except OSError:  # stdin is closed
        pass
    raise _no_supervisor()


def _no_supervisor() -> ConfigError:
    return ConfigError("--worker is for `recinfer serve --workers N`, which starts its workers itself; leave it out")
