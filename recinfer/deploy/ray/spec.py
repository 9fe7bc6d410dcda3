"""The specification of a deployment as plain data, and the configuration of each of its servers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path

from recinfer.errors import ConfigError
from recinfer.serving.config import AddressConfig, ModelsConfig, RoleConfig, SecurityConfig, ServeConfig, TablesConfig

__all__ = ["Deployment", "Kind"]

_POLL_S = 2.0  # between two looks of a ranker at the file and the store


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
        archive: absolute folder on every node.
        kinds: the groups of ranks, then the rankers.
        model_config: file on every node that chooses versions of the archive's store, which rankers follow; None: the archive
            alone is served.
        nodes: number of nodes, over which the servers of a kind are spread.
        cpus: CPUs per server, used only for placement.
        cool_down: seconds of low load before a server is removed.
        security: token and TLS of all servers; PEM files are at the same absolute path on every node.
        clients: TLS of rankers' calls, as settings of shards.json: ``tls_ca`` and such.
    """

    name: str
    model: str
    archive: Path
    kinds: tuple[Kind, ...]
    model_config: Path | None = None
    nodes: int = 1
    cpus: float = 1.0
    cool_down: float = 300.0
    security: SecurityConfig = field(default_factory=SecurityConfig)
    clients: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Path | None:
        """The folder of ``<model>/<version>/`` that the archive is in; None: it is in none."""
        return self.archive.parent.parent if self.archive.parent.name == self.model else None

    def scaled(self, shards: int | None, rankers: int | None) -> Deployment:
        """With other numbers of shard servers per group and of rankers. Raises ConfigError."""
        return replace(self, kinds=tuple(kind.scaled(shards if kind.ranks else rankers) for kind in self.kinds))

    def config(self, kind: Kind, host: str, port: int, shards: Path) -> ServeConfig:
        """The settings of a server; a ranker reads ``shards``."""
        chosen, is_ranker = self.model_config, not kind.ranks
        return ServeConfig(
            archives=(self.archive,) if chosen is None else (),
            address=AddressConfig(host, port, metrics_port=0),
            tables=TablesConfig(preload=bool(kind.ranks)),
            models=ModelsConfig(
                model_store=self.store,
                poll=_POLL_S if is_ranker and chosen is not None else None,
                model_config=chosen,
                admin=is_ranker and self.store is not None,
            ),
            security=self.security,
            role=RoleConfig(kind.ranks) if kind.ranks else RoleConfig(shards=shards),
        )
