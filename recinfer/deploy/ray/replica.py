"""The Ray Serve replica that runs one server: starts it on its own node, reports its health and load, and drains it."""

from __future__ import annotations

import logging
import tempfile
import threading
import time
from pathlib import Path

from recinfer.deploy.ray.probe import Prober
from recinfer.deploy.ray.process import ServerProcess
from recinfer.deploy.ray.records import Records, Server, addresses, requests_in, shards_text
from recinfer.deploy.ray.rollout import follow
from recinfer.errors import RecinferError, UnavailableError
from recinfer.serving.wire.address import join_address

__all__ = ["Agent", "ServerReplica", "shards_file"]

_PERIOD_S = 1.0
_MISSES = 10  # looks in a row without an answer after which a server is given up
_START_S = 600.0
_READ_S, _READ_AT_MOST_S = 1.0, 15.0  # for rankers to have read another list: they look twice a second
_RANKER_DRAIN_S = 5.0  # for callers to have noticed that a ranker is not listed any more
_STOP_S = 20.0
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
        self._agent = Agent(Records(), deployment, group, actor, node, host)
        self._agent.wait()

    def check_health(self) -> None:
        """Raises UnavailableError if another replica must take over."""
        if self._agent.failed:
            raise UnavailableError(self._agent.failed)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The load, for recinfer.deploy.ray.application.servers_needed."""
        return {"needed": self._agent.needed}

    def __del__(self) -> None:
        """Serve's hook for a graceful shutdown: returns when the server has finished its requests."""
        if hasattr(self, "_agent"):
            self._agent.stop()


class Agent:
    """Runs one server in a thread of its own, from its start until ``stop``, and keeps its record up to date.

    A server that ended after it had served starts again on its port, since callers have its address. One that does not
    respond, or does not start, ends the agent, and Serve starts another replica.

    Attributes:
        failed: why the agent has ended; empty while it runs.
        needed: the number of fully loaded servers that the load of this one amounts to.
        server: the record.
    """

    def __init__(self, records: Records, deployment: str, group: int | None, actor: str, node: str, host: str) -> None:
        found = records.saved(deployment)
        if found is None:
            raise UnavailableError(f"deployment {deployment!r} was removed")
        self._records, self._saved, self.failed, self.needed = records, found, "", 0.0
        self.server, self._wish = records.claim(deployment, group, actor, node, host)
        self._process: ServerProcess | None = None
        self._prober: Prober | None = None
        self._listed: dict[int, list[str]] = {}
        self._text: str | None = None
        self._misses, self._since = 0, 0.0
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="recinfer-agent", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server serves. Raises UnavailableError if it does not start."""
        self._ready.wait()
        if self.failed:
            raise UnavailableError(f"{self.server.name}: {self.failed}")

    def stop(self) -> None:
        """Remove the server from rankers' lists, wait until nobody calls it, have it finish its requests, and wait."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set() and not self.failed:
            try:
                self._step()
            except RecinferError as error:
                self.failed = self.server.why = str(error)
                self.server.state = "pending"
            except Exception:  # the next step may succeed
                _log.exception("%s: a step failed", self.server.name)
            if self.server.serving or self.failed:
                self._ready.set()
            self._stopping.wait(_PERIOD_S)
        if self.failed:
            self._write()  # the record says why, and the next replica takes its name
        else:
            self._drain()
        if self._process is not None:
            self._process.stop(_STOP_S)
        if not self.failed:
            shards_file(self._saved.spec.tag, self.server.name).unlink(missing_ok=True)
            self._records.forget(self._saved.spec.name, self.server.name)

    def _step(self) -> None:
        """Look at the server once, start it if it does not run, and write its record."""
        self._saved = self._records.saved(self._saved.spec.name) or self._saved
        server, spec, others = self.server, self._saved.spec, self._records.servers(self._saved.spec.name)
        if server.group is None and not self._list(others):
            server.why = "it waits for the shard servers"
        elif self._process is None:
            self._process = self._start()
        else:
            self._look(self._process)
        requests = requests_in(server, others)
        self.needed = max(requests / spec.queue_depth, 100 * server.busy / spec.busy_percent)
        self._write()
        if server.serving and server.group is None:
            follow(self._saved, server)

    def _start(self) -> ServerProcess:
        server, spec = self.server, self._saved.spec
        server.address, server.state = "", "starting"
        self._misses, self._since, self._prober = 0, time.monotonic(), Prober(spec)
        arguments = spec.arguments(server.group, self._saved.version, server.host, self._wish)
        if server.group is None:
            arguments += ["--shards", str(shards_file(spec.tag, server.name))]
        return ServerProcess(arguments, spec.environment())

    def _look(self, process: ServerProcess) -> None:
        server, port = self.server, self.server.port
        if not process.look(server):
            if not (server.serving or self._wish):
                raise UnavailableError(server.why)
            _log.warning("%s on %s: %s", server.name, server.host, server.why)
            # A server that never served may have found its wished port taken.
            self._wish = port if server.serving else 0
            server.restarts, server.calls = server.restarts + 1, {}
            self._process = self._start()
            return
        if server.metrics_port:
            server.address = join_address(server.host, server.port)
            self._probe(process)
        if server.serving:
            self._since = time.monotonic()
        elif time.monotonic() - self._since > _START_S:
            process.stop(0.0)
            raise UnavailableError(f"it was not ready within {_START_S:g} s")

    def _probe(self, process: ServerProcess) -> None:
        server = self.server
        assert self._prober is not None
        try:
            ready, self._misses = self._prober.look(server), 0
        except OSError as error:
            self._misses += 1
            if self._misses >= _MISSES and server.serving:
                process.stop(0.0)  # a hung server does not react to SIGTERM
                raise UnavailableError(f"its metrics port does not respond: {error}") from None
            server.why = server.why if server.serving else f"its metrics port does not respond: {error}"
            return
        if ready:
            server.state, server.why = "serving", ""
        elif server.serving:
            server.state, server.why = "starting", "it is not ready"

    def _list(self, others: list[Server]) -> bool:
        """Write shards.json if it changes; the ranker reads it within half a second. Returns whether there is one."""
        self._listed = addresses(len(self._saved.spec.groups), others, self._listed)
        text = shards_text(self._saved.spec, self._listed)
        if text is not None and text != self._text:
            path = shards_file(self._saved.spec.tag, self.server.name)
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
            self._text = text
        return text is not None

    def _drain(self) -> None:
        """Wait until no client or ranker sends requests to the server any more."""
        served, self.server.state = self.server.serving, "draining"
        self._write()
        if not served:
            return
        start = time.monotonic()
        while (spent := time.monotonic() - start) < _READ_AT_MOST_S:
            if self.server.group is None and spent >= _RANKER_DRAIN_S:
                return
            listing = any(self.server.address in other.calls for other in self._records.servers(self._saved.spec.name))
            if self.server.group is not None and spent >= _READ_S and not listing:
                return
            time.sleep(_PERIOD_S / 2)

    def _write(self) -> None:
        self._records.write(self._saved.spec.name, self.server)


def shards_file(tag: str, server: str) -> Path:
    """The shards.json of a ranker, on its node."""
    return Path(tempfile.gettempdir()) / f"recinfer-{tag}-{server}.json"
