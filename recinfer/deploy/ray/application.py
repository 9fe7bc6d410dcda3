"""The Ray Serve application of a deployment: one Serve deployment per kind of servers, each replica with a server in its
process."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer import env
from recinfer.deploy.ray.records import Records
from recinfer.deploy.ray.spec import Deployment, Kind
from recinfer.errors import RecinferError, UnavailableError
from recinfer.files import write_file
from recinfer.serving.app.running import RunningServer
from recinfer.serving.engine.change_log import show_changes
from recinfer.serving.server.tuning import raise_open_files, tune_process
from recinfer.serving.shards.config import shards_json

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.config import AutoscalingContext

__all__ = ["Agent", "ServerReplica", "application", "servers_needed"]

_PERIOD_S = 1.0
_DELISTED_S = 5.0  # for rankers and callers to have noticed that a server is not listed any more
_FINISH_S = 20.0  # for a server's requests to end
_WINDOW_S, _UP_S = 15.0, 5.0  # replicas push their metrics every ten seconds
_TOLERANCE = 0.1
_ANSWER_S = 10.0  # Serve replaces a replica after three such times
_TRIES = 3  # failed starts before Serve gives up a kind of servers that has none
_STOP_S = 45.0  # for both times together; serve.delete() waits for 60 s
_log = logging.getLogger(__name__)


class Agent:
    """Runs one server in this process until ``stop``, and keeps its record, and a ranker's shards.json, up to date
    in a thread of its own.

    Args:
        deployment, kind: names of the deployment and of the kind of the server.
        actor, host: name of the replica, and address of its node.
        folder: of a ranker's shards.json on that node.

    Attributes:
        server: the record.

    Raises:
        UnavailableError: the server does not start; names the node.
    """

    _thread: threading.Thread | None = None  # none before the server serves

    def __init__(self, records: Records, deployment: str, kind: str, actor: str, host: str, folder: Path) -> None:
        self._records = records
        self._name = deployment
        self._spec = records.deployment(deployment)
        self._kind = next(each for each in self._spec.kinds if each.name == kind)
        self.server, port = records.claim(deployment, kind, actor, host)
        self.server.pid = os.getpid()
        self._shards = folder / f"recinfer-{deployment}-{self.server.name}.json"
        self._written = ""
        self._stopping = threading.Event()
        try:
            self._running = self._start(port)
        except RecinferError as error:
            raise UnavailableError(f"on {host}: {error}") from None
        while self.server.state != "serving":
            self._step()
            time.sleep(_PERIOD_S / 4)
        self._thread = threading.Thread(target=self._run, name="recinfer-agent", daemon=True)
        self._thread.start()

    def check_health(self) -> None:
        """Return once the server responds."""
        self._running.status()

    def stop(self) -> None:
        """Remove the server from lists, wait until nobody calls it, have it finish its requests, and wait. A second call
        has no effect."""
        if self._thread is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join()
        self.server.state = "draining"
        self._records.write(self._name, self.server)
        time.sleep(_DELISTED_S)
        self._running.stop(_FINISH_S)
        self._records.forget(self._name, self.server.name)

    def _start(self, port: int) -> RunningServer:
        """The server, on ``port`` if it is free; a ranker's starts once every group of ranks has had a server."""
        while not self._kind.ranks and not self._list():
            time.sleep(_PERIOD_S)
        try:
            return RunningServer(self._spec.config(self._kind, self.server.host, port, self._shards), self._report)
        except UnavailableError:
            if not port:
                raise
        return self._start(0)

    def _report(self, line: str) -> None:
        """Take a ranker's line about its wait for shards."""
        _log.info("%s: %s", self.server.name, line)
        self.server.why = line

    def _run(self) -> None:
        while not self._stopping.wait(_PERIOD_S):
            try:
                self._step()
            except Exception:  # the next time it may succeed
                _log.exception("%s: its record is not up to date", self.server.name)

    def _step(self) -> None:
        """Bring a ranker's shards.json and the record up to date."""
        server, ready = self.server, self._running.ready
        if not self._kind.ranks:
            self._list()
        status = self._running.status()
        models = status["held"]["versions"] if self._kind.ranks else status["models"]
        server.version = ", ".join(dict.fromkeys(model["version"] for model in models if model.get("weight", 1)))
        server.load = round(status["load"], 2)
        server.memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        server.port, server.metrics_port = ready.port, ready.metrics_port or 0
        server.state = "serving" if status["ready"] else "starting"
        server.why = "" if status["ready"] else server.why
        self._records.write(self._name, server)

    def _list(self) -> bool:
        """Write shards.json if it changes; the ranker reads it within half a second. Returns False if a rank has no server:
        rankers reject a file that lacks a rank, so the last one stays."""
        serving = [server for server in self._records.servers(self._name) if server.state == "serving"]
        ranks = {
            rank: sorted(server.address for server in serving if server.kind == kind.name)
            for kind in self._spec.kinds
            for rank in kind.ranks
        }
        if not all(ranks.values()):
            return False
        if self._written != (text := shards_json(ranks, self._spec.clients)):
            write_file(self._shards, text.encode())
            self._written = text
        return True


