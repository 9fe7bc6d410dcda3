"""Records of deployments and of their servers in Ray's key-value store, which lives as long as the cluster's head.

Servers write their own record, so rankers and commands know all servers without a process that collects them.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recinfer.deploy.ray.spec import Deployment
from recinfer.errors import NotFoundError
from recinfer.serving.wire.address import join_address

__all__ = ["NAMESPACE", "Records", "Server", "status_of"]

NAMESPACE = "recinfer"
"""The namespace of all keys."""


@dataclass
class Server:
    """The record of one server of a deployment.

    Attributes:
        name: such as ``shard-0-2`` or ``ranker-1``; ``kind``: such as ``shard-0`` or ``ranker``.
        actor: name of the Serve replica that runs it, on the node at ``host``.
        state: ``starting``, ``serving`` or ``draining``; ``why``: the reason why a ranker waits for shard servers.
        restarts: how often a replica of its name started after the first one.
        port, metrics_port, pid: of its process.
        version: the served one.
        load: the share of its capacity in use, 0 to 1; ``memory``: resident bytes.
    """

    name: str
    kind: str
    actor: str
    host: str
    state: str = "starting"
    why: str = ""
    restarts: int = 0
    port: int = 0
    metrics_port: int = 0
    pid: int = 0
    version: str = ""
    load: float = 0.0
    memory: int = 0

    @property
    def address(self) -> str:
        """``host:port``; empty before it has a port."""
        return join_address(self.host, self.port) if self.port else ""


class Records:
    """Reads and writes the records of the cluster that this process is connected to."""

    @property
    def _store(self) -> Any:
        """Ray's key-value store, which has no public successor."""
        from ray.experimental import internal_kv

        return internal_kv

    def names(self) -> list[str]:
        """Names of all deployments."""
        return sorted(key for key in self._keys("") if "/" not in key)

    def deployment(self, name: str | None) -> Deployment:
        """A deployment as it should be; ``name`` may be None if there is only one. Raises NotFoundError."""
        there = self.names()
        found = self._get(there[0] if name is None and len(there) == 1 else name or "")
        if isinstance(found, Deployment):
            return found
        raise NotFoundError(
            f"deployment: got {'none' if name is None else repr(name)}, expected one of: {', '.join(there) or 'none exist'}"
        )

    def save(self, spec: Deployment) -> None:
        """Write a deployment, under its name."""
        self._put(spec.name, spec, overwrite=True)

    def servers(self, deployment: str) -> list[Server]:
        """The servers of a deployment whose replicas have not ended, by name."""
        return self._servers(deployment, ended=False)

    def write(self, deployment: str, server: Server) -> None:
        """Write the record of a server."""
        self._put(f"{deployment}/{server.name}", server, overwrite=True)

    def claim(self, deployment: str, kind: str, actor: str, host: str) -> tuple[Server, int]:
        """A record for a new replica, and the port that it should try first.

        The replica takes the name of a server whose replica has ended, and on the same host its port, which callers
        know.
        """
        for before in sorted(self._servers(deployment, ended=True), key=lambda server: server.host != host):
            made = Server(before.name, kind, actor, host, restarts=before.restarts + 1)
            key = f"{deployment}/{made.name}"
            if before.kind == kind and self._delete(key) and self._put(key, made, overwrite=False):
                return made, before.port if before.host == host else 0
        for number in itertools.count():
            made = Server(f"{kind}-{number}", kind, actor, host)
            if self._put(f"{deployment}/{made.name}", made, overwrite=False):
                return made, 0
        raise AssertionError

    def forget(self, deployment: str, server: str | None = None) -> None:
        """Remove the record of one server, or of a deployment and all its servers."""
        keys = (deployment, *self._keys(f"{deployment}/")) if server is None else (f"{deployment}/{server}",)
        for key in keys:
            self._delete(key)

    def _servers(self, deployment: str, ended: bool) -> list[Server]:
        found = [self._get(key) for key in self._keys(f"{deployment}/")]
        alive = self._actors()  # after the records, so that no new actor seems to have ended
        mine = [server for server in found if server is not None and (server.actor not in alive) is ended]
        return sorted(mine, key=lambda server: (len(server.name), server.name))

    def _keys(self, prefix: str) -> list[str]:
        return [key.decode() for key in self._store._internal_kv_list(prefix.encode(), namespace=NAMESPACE)]

    def _get(self, key: str) -> Any:
        found: bytes | None = self._store._internal_kv_get(key.encode(), namespace=NAMESPACE)
        return None if found is None else pickle.loads(found)

    def _put(self, key: str, value: Deployment | Server, overwrite: bool) -> bool:
        """Returns whether there was no value."""
        return not self._store._internal_kv_put(
            key.encode(), pickle.dumps(value), overwrite=overwrite, namespace=NAMESPACE
        )

    def _delete(self, key: str) -> bool:
        return bool(self._store._internal_kv_del(key.encode(), namespace=NAMESPACE))

    def _actors(self) -> set[str]:
        """Names of the actors that have not ended."""
        import ray

        return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def status_of(spec: Deployment, servers: Sequence[Server]) -> dict[str, Any]:
    """The state as JSON values, as ``recinfer deploy --status`` shows it. A deployment is ``ready`` when the wanted number
    of servers runs and each of them serves."""
    shown, ready = list[dict[str, Any]](), True
    for kind in spec.kinds:
        mine, role = [server for server in servers if server.kind == kind.name], "shard" if kind.ranks else "ranker"
        ready &= kind.least <= len(mine) <= kind.most and all(server.state == "serving" for server in mine)
        shown += [{**asdict(each), "address": each.address, "role": role, "ranks": list(kind.ranks)} for each in mine]
    rankers = [each for each in shown if each["role"] == "ranker"]
    return {
        "name": spec.name,
        "model": spec.model,
        "version": ", ".join(sorted({ranker["version"] for ranker in rankers} - {""})),
        "ready": ready,
        "why": [f"{server.name} on {server.host}: {server.why}" for server in servers if server.why],
        "rankers": sorted(ranker["address"] for ranker in rankers if ranker["state"] == "serving"),
        "servers": shown,
    }
