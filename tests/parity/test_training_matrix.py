"""Forward, gradients and state of sharded training equal the unsharded module's, on 1 to 4 real ranks.

A part of the matrix runs with the suite; all of it with ``--full-matrix``.
"""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
from tests.parity.training_cases import Case, full_matrix, representative, run_cases


@pytest.mark.parametrize(("world", "local"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_sharded_training_is_the_unsharded_one(world: int, local: int, request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full-matrix")
    cases = full_matrix() if full else representative()
    if world == 3 and not full:  # two of five by day: of each kind, batch, pooling, weighting and optimizer
        cases = [case for number, case in enumerate(cases) if number % 5 in (0, 2)]
    run_ranks(world, run_cases, cases, local, env={"LOCAL_WORLD_SIZE": str(local)}, timeout=1800 if full else 300)


@pytest.mark.parametrize(("world", "local"), [(2, 1), (3, 1), (4, 1), (4, 4)])
def test_hosts_of_other_sizes(world: int, local: int, request: pytest.FixtureRequest) -> None:
    """What depends on which ranks share a host, on hosts of one rank and on one host of all."""
    kinds = ("table_row_wise", "grid_shard", "mixed")
    full = request.config.getoption("--full-matrix")
    cases = [case for case in full_matrix() if case.kind in kinds] if full else [Case(k, "MEAN", True) for k in kinds]
    run_ranks(world, run_cases, cases, local, env={"LOCAL_WORLD_SIZE": str(local)}, timeout=1800 if full else 300)
