"""Prefetching rows of a coming batch: when it happens, with which batch sizes, and what is left of batches that are dropped.

The groups here are FBGEMM's own modules, on CPU, where they keep the queue of prefetched batches that they keep on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.embedding_lookup import GroupedEmbeddingsLookup, GroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingLocation
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from recinfer.distributed.tables import group_kernel
from recinfer.distributed.tables.cuda import ModuleTableGroup, make_table_group
from recinfer.distributed.tables.replicas import Replicas
from recinfer.distributed.train_pipeline import PrefetchTrainPipelineSparseDist
from recinfer.distributed.types import ShardingPlan
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import EBC, TABLES, AnySharder, make_model, optimizer_of, sharded
from tests.distributed.test_replicas_and_state import config
from tests.distributed.test_table_group import EVEN, call
from tests.distributed.test_train_pipeline import CPU, batches_of, drain

LAST = 5  # batches


class Watched(ModuleTableGroup):
    """FBGEMM's module with a record of its calls, in order."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.done: list[str] = []

    def prefetch(self, *args: Any) -> None:
        self.done.append("prefetch")
        with mock.patch.object(torch.cuda, "current_stream"):  # the module's timer asks for it
            super().prefetch(*args)

    def _run(self, *args: Any) -> Tensor:
        self.done.append("lookup")
        out = super()._run(*args)
        if out.requires_grad:
            out.register_hook(lambda _: self.done.append("update"))
        return out

    @property
    def waiting(self) -> int:
        """Batches that were prefetched and not looked up."""
        return len(self.tbe.timesteps_prefetched)


@contextmanager
def watched(location: EmbeddingLocation = EmbeddingLocation.DEVICE) -> Iterator[list[Watched]]:
    """Inside, fused groups are such modules, in this list."""
    made = []

    def make(shapes: Any, pooling: Any, settings: Any, dtype: Any, device: Any, _: Any) -> Any:
        if settings is None:
            return make_table_group(shapes, pooling, settings, dtype, device)
        made.append(Watched(shapes, pooling, settings, dtype, CPU, location))
        return made[-1]

    group_kernel.make_table_group = make
    try:
        yield made
    finally:
        group_kernel.make_table_group = make_table_group


def rows_cut(world_size: int) -> ShardingPlan:
    model = make_model("meta")
    per_table = {table.name: row_wise(compute_kernel="fused") for table in TABLES}
    made = construct_module_sharding_plan(
        model.get_submodule(EBC),
        per_table,
        AnySharder(),
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return ShardingPlan(plan={EBC: made})


def in_order(rank: int, world_size: int) -> tuple[list[list[str]], list[bool], list[int]]:
    with watched() as groups:
        dmp = sharded(rank, world_size, plan=rows_cut(world_size))
    pipeline = PrefetchTrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU)
    under_way = []
    dmp.module.register_forward_pre_hook(
        lambda *_: under_way.append(EBC in pipeline._context.input_dist_tensors_requests)
    )
    drain(pipeline, batches_of(rank, world_size, LAST))
    return [group.done for group in groups], under_way, [group.waiting for group in groups]


def test_the_next_batch_is_prefetched_while_this_one_trains() -> None:
    one = ["lookup", "prefetch", "update"]
    for done, under_way, waiting in run_ranks(2, in_order):
        assert done and all(steps == ["prefetch", *one * (LAST - 1), "lookup", "update"] for steps in done)
        # A forward finds the ids of the next batch on their way.
        assert under_way == [True] * (LAST - 1) + [False]
        assert set(waiting) == {0}


def dropped(rank: int, world_size: int) -> list[list[int]]:
    found = []
    for detach in (False, True):
        with watched() as groups:
            dmp = sharded(rank, world_size, plan=rows_cut(world_size))
        pipeline = PrefetchTrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU, execute_all_batches=detach)
        stream = iter(batches_of(rank, world_size, LAST))
        if detach:
            pipeline.progress(stream)
            assert {group.waiting for group in groups} == {1}
            pipeline.detach()
        else:
            assert 0 < len(drain(pipeline, list(stream))) < LAST
        found.append([group.waiting for group in groups])
        # The next batch is looked up in its own rows' places, not in those of the dropped batch.
        drain(pipeline, batches_of(rank, world_size, 2))
    return found


def test_dropped_batches_leave_nothing_in_the_queue() -> None:
    for of_rank in run_ranks(2, dropped):
        assert all(set(waiting) == {0} for waiting in of_rank)


def test_purged_rows_are_not_looked_up_where_they_were() -> None:
    group = Watched(EVEN, PoolingType.SUM, FusedSettings())
    ids = call(EVEN, 1)
    group.prefetch(ids.ids, ids.offsets)
    assert group.waiting == 1
    group.purge()
    assert group.waiting == 0


def locks(rank: int, world_size: int) -> str:
    with watched(EmbeddingLocation.MANAGED_CACHING):
        dmp = sharded(rank, world_size, plan=rows_cut(world_size))
    with pytest.raises(ConfigError) as caught:
        PrefetchTrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU).progress(iter(batches_of(rank, world_size)))
    return str(caught.value)


def test_a_cache_that_may_drop_rows_before_their_update_is_refused() -> None:
    (message,) = run_ranks(1, locks)
    assert "prefetch_pipeline=True" in message and "'t0'" in message
    settings = FusedSettings.from_params({"prefetch_pipeline": True})
    where = EmbeddingLocation.MANAGED_CACHING
    assert ModuleTableGroup(EVEN, PoolingType.SUM, settings, location=where).keeps_prefetched
    assert not ModuleTableGroup(EVEN, PoolingType.SUM, FusedSettings(), location=where).keeps_prefetched


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.NONE])
def test_prefetch_takes_features_of_different_batch_sizes(pooling: PoolingType) -> None:
    """FBGEMM's module checks the bounds of the bags when it prefetches, as when it looks up."""
    with watched() as groups:
        grouped = config(pooling, "SGD", False, (4, 4))
        kind = GroupedPooledEmbeddingsLookup if pooling is PoolingType.SUM else GroupedEmbeddingsLookup
        lookup = kind([grouped])
    features = KeyedJaggedTensor(
        ["f", "g", "h"],
        torch.tensor([6, 1, 2, 0, 2]),
        lengths=torch.tensor([1, 1, 1, 0, 2]),
        stride_per_key_per_rank=[[2], [1], [2]],
    )
    expected = lookup(features)
    lookup.prefetch(features)
    assert groups[0].waiting == 1
    assert torch.equal(lookup(features), expected)
    assert groups[0].waiting == 0


def of_replicas(rank: int, world_size: int) -> int:
    group = Watched(EVEN, PoolingType.SUM, FusedSettings())
    group.replicas = Replicas(dist.group.WORLD)
    ids = call(EVEN, rank)
    group.prefetch(ids.ids, ids.offsets)
    return group.waiting


def test_replicas_prefetch_nothing() -> None:
    """Each of their updates looks up the ids of all ranks, and would take what was prefetched for the next batch."""
    assert run_ranks(2, of_replicas) == [0, 0]
