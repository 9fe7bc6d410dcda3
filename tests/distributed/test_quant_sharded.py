"""Sharded = unsharded: every sharding, precision, pooling and path gives the unsharded quantized module's numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recinfer.distributed.quant_embedding import QuantEmbeddingCollectionSharder, ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    ShardedQuantEmbeddingBagCollection,
)
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.layout.cuts import column_unit
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.buffers import Placed, allocate
from recinfer.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.formats.registry import row_format
from recinfer.quant.rows import PACKED_TYPES, padded_dim
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.plans import sharding
from tests.matrix import by_pairs
from tests.quant.cases import MIXED, float_bags, quantized_sequences, random_features

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
KINDS = ["table_wise", "row_wise", "column_wise", "grid", "mixed"]
TYPES = [*[dict.fromkeys("abcd", t) for t in PACKED_TYPES], MIXED]
TYPE_IDS = [*[t.value for t in PACKED_TYPES], "mixed"]
TYPES_BY_ID = dict(zip(TYPE_IDS, TYPES))


def plan_for(module: torch.nn.Module, kind: str, world_size: int, device: str = "cpu") -> dict[str, ParameterSharding]:
    configs = module.embedding_bag_configs() if hasattr(module, "embedding_bag_configs") else module.embedding_configs()
    order = ["column_wise", "row_wise", "table_wise", "grid"]
    ranks = list(range(world_size))
    return {
        c.name: sharding(
            c,
            order[i % 4] if kind == "mixed" else kind,
            [i % world_size] if kind == "table_wise" else ranks[i % world_size :] + ranks[: i % world_size],
            device,
            column_unit(c.data_type),
        )
        for i, c in enumerate(configs)
    }


def packed_twin(module: EmbeddingBagCollection | EmbeddingCollection, sharded: torch.nn.Module, **kwargs: object):
    """The same shards rebuilt from one buffer, table-major as an archive maps them."""
    order = {c.name: i for i, c in enumerate(sharded._configs)}
    shards = sorted(sharded.shards, key=lambda s: (order[s.rect.table], s.rect.col_start, s.rect.row_start))
    packed = [sharded._packed.rows_of(s) for s in shards]
    buffer = torch.cat([*[p.reshape(-1) for p in packed], torch.zeros(64, dtype=torch.uint8)])
    placed, at = [], 0
    for shard, rows in zip(shards, packed):
        placed.append(replace(shard, offset=at))
        at += rows.numel()
    return type(sharded).from_packed(sharded._configs, placed, buffer, **kwargs)


@pytest.mark.parametrize(("types", "kind", "world_size"), by_pairs(TYPE_IDS, KINDS, [1, 2, 3]))
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_pooled(types: str, kind: str, world_size: int, weighted: bool) -> None:
    module = EmbeddingBagCollection.from_float(
        float_bags([SUM, MEAN, MEAN, SUM], weighted), per_table=TYPES_BY_ID[types]
    )
    plan = plan_for(module, kind, world_size)
    env = ShardingEnv.from_local(world_size, 0)
    shared = ShardedQuantEmbeddingBagCollection(module, plan, env)
    steps = ShardedQuantEmbeddingBagCollection(module, plan, env, fused=False)
    mapped = packed_twin(module, shared, is_weighted=weighted, world_size=world_size)
    mapped_steps = packed_twin(module, shared, is_weighted=weighted, world_size=world_size, fused=False)
    assert shared.fused and mapped.fused and not steps.fused and not mapped_steps.fused
    exact = kind in ("table_wise", "column_wise")
    for batch, longest in ((1, 5), (17, 5), (4, 0), (0, 5)):
        features = random_features(
            module.embedding_bag_configs(), batch, weighted=weighted, longest=longest, seed=batch
        )
        features = features.permute([4, 1, 0, 3, 2])
        want = module(features)
        for sharded in (shared, mapped, steps, mapped_steps):
            got = sharded(features)
            assert got.keys() == want.keys() == ["f0", "f1", "f2", "f3", "f4"]
            assert got.length_per_key() == want.length_per_key()
            if exact or sharded in (shared, mapped):
                assert torch.equal(got.values(), want.values())
            else:
                torch.testing.assert_close(got.values(), want.values(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("types", "kind", "world_size"), by_pairs(TYPE_IDS, KINDS, [1, 3]))
def test_sequences(types: str, kind: str, world_size: int) -> None:
    module = quantized_sequences(TYPES_BY_ID[types])
    plan = plan_for(module, kind, world_size)
    env = ShardingEnv.from_local(world_size, 0)
    shared = ShardedQuantEmbeddingCollection(module, plan, env)
    steps = ShardedQuantEmbeddingCollection(module, plan, env, fused=False)
    mapped = packed_twin(module, shared, world_size=world_size)
    mapped_steps = packed_twin(module, shared, world_size=world_size, fused=False)
    for batch in (1, 17, 0):
        features = random_features(module.embedding_configs(), batch, seed=batch).permute([4, 1, 0, 3, 2])
        want = module(features)
        for sharded in (shared, steps, mapped, mapped_steps):
            got = sharded(features)
            assert list(got) == list(want)
            for name in want:
                assert torch.equal(got[name].values(), want[name].values())
                assert torch.equal(got[name].lengths(), want[name].lengths())


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
def test_of_a_replicated_table_one_rank_is_asked(pooled: bool, fused: bool | None) -> None:
    module: EmbeddingBagCollection | EmbeddingCollection
    if pooled:
        module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, MEAN]))
    else:
        module = quantized_sequences(MIXED)
    plan = plan_for(module, "row_wise", 2)
    plan["a"] = plan["d"] = ParameterSharding("data_parallel", "quant", [0, 1], None)
    made = ShardedQuantEmbeddingBagCollection if pooled else ShardedQuantEmbeddingCollection
    sharded = made(module, plan, ShardingEnv.from_local(2, 0), fused=fused)  # type: ignore[arg-type]
    features = random_features(sharded._configs, 6)
    got, want = sharded(features), module(features)
    if pooled:
        torch.testing.assert_close(got.values(), want.values(), rtol=1e-5, atol=1e-5)
    else:
        assert all(torch.equal(got[name].values(), want[name].values()) for name in want)


@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
def test_a_feature_that_two_tables_read_is_checked_for_the_shorter(pooled: bool) -> None:
    shapes = [("a", 40, 8, ["f"]), ("b", 9, 8, ["f", "g"])]
    module: EmbeddingBagCollection | EmbeddingCollection
    if pooled:
        module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN], shapes=shapes))
    else:
        module = quantized_sequences(MIXED, shapes)
    made = ShardedQuantEmbeddingBagCollection if pooled else ShardedQuantEmbeddingCollection
    plan = plan_for(module, "row_wise", 3)
    sharded = made(module, plan, ShardingEnv.from_local(3, 0), fused=False)  # type: ignore[arg-type]
    ids = torch.tensor([0, 8, 3, 8, 1])
    lengths = torch.tensor([2, 1, 0, 2])
    got, want = (m(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)) for m in (sharded, module))
    if pooled:
        assert got.keys() == want.keys()
        torch.testing.assert_close(got.values(), want.values(), rtol=1e-5, atol=1e-5)
    else:
        assert list(got) == list(want)
        assert all(torch.equal(got[name].values(), want[name].values()) for name in want)
    ids[1] = 9
    with pytest.raises(InputError, match=r"feature 'f', sample 0: id 9 is out of range; its table has rows 0 to 8"):
        sharded(KeyedJaggedTensor(["f", "g"], ids, lengths=lengths))


def test_the_op_of_a_rank_knows_the_rows_of_tables_that_are_laid_out_for_it() -> None:
    module = EmbeddingBagCollection.from_float(float_bags(), per_table=MIXED)
    plan = plan_for(module, "mixed", 2)
    sharded = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(2, 0), fused=False)
    assert all(group.batch.knows_rows for lookup in sharded._built().lookups for group in lookup.kernels)


def test_row_pieces_far_apart_are_not_taken_for_neighbours() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    sharded = ShardedQuantEmbeddingBagCollection(module, plan_for(module, "row_wise", 2), ShardingEnv.from_local(2, 0))
    rank_major = sorted(sharded.shards, key=lambda s: -s.rect.rank)
    buffers, placed = allocate(rank_major, torch.device("cpu"))
    for shard in placed:
        buffers.write(shard, sharded._packed.rows_of(shard))
    scattered = ShardedQuantEmbeddingBagCollection.from_packed(sharded._configs, placed, buffers.near, world_size=2)
    assert not scattered.fused
    features = random_features(sharded._configs, 8)
    torch.testing.assert_close(scattered(features).values(), module(features).values(), rtol=1e-5, atol=1e-5)


def test_int32_ids_stay_int32_through_the_steps() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    sharded = ShardedQuantEmbeddingBagCollection(
        module, plan_for(module, "row_wise", 2), ShardingEnv.from_local(2, 0), fused=False
    )
    features = random_features(module.embedding_bag_configs(), 8, dtype=torch.int32)
    ctx = sharded.create_context()
    dist = sharded.input_dist(ctx, features)
    assert {part.values().dtype for ranks in dist for part in ranks} == {torch.int32}
    torch.testing.assert_close(sharded(features).values(), module(features).values(), rtol=1e-5, atol=1e-5)


def test_tbes_register_every_shard_and_share_the_mapped_bytes() -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, SUM, SUM]))
    shared = ShardedQuantEmbeddingBagCollection(module, plan_for(module, "mixed", 2), ShardingEnv.from_local(2, 0))
    mapped = packed_twin(module, shared, world_size=2)
    tbes = mapped.get_tbes_to_register()
    # Two ranks, and one of them has a MEAN table whole.
    assert len(tbes) == 3 and all(t.weights_host.data_ptr() == mapped._packed.buffers.near.data_ptr() for t in tbes)
    rects = [(t.name, t.local_rows, t.local_cols) for group in tbes.values() for t in group.embedding_tables]
    assert sum(rows * cols for _, rows, cols in rects) == sum(
        c.num_embeddings * c.embedding_dim for c in module.embedding_bag_configs()
    )
    assert len(rects) == len(mapped.shards)
    assert shared.shardings == {"column_wise": ["a"], "row_wise": ["b"], "table_wise": ["c"], "grid_shard": ["d"]}
    assert {type(t).__name__ for t in shared.tbes_configs()} == {"IntNBitTableBatchedEmbeddingBagsCodegen"}


def test_errors_name_bad_ids_and_bad_plans() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    env = ShardingEnv.from_local(2, 0)
    plan = plan_for(module, "row_wise", 2)
    for fused in (None, False):
        sharded = ShardedQuantEmbeddingBagCollection(module, plan, env, fused=fused)
        features = random_features(module.embedding_bag_configs(), 3)
        features.values()[-1] = 77
        with pytest.raises(InputError, match=r"feature 'f4', sample [012]: id 77 is out of range"):
            sharded(features)
        with pytest.raises(InputError, match="id 77"):
            sharded.check_ids(features)
    with pytest.raises(ConfigError, match="tables d have no sharding"):
        ShardedQuantEmbeddingBagCollection(module, {k: v for k, v in plan.items() if k != "d"}, env)
    broken = plan_for(module, "row_wise", 2)
    broken["a"].sharding_spec.shards.pop()
    with pytest.raises(ConfigError, match=r"table '?a'?"):
        ShardedQuantEmbeddingBagCollection(module, broken, env)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ConfigError, match=r"planned on cuda:[01], but this machine has"):
            ShardedQuantEmbeddingBagCollection(module, plan_for(module, "row_wise", 2, "cuda"), env)


@pytest.mark.parametrize("kind", ["table_wise", "mixed"])
@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
def test_every_tbe_is_registered_with_its_own_tables(types: dict[str, DataType], kind: str, pooled: bool) -> None:
    env = ShardingEnv.from_local(2, 0)
    module: EmbeddingBagCollection | EmbeddingCollection
    sharded: ShardedQuantEmbeddingBagCollection | ShardedQuantEmbeddingCollection
    if pooled:
        module = EmbeddingBagCollection.from_float(float_bags(), per_table=types)
        sharded = ShardedQuantEmbeddingBagCollection(module, plan_for(module, kind, 2), env)
    else:
        module = quantized_sequences(types)
        sharded = ShardedQuantEmbeddingCollection(module, plan_for(module, kind, 2), env)
    features = random_features(sharded._configs, 7)
    if not all(row_format(data_type).fbgemm for data_type in types.values()):
        with pytest.raises(UnavailableError, match="FBGEMM has no TBE module for"):
            sharded.tbes_configs()
        return
    rects = []
    for tbe, group in sharded.tbes_configs().items():
        tables = group.embedding_tables
        rects += [(t.name, t.local_rows, t.local_cols) for t in tables]
        assert [(name, rows, dim) for name, rows, dim, *_ in tbe.embedding_specs] == [
            (t.name, t.local_rows, padded_dim(t.local_cols, t.data_type)) for t in tables
        ]
        assert {t.data_type for t in tables} == {group.data_type} and len({s[3] for s in tbe.embedding_specs}) == 1
        assert tbe.embedding_specs[0][3].name == group.data_type.value
        assert len(tbe.feature_table_map) == group.num_features()
        if kind != "table_wise":
            continue
        # A registered module reads the very rows: it gives what the collection gives for its features.
        mine = features.permute([features.keys().index(f) for f in group.feature_names()])
        got, want = tbe(mine.values(), mine.offsets()), module(features)
        if pooled:
            assert torch.equal(got, torch.cat([want[f] for f in group.feature_names()], dim=1))
        else:
            assert torch.equal(got, torch.cat([want[f].values() for f in group.feature_names()]))
    assert sorted(rects) == sorted((s.rect.table, s.rect.rows, s.rect.cols) for s in sharded.shards)


def _moved(shard: Placed, **changed: int) -> Placed:
    return replace(shard, rect=replace(shard.rect, **changed))


@pytest.mark.parametrize("fused", [None, False])
def test_packed_shards_that_do_not_cover_a_table_are_refused(fused: bool | None) -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    env = ShardingEnv.from_local(2, 0)
    shared = ShardedQuantEmbeddingBagCollection(module, plan_for(module, "grid", 2), env)
    whole = packed_twin(module, shared, world_size=2, fused=fused)
    buffer = whole._packed.buffers.near

    def refused(shards: list[Placed], match: str) -> None:
        with pytest.raises(ConfigError, match=match):
            type(whole).from_packed(whole._configs, shards, buffer, world_size=2, fused=fused)

    assert len(whole.shards) > len(whole._configs)
    for shard in whole.shards:
        others = [s for s in whole.shards if s is not shard]
        rect = shard.rect
        not_once = rf"table '{rect.table}'"
        refused(others, not_once)
        refused([*whole.shards, shard], not_once)
        if rect.rows > 1:
            refused([*others, _moved(shard, row_stop=rect.row_stop - 1)], not_once)
            refused([*others, _moved(shard, row_start=rect.row_start + 1)], not_once)
        refused([*others, _moved(shard, col_stop=rect.col_stop + 4)], not_once)
        refused([*others, replace(shard, offset=buffer.numel())], r"is bytes \d+:\d+ of a buffer of \d+")
        refused([*others, _moved(shard, rank=2)], "is on rank 2; expected a rank of at least 0 and below 2")


def test_sharders() -> None:
    bags, sequences = QuantEmbeddingBagCollectionSharder(), QuantEmbeddingCollectionSharder()
    assert bags.module_type is EmbeddingBagCollection and sequences.module_type is EmbeddingCollection
    module = quantized_sequences(MIXED)
    sharded = sequences.shard(module, plan_for(module, "mixed", 2), ShardingEnv.from_local(2, 0))
    features = random_features(module.embedding_configs(), 3)
    assert torch.equal(sharded(features)["f2"].values(), module(features)["f2"].values())


def test_copy_shares_rows_and_has_the_plan() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    plan = plan_for(module, "mixed", 2)
    sharded = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(2, 0))
    copied = sharded.copy(torch.device("cpu"))
    features = random_features(module.embedding_bag_configs(), 5)
    assert copied is not sharded and copied.fused_lookup is sharded.fused_lookup
    assert torch.equal(copied(features).values(), sharded(features).values())
    infos = sharded.sharding_type_to_sharding_infos()
    assert {kind: [i.embedding_config.name for i in of_kind] for kind, of_kind in infos.items()} == sharded.shardings
    assert all(i.param_sharding is plan[i.embedding_config.name] for of_kind in infos.values() for i in of_kind)
    with pytest.raises(ConfigError, match="with a plan for cuda"):
        sharded.copy(torch.device("cuda"))
