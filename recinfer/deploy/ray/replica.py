"""The Ray Serve replica that runs one server: starts it on its own node, reports its health and load, and drains it."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recinfer import env
from recinfer.archive.mapping import name_files_at_sigbus
from recinfer.deploy.ray.records import Records, requests_in
from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import RecinferError, UnavailableError
from recinfer.files import write_file
from recinfer.serving.app.running import RunningServer
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.engine.change_log import show_changes
from recinfer.serving.server.tuning import raise_open_files, tune_process
from recinfer.serving.shards.config import shards_json
from recinfer.serving.wire.address import join_address

__all__ = ["Agent", "ServerReplica", "shards_file"]

_PERIOD_S = 1.0
_READ_S, _READ_AT_MOST_S = 1.0, 15.0  # for rankers to have read another list: they look twice a second
_RANKER_DRAIN_S = 5.0  # for callers to have noticed that a ranker is not listed any more
_STOP_S = 20.0
_CALL_S = 600.0  # loading reads and checks a whole archive
_UNCOUNTED = frozenset({"State", "Prepare", "ListModels", "Load", "Unload", "SetDefault"})  # a deployment's own calls
_log = logging.getLogger(__name__)


class ServerReplica:
    """The class of all Serve deployments. Serve calls all its methods.

    Args:
        deployment: name of the deployment.
        group: number of the group of ranks of its server; None for a ranker.
        others: Serve's handles of the deployments of shard servers, which make them part of the application.
    """

    def __init__(self, deployment: str, group: int | None, *others: object) -> None:
        import ray
        from ray import serve

        node = ray.get_runtime_context().get_node_id()
        host = next(found["NodeManagerAddress"] for found in ray.nodes() if found["NodeID"] == node)
        actor = serve.get_replica_context().replica_id.to_full_id_str()
        # This process runs the server alone, so it gets the settings of `recinfer serve`.
        env.share_heaps()
        raise_open_files()
        name_files_at_sigbus()
        tune_process()
        show_changes()
        self._agent = Agent(Records(), deployment, group, actor, node, host)

    def check_health(self) -> None:
        """Return once the server responds; Serve replaces a replica that does not return in time."""
        self._agent.status()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load, for recinfer.deploy.ray.application.servers_needed."""
        return {"needed": self._agent.needed}

    def __del__(self) -> None:
        """Serve's hook for a graceful shutdown: returns when the server has finished its requests."""
        if hasattr(self, "_agent"):
            self._agent.stop()


class Agent:
    """Runs one server in this process until ``stop``, and keeps its record, and a ranker's shards.json and versions, up to
    date in threads of its own.

    Attributes:
        needed: the number of fully loaded servers that the load of this one amounts to.
        server: the record.

    Raises:
        UnavailableError: the deployment was removed.
        RecinferError: the server does not start; its record says why, and the next replica takes its name.
    """

    def __init__(self, records: Records, deployment: str, group: int | None, actor: str, node: str, host: str) -> None:
        self._records, self._name = records, deployment
        self._spec = self._read_spec()
        self.server, port = records.claim(deployment, group, actor, node, host)
        self.server.pid, self.needed = os.getpid(), 0.0
        self._listed: dict[int, list[str]] = {}
        self._written = ""
        self._last = (time.monotonic(), 0, 0.0)
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

    def status(self) -> dict[str, Any]:
        """The figures of the server; waits until it responds."""
        return self._running.status()

    def stop(self) -> None:
        """Remove the server from rankers' lists, wait until nobody calls it, have it finish its requests, and wait. A second
        call has no effect."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self._drain()
        self._running.stop(_STOP_S)
        shards_file(self._spec.tag, self.server.name).unlink(missing_ok=True)
        self._records.forget(self._name, self.server.name)

    def _read_spec(self) -> Deployment:
        found = self._records.deployment(self._name)
        if found is None:
            raise UnavailableError(f"deployment {self._name!r} was removed")
        return found

    def _start(self, port: int) -> RunningServer:
        """The server, on ``port`` if it is free; a ranker's starts once every group of ranks has had a server."""
        server, spec = self.server, self._spec
        file = shards_file(spec.tag, server.name)
        while server.group is None and not self._list():
            time.sleep(_PERIOD_S)
            self._spec = spec = self._read_spec()
        try:
            return RunningServer(spec.config(server.group, server.host, port, file), self._report)
        except UnavailableError:
            if not port:
                raise
        return RunningServer(spec.config(server.group, server.host, 0, file), self._report)

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
        server, ready = self.server, self._running.ready
        self._spec = self._records.deployment(self._name) or self._spec
        if server.group is None:
            self._list()
        status = self.status()
        models = status["models"] if server.group is None else status["held"]["versions"]
        server.loaded = [model["version"] for model in models]
        server.version = ", ".join(dict.fromkeys(model["version"] for model in models if model.get("weight", 1)))
        server.busy = 0.0 if server.group is None else float(status["held"]["busy"])
        replicas = (status["shards"] or {}).get("replicas", ())
        server.calls = {replica["address"]: int(replica["outstanding"]) for replica in replicas}
        server.rate, server.inside = self._rates(status)
        server.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        server.port, server.metrics_port = ready.port, ready.metrics_port or 0
        server.address = join_address(server.host, ready.port)
        if status["ready"]:
            server.state, server.why = "serving", ""
        else:
            server.state, server.why = "starting", server.why or "it is not ready"
        requests = requests_in(server, self._records.servers(self._name))
        self.needed = max(requests / self._spec.queue_depth, 100 * server.busy / self._spec.busy_percent)
        self._write()

    def _rates(self, status: dict[str, Any]) -> tuple[float, float]:
        """Requests per second since the last call, and the seconds per second that completed requests spent in the
        server."""
        then, last_count, last_seconds = self._last
        count = sum(item["count"] for item in status["requests"] if item["method"] not in _UNCOUNTED)
        seconds = sum(state["total"] for method, state in status["latency"].items() if method not in _UNCOUNTED)
        self._last = now, _, _ = time.monotonic(), count, seconds
        return (count - last_count) / (now - then), (seconds - last_seconds) / (now - then)

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
            write_file(shards_file(self._spec.tag, self.server.name), text.encode())
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
        start = time.monotonic()
        while (spent := time.monotonic() - start) < _READ_AT_MOST_S:
            if self.server.group is None and spent >= _RANKER_DRAIN_S:
                return
            listing = any(self.server.address in other.calls for other in self._records.servers(self._name))
            if self.server.group is not None and spent >= _READ_S and not listing:
                return
            time.sleep(_PERIOD_S / 2)

    def _write(self) -> None:
        self._records.write(self._name, self.server)


def shards_file(tag: str, server: str) -> Path:
    """The shards.json of a ranker, on its node."""
    return Path(tempfile.gettempdir()) / f"recinfer-{tag}-{server}.json"
