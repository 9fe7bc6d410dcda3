"""The specification of a deployment as plain data, and the configuration of each of its servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from recinfer.errors import ConfigError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.config import AddressConfig, ModelsConfig, RoleConfig, SecurityConfig, ServeConfig, TablesConfig

__all__ = ["Deployment", "Kind"]

_LOAD_S = 600.0  # loading reads and checks a whole archive


@dataclass(frozen=True)
class Kind:
    """The servers of one group of ranks, or the rankers.

    Attributes:
        name: such as ``shard-0``, or ``ranker``.
        ranks: ranks of each server; empty for rankers.
        memory: bytes that Ray reserves for a server.
        percent: load above which a server is added.
        least: number of servers, or with ``ceiling`` the least number, from which load adds servers up to ``ceiling``.
        peak: the largest number before.

    Raises:
        ConfigError: ``least`` is out of its range.
    """

    name: str
    ranks: tuple[int, ...]
    memory: int
    percent: int
    least: int = 2
    ceiling: int | None = None
    peak: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"{self.name} servers: got {self.least}, expected 1 to the maximum of {self.most}")

    @property
    def most(self) -> int:
        """The largest number of servers."""
        return self.least if self.ceiling is None else self.ceiling

    def scaled(self, count: int | None) -> Kind:
        """With another least number of servers; None leaves it unchanged."""
        return self if count is None else replace(self, least=count, peak=max(self.peak, self.most))

    def per_node(self, nodes: int) -> int | None:
        """The most servers on one of ``nodes`` nodes, so that no node has all of them; None: no limit. The limit never
        falls: Serve replaces all servers of a kind whose limit changes, and a kind of one server would stop serving meanwhile."""
        return math.ceil(max(self.most, self.peak) / nodes) if nodes > 1 else None


@dataclass(frozen=True)
class Deployment:
    """An archive on a cluster.

    Attributes:
        name: name of the deployment and prefix of all names; ``model``: name of the model.
        archive: absolute folder of the first version, on every node.
        version: the served version: a folder's name in the store, or the manifest's without a store.
        kinds: the groups of ranks, then the rankers.
        previous: the version served before, None if there was none.
        nodes: number of nodes, over which the servers of a kind are spread.
        cpus: CPUs per server, used only for placement.
        cool_down: seconds of low load before a server is removed.
        security: token and TLS of all servers; PEM files are at the same absolute path on every node.
        clients: TLS of the servers' clients, as settings of shards.json and arguments of AdminClient: ``tls_ca`` and such.
    """

    name: str
    model: str
    archive: Path
    version: str
    kinds: tuple[Kind, ...]
    previous: str | None = None
    nodes: int = 1
    cpus: float = 1.0
    cool_down: float = 300.0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    clients: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path | None:
        """The folder of ``<model>/<version>/`` that the archive is in; None: it is in none, and the version cannot change."""
        return self.archive.parent.parent if self.archive.parent.name == self.model else None

    def kind(self, name: str) -> Kind:
        """The kind of that name."""
        return next(kind for kind in self.kinds if kind.name == name)

    def scaled(self, shards: int | None, rankers: int | None) -> Deployment:
        """With other numbers of shard servers per group and of rankers. Raises ConfigError."""
        return replace(self, kinds=tuple(kind.scaled(shards if kind.ranks else rankers) for kind in self.kinds))

    def config(self, kind: Kind, host: str, port: int, shards: Path) -> ServeConfig:
        """The settings of a server; a ranker reads ``shards``."""
        return ServeConfig(
            archives=(self.archive if self.store is None else self.store / self.model / self.version,),
            address=AddressConfig(host, port, metrics_port=0),
            tables=TablesConfig(preload=bool(kind.ranks)),
            models=ModelsConfig(model_store=self.store, admin=not kind.ranks and self.store is not None),
            security=self.security,
            role=RoleConfig(kind.ranks) if kind.ranks else RoleConfig(shards=shards),
        )

    def admin(self, address: str) -> AdminClient:
        """A client of the admin service of the ranker at ``address``."""
        return AdminClient(address, timeout=_LOAD_S, token=self.security.token or "", **self.clients)
