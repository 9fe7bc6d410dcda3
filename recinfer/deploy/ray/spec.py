"""The specification of a deployment as plain data, and the configuration of each of its servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recinfer.deploy import BUSY_PERCENT, check_percent
from recinfer.deploy.groups import Footprint, check_label, dns_label
from recinfer.errors import ConfigError, UnavailableError
from recinfer.serving.config import AddressConfig, ModelsConfig, RoleConfig, SecurityConfig, ServeConfig, TablesConfig
from recinfer.sizes import size_text

__all__ = ["Bounds", "Deployment", "check_room", "deployment_of", "kind_name"]


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

    def scaled(self, count: int | None) -> Bounds:
        """With another number of servers; None leaves it unchanged."""
        if count is None:
            return self
        return replace(self, start=count) if self.scales else Bounds(count, count, count)


@dataclass(frozen=True)
class Deployment:
    """An archive on a cluster.

    Attributes:
        name: name of the deployment and prefix of all names; ``tag``: unique to this run of it, part of file names.
        servers: the groups of ranks, and the memory of each server.
        archive: folder of the first version, on every node.
        store: folder of ``<model>/<version>/`` on every node; None if the version cannot change.
        version: the served version: a folder's name in the store, or the manifest's without a store.
        previous: the version served before, None if there was none; ``candidate``: the one that a rollout loads.
        cpus: CPUs per server, used only for placement.
        shards, rankers: bounds on the shard servers per group, and on the rankers.
        queue_depth: average number of requests in a server above which a server is added.
        busy_percent: busy share of a shard server's time above which a shard server is added.
        cool_down: seconds of low load before a server is removed.
        security: token and TLS of all servers; PEM files are at the same absolute path on every node.
        tls_ca: authority by which rankers verify shard servers; None for no TLS.
        tls_name: host name in the servers' certificates, if it differs from the node's address.
        nodes: nodes of the cluster when it was deployed, over which the servers of a kind are spread; 0: not known.
        shares: the most shard servers of a group on one node, and the most rankers; 0: no limit.

    Raises:
        ConfigError: a number out of its range, or TLS files that do not go together.
    """

    name: str
    tag: str
    servers: Footprint
    archive: Path
    store: Path | None
    version: str
    previous: str | None = None
    candidate: str | None = None
    cpus: float = 1.0
    shards: Bounds = Bounds(2, 2, 2)
    rankers: Bounds = Bounds(2, 2, 2)
    queue_depth: int = 16
    busy_percent: int = BUSY_PERCENT
    cool_down: float = 300.0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tls_ca: Path | None = None
    tls_name: str | None = None
    nodes: int = 0
    shares: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for what, bounds in (("replicas", self.shards), ("rankers", self.rankers)):
            if not 1 <= bounds.least <= bounds.start <= bounds.most:
                raise ConfigError(
                    f"{what}: got {bounds.start} between {bounds.least} and {bounds.most}; "
                    "expected minimum <= number <= maximum, with a minimum of at least 1"
                )
        if self.queue_depth < 1:
            raise ConfigError(f"queue depth: got {self.queue_depth}, expected at least 1")
        check_percent(self.busy_percent)
        needed = {"--tls-cert": self.security.tls_cert, "--tls-key": self.security.tls_key, "--tls-ca": self.tls_ca}
        lacking = [option for option, path in needed.items() if path is None]
        if lacking and any((*needed.values(), self.security.tls_client_ca, self.tls_name)):
            raise ConfigError(
                f"TLS: {' and '.join(lacking)} missing; expected the servers' --tls-cert and --tls-key, and --tls-ca, "
                "the certificate authority that rankers verify them with"
            )

    @property
    def kinds(self) -> list[int | None]:
        """The numbers of the groups, and None for the rankers."""
        return [*range(len(self.servers.groups)), None]

    @property
    def files(self) -> list[Path]:
        """The PEM files."""
        found = (self.security.tls_cert, self.security.tls_key, self.security.tls_client_ca, self.tls_ca)
        return [path for path in dict.fromkeys(found) if path is not None]

    def memory(self, group: int | None) -> int:
        """Bytes of memory of a server of ``group``; None means a ranker."""
        return self.servers.ranker_bytes if group is None else self.servers.groups[group].memory_bytes

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

    def config(self, group: int | None, host: str, port: int, shards: Path) -> ServeConfig:
        """The settings of a server of ``group`` (None: of a ranker, which reads ``shards``)."""
        model, is_ranker = self.servers.model, group is None
        return ServeConfig(
            archives=(self.archive if self.store is None else self.store / model / self.version,),
            address=AddressConfig(host, port, metrics_port=0),
            tables=TablesConfig(preload=not is_ranker),
            models=ModelsConfig(model_store=self.store, admin=is_ranker and self.store is not None),
            security=self.security,
            role=RoleConfig(shards=shards) if group is None else RoleConfig(self.servers.groups[group].ranks),
        )

    def client_settings(self) -> dict[str, str]:
        """TLS of the servers' clients: settings of shards.json, and arguments of AdminClient. With mutual TLS, rankers
        present the servers' certificate."""
        values = {"tls_ca": self.tls_ca, "tls_name": self.tls_name}
        if self.security.tls_client_ca is not None:
            values |= {"tls_cert": self.security.tls_cert, "tls_key": self.security.tls_key}
        return {name: str(value) for name, value in values.items() if value is not None}


def deployment_of(found: Footprint, archive: Path, store: Path | None, tag: str, **options: Any) -> Deployment:
    """The deployment of an archive.

    Args:
        found: its groups of ranks and their memory.
        store: None: the folder two above the archive, where the one above has the model's name.
        options: as Deployment has them; ``name`` may be None, the model's name as a label.

    Raises:
        ConfigError: inconsistent numbers, or an archive that is not at its place in the store.
    """
    archive = archive.resolve()
    if store is not None and archive.parent != store.resolve() / found.model:
        raise ConfigError(
            f"model store: {archive} is not at {store.resolve() / found.model}/<version>; move it there, or leave "
            f"out --model-store"
        )
    store = archive.parent.parent if archive.parent.name == found.model else None
    name = options.pop("name", None)
    check_label("name", name)
    version = found.version if store is None else archive.name
    return Deployment(name or dns_label(found.model), tag, found, archive, store, version, **options)


def kind_name(group: int | None) -> str:
    """Name of the servers of a group of ranks; None means the rankers."""
    return "ranker" if group is None else f"shard-{group}"


def check_room(spec: Deployment, more: Iterable[int | None], free: Mapping[str, tuple[float, float]]) -> None:
    """Check that nodes have room for more servers, one of each group in ``more``. Ray itself would wait for it.

    Args:
        free: by address of a node, its bytes of memory and CPUs that nothing has reserved.

    Raises:
        UnavailableError: no node has the resources; names the needed and the free ones.
    """
    left = dict(free)
    for group in more:
        memory = spec.memory(group)
        room = [host for host, (size, cpus) in left.items() if size >= memory and cpus >= spec.cpus]
        if not room:
            shown = [f"{host} {size_text(size)} and {cpus:g} CPUs" for host, (size, cpus) in sorted(free.items())]
            ranks = "" if group is None else f" (ranks {spec.servers.groups[group].listed})"
            raise UnavailableError(
                f"no node has resources for another server {kind_name(group)}{ranks}: it needs {size_text(memory)} of "
                f"memory and {spec.cpus:g} CPUs; free: {'; '.join(shown) or 'no nodes'}"
            )
        host = max(room, key=left.__getitem__)
        left[host] = left[host][0] - memory, left[host][1] - spec.cpus
