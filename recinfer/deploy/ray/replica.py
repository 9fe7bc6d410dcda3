"""The agent of one server: starts it in this process, keeps its record, reports its health and load, and drains it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recinfer.deploy.ray.records import Records
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import RecinferError, UnavailableError
from recinfer.files import write_file
from recinfer.serving.app.running import RunningServer
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.shards.config import shards_json
from recinfer.serving.wire.address import join_address

__all__ = ["Agent"]

_PERIOD_S = 1.0
_READ_S, _READ_AT_MOST_S = 1.0, 15.0  # for rankers to have read another list: they look twice a second
_RANKER_DRAIN_S = 5.0  # for callers to have noticed that a ranker is not listed any more
_STOP_S = 20.0
_CALL_S = 600.0  # loading reads and checks a whole archive
_log = logging.getLogger(__name__)


class Agent:
    """Runs one server in this process until ``stop``, and keeps its record, and a ranker's shards.json and versions, up to
    date in threads of its own.

    Args:
        actor, host: name of the replica, and address of its node.
        folder: of a ranker's shards.json on that node.

    Attributes:
        server: the record.

    Raises:
        UnavailableError: the deployment was removed.
        RecinferError: the server does not start; its record says why, and the next replica takes its name.
    """

    _thread: threading.Thread | None = None  # none before the server serves

    def __init__(
        self, records: Records, deployment: str, group: int | None, actor: str, host: str, folder: Path
    ) -> None:
        self._records = records
        self._name = deployment
        self._spec = self._read_spec()
        self.server, port = records.claim(deployment, group, actor, host)
        self.server.pid = os.getpid()
        self._shards = folder / f"recinfer-{deployment}-{self.server.name}.json"
        self._listed: dict[int, list[str]] = {}
        self._written = ""
        self._stopping = threading.Event()
        try:
            self._running = self._start(port)
            while not self.server.serving:
                self._step()
                time.sleep(_PERIOD_S / 4)
        except RecinferError as error:
            self.server.state, self.server.why = "pending", str(error)
            self._write()
            raise
        self._thread = self._each_second(self._step)
        if group is None and self._spec.store is not None:
            self._each_second(self._follow)  # in another thread, since loading takes long

    def check_health(self) -> None:
        """Return once the server responds."""
        self._running.status()

    def stop(self) -> None:
        """Remove the server from rankers' lists, wait until nobody calls it, have it finish its requests, and wait. A second
        call has no effect."""
        if self._thread is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._drain()
        self._running.stop(_STOP_S)
        self._records.forget(self._name, self.server.name)

    def _read_spec(self) -> Deployment:
        found = self._records.deployment(self._name)
        if found is None:
            raise UnavailableError(f"deployment {self._name!r} was removed")
        return found

    def _start(self, port: int) -> RunningServer:
        """The server, on ``port`` if it is free; a ranker's starts once every group of ranks has had a server."""
        server = self.server
        while server.group is None and not self._list():
            time.sleep(_PERIOD_S)
            self._spec = self._read_spec()
        try:
            return RunningServer(self._spec.config(server.group, server.host, port, self._shards), self._report)
        except UnavailableError:
            if not port:
                raise
        return RunningServer(self._spec.config(server.group, server.host, 0, self._shards), self._report)

    def _report(self, line: str) -> None:
        """Take a ranker's line about its wait for shards."""
        _log.info("%s: %s", self.server.name, line)
        self.server.why = "" if self.server.serving else line

    def _each_second(self, work: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            while not self._stopping.wait(_PERIOD_S):
                try:
                    work()
                except Exception:  # the next time it may succeed
                    _log.exception("%s: %s failed", self.server.name, work.__name__)

        thread = threading.Thread(target=run, name="recinfer-agent", daemon=True)
        thread.start()
        return thread

    def _step(self) -> None:
        """Bring a ranker's shards.json and the record up to date."""
        server, ready, is_ranker = self.server, self._running.ready, self.server.group is None
        self._spec = self._records.deployment(self._name) or self._spec
        if is_ranker:
            self._list()
        status = self._running.status()
        models = status["models"] if is_ranker else status["held"]["versions"]
        server.loaded = [model["version"] for model in models]
        server.version = ", ".join(dict.fromkeys(model["version"] for model in models if model.get("weight", 1)))
        server.calls = sorted({replica["address"] for replica in status["shards"]["replicas"]}) if is_ranker else []
        server.load = round(status["load"], 2)
        server.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        server.port, server.metrics_port = ready.port, ready.metrics_port or 0
        server.address = join_address(server.host, ready.port)
        server.state = "serving" if status["ready"] else "starting"
        server.why = "" if status["ready"] else server.why or "it is not ready"
        self._write()

    def _list(self) -> bool:
        """Write shards.json if it changes; the ranker reads it within half a second. Returns whether there is one."""
        servers = self._records.servers(self._name)
        for group in self._spec.servers.groups:
            serving = sorted(each.address for each in servers if each.group == group.number and each.serving)
            if not serving and group.number not in self._listed:
                return False  # rankers reject a file that lacks a rank
            if serving:  # without one the last list stays, for the ranker's errors
                self._listed[group.number] = serving
        ranks = {rank: self._listed[group.number] for group in self._spec.servers.groups for rank in group.ranks}
        if self._written != (text := shards_json(ranks, self._spec.client_settings())):
            write_file(self._shards, text.encode())
            self._written = text
        return True

    def _follow(self) -> None:
        """Load the versions that the ranker needs, switch to the deployment's, and unload the versions that are no longer
        needed."""
        spec, server = self._spec, self.server
        needed = {spec.version, spec.previous, spec.candidate}
        server.refused = {version: why for version, why in server.refused.items() if version == spec.candidate}
        others = [each for each in self._records.servers(self._name) if each.group is None and each.serving]
        # One ranker loads at a time, in the order of their names, so that callers reach the others.
        waits = any(each.name < server.name and spec.candidate not in each.loaded for each in others)
        missing = {spec.version, None if waits else spec.candidate} - {None, *server.loaded, *server.refused}
        if not missing and server.version == spec.version and needed.issuperset(server.loaded):
            return
        settings: dict[str, Any] = {"token": spec.security.token or "", **spec.client_settings()}
        model = spec.servers.model
        with AdminClient(server.address, timeout=_CALL_S, **settings) as admin:
            for version in missing:
                try:
                    admin.load(model, str(version))
                except RecinferError as error:
                    server.refused[str(version)] = str(error)
            if server.version != spec.version:
                admin.set_default(model, spec.version)
            for version, found in admin.list_models().get(model, {}).items():
                if version not in needed and not found.weight:
                    admin.unload(model, version)

    def _drain(self) -> None:
        """Wait until no client or ranker sends requests to the server any more."""
        self.server.state = "draining"
        self._write()
        start, least = time.monotonic(), _RANKER_DRAIN_S if self.server.group is None else _READ_S
        while (spent := time.monotonic() - start) < _READ_AT_MOST_S:
            listed = any(self.server.address in other.calls for other in self._records.servers(self._name))
            if spent >= least and not listed:
                return
            time.sleep(_PERIOD_S / 2)

    def _write(self) -> None:
        self._records.write(self._name, self.server)
