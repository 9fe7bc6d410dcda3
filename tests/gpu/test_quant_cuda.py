"""The quantized runtime on a GPU against the CPU: the same numbers from the same packed rows."""

from __future__ import annotations

import pytest
import torch

from recinfer import fbgemm
from recinfer.distributed.quant_embedding import ShardedQuantEmbeddingCollection
from recinfer.distributed.quant_embeddingbag import ShardedQuantEmbeddingBagCollection
from recinfer.distributed.types import ShardingEnv
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import DataType, PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.rows import PACKED_TYPES
from tests.distributed.plans import sharding
from tests.quant.cases import MIXED, float_bags, quantized_sequences, random_features

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TYPES = [*[dict.fromkeys("abcd", t) for t in PACKED_TYPES], MIXED]
TYPE_IDS = [*[t.value for t in PACKED_TYPES], "mixed"]
KINDS = ["table_wise", "row_wise", "column_wise", "grid"]


def plan_on(configs: list, kind: str, devices: list[str]) -> dict:
    """``kind``-wise over as many ranks as devices; two ranks may share one GPU."""
    unit = {DataType.INT4: 4, DataType.INT2: 4}
    plan = {c.name: sharding(c, kind, list(range(len(devices))), "cpu", unit.get(c.data_type, 1)) for c in configs}
    for entry in plan.values():
        for piece in entry.sharding_spec.shards:
            rank = piece.placement.rank()
            piece.placement = type(piece.placement)(f"rank:{rank}/{devices[rank]}")
    return plan


@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_pooled_on_cuda(types: dict[str, DataType], weighted: bool) -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, MEAN, SUM], weighted), per_table=types)
    on_gpu = module.copy("cuda")
    assert on_gpu.row_alignment == 16
    for batch in (1, 33, 700):
        features = random_features(module.embedding_bag_configs(), batch, weighted=weighted)
        got = on_gpu(features.to("cuda")).values()
        torch.testing.assert_close(got.cpu(), module(features).values(), rtol=1e-5, atol=1e-5)
    back = on_gpu.to("cpu")
    assert torch.equal(back(features).values(), module(features).values())


@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_on_cuda(types: dict[str, DataType], kind: str) -> None:
    module = EmbeddingBagCollection.from_float(float_bags([SUM, MEAN, MEAN, SUM]), per_table=types)
    plan = plan_on(module.embedding_bag_configs(), kind, ["cuda:0", "cuda:0"])
    sharded = ShardedQuantEmbeddingBagCollection(module, plan, ShardingEnv.from_local(2, 0))
    assert not sharded.fused
    features = random_features(module.embedding_bag_configs(), 40)
    for given in (features, features.to("cuda")):
        got = sharded(given)
        assert got.values().device.type == "cuda" and got.keys() == ["f0", "f1", "f2", "f3", "f4"]
        torch.testing.assert_close(got.values().cpu(), module(features).values(), rtol=1e-5, atol=1e-5)
    assert {table.name for group in sharded.get_tbes_to_register().values() for table in group.embedding_tables} == set(
        types
    )


@pytest.mark.parametrize("types", TYPES, ids=TYPE_IDS)
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_on_cuda(types: dict[str, DataType], kind: str) -> None:
    module = quantized_sequences(types)
    plan = plan_on(module.embedding_configs(), kind, ["cuda:0", "cuda:0"])
    sharded = ShardedQuantEmbeddingCollection(module, plan, ShardingEnv.from_local(2, 0))
    features = random_features(module.embedding_configs(), 25)
    want, got = module(features), sharded(features)
    for name in want:
        torch.testing.assert_close(got[name].values().cpu(), want[name].values(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kernel", ["fbgemm", "triton"])
def test_ids_out_of_range_are_reported_and_the_device_stays_usable(
    kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "fbgemm" and not fbgemm.HAS_CUDA:
        pytest.skip("FBGEMM's build here is not the one for CUDA")
    monkeypatch.setenv("RECINFER_KERNEL", kernel)
    module = EmbeddingBagCollection.from_float(float_bags()).copy("cuda")
    features = random_features(module.embedding_bag_configs(), 5)
    good = features.to("cuda")
    features.values()[-1] = -3
    with pytest.raises(
        InputError, match="id -3 is out of range" if kernel == "fbgemm" else "an earlier lookup had ids"
    ):
        module(features.to("cuda"))  # recinfer's kernel counts it, and the next call raises
        torch.cuda.synchronize()
        module(good)
    with pytest.raises(InputError, match="id -3 is out of range"):
        module(features)  # ids on the host are checked there
    assert torch.isfinite(module(good).values()).all()
