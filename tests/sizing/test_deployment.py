"""From a measured knee to hosts: ranks by memory, hosts by rate, a lost host, prices, and why a kind does not fit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from recinfer.archive.manifest import Manifest
from recinfer.archive.reader import open_archive
from recinfer.distributed.planner.types import PlannerError
from recinfer.errors import ConfigError
from recinfer.sizing.capacity import Measured
from recinfer.sizing.deployment import Goal, deployment, ranks_needed
from recinfer.sizing.hosts import HostType
from tests.sizing.simulated import QueueDriver
from tests.sizing.test_capacity import measured

P99_S = 20e-3


@pytest.fixture(scope="module")
def manifest(archive: Path) -> Manifest:
    return open_archive(archive, ranks=()).manifest


@pytest.fixture(scope="module")
def server() -> Measured:
    found = measured(QueueDriver(1e-3, 1e-3), P99_S)
    return replace(found, machine={**found.machine, "cores": 4})


@pytest.fixture(scope="module")
def sharded(server: Measured) -> Measured:
    return replace(server, what="ranker and shard")


FOUR, EIGHT = HostType("four", 4, 8, 1.0), HostType("eight", 8, 16, 2.0)


def test_hosts_are_the_rate_over_seventy_percent_of_the_knee(manifest: Manifest, server: Measured) -> None:
    found = deployment(manifest, FOUR, Goal(5000.0, P99_S), server, None)
    assert found.meets
    assert (found.shards, found.rankers) == (1, 0)
    assert found.replicas == math.ceil(5000 / (0.7 * server.knee_qps))
    assert found.share <= 0.7
    assert found.share_one_lost == pytest.approx(5000 / ((found.replicas - 1) * server.knee_qps))
    assert found.p99_s is not None
    assert found.p99_s <= P99_S
    assert found.cost == found.hosts * 1.0


def test_a_host_with_more_cores_takes_more(manifest: Manifest, server: Measured) -> None:
    four, eight = (deployment(manifest, host, Goal(20_000.0, P99_S), server, None) for host in (FOUR, EIGHT))
    assert eight.host_qps == 2 * four.host_qps
    assert eight.replicas == pytest.approx(four.replicas / 2, abs=1)


def test_requested_replicas_are_kept_at_a_low_rate(manifest: Manifest, server: Measured) -> None:
    found = deployment(manifest, FOUR, Goal(1.0, P99_S, min_replicas=3), server, None)
    assert (found.replicas, found.hosts) == (3, 3)


def test_shards_need_rankers_and_a_p99_that_all_of_them_keep(manifest: Manifest, sharded: Measured) -> None:
    found = deployment(manifest, FOUR, Goal(1000.0, P99_S), None, sharded, shards=4)
    assert found.hosts == 4 * found.replicas + found.rankers
    assert found.rankers == found.replicas
    alone = deployment(manifest, FOUR, Goal(1000.0, P99_S), sharded, None)
    assert found.p99_s is not None and alone.p99_s is not None
    assert found.p99_s > alone.p99_s
    slow = deployment(manifest, FOUR, Goal(1000.0, 6e-3), None, sharded, shards=64)
    assert slow.why_not == "64 shards together are too slow"


def test_no_p99_of_several_shards_if_the_model_disagrees_with_the_measurement(
    manifest: Manifest, sharded: Measured
) -> None:
    odd = replace(sharded, service_s=tuple(5 * each for each in sharded.service_s))
    assert deployment(manifest, FOUR, Goal(1000.0, P99_S), None, odd, shards=4).p99_s is None


def test_why_a_kind_of_host_is_not_used(manifest: Manifest, server: Measured, sharded: Measured) -> None:
    goal = Goal(1000.0, P99_S)
    assert deployment(manifest, FOUR, goal, None, None).why_not == "not measured: recinfer bench capacity ARCHIVE"
    assert "--sharded" in deployment(manifest, FOUR, goal, server, None, shards=2).why_not
    assert "more than --max-hosts 3" in deployment(manifest, FOUR, goal, None, sharded, shards=4, max_hosts=3).why_not
    tiny = HostType("tiny", 1, 0.5, 0.1)
    assert "no memory left for tables" in deployment(manifest, tiny, goal, server, sharded).why_not
    none = replace(server, knee_qps=0.0)
    assert deployment(manifest, FOUR, goal, none, None).why_not == "no rate met the objective"


def test_the_planner_says_how_many_ranks_the_memory_needs(manifest: Manifest) -> None:
    num_bytes = sum(table.rows * (table.dim + 4) for table in manifest.tables)
    reserved = HostType("x", 1, 64.0, 1.0).memory_gib * 2**30 - HostType("x", 1, 64.0, 1.0).table_bytes

    def host(table_bytes: float) -> HostType:
        return HostType("x", 1, (reserved + table_bytes) / 2**30, 1.0)

    assert ranks_needed(manifest, host(2 * num_bytes)) == 1
    assert 2 <= ranks_needed(manifest, host(num_bytes / 1.5)) <= 4
    with pytest.raises(PlannerError):
        ranks_needed(manifest, HostType("x", 1, 0.5, 1.0))


def test_a_goal_is_above_nothing() -> None:
    with pytest.raises(ConfigError):
        Goal(0.0, 1.0)
