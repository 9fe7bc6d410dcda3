"""From a measured capacity to hosts: ranks that the memory needs, hosts that the rate needs, what one lost host costs, prices."""

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
from recinfer.sizing.capacity import PROMISED, Measured
from recinfer.sizing.fanout import agreement, carried
from recinfer.sizing.hosts import HostType

__all__ = ["PLANNED_SHARE", "Deployment", "Goal", "deployment", "ranks_needed"]

PLANNED_SHARE = 0.7
"""Of the knee: what a host is planned for."""

_MOST_RANKS = 1024
_HEDGE_PERCENT = 95.0


@dataclass(frozen=True)
class Goal:
    """What is promised: ``p99_s`` seconds for 99 % of ``qps`` requests a second, with ``min_replicas`` of everything."""

    qps: float
    p99_s: float
    min_replicas: int = 2

    def __post_init__(self) -> None:
        if not 0 < self.qps < math.inf or not 0 < self.p99_s < math.inf or self.min_replicas < 1:
            raise ConfigError(f"got {self.qps} requests a second within {self.p99_s} s, expected more than 0 of both")


@dataclass(frozen=True)
class Deployment:
    """Hosts of one kind for a model.

    Attributes:
        host: their kind.
        shards: ranks of the plan; 1: each host has all tables and answers callers itself.
        replicas: hosts of each shard.
        rankers: hosts that ask the shards; 0 where there is one.
        host_qps: the knee of one host.
        share: of the knee that each host gets.
        share_one_lost: the same while one host is gone.
        p99_s: at ``share``, measured or carried; None: not known.
        why_not: what keeps it from being used; empty: it keeps the promise.
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
        """All of them."""
        return self.shards * self.replicas + self.rankers

    @property
    def cost(self) -> float:
        """An hour."""
        return self.hosts * self.host.price

    @property
    def meets(self) -> bool:
        """Whether it keeps the promise."""
        return not self.why_not


def ranks_needed(manifest: Manifest, host: HostType) -> int:
    """The least number of ranks with which the planner fits the archive's tables into hosts of this kind.

    Raises:
        PlannerError: no number up to 1,024 does; the planner's words.
    """
    model = embedding_model(manifest)
    stored = {table.name: DataType.parse(str(table.data_type)) for table in manifest.tables}
    num_bytes = sum(
        table.rows * (table.dim * table.data_type.bits / 8 + (4 if table.data_type.bits < 16 else 0))
        for table in manifest.tables
    )
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
    """The hosts of this kind that keep the promise: the rate over 70 % of the knee, at least ``goal.min_replicas``.

    A knee is taken to grow with the cores of a host: it was measured on another one.

    Args:
        server, sharded: what one server, and a ranker with one shard server, can take; None: not measured.
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
        return Deployment(host, ranks, why_not="no rate kept the promise")
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
    """Seconds at ``share`` of the knee: a server's is measured; that of several shards is carried where the queue on paper
    agrees with what was measured.
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
    return float(np.quantile(carried(measured, shards=shards, qps=rate, hedge_after_s=after), PROMISED))
