"""Records of deployments and of their servers in Ray's key-value store, which lives as long as the cluster's head.

Servers write their own record, so rankers and commands know all servers without a process that collects them.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from recinfer.deploy.ray.spec import Deployment, kind_name

__all__ = ["NAMESPACE", "Records", "Server", "status_of"]

NAMESPACE = "recinfer"
"""The namespace of all keys."""


@dataclass
class Server:
    """The record of one server of a deployment.

    Attributes:
        name: such as ``shard-0-2`` or ``ranker-1``; ``group``: number of its group of ranks, None for a ranker.
        actor: name of the Serve replica that runs it, on the node at ``host``.
        state: ``pending`` (its replica has ended), ``starting``, ``serving`` or ``draining``; ``why``: the reason why
            it is not serving.
        restarts: how often a replica of its name started after the first one.
        address, port, metrics_port, pid: of its process.
        version: the served one; ``loaded``: all loaded ones; ``refused``: the error of a version that it could not load.
        load: the share of its capacity in use, 0 to 1; ``memory``: resident bytes.
        calls: addresses of the shard servers that a ranker calls.
    """

    name: str
    group: int | None
    actor: str = ""
    host: str = ""
    state: str = "pending"
    why: str = ""
    restarts: int = 0
    address: str = ""
    port: int = 0
    metrics_port: int = 0
    pid: int = 0
    version: str = ""
    loaded: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    load: float = 0.0
    memory: int = 0
    calls: list[str] = field(default_factory=list)

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.state == "serving"


class Records:
    """Reads and writes the records of the cluster that this process is connected to.

    Args:
        store: the functions of ``ray.experimental.internal_kv``, which has no public successor; None: that module.
    """

    def __init__(self, store: Any = None) -> None:
        if store is None:
            from ray.experimental import internal_kv

            store = internal_kv
        self._store = store

    def names(self) -> list[str]:
        """Names of all deployments."""
        return sorted(key for key in self._keys("") if "/" not in key)

    def deployment(self, name: str) -> Deployment | None:
        """A deployment as it should be; None if there is none of that name."""
        found = self._get(name)
        return None if found is None else pickle.loads(found)

    def save(self, spec: Deployment) -> None:
        """Write a deployment, under its name."""
        self._store._internal_kv_put(spec.name.encode(), pickle.dumps(spec), overwrite=True, namespace=NAMESPACE)

    def servers(self, deployment: str) -> list[Server]:
        """The servers of a deployment, shard servers first. A server whose actor has ended is ``pending``."""
        alive = self._actors()
        values = [self._get(key) for key in self._keys(f"{deployment}/")]
        found = [Server(**json.loads(value)) for value in values if value is not None]
        for server in found:
            if server.actor not in alive:
                server.state, server.why = "pending", server.why or f"its replica on {server.host} has ended"
                server.address, server.metrics_port, server.pid, server.memory = "", 0, 0, 0
        return sorted(found, key=lambda each: (each.group is None, each.group or 0, len(each.name), each.name))

    def write(self, deployment: str, server: Server, overwrite: bool = True) -> bool:
        """Write the record of a server; returns whether there was none."""
        key, value = f"{deployment}/{server.name}".encode(), json.dumps(asdict(server)).encode()
        return not self._store._internal_kv_put(key, value, overwrite=overwrite, namespace=NAMESPACE)

    def claim(self, deployment: str, group: int | None, actor: str, host: str) -> tuple[Server, int]:
        """A record for a new replica, and the port that it should try first.

        The replica takes the name of a server whose replica has ended, and on the same host its port, which callers
        know.
        """
        ended = [each for each in self.servers(deployment) if each.group == group and each.state == "pending"]
        for before in sorted(ended, key=lambda server: server.host != host):
            made = Server(before.name, group, actor, host, "starting", before.why, before.restarts + 1)
            if self._delete(f"{deployment}/{made.name}") and self.write(deployment, made, overwrite=False):
                return made, before.port if before.host == host else 0
        for number in itertools.count():
            made = Server(f"{kind_name(group)}-{number}", group, actor, host, "starting")
            if self.write(deployment, made, overwrite=False):
                return made, 0
        raise AssertionError

    def forget(self, deployment: str, server: str | None = None) -> None:
        """Remove the record of one server, or of a deployment and all its servers."""
        keys = (deployment, *self._keys(f"{deployment}/")) if server is None else (f"{deployment}/{server}",)
        for key in keys:
            self._delete(key)

    def _keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._store._internal_kv_list(prefix.encode(), namespace=NAMESPACE)]

    def _get(self, key: str) -> bytes | None:
        found: bytes | None = self._store._internal_kv_get(key.encode(), namespace=NAMESPACE)
        return found

    def _delete(self, key: str) -> bool:
        return bool(self._store._internal_kv_del(key.encode(), namespace=NAMESPACE))

    def _actors(self) -> set[str]:
        """Names of the actors that have not ended."""
        import ray

        return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def status_of(spec: Deployment, servers: Sequence[Server]) -> dict[str, Any]:
    """The state as JSON values, as ``recinfer deploy --status`` shows it. A deployment is ``ready`` when the wanted number
    of servers serves and every ranker calls all shard servers."""
    shown, counts = list[Server](), True
    for group in (*range(len(spec.servers.groups)), None):
        bounds, mine = spec.bounds(group), [server for server in servers if server.group == group]
        here = [server for server in mine if server.state != "pending"]
        # The number that the load needs is Serve's affair; below the minimum a server is missing in any case.
        lacking = max(0, bounds.least - len(here))
        counts &= bounds.least <= len(here) <= bounds.most
        ended = [server for server in mine if server.state == "pending"]
        absent = Server(kind_name(group), group, why="its replica has not started")
        shown += here + (ended + [absent] * lacking)[:lacking]
    listed = {server.address for server in shown if server.group is not None}
    rankers = [server for server in shown if server.group is None]
    return {
        "name": spec.name,
        "model": spec.servers.model,
        "version": spec.version,
        "previous": spec.previous,
        "ready": counts and all(s.serving for s in shown) and all(set(s.calls) == listed for s in rankers),
        "rankers": sorted(server.address for server in rankers if server.serving),
        "servers": [
            {
                **asdict(server),
                "role": "ranker" if server.group is None else "shard",
                "ranks": [] if server.group is None else list(spec.servers.groups[server.group].ranks),
            }
            for server in shown
        ],
    }
