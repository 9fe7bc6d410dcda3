"""Sharded modules on real ranks, beyond the parity matrix: values, state, weights, codecs, single steps."""

from __future__ import annotations

import pytest

from tests.distributed import sharded_cases as cases
from tests.distributed.spawn import run_ranks

CALLS = {
    "values": [(cases.first_values_do_not_depend_on_the_sharding, ())],
    "state": [(cases.state_goes_round, ()), (cases.optimizer_has_its_state, ())],
    "copy": [(cases.a_copy_trains_on_its_own, ())],
    "weights": [
        (cases.weights_learn, (kind, batch))
        for kind in ("table_wise", "row_wise", "mixed", "data_parallel")
        for batch in ("uneven", "variable", "empty")
    ],
    "processors": [
        (cases.processors_learn, (kind, batch))
        for kind in ("row_wise", "mixed")
        for batch in ("even", "uneven", "variable")
    ],
    "one bag": [
        (cases.one_bag, (kind, mode))
        for kind in ("table_wise", "column_wise", "row_wise", "data_parallel")
        for mode in ("sum", "mean")
    ],
    "clipping": [(cases.clipped_gradients_are_those_of_any_sharding, ())],
    "several widths": [
        (cases.unpooled_pieces_of_several_widths_leave_a_rank_idle, ()),
        (cases.unpooled_pieces_of_several_widths_count_their_steps, ()),
    ],
    "codecs": [(cases.codecs_shrink, ())],
    "dedup": [(cases.dedup_by_default, ())],
    "repeated keys": [(cases.a_key_comes_twice, ())],
    "steps": [(cases.steps_by_hand, ()), (cases.sizes_of_several_modules_go_together, ())],
}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("what", list(CALLS))
def test_on_ranks(what: str, world: int) -> None:
    run_ranks(world, cases.all_of, CALLS[what])


def test_weights_learn_on_a_host_without_tables() -> None:
    run_ranks(4, cases.weights_learn_on_a_host_without_tables, env={"LOCAL_WORLD_SIZE": "2"})
