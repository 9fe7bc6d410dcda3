"""Tables behind a cache of rows: checkpoints see changed rows, loaded rows are looked up; modes reach the lookups.

FBGEMM's cache lives on a GPU. Here a group of the same interface keeps all its rows in one: lookups and updates see the
cache alone, until it is flushed or purged. tests/gpu has the same with FBGEMM's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recinfer.checkpoint import load_checkpoint, save_checkpoint
from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingComputeKernel, EmbeddingLocation, OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.tables import group_kernel
from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.tables.cuda import ModuleTableGroup, make_table_group
from recinfer.distributed.tables.replicas import Replicas
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingPlan
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_replicas_and_state import config
from tests.distributed.test_table_group import EVEN, call, filled, output_gradient
from tests.parity.training_cases import table_plan

SGD = {"optimizer": OptimType.SGD, "learning_rate": 0.5}
CPU = torch.device("cpu")


class CachedGroup(TableGroup):
    """A group whose tables lie elsewhere: kernels see ``weights``, the cache of all rows, everybody else ``tables``."""

    def _build(self, dtype: torch.dtype, device: torch.device | None) -> None:
        super()._build(dtype, device)
        self.far = torch.zeros_like(self.weights)
        self.holds_rows = False

    def table_weights(self) -> list[Tensor]:
        places = zip(self.shapes, self._starts)
        return [self.far[start : start + s.rows * s.dim].view(s.rows, s.dim) for s, start in places]

    def lookup(self, *args: Any) -> Tensor:
        self.prefetch(*args[:2])
        return super().lookup(*args)

    @torch.no_grad()
    def prefetch(self, *args: Any) -> None:
        if not self.holds_rows:
            self.weights.copy_(self.far)
        self.holds_rows = True

    @torch.no_grad()
    def flush(self) -> None:
        if self.holds_rows:
            self.far.copy_(self.weights)

    def purge(self) -> None:
        self.holds_rows = False


@contextmanager
def caches() -> Iterator[None]:
    """Inside, tables of the kernel fused_uvm_caching are behind such a cache."""

    def make(shapes: Any, pooling: Any, settings: Any, dtype: Any, device: Any, location: Any) -> TableGroup:
        if location is EmbeddingLocation.MANAGED_CACHING:
            return CachedGroup(shapes, pooling, settings, dtype, device)
        return make_table_group(shapes, pooling, settings, dtype, device, location)

    group_kernel.make_table_group = make  # type: ignore[assignment]
    try:
        yield
    finally:
        group_kernel.make_table_group = make_table_group


def model(kind: str, module: str, kernel: str, world: int) -> DistributedModelParallel:
    """A sharded module of two tables of one group (nn.EmbeddingBag has one), the same values each time."""
    torch.manual_seed(0)
    sharder: Any
    configs: Any
    if module == "bags":
        configs = [EmbeddingBagConfig(12, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
        inner, sharder = EmbeddingBagCollection(configs), EmbeddingBagCollectionSharder(SGD)
    elif module == "rows":
        configs = [EmbeddingConfig(12, 4, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
        inner, sharder = EmbeddingCollection(configs), EmbeddingCollectionSharder(SGD)
    else:
        configs = [EmbeddingConfig(12, 4, "weight")]
        inner, sharder = nn.EmbeddingBag(12, 4, mode="sum"), EmbeddingBagSharder(SGD)
    plan = EmbeddingModuleShardingPlan({c.name: table_plan(c, kind, world, world, 0, kernel) for c in configs})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(nn.Sequential(inner), env, CPU, ShardingPlan({"0": plan}), [sharder])


def values(model: DistributedModelParallel, module: str) -> Tensor:
    """What the model gives for rows 0 to 3."""
    ids, lengths = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0]), torch.ones(8, dtype=torch.int64)
    if module == "one bag":
        out: Tensor = model(ids.view(-1, 1))
        return out * 1
    got = model(KeyedJaggedTensor(["f0", "f1"], ids, lengths=lengths))
    return torch.cat([got["f0"].values(), got["f1"].values()]) if module == "rows" else got.values() * 1


def local(state: dict[str, Any]) -> dict[str, Tensor]:
    return {k: torch.cat([s.tensor for s in v.local_shards()] or [torch.empty(0)]).clone() for k, v in state.items()}


def a_cache_shows_in_nothing(rank: int, world: int, kind: str, module: str, folder: str) -> None:
    with caches():
        cached, fresh = (model(kind, module, "fused_uvm_caching", world) for _ in range(2))
    plain = model(kind, module, "fused", world)
    for _ in range(2):
        for each in (cached, plain):
            values(each, module).square().sum().backward()
    # Saving, through the wrapper, the model and a checkpoint.
    want = local(plain.state_dict())
    for got in (cached.state_dict(), cached.module.state_dict()):
        assert all(torch.equal(rows, want[key]) for key, rows in local(got).items())
    trained = values(plain, module).detach()
    values(cached, module).sum().backward()
    values(plain, module).sum().backward()
    further = values(plain, module).detach()
    save_checkpoint(folder, cached.module)
    # Loading earlier rows, while the cache is full of changed ones.
    cached.load_state_dict(_of_shards(plain, want))
    assert torch.equal(values(cached, module), trained)
    # Loading a checkpoint, into a cache that is full of the first rows.
    values(fresh, module)
    load_checkpoint(folder, fresh.module)
    assert torch.equal(values(fresh, module), further)
    # Loading what lacks a table keeps its changed rows.
    values(fresh, module).sum().backward()
    changed = values(fresh, module).detach()
    fresh.load_state_dict(OrderedDict(), strict=False)
    assert torch.equal(values(fresh, module), changed)


def _of_shards(like: DistributedModelParallel, rows: dict[str, Tensor]) -> OrderedDict[str, Any]:
    """The state of ``like`` with other rows; ``like`` has them from now on."""
    state = OrderedDict(like.state_dict())
    for key, value in state.items():
        for shard in value.local_shards():
            shard.tensor.copy_(rows[key].view_as(shard.tensor))
    return state


@pytest.mark.parametrize("module", ["bags", "rows", "one bag"])
@pytest.mark.parametrize(("world", "kind"), [(1, "table_wise"), (2, "row_wise")])
def test_checkpoints_do_not_see_the_cache(world: int, kind: str, module: str, tmp_path: Path) -> None:
    run_ranks(world, a_cache_shows_in_nothing, kind, module, str(tmp_path / "saved"))


def test_the_state_of_a_lookup_does_not_see_the_cache() -> None:
    grouped = config(PoolingType.SUM, "SGD", False, (4, 4))
    grouped.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING
    with caches():
        lookup = GroupedPooledEmbeddingsLookup([grouped])
    features = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([1, 2, 0]), lengths=torch.ones(3, dtype=torch.int64))
    first = {k: v.clone() for k, v in lookup.state_dict().items()}
    before = lookup(features)
    before.sum().backward()
    after = lookup(features).detach()
    assert not torch.equal(lookup.state_dict()["a.weight"], first["a.weight"])
    lookup.load_state_dict({"a.weight": first["a.weight"]}, strict=False)
    torch.testing.assert_close(lookup(features), torch.cat([before.detach()[:, :8], after[:, 8:]], dim=1))


def prefetch_reaches_the_cache(rank: int, world: int) -> None:
    for module in ("bags", "rows", "one bag"):
        with caches():
            inner: Any = model("row_wise", module, "fused_uvm_caching", world).module.get_submodule("0")
        ids = torch.tensor([[1], [11]])
        features = KeyedJaggedTensor(["f0", "f1"], ids.view(-1), lengths=torch.tensor([1, 1]))
        context = inner.create_context()
        received = inner.input_dist(context, ids if module == "one bag" else features).wait().wait()
        caches_held = [part for part in inner._lookups[0].modules() if isinstance(part, CachedGroup)]
        assert [part.holds_rows for part in caches_held] == [False]
        inner.prefetch(received, None, context)
        assert [part.holds_rows for part in caches_held] == [True]
        assert inner.compute_and_output_dist(context, received) is not None


def test_prefetch_reaches_the_cache() -> None:
    run_ranks(2, prefetch_reaches_the_cache)


def modes_reach_the_lookups(rank: int, world: int) -> None:
    for kind in ("table_wise", "data_parallel"):
        for module in ("bags", "rows", "one bag"):
            whole = model(kind, module, "dense" if kind == "data_parallel" else "fused", world)
            inner: Any = whole.module.get_submodule("0")
            assert inner._lookups
            for mode in (False, True):
                assert whole.train(mode) is whole
                assert {part.training for lookup in inner._lookups for part in lookup.modules()} == {mode}


def test_train_and_eval_reach_the_lookups() -> None:
    run_ranks(2, modes_reach_the_lookups)


# --------------------------------------------------------------------------------------------------- FBGEMM's module


def steps_of_replicas(rank: int, world: int) -> list[Tensor]:
    """FBGEMM counts every forward; it has no Adam on CPU, but counts the steps of row-wise Adagrad too."""
    clipped = {"gradient_clipping": True, "max_gradient": 0.5}
    settings = FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD", "learning_rate": 0.1, **clipped})
    rows = []
    for pooling in (PoolingType.SUM, PoolingType.NONE):
        module, ours = ModuleTableGroup(EVEN, pooling, settings), TableGroup(EVEN, pooling, settings)
        for group in (module, ours):
            filled(group)
            group.replicas = Replicas(dist.group.WORLD)
        for step in range(1, 4):
            batch = call(EVEN, 10 * step + rank)
            for group in (module, ours):
                with torch.no_grad():
                    group(batch.ids, batch.offsets)
                out = group(batch.ids, batch.offsets)
                out.backward(output_gradient(out, step + rank))
            assert (int(module.tbe.iter), int(module.tbe.iter_cpu)) == (step, step)
        for mine, its in zip(ours.table_weights(), module.table_weights()):
            torch.testing.assert_close(mine, its)
        rows += [w.clone() for w in module.table_weights()]
    return rows


def test_replicas_count_one_step_a_step() -> None:
    here, there = run_ranks(2, steps_of_replicas)
    assert all(torch.equal(a, b) for a, b in zip(here, there))


def test_a_lookup_without_gradients_is_no_step() -> None:
    group = ModuleTableGroup(EVEN, PoolingType.SUM, FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD"}))
    batch = call(EVEN, 1)
    with torch.no_grad():
        group(batch.ids, batch.offsets)
    assert int(group.tbe.iter) == int(group.tbe.iter_cpu) == 0
    group(batch.ids, batch.offsets).sum().backward()
    assert int(group.tbe.iter) == int(group.tbe.iter_cpu) == 1
    group.flush()
    group.purge()
