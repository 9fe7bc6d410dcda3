"""Deployments from measured capacity: ranks for the memory, hosts for the rate, load after losing a host, and
prices."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from recinfer.archive.manifest import Manifest
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.types import PlannerError
from recinfer.errors import ConfigError
from recinfer.inference.reshard import embedding_model
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.rows import row_bytes
from recinfer.sizing.capacity import OBJECTIVE_SHARE, Measured
from recinfer.sizing.fanout import agreement, carried
from recinfer.sizing.hosts import HostType

__all__ = ["PLANNED_SHARE", "Deployment", "Goal", "deployment", "ranks_needed"]

PLANNED_SHARE = 0.7
"""Share of the knee for which a host is planned."""

_MOST_RANKS = 1024
_HEDGE_PERCENT = 95.0


@dataclass(frozen=True)
class Goal:
    """The objective: 99 % of ``qps`` requests per second within ``p99_s`` seconds, with at least ``min_replicas`` of
    each server."""

    qps: float
    p99_s: float
    min_replicas: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.qps < math.inf or not 0 < self.p99_s < math.inf or self.min_replicas < 1:
            raise ConfigError(f"got {self.qps} requests per second within {self.p99_s} s, expected numbers above 0")


@dataclass(frozen=True)
class Deployment:
    """Hosts of one kind for a model.

    Attributes:
        host: the kind of host.
        shards: ranks of the plan; with 1 each host has all tables and answers clients itself.
        replicas: hosts of each shard.
        rankers: ranker hosts; 0 without shards.
        host_qps: the knee of one host.
        share: load of each host as a share of its knee.
        share_one_lost: ``share`` while one host is down.
        p99_s: p99 at ``share``, measured or computed; None: unknown.
        why_not: why it does not meet the objective; empty if it does.
    """

    host: HostType
    shards: int
    replicas: int = 0
    rankers: int = 0
    host_qps: float = 0.0
    share: float = math.nan
    share_one_lost: float = math.nan
    p99_s: float | None = None
    why_not: str = ""

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.shards * self.replicas + self.rankers

    @property
    def cost(self) -> float:
        """Price per hour."""
        return self.hosts * self.host.price

    @property
    def meets(self) -> bool:
        """Whether the deployment meets the objective."""
        return not self.why_not


def ranks_needed(manifest: Manifest, host: HostType) -> int:
    """The least number of ranks with which the planner fits the archive's tables into hosts of this kind.

    Raises:
        PlannerError: no number up to 1,024 is enough; the message is the planner's.
    """
    model = embedding_model(manifest)
    stored = {table.full_name: DataType.parse(str(table.data_type)) for table in manifest.tables}
    num_bytes = sum(table.rows * row_bytes(table.dim, table.data_type) for table in manifest.tables)
    if not host.table_bytes:
        raise PlannerError(f"a {host.name} host has no memory left for tables: {host.memory_gib:g} GiB")
    least = max(1, math.ceil(num_bytes / host.table_bytes))
    tried, last = least, None
    while tried <= _MOST_RANKS:
        try:
            plan_inference(
                model,
                world_size=tried,
                per_table_precision=stored,
                ddr_gb=host.table_bytes / 2**30,
                batch_size=1,
                timeout_seconds=10.0,
            )
            return tried
        except PlannerError as error:
            last = error
            tried += max(1, tried // 8)
    raise last or PlannerError(f"the tables need {least:,} {host.name} hosts, more than {_MOST_RANKS:,}")


def deployment(
    manifest: Manifest,
    host: HostType,
    goal: Goal,
    server: Measured | None,
    sharded: Measured | None,
    *,
    shards: int | None = None,
    max_hosts: int = 1000,
) -> Deployment:
    """The hosts of this kind that meet the objective: the rate divided by 70 % of the knee, at least
    ``goal.min_replicas``.

    Knees are assumed to be proportional to the cores of a host.

    Args:
        server, sharded: capacity of one server, and of a ranker with one shard server; None: not measured.
        shards: ranks; None: as many as the memory needs.
    """
    try:
        ranks = ranks_needed(manifest, host) if shards is None else shards
    except PlannerError as error:
        return Deployment(host, 1, why_not=str(error).splitlines()[0][:80])
    measured = server if ranks == 1 else sharded
    if measured is None:
        how = "recinfer bench capacity ARCHIVE" + (" --sharded" if ranks > 1 else "")
        return Deployment(host, ranks, why_not=f"not measured: {how}")
    if not measured.knee_qps:
        return Deployment(host, ranks, why_not="no rate met the objective")
    host_qps = measured.knee_qps * host.cores / measured.machine["cores"]
    replicas = max(goal.min_replicas, math.ceil(goal.qps / (PLANNED_SHARE * host_qps)))
    rankers = replicas if ranks > 1 else 0
    share = goal.qps / (replicas * host_qps)
    lost = goal.qps / ((replicas - 1) * host_qps) if replicas > 1 else math.inf
    p99_s = _p99(measured, share, ranks, host)
    found = Deployment(host, ranks, replicas, rankers, host_qps, share, lost, p99_s)
    why_not = ""
    if found.hosts > max_hosts:
        why_not = f"{found.hosts:,} hosts, more than --max-hosts {max_hosts:,}"
    elif p99_s is not None and p99_s > goal.p99_s:
        why_not = f"{ranks} shards together are too slow"
    return Deployment(host, ranks, replicas, rankers, host_qps, share, lost, p99_s, why_not)


def _p99(measured: Measured, share: float, shards: int, host: HostType) -> float | None:
    """p99 in seconds at ``share`` of the knee: measured for a server; computed for several shards if the queue model
    agrees with the measurement.
    """
    if shards == 1:
        kept = sorted((point for point in measured.points if point.kept), key=lambda point: point.qps)
        rates, p99s = [point.qps for point in kept], [point.p99_s for point in kept]
        return float(np.interp(share * measured.knee_qps, rates, p99s))
    if not measured.service_s or not agreement(measured).agrees:
        return None
    rate = share * measured.knee_qps
    alone = carried(measured, shards=1, qps=rate)
    after = float(np.percentile(alone, _HEDGE_PERCENT))
    return float(np.quantile(carried(measured, shards=shards, qps=rate, hedge_after_s=after), OBJECTIVE_SHARE))
