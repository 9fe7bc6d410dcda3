"""``create_lookup`` and the lookups use fused_params and feature processors, or fail with an error that names them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recinfer.distributed.embedding import create_embedding_sharding
from recinfer.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup, MetaInferGroupedPooledEmbeddingsLookup
from recinfer.distributed.embedding_types import EmbeddingComputeKernel, GroupedEmbeddingConfig, ShardedEmbeddingTable
from recinfer.distributed.embeddingbag import (
    EmbeddingBagSharder,
    ShardedEmbeddingBagCollection,
    create_embedding_bag_sharding,
)
from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from recinfer.distributed.grouped_position_weighted import GroupedPositionWeightedModule
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    create_infer_embedding_bag_sharding,
)
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import CheckpointError, ConfigError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.test_infer_lookup import infos as packed_infos
from tests.distributed.test_sharding import features, info, plan
from tests.quant.cases import float_bags, quantized_sequences

ALONE = ShardingEnv.from_local(1, 0)
WHOLE = plan("table_wise", [(0, 0, 5, 4, 0)])
BATCH = features(f=([2, 1], [0, 3, 3]))


def stepped(pooled: bool, own: dict[str, Any] | None, given: dict[str, Any] | None) -> torch.Tensor:
    """How far one backward of ones moves row 0."""
    table = info("t", 5, 4, ["f"], WHOLE)
    table.fused_params = own
    make = create_embedding_bag_sharding if pooled else create_embedding_sharding
    lookup = make("table_wise", [table], ALONE).create_lookup(fused_params=given)
    before = lookup.state_dict()["t.weight"].clone()
    lookup(BATCH).sum().backward()
    return (before - lookup.state_dict()["t.weight"])[0, 0]


@pytest.mark.parametrize("pooled", [True, False])
def test_fused_params_count_where_the_table_has_none_of_its_own(pooled: bool) -> None:
    assert stepped(pooled, None, {"learning_rate": 0.25}).item() == pytest.approx(0.25, abs=1e-6)
    assert stepped(pooled, {"learning_rate": 0.5}, {"learning_rate": 0.25}).item() == pytest.approx(0.5, abs=1e-6)
    assert stepped(pooled, {"learning_rate": 0.5}, None).item() == pytest.approx(0.5, abs=1e-6)
    with pytest.raises(ConfigError, match="unknown keys"):
        stepped(pooled, None, {"learning_rat": 1.0})


def test_a_feature_processor_weighs_the_ids_and_learns() -> None:
    table = info("t", 5, 4, ["f"], WHOLE)
    processor = GroupedPositionWeightedModule({"f": 3})
    (weight,) = (p for _, p in processor.named_parameters())
    with torch.no_grad():
        weight.copy_(torch.tensor([2.0, 3.0, 5.0]))
    sharding = create_embedding_bag_sharding("table_wise", [table], ALONE)
    lookup = sharding.create_lookup(fused_params={"learning_rate": 0.0}, feature_processor=processor)
    rows = lookup.state_dict()["t.weight"].clone()
    out = lookup(BATCH)
    torch.testing.assert_close(out, torch.stack([2 * rows[0] + 3 * rows[3], 2 * rows[3]]))
    out.sum().backward()
    torch.testing.assert_close(
        weight.grad, torch.stack([rows[0].sum() + rows[3].sum(), rows[3].sum(), rows.new_zeros(())])
    )
    plain = create_embedding_bag_sharding("table_wise", [info("t", 5, 4, ["f"], WHOLE)], ALONE).create_lookup()
    plain.load_state_dict({"t.weight": rows})
    torch.testing.assert_close(plain(BATCH), torch.stack([rows[0] + rows[3], rows[3]]))


def test_processors_that_could_not_work_are_refused() -> None:
    processor = GroupedPositionWeightedModule({"f": 3})
    two = ShardingEnv.from_local(2, 0)
    cut = info("t", 5, 4, ["f"], plan("row_wise", [(0, 0, 3, 4, 0), (3, 0, 2, 4, 1)]))
    with pytest.raises(ConfigError, match="table 't' is sharded by rows"):
        create_embedding_bag_sharding("row_wise", [cut], two).create_lookup(feature_processor=processor)
    mean = info("t", 5, 4, ["f"], WHOLE, pooling=PoolingType.MEAN)
    with pytest.raises(ConfigError, match="table 't' is a MEAN table"):
        create_embedding_bag_sharding("table_wise", [mean], ALONE).create_lookup(feature_processor=processor)
    with pytest.raises(ConfigError, match="unpooled rows take no weights"):
        create_embedding_sharding("table_wise", [info("t", 5, 4, ["f"], WHOLE)], ALONE).create_lookup(
            feature_processor=processor
        )
    packed = packed_infos(quantized_bags(), "table_wise")
    sharding = create_infer_embedding_bag_sharding("table_wise", packed, two)
    with pytest.raises(ConfigError, match="not supported here"):
        sharding.create_lookup(feature_processor=processor)


def quantized_bags() -> QuantEmbeddingBagCollection:
    floats = float_bags([PoolingType.SUM] * 4, False)
    return QuantEmbeddingBagCollection.from_float(floats, per_table=dict.fromkeys("abcd", DataType.INT8))


def test_inference_lookups_give_the_type_that_is_asked_for() -> None:
    sharding = create_infer_embedding_bag_sharding(
        "table_wise", packed_infos(quantized_bags(), "table_wise"), ShardingEnv.from_local(2, 0)
    )
    lookup = sharding.create_lookup(fused_params={"output_dtype": "FP16", "register_tbes": True})
    names = [name for of_rank in sharding.feature_names_per_rank() for name in of_rank]
    kjt = KeyedJaggedTensor(
        names, torch.zeros(len(names), dtype=torch.int64), lengths=torch.ones(len(names), dtype=torch.int64)
    )
    out = lookup.lookups[1](kjt)
    assert out.dtype == torch.float16
    torch.testing.assert_close(sharding.create_lookup().lookups[1](kjt), out.float(), rtol=1e-3, atol=1e-3)


def test_a_quantized_module_keeps_its_own_type() -> None:
    module = quantized_bags()
    plans = {i.embedding_config.name: i.param_sharding for i in packed_infos(module, "table_wise")}
    env = ShardingEnv.from_local(2, 0)
    QuantEmbeddingBagCollectionSharder(fused_params={"output_dtype": torch.float32}).shard(module, plans, env)
    with pytest.raises(ConfigError, match=r"output_dtype FP16, but the quantized module gives torch\.float32"):
        QuantEmbeddingBagCollectionSharder(fused_params={"output_dtype": "FP16"}).shard(module, plans, env)
    with pytest.raises(ConfigError, match="output_dtype FP16"):
        ShardedQuantEmbeddingCollection(
            quantized_sequences(dict.fromkeys("abcd", DataType.INT8)), {}, env, {"output_dtype": "FP16"}
        )


def test_an_inference_lookup_uses_the_weights_of_its_processor() -> None:
    table = ShardedEmbeddingTable(
        5, 4, "t", DataType.FP16, ["f"], pooling=PoolingType.SUM, local_rows=5, local_cols=4,
        compute_kernel=EmbeddingComputeKernel.QUANT,
    )  # fmt: skip
    config = GroupedEmbeddingConfig(
        DataType.FP16, PoolingType.SUM, False, False, EmbeddingComputeKernel.QUANT, [table], None
    )
    processor = GroupedPositionWeightedModule({"f": 3})
    (weight,) = (p for _, p in processor.named_parameters())
    with torch.no_grad():
        weight.copy_(torch.tensor([2.0, 3.0, 5.0]))
    lookup = MetaInferGroupedPooledEmbeddingsLookup([config], feature_processor=processor)
    rows = torch.arange(20.0).view(5, 4).half()
    lookup.load_state_dict({"t.weight": rows.view(torch.uint8)})
    with torch.no_grad():
        torch.testing.assert_close(lookup(BATCH), torch.stack([2 * rows[0] + 3 * rows[3], 2 * rows[3]]).float())


def test_a_processor_and_its_groups_come_together() -> None:
    def config(processed: bool) -> GroupedEmbeddingConfig:
        table = ShardedEmbeddingTable(
            5, 4, "t", feature_names=["f"], local_rows=5, local_cols=4, compute_kernel=EmbeddingComputeKernel.DENSE
        )
        return GroupedEmbeddingConfig(
            DataType.FP32, PoolingType.SUM, processed, processed, EmbeddingComputeKernel.DENSE, [table], None
        )

    with pytest.raises(ConfigError, match="feature_processor is missing"):
        GroupedPooledEmbeddingsLookup([config(True)])
    with pytest.raises(ConfigError, match="feature_processor is given and no group"):
        GroupedPooledEmbeddingsLookup([config(False)], feature_processor=GroupedPositionWeightedModule({"f": 3}))


def test_rows_are_not_assigned_but_copied() -> None:
    lookup = create_embedding_bag_sharding("table_wise", [info("t", 5, 4, ["f"], WHOLE)], ALONE).create_lookup()
    with pytest.raises(CheckpointError, match="assign=True"):
        lookup.load_state_dict(lookup.state_dict(), assign=True)
    config = EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    sharded = ShardedEmbeddingBagCollection(EmbeddingBagCollection([config]), {"t": WHOLE}, ALONE)
    sharded.load_state_dict(sharded.state_dict())
    with pytest.raises(RuntimeError, match="assign=True: kernels read their rows in place"):
        sharded.load_state_dict(sharded.state_dict(), assign=True)
    bag = EmbeddingBagSharder().shard(torch.nn.EmbeddingBag(5, 4, mode="sum"), {"weight": WHOLE}, ALONE)
    with pytest.raises(RuntimeError, match="assign=True"):
        bag.load_state_dict(bag.state_dict(), assign=True)


def test_an_embedding_bags_sharder_hands_its_codecs_on() -> None:
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
    sharder = EmbeddingBagSharder(qcomm_codecs_registry=codecs)
    bag = sharder.shard(torch.nn.EmbeddingBag(5, 4, mode="sum"), {"weight": WHOLE}, ALONE)
    assert bag.qcomm_codecs_registry is codecs
    assert bag.shardings["table_wise"].qcomm_codecs_registry is codecs
