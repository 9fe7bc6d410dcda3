"""A worker's end of the pipe to its supervisor: what it shows of itself, and changes of models, which go to all workers."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import threading
from concurrent.futures import Future
from typing import IO, TYPE_CHECKING, Any

from recinfer.serving.engine.store import served_state
from recinfer.serving.server.loop import start_on_loop
from recinfer.serving.wire import codec
from recinfer.serving.wire.proto import admin_pb2 as pb
from recinfer.serving.workers.pipe import Pipe

if TYPE_CHECKING:
    from recinfer.serving.engine.store import StoreManager
    from recinfer.serving.server.server import Server

__all__ = ["WorkerLink"]


class WorkerLink:
    """Speaks with the supervisor over stdin and stdout.

    Attributes:
        gone: set when the supervisor has gone, however it went.
        restore: what :func:`recinfer.serving.engine.store.served_state` of a running worker gave, for one that takes the place
            of another; None for the first ones.
    """

    def __init__(self, read: IO[str] | None = None, write: IO[str] | None = None) -> None:
        self._read = read or sys.stdin
        self.gone = threading.Event()
        self.restore: dict[str, Any] | None = _first(self._read.readline())
        self._server: Server | None = None
        self._manager: StoreManager | None = None
        self._pipe = Pipe(self._read, write or sys.stdout, self._answer)
        threading.Thread(target=self._run, name="recinfer-supervisor", daemon=True).start()

    def attach(self, server: Server, manager: StoreManager | None) -> None:
        """From now on the supervisor's questions are about this server and its models."""
        self._server, self._manager = server, manager

    async def change(self, call: str, data: bytes) -> bytes:
        """An admin call, serialized, made in all workers; the serialized answer."""
        if call == "Load" and self._manager is not None:
            request = codec.parse(pb.LoadRequest, data)
            if not request.version:  # all are to load the version that is the newest now
                request.version = self._manager.newest_version(request.model)
                data = request.SerializeToString()
        asked = self._pipe.ask("change", call=call, data=base64.b64encode(data).decode())
        return base64.b64decode(await asyncio.wrap_future(asked))

    def _run(self) -> None:
        try:
            self._pipe.run()
        finally:
            self.gone.set()

    def _answer(self, what: str, arguments: dict[str, Any]) -> Any:
        server = self._server
        if server is None:
            return None
        if what == "status":
            return server.status()
        if what == "state":
            return served_state(server.service.registry) if self._manager is None else self._manager.state()
        if what == "set_spread":
            return server.service.registry.restore(arguments["spread"])
        if what == "admin":
            return self._admin(server, arguments["call"], base64.b64decode(arguments["data"]))
        raise AssertionError(what)

    def _admin(self, server: Server, call: str, data: bytes) -> Future[dict[str, Any]]:
        async def done() -> dict[str, Any]:
            before = server.service.registry.spread()
            return {"answer": base64.b64encode(await server.admin_calls[call](data)).decode(), "before": before}

        return start_on_loop(done())


def _first(line: str) -> dict[str, Any] | None:
    """The supervisor's first line: ``{"restore": ...}``. Anything else, or nothing, is somebody who tries a worker out."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message.get("restore") if isinstance(message, dict) else None
