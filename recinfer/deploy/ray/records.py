"""Records of deployments and of their servers in Ray's key-value store, which lives as long as the cluster's head.

Servers write their own record, so rankers and commands know all servers without a process that collects them.
"""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from recinfer.deploy.ray.spec import Deployment, kind_name
from recinfer.serving.shards.config import shards_json

__all__ = ["NAMESPACE", "Records", "Saved", "Server", "Store", "addresses", "requests_in", "shards_text"]

NAMESPACE = "recinfer"
"""The namespace of all keys, and of the actors that are not Serve's."""


class Store:
    """The key-value store and the actors of the cluster that this process is connected to."""

    def put(self, key: str, value: bytes, overwrite: bool) -> bool:
        """Write a value; returns whether there was none."""
        from ray.experimental.internal_kv import _internal_kv_put

        return not _internal_kv_put(key.encode(), value, overwrite=overwrite, namespace=NAMESPACE)

    def get(self, key: str) -> bytes | None:
        """A value; None if there is none."""
        from ray.experimental.internal_kv import _internal_kv_get

        found: bytes | None = _internal_kv_get(key.encode(), namespace=NAMESPACE)
        return found

    def delete(self, key: str) -> bool:
        """Remove a value; returns whether there was one."""
        from ray.experimental.internal_kv import _internal_kv_del

        return bool(_internal_kv_del(key.encode(), namespace=NAMESPACE))

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin with ``prefix``."""
        from ray.experimental.internal_kv import _internal_kv_list

        return [key.decode() for key in _internal_kv_list(prefix.encode(), namespace=NAMESPACE)]

    def actors(self) -> set[str]:
        """Names of the actors that have not ended."""
        import ray

        return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


@dataclass(frozen=True)
class Saved:
    """A deployment as it should be.

    Attributes:
        spec: its specification, with the numbers of servers that were last asked for.
        version: the version that it serves; ``previous``: the one before it, None if there was none.
    """

    spec: Deployment
    version: str
    previous: str | None = None


@dataclass
class Server:
    """The record of one server of a deployment.

    Attributes:
        name: such as ``shard-0-2`` or ``ranker-1``; ``group``: number of its group of ranks, None for a ranker.
        actor: name of the Serve replica that runs it, on ``node`` at ``host``.
        state: ``pending`` (its replica has ended), ``starting``, ``serving`` or ``draining``; ``why``: the reason why
            it is not serving.
        restarts: how often it started again, also in another replica.
        address, port, metrics_port, pid: of its process.
        version: the served one; ``rate``: requests per second; ``memory``: resident bytes.
        inside: average number of requests in it; ``busy``: the share of time in which a shard server is busy.
        calls: a ranker's open calls to each shard server that it lists, by address.
    """

    name: str
    group: int | None
    actor: str = ""
    node: str = ""
    host: str = ""
    state: str = "pending"
    why: str = ""
    restarts: int = 0
    address: str = ""
    port: int = 0
    metrics_port: int = 0
    pid: int = 0
    version: str = ""
    rate: float = 0.0
    memory: int = 0
    inside: float = 0.0
    busy: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def serving(self) -> bool:
        """Whether it takes requests."""
        return self.state == "serving"


class Records:
    """Reads and writes records in ``store``."""

    def __init__(self, store: Store | None = None) -> None:
        self._store = store or Store()

    def names(self) -> list[str]:
        """Names of all deployments."""
        return sorted(key for key in self._store.keys("") if "/" not in key)

    def saved(self, deployment: str) -> Saved | None:
        """A deployment as it should be; None if there is none of that name."""
        found = self._store.get(deployment)
        return None if found is None else pickle.loads(found)

    def save(self, saved: Saved) -> None:
        """Write a deployment, under its name."""
        self._store.put(saved.spec.name, pickle.dumps(saved), overwrite=True)

    def servers(self, deployment: str) -> list[Server]:
        """The servers of a deployment, shard servers first. A server whose actor has ended is ``pending``."""
        alive = self._store.actors()
        found = [each for key in self._store.keys(f"{deployment}/") if (each := self._read(key)) is not None]
        for server in found:
            if server.actor not in alive:
                server.state, server.why = "pending", server.why or f"its replica on {server.host} has ended"
                server.address, server.metrics_port, server.pid, server.memory = "", 0, 0, 0
        return sorted(
            found, key=lambda server: (server.group is None, server.group or 0, len(server.name), server.name)
        )

    def write(self, deployment: str, server: Server, overwrite: bool = True) -> bool:
        """Write the record of a server; returns whether there was none."""
        return self._store.put(f"{deployment}/{server.name}", json.dumps(asdict(server)).encode(), overwrite)

    def claim(self, deployment: str, group: int | None, actor: str, node: str, host: str) -> tuple[Server, int]:
        """A record for a new replica, and the port that it should try first.

        The replica takes the name of a server whose replica has ended, and on the same host its port, which callers
        know.
        """
        ended = [each for each in self.servers(deployment) if each.group == group and each.state == "pending"]
        for before in sorted(ended, key=lambda server: server.host != host):
            made = Server(before.name, group, actor, node, host, "starting", before.why, before.restarts + 1)
            if self.forget(deployment, made.name) and self.write(deployment, made, overwrite=False):
                return made, before.port if before.host == host else 0
        for number in itertools.count():
            made = Server(f"{kind_name(group)}-{number}", group, actor, node, host, "starting")
            if self.write(deployment, made, overwrite=False):
                return made, 0
        raise AssertionError

    def forget(self, deployment: str, server: str | None = None) -> bool:
        """Remove the record of one server, or of a deployment and all its servers; returns whether there was one."""
        if server is not None:
            return self._store.delete(f"{deployment}/{server}")
        return any([self._store.delete(key) for key in (deployment, *self._store.keys(f"{deployment}/"))])

    def _read(self, key: str) -> Server | None:
        found = self._store.get(key)
        return None if found is None else Server(**json.loads(found))


def requests_in(server: Server, others: Iterable[Server]) -> float:
    """Requests in a server at once: in a ranker by its own count; in a shard server the calls that rankers wait for,
    because its queue is in its sockets."""
    if server.group is None:
        return server.inside
    return float(sum(other.calls.get(server.address, 0) for other in others))


def addresses(groups: int, found: Iterable[Server], last: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """The addresses to list for each group: its serving servers, or, if none serves, the last listed ones, which
    rankers then name in their errors. A group that never had a server is left out."""
    serving = [server for server in found if server.group is not None and server.serving]
    here = {
        group: sorted(s.address for s in serving if s.group == group) or last.get(group, []) for group in range(groups)
    }
    return {group: listed for group, listed in here.items() if listed}


def shards_text(spec: Deployment, listed: Mapping[int, list[str]]) -> str | None:
    """The text of shards.json; None while a group has never had a server, because rankers reject a file that lacks a
    rank."""
    if len(listed) < len(spec.groups):
        return None
    ranks = {rank: listed[number] for number, group in enumerate(spec.groups) for rank in group}
    return shards_json(ranks, spec.settings())
