"""The specification of a deployment as plain data, and the command line of each of its servers."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recinfer.deploy import BUSY_PERCENT, check_percent
from recinfer.deploy.ray.tls import Tls
from recinfer.errors import ConfigError, UnavailableError
from recinfer.sizes import size_text

if TYPE_CHECKING:
    from recinfer.deploy.groups import Footprint

__all__ = ["Bounds", "Deployment", "Node", "check_room", "cores", "deployment_of", "kind_name"]


@dataclass(frozen=True)
class Bounds:
    """Number of servers of one kind: ``start`` initially, then between ``least`` and ``most`` depending on load."""

    start: int
    least: int
    most: int

    @property
    def scales(self) -> bool:
        """Whether the number depends on load."""
        return self.least < self.most

    def scaled(self, what: str, count: int | None) -> Bounds:
        """With another number of servers; None leaves it unchanged. Raises ConfigError naming ``what``."""
        if count is None:
            return self
        if count < 1 or (self.scales and not self.least <= count <= self.most):
            limits = f"{self.least} to {self.most}, the bounds of autoscaling" if self.scales else "1 or more"
            raise ConfigError(f"{what}: got {count}, expected {limits}")
        return Bounds(count, self.least, self.most) if self.scales else Bounds(count, count, count)

    def check(self, what: str) -> None:
        """Raises ConfigError naming ``what``."""
        if not 1 <= self.least <= self.start <= self.most:
            raise ConfigError(
                f"{what}: got {self.start} between {self.least} and {self.most}; "
                "expected minimum <= number <= maximum, with a minimum of at least 1"
            )


@dataclass(frozen=True)
class Node:
    """A live machine of the cluster: its address, and the resources that nothing has reserved."""

    host: str
    memory: float
    cpus: float


@dataclass(frozen=True)
class Deployment:
    """An archive on a cluster.

    Attributes:
        name: name of the deployment and prefix of all names.
        tag: unique to this run of the deployment; part of file names.
        model: name of the model in the manifest.
        version: the version served first: the folder's name in the store, or the manifest's without a store.
        archive: its folder, on every node.
        store: folder of ``<model>/<version>/`` on every node; None if the version cannot change.
        groups: the ranks of each shard.
        shard_memory: bytes of each group's servers; ``ranker_memory``: of a ranker.
        cpus: CPUs per server, used only for placement.
        shards, rankers: bounds on the shard servers per group, and on the rankers.
        queue_depth: average number of requests in a server above which a server is added.
        busy_percent: busy share of a shard server's time above which a shard server is added.
        cool_down: seconds of low load before a server is removed.
        nodes: nodes of the cluster when it was deployed, over which the servers of a kind are spread; 0: not known.
        shares: the most shard servers of a group on one node, and the most rankers; 0: no limit.
        token: bearer token of all servers; None for none.
        insecure: allow listening beyond loopback without a token.
        tls: TLS of all servers and their clients; None for no TLS.
    """

    name: str
    tag: str
    model: str
    version: str
    archive: str
    store: str | None
    groups: tuple[tuple[int, ...], ...]
    shard_memory: tuple[int, ...]
    ranker_memory: int
    cpus: float = 1.0
    shards: Bounds = Bounds(2, 2, 2)
    rankers: Bounds = Bounds(2, 2, 2)
    queue_depth: int = 16
    busy_percent: int = BUSY_PERCENT
    cool_down: float = 300.0
    nodes: int = 0
    shares: tuple[int, int] = (0, 0)
    token: str | None = field(default=None, repr=False)
    insecure: bool = False
    tls: Tls | None = None

    def __post_init__(self) -> None:
        self.shards.check("replicas")
        self.rankers.check("rankers")
        if self.queue_depth < 1:
            raise ConfigError(f"queue depth: got {self.queue_depth}, expected at least 1")
        check_percent(self.busy_percent)

    @property
    def kinds(self) -> list[int | None]:
        """The numbers of the groups, and None for the rankers."""
        return [*range(len(self.groups)), None]

    def memory(self, group: int | None) -> int:
        """Bytes of memory of a server of ``group``; None means a ranker."""
        return self.ranker_memory if group is None else self.shard_memory[group]

    def bounds(self, group: int | None) -> Bounds:
        """Bounds of ``group``; None means the rankers."""
        return self.rankers if group is None else self.shards

    def per_node(self, group: int | None) -> int | None:
        """The most servers of a kind on one node, so that no node has all of them; None: no limit."""
        return self.shares[group is None] or None

    def spread(self) -> Deployment:
        """With the shares that its numbers of servers need on its nodes. A share never falls: Serve replaces all servers
        of a kind whose share changes, and a kind of one server would stop serving meanwhile."""
        if self.nodes <= 1:
            return self
        shards, rankers = (math.ceil(bounds.most / self.nodes) for bounds in (self.shards, self.rankers))
        return replace(self, shares=(max(shards, self.shares[0]), max(rankers, self.shares[1])))

    def archive_of(self, version: str) -> str:
        """The folder of a version."""
        return self.archive if self.store is None else str(Path(self.store) / self.model / version)

    def arguments(self, group: int | None, version: str, host: str, port: int = 0) -> list[str]:
        """Arguments of ``recinfer serve``, except a ranker's ``--shards``."""
        arguments = [self.archive_of(version), "--host", host, "--port", str(port), "--metrics-port", "0"]
        if self.store is not None:
            arguments += ["--model-store", self.store]
        if group is not None:
            arguments += ["--ranks", ",".join(map(str, self.groups[group])), "--preload"]
        elif self.store is not None:
            arguments.append("--admin")
        if self.tls is not None:
            arguments += self.tls.arguments()
        return [*arguments, "--insecure"] if self.insecure else arguments

    def settings(self) -> dict[str, str]:
        """Settings of shards.json for the connections from rankers to shard servers."""
        return {} if self.tls is None else self.tls.settings()

    def environment(self) -> dict[str, str]:
        """Environment of all servers. It carries the token, because every user of a node can read a process's
        arguments."""
        threads = {"OMP_NUM_THREADS": "1"}
        return threads if self.token is None else {**threads, "RECINFER_TOKEN": self.token}


