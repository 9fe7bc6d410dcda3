"""The specification of a deployment as plain data, and the configuration of each of its servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from recinfer.deploy import BUSY_PERCENT, LOAD_PERCENT
from recinfer.deploy.groups import Footprint
from recinfer.errors import ConfigError
from recinfer.serving.config import AddressConfig, ModelsConfig, RoleConfig, SecurityConfig, ServeConfig, TablesConfig

__all__ = ["Bounds", "Deployment", "kind_name"]


@dataclass(frozen=True)
class Bounds:
    """The number of servers of one kind: ``least``, or from ``least`` to ``ceiling`` depending on load; ``peak``: the largest
    number before."""

    least: int
    ceiling: int | None = None
    peak: int = 0

    @property
    def most(self) -> int:
        """The largest number."""
        return self.least if self.ceiling is None else self.ceiling

    def scaled(self, count: int | None) -> Bounds:
        """With another least number of servers; None leaves it unchanged."""
        return self if count is None else Bounds(count, self.ceiling, max(self.peak, self.most))


@dataclass(frozen=True)
class Deployment:
    """An archive on a cluster.

    Attributes:
        name: name of the deployment and prefix of all names.
        servers: the groups of ranks, and the memory of each server.
        archive: absolute folder of the first version, on every node.
        version: the served version: a folder's name in the store, or the manifest's without a store.
        previous: the version served before, None if there was none; ``candidate``: the one that a rollout loads.
        nodes: number of nodes, over which the servers of a kind are spread.
        cpus: CPUs per server, used only for placement.
        shards, rankers: numbers of shard servers per group, and of rankers.
        busy_percent: load of shard servers above which one is added; ``load_percent``: that of rankers.
        cool_down: seconds of low load before a server is removed.
        security: token and TLS of all servers; PEM files are at the same absolute path on every node.
        tls_ca: authority by which rankers verify shard servers; None for no TLS.
        tls_name: host name in the servers' certificates, if it differs from the node's address.

    Raises:
        ConfigError: a number out of its range, or TLS files that do not go together.
    """

    name: str
    servers: Footprint
    archive: Path
    version: str
    previous: str | None = None
    candidate: str | None = None
    nodes: int = 1
    cpus: float = 1.0
    shards: Bounds = Bounds(2)
    rankers: Bounds = Bounds(2)
    busy_percent: int = BUSY_PERCENT
    load_percent: int = LOAD_PERCENT
    cool_down: float = 300.0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    tls_ca: Path | None = None
    tls_name: str | None = None

    def __post_init__(self) -> None:
        for what, bounds in (("replicas", self.shards), ("rankers", self.rankers)):
            if not 1 <= bounds.least <= bounds.most:
                raise ConfigError(f"{what}: got {bounds.least}, expected 1 to the maximum of {bounds.most}")
        needed = {"--tls-cert": self.security.tls_cert, "--tls-key": self.security.tls_key, "--tls-ca": self.tls_ca}
        lacking = [option for option, path in needed.items() if path is None]
        if lacking and any((*needed.values(), self.security.tls_client_ca, self.tls_name)):
            raise ConfigError(
                f"TLS: {' and '.join(lacking)} missing; expected the servers' --tls-cert and --tls-key, and --tls-ca, "
                "the certificate authority that rankers verify them with"
            )

    @property
    def store(self) -> Path | None:
        """The folder of ``<model>/<version>/`` that the archive is in; None: it is in none, and the version cannot change."""
        return self.archive.parent.parent if self.archive.parent.name == self.servers.model else None

    def memory(self, group: int | None) -> int:
        """Bytes of memory that Ray reserves for a server of ``group`` (None: a ranker)."""
        return self.servers.ranker_bytes if group is None else self.servers.groups[group].memory_bytes

    def bounds(self, group: int | None) -> Bounds:
        """Bounds of ``group``; None means the rankers."""
        return self.rankers if group is None else self.shards

    def per_node(self, group: int | None) -> int | None:
        """The most servers of a kind on one node, so that no node has all of them; None: no limit. The limit never falls:
        Serve replaces all servers of a kind whose limit changes, and a kind of one server would stop serving meanwhile."""
        bounds = self.bounds(group)
        return math.ceil(max(bounds.most, bounds.peak) / self.nodes) if self.nodes > 1 else None

    def config(self, group: int | None, host: str, port: int, shards: Path) -> ServeConfig:
        """The settings of a server of ``group`` (None: of a ranker, which reads ``shards``)."""
        is_ranker = group is None
        return ServeConfig(
            archives=(self.archive if self.store is None else self.store / self.servers.model / self.version,),
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


def kind_name(group: int | None) -> str:
    """Name of the servers of a group of ranks; None means the rankers."""
    return "ranker" if group is None else f"shard-{group}"