class ServerReplica(Agent):
    """The class of all Serve deployments. Serve calls all its methods.

    Args:
        deployment, kind: names of the deployment and of the kind of its server.
        others: Serve's handles of the deployments of shard servers, which make them part of the application.
    """

    def __init__(self, deployment: str, kind: str, *others: object) -> None:
        import ray
        from ray import serve

        context, actor = ray.get_runtime_context(), serve.get_replica_context().replica_id.to_full_id_str()
        folder = Path(context.get_temp_dir(), context.get_session_name())  # where Ray keeps the replica's log too
        # This process runs the server alone, so it gets the settings of `recinfer serve`.
        env.share_heaps()
        raise_open_files()
        tune_process()
        show_changes()
        super().__init__(Records(), deployment, kind, actor, ray.util.get_node_ip_address(), folder)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The number of servers at the wanted load that the load of this one amounts to, for ``servers_needed``."""
        return {"needed": 100 * self.server.load / self._kind.percent}

    def __del__(self) -> None:
        """Serve's hook for a graceful shutdown."""
        self.stop()


def application(spec: Deployment) -> Application:
    """The application. Serve has no requests of its own to route: the rankers are its ingress in name alone."""
    *shards, rankers = spec.kinds
    others = [_deployment(spec, kind).bind(spec.name, kind.name) for kind in shards]
    found: Application = _deployment(spec, rankers).bind(spec.name, rankers.name, *others)
    return found


def _deployment(spec: Deployment, kind: Kind) -> Any:
    from ray import serve

    scaling: dict[str, Any] | None = None
    if kind.least < kind.most:
        scaling = {
            "min_replicas": kind.least,
            "max_replicas": kind.most,
            "look_back_period_s": _WINDOW_S,
            "upscale_delay_s": _UP_S,
            "downscale_delay_s": spec.cool_down,
            "policy": {"policy_function": f"{__name__}:{servers_needed.__name__}"},
        }
    variables = {"OMP_NUM_THREADS": "1", "GRPC_VERBOSITY": "NONE"}
    made = serve.deployment(
        ServerReplica,
        name=kind.name,
        ray_actor_options={"num_cpus": spec.cpus, "memory": kind.memory, "runtime_env": {"env_vars": variables}},
        max_replicas_per_node=kind.per_node(spec.nodes),
        max_constructor_retry_count=_TRIES,
        health_check_period_s=1.0,
        health_check_timeout_s=_ANSWER_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=_STOP_S,
        num_replicas=kind.least if scaling is None else None,
        autoscaling_config=scaling,
    )
    # Serve restarts all replicas of an application that runs again, unless its code has the same version. Serve 2.60
    # has no public name for it.
    made._version = "1"
    return made


def servers_needed(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Serve's policy: as many servers as the load amounts to, by the rule of Kubernetes' HorizontalPodAutoscaler."""
    needed, count = (context.aggregated_metrics or {}).get("needed", {}), context.target_num_replicas
    if not needed or len(needed) < context.current_num_replicas:
        return count, {}  # a server that has not reported yet may be the one with the load
    total = sum(needed.values())
    if abs(total / count - 1.0) <= _TOLERANCE:
        return count, {}
    return min(math.ceil(total), 2 * count), {}