def deployment_of(found: Footprint, archive: Path, store: Path | None, tag: str, **options: Any) -> Deployment:
    """The deployment of an archive.

    Args:
        found: its groups of ranks and their memory.
        store: None: the folder two above the archive, where the one above has the model's name.
        options: as Deployment has them; ``name`` may be None, the model's name as a label.

    Raises:
        ConfigError: inconsistent numbers, or an archive that is not at its place in the store.
    """
    from recinfer.deploy.groups import dns_label  # brings torch along, which no replica needs

    archive = archive.resolve()
    if store is not None and archive.parent != store.resolve() / found.model:
        raise ConfigError(
            f"model store: {archive} is not at {store.resolve() / found.model}/<version>; move it there, or leave "
            f"out --model-store"
        )
    store = archive.parent.parent if archive.parent.name == found.model else None
    name = options.pop("name", None)
    if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", name):
        raise ConfigError(f"name: got {name[:80]!r}, expected a-z, 0-9 and '-', at most 63")
    return Deployment(
        name=name or dns_label(found.model),
        tag=tag,
        model=found.model,
        version=found.version if store is None else archive.name,
        archive=str(archive),
        store=None if store is None else str(store),
        groups=tuple(group.ranks for group in found.groups),
        shard_memory=tuple(group.memory_bytes for group in found.groups),
        ranker_memory=found.ranker_bytes,
        **options,
    )


def kind_name(group: int | None) -> str:
    """Name of the servers of a group of ranks; None means the rankers."""
    return "ranker" if group is None else f"shard-{group}"


def check_room(spec: Deployment, more: Collection[int | None], nodes: Collection[Node]) -> None:
    """Check that nodes have room for more servers, one of each group in ``more``. Ray itself would wait for it.

    Raises:
        UnavailableError: no node has the resources; names the needed and the free ones.
    """
    left = list(nodes)
    for group in more:
        memory = spec.memory(group)
        room = [node for node in left if node.memory >= memory and node.cpus >= spec.cpus]
        if not room:
            free = [f"{node.host} {size_text(node.memory)} and {node.cpus:g} CPUs" for node in sorted(nodes, key=str)]
            ranks = "" if group is None else f" (ranks {', '.join(map(str, spec.groups[group]))})"
            raise UnavailableError(
                f"no node has resources for another server {kind_name(group)}{ranks}: it needs {size_text(memory)} of "
                f"memory and {spec.cpus:g} CPUs; free: {'; '.join(free) or 'no nodes'}"
            )
        node = max(room, key=lambda node: (node.memory, node.cpus))
        left.remove(node)
        left.append(Node(node.host, node.memory - memory, node.cpus - spec.cpus))


def cores(text: str) -> float:
    """``"2"``, ``"0.5"`` or ``"500m"`` as a number; raises ConfigError."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(m?)", text)
    if found is None:
        raise ConfigError(f"cpus: got {text!r}, expected a number as in 2, 0.5 or 500m")
    return float(found[1]) / (1000 if found[2] else 1)
