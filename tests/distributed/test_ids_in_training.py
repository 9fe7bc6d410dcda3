"""Ids of training: outside their table, of another dtype; batches with inverse indices; ranks whose batches differ."""

from __future__ import annotations

import logging
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from recinfer.distributed.train_pipeline import TrainPipelineSparseDist
from recinfer.distributed.types import ShardingPlan, ShardingType
from recinfer.errors import InputError, UnavailableError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks

ROWS = 6
KINDS = {
    "table_wise": lambda ranks: table_wise(rank=ranks - 1),
    "row_wise": lambda ranks: row_wise(),
    "column_wise": lambda ranks: column_wise(ranks=[r % ranks for r in range(2)]),
    "replicas": lambda ranks: data_parallel(compute_kernel="fused"),
    "dense replicas": lambda ranks: data_parallel(compute_kernel="dense"),
}


class BagSharder(EmbeddingBagCollectionSharder):
    """Every sharding type on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t.value for t in ShardingType]


class RowSharder(EmbeddingCollectionSharder):
    """Every sharding type on CPU."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [t.value for t in ShardingType]


class Summed(nn.Sequential):
    """A loss and the output, as pipelines take them."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self[0](features).values()
        return out.sum(), out


def sharded(pooled: bool, kind: str, world_size: int, parent: Any = nn.Sequential, **fused: Any) -> Any:
    module: nn.Module
    if pooled:
        module = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 8, "t", feature_names=["f", "g"])])
        module.embedding_bags["t"].weight.data = torch.arange(float(ROWS)).unsqueeze(1).repeat(1, 8)
    else:
        module = EmbeddingCollection([EmbeddingConfig(ROWS, 8, "t", feature_names=["f", "g"])])
        module.embeddings["t"].weight.data = torch.arange(float(ROWS)).unsqueeze(1).repeat(1, 8)
    sharder: Any = (BagSharder if pooled else RowSharder)({"optimizer": OptimType.SGD, "learning_rate": 1.0} | fused)
    plan = construct_module_sharding_plan(
        module,
        {"t": KINDS[kind](world_size)},
        sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    return DistributedModelParallel(parent(module), plan=ShardingPlan({"0": plan}), sharders=[sharder])


def ids_of(ids: torch.Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f", "g"], torch.cat([ids, ids[:0]]), lengths=torch.tensor([len(ids), 0]))


def vectors(out: Any, name: str = "f") -> torch.Tensor:
    found = out[name]
    return found if isinstance(found, torch.Tensor) else found.values()


def bad_ids(rank: int, world_size: int, pooled: bool, kind: str) -> None:
    dmp = sharded(pooled, kind, world_size)
    for bad in (-1, ROWS, 2**40, -(2**40)):
        with pytest.raises(
            InputError, match=rf"feature 'f': id {bad} is not in its table 't'; expected 0 to {ROWS - 1}"
        ):
            dmp(ids_of(torch.tensor([2, bad])))
    for other in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1], dtype=torch.int16)):
        with pytest.raises(InputError, match=f"ids: got {other.dtype}; expected torch.int32 or torch.int64"):
            dmp(ids_of(other))
    with torch.no_grad():  # nothing was trained, and the edges are in
        out = vectors(dmp(ids_of(torch.tensor([0, ROWS - 1], dtype=torch.int32))))
    assert float(out.sum()) == 8 * (ROWS - 1)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_id_outside_its_table_is_an_error(kind: str, pooled: bool) -> None:
    run_ranks(2, bad_ids, pooled, kind)


def modes(rank: int, world_size: int, kind: str) -> list[str]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recinfer.distributed.sharded.id_check").addHandler(handler)
    for mode in ("WARNING", "IGNORE"):
        dmp = sharded(True, kind, world_size, bounds_check_mode=mode)
        for _ in range(2):
            out = vectors(dmp(ids_of(torch.tensor([4, -1, ROWS])))).detach()
            assert float(out[0, 0]) == 4.0  # row 4, and row 0 twice
    return seen


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_a_mode_that_was_asked_for_reads_row_0_and_warns_once(kind: str) -> None:
    for seen in run_ranks(2, modes, kind):
        assert len(seen) == 1 and "id -1 is not in its table 't'" in seen[0] and "row 0" in seen[0]


def inverse(rank: int, world_size: int, pooled: bool, kind: str) -> None:
    dmp = sharded(pooled, kind, world_size)
    batch = KeyedJaggedTensor(
        ["f", "g"],
        torch.tensor([1, 2, 3, 5]),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["g", "f"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )
    out = dmp(batch)
    if pooled:
        assert vectors(out)[:, 0].tolist() == [5, 1, 5]
        assert vectors(out, "g")[:, 0].tolist() == [5, 5, 5]
        return
    assert vectors(out)[:, 0].tolist() == [2, 3, 1, 2, 3] and out["f"].lengths().tolist() == [2, 1, 2]
    assert vectors(out, "g")[:, 0].tolist() == [5, 5, 5] and out["g"].lengths().tolist() == [1, 1, 1]
    if kind == "table_wise":
        vectors(out).sum().backward()  # each of 2 ranks adds half: rows 2 and 3 lose 2, row 1 loses 1
        now = vectors(dmp(ids_of(torch.tensor([1, 2, 3]))))[:, 0]
        assert now.tolist() == [0, 0, 1]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "dense replicas"])
def test_inverse_indices_expand_a_variable_batch(kind: str, pooled: bool) -> None:
    run_ranks(2, inverse, pooled, kind)


def different_forms(rank: int, world_size: int, how: str, pipelined: bool) -> None:
    dmp = sharded(True, "row_wise", world_size, Summed)

    def train(batch: KeyedJaggedTensor) -> torch.Tensor:
        if not pipelined:
            return dmp(batch)[1]
        # A pipeline sends the sizes of several modules together. One that met an error is not used again.
        optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)  # tables are trained by their backward
        return TrainPipelineSparseDist(dmp, optimizer, torch.device("cpu")).progress(iter([batch]))

    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    strides: Any = [[1], [1]] if how == "variable" and rank == 1 else None
    if how == "dtype" and rank == 1:
        ids = ids.int()
    batch = KeyedJaggedTensor(["f", "g"], ids, lengths=lengths, stride_per_key_per_rank=strides)
    other = "a variable batch with int64 lengths, int64 values" if how == "variable" else "int32 values"
    mine, theirs = ("rank 1 sends", "rank 0 sends")[rank], other
    with pytest.raises(InputError, match=mine) as caught:
        train(batch)
    assert theirs in str(caught.value) and "a fixed batch with int64 lengths, int64 values, no weights" in str(
        caught.value
    )
    batch = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 2]), lengths=lengths)
    assert train(batch).shape == (1, 16)  # the exchange is whole again


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("how", ["variable", "dtype"])
def test_ranks_that_send_different_forms_of_batch_say_so(how: str, pipelined: bool) -> None:
    run_ranks(2, different_forms, how, pipelined)


def fewer_batches(rank: int, world_size: int) -> None:
    dmp = sharded(True, "row_wise", world_size)
    group = dist.new_group(backend="gloo")
    distributed_c10d._set_pg_timeout(
        timedelta(seconds=2), group
    )  # not of its making, for which a busy machine needs longer
    dmp.module[0]._input_dists[0]._dist._pg = group
    if rank == 0:
        with pytest.raises(UnavailableError, match=r"on rank 0.*ranks ran unequal numbers of batches"):
            vectors(dmp(ids_of(torch.tensor([1]))))


def test_a_rank_with_more_batches_than_others_is_told_the_likely_cause() -> None:
    run_ranks(2, fewer_batches)
