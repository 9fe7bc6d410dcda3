"""Documented parameters and members that no other test uses, on real modules and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from recinfer.distributed.comm_ops import (
    alltoall_pooled,
    alltoallv,
    reduce_scatter_pooled,
)
from recinfer.distributed.dist_data import KJTAllToAll
from recinfer.distributed.embedding import EmbeddingCollectionContext, EmbeddingCollectionSharder
from recinfer.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
)
from recinfer.distributed.embedding_types import (
    BaseEmbeddingLookup,
    BaseEmbeddingSharder,
    BaseQuantEmbeddingSharder,
    FeatureShardingMixIn,
    KJTList,
    ListOfKJTList,
    ModuleShardingMixIn,
)
from recinfer.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
)
from recinfer.distributed.exchange.pooled import PooledContext
from recinfer.distributed.exchange.sequence import SequenceShardingContext
from recinfer.distributed.exchange.weights import WeightRoute
from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from recinfer.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_module,
    get_unwrapped_module,
)
from recinfer.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.train_pipeline import TrainPipeline, TrainPipelineSparseDist
from recinfer.distributed.types import (
    EmbeddingModuleShardingPlan,
    GenericMeta,
    ModuleShardingPlan,
    NoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_infer_lookup import infos as packed_infos
from tests.distributed.test_model_parallel import (
    EBC,
    AnySharder,
    full_state,
    make_batch,
    make_model,
    make_plan,
    optimizer_of,
    sharded,
)
from tests.quant.cases import float_bags

CPU = torch.device("cpu")

# --------------------------------------------------------------------------------------------------- sharders and plans


def test_sharders_count_bytes_and_offer_types() -> None:
    rows = torch.empty(10, 4)
    floats: BaseEmbeddingSharder[Any] = EmbeddingBagCollectionSharder()
    assert floats.storage_usage(rows, "cuda", "fused") == {"hbm": 160}
    assert floats.storage_usage(rows, "cuda", "fused_uvm") == {"ddr": 160}
    assert floats.storage_usage(rows, "cpu", "fused") == {"ddr": 160}
    assert EmbeddingCollectionSharder().sharding_types("cuda") == [
        "data_parallel", "table_wise", "column_wise", "row_wise",
    ]  # fmt: skip
    quantized = QuantEmbeddingBagCollectionSharder(shardable_params=["b", "c"])
    assert isinstance(quantized, BaseQuantEmbeddingSharder)
    assert quantized.storage_usage(torch.empty(10, 4, dtype=torch.uint8), "cuda", "quant_uvm") == {"ddr": 80}
    assert quantized.sharding_types("cpu") == ["table_wise", "row_wise", "column_wise"]
    module = QuantEmbeddingBagCollection.from_float(
        float_bags([PoolingType.SUM] * 4, False), per_table=dict.fromkeys("abcd", DataType.INT8)
    )
    assert sorted(quantized.shardable_parameters(module)) == ["b", "c"]
    plans = {i.embedding_config.name: i.param_sharding for i in packed_infos(module, "table_wise")}
    made = quantized.shard(module, plans, ShardingEnv.from_local(2, 0))
    assert [c.name for c in made.embedding_bag_configs()] == ["a", "b", "c", "d"]


def test_a_plan_prints_its_parameters_and_shards() -> None:
    module = EmbeddingBagCollection(make_model("meta").get_submodule(EBC).embedding_bag_configs())
    plan = construct_module_sharding_plan(
        module, {t: row_wise() for t in ("t0", "t1", "t2", "t3")}, AnySharder(), 2, 2, "cpu"
    )
    assert isinstance(plan, EmbeddingModuleShardingPlan) and isinstance(plan, ModuleShardingPlan)
    parameters, shards = str(plan).split("\n\n")
    assert parameters.splitlines()[2].split() == ["t0", "row_wise", "dense", "[0,", "1]"]
    assert len(shards.splitlines()) == 2 + 8


# --------------------------------------------------------------------------------------------------- the interfaces


class Local(EmbeddingSharding[EmbeddingShardingContext, KeyedJaggedTensor, torch.Tensor, torch.Tensor]):
    """A user's sharding in which nothing has to be exchanged."""

    class Features(BaseSparseFeaturesDist[KeyedJaggedTensor]):
        def forward(self, sparse_features: KeyedJaggedTensor) -> Any:
            return NoWait(NoWait(sparse_features))

    class Output(BaseEmbeddingDist[EmbeddingShardingContext, torch.Tensor, torch.Tensor]):
        def forward(self, local_embs: torch.Tensor, sharding_ctx: EmbeddingShardingContext | None = None) -> Any:
            return NoWait(local_embs if sharding_ctx is None else local_embs * sum(sharding_ctx.batch_size_per_rank))

    class Lookup(BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor]):
        def forward(self, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
            return sparse_features.values().float().view(-1, 1)

    def create_input_dist(self, device: torch.device | None = None) -> Any:
        return self.Features()

    def create_output_dist(self, device: torch.device | None = None) -> Any:
        return self.Output()

    def create_lookup(self, device: Any = None, fused_params: Any = None, feature_processor: Any = None) -> Any:
        return self.Lookup()

    def embedding_dims(self) -> list[int]:
        return [1]

    def embedding_shard_metadata(self) -> list[Any]:
        return [None]

    def embedding_names(self) -> list[str]:
        return ["f"]

    def embedding_names_per_rank(self) -> list[list[str]]:
        return [["f"]]


def test_a_sharding_of_the_users_own() -> None:
    sharding = Local()
    kjt = KeyedJaggedTensor(["f"], torch.tensor([3, 4]), lengths=torch.ones(2, dtype=torch.int64))
    here = sharding.create_input_dist()(kjt).wait().wait()
    context = EmbeddingShardingContext(batch_size_per_rank=[2, 1])
    out = sharding.create_output_dist()(sharding.create_lookup()(here), context).wait()
    assert out.tolist() == [[9.0], [12.0]]
    assert sharding.qcomm_codecs_registry is None
    for ask in (sharding.feature_names, sharding.feature_names_per_rank, sharding.features_per_rank):
        with pytest.raises(NotImplementedError, match=f"Local must implement {ask.__name__}"):
            ask()
    with pytest.raises(NotImplementedError, match="Local must implement embedding_tables"):
        sharding.embedding_tables()
    assert isinstance(sharding, FeatureShardingMixIn)
    with pytest.raises(NotImplementedError, match="ModuleShardingMixIn must implement shardings"):
        _ = ModuleShardingMixIn().shardings
    assert isinstance(GenericMeta("Named", (), {}), GenericMeta)
    with pytest.raises(TypeError, match="abstract"):
        TrainPipeline()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="abstract"):
        DataParallelWrapper()  # type: ignore[abstract]


# --------------------------------------------------------------------------------------------------- DistributedModelParallel


class WithSparse(nn.Module):
    """A model with a table that is not sharded and has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("meta").model
        self.side = nn.EmbeddingBag(9, 8, sparse=True, mode="sum")


class ByFsdp(DataParallelWrapper):
    """The dense layers under FSDP."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        dense = dmp._dmp_wrapped_module.model.dense_arch
        assert env.process_group is not None
        dmp._dmp_wrapped_module.model.dense_arch = FullyShardedDataParallel(
            dense, process_group=env.process_group, device_id=device
        )


def names_and_wrappers(rank: int, world_size: int) -> dict[str, Any]:
    model = WithSparse()
    path = EBC
    plan = ShardingPlan({path: make_plan(make_model("meta"), world_size).plan[EBC]})
    dmp = DistributedModelParallel(
        model, plan=plan, sharders=[AnySharder()], init_data_parallel=False, init_parameters=True
    )
    names = list(dmp.sparse_grad_parameter_names(["first"], prefix="top"))
    whole = {f"x.{k}": v for k, v in dmp.state_dict().items()}
    misfits = dmp.load_state_dict(whole, prefix="x.")
    kept: dict[str, Any] = {"kept": torch.zeros(1)}
    same = dmp.state_dict(destination=kept, prefix="y.", keep_vars=True)
    shallow = [n for n, _ in dmp.named_parameters(prefix="p", recurse=False)]
    deep = [n for n, _ in dmp.named_parameters(prefix="p") if "over_arch" in n]
    bare = [n for n, _ in dmp.bare_named_parameters(prefix="b") if "side" in n]
    buffers = [n for n, _ in dmp.named_buffers(prefix="b", recurse=True)]
    fsdp = sharded(rank, world_size, data_parallel_wrapper=ByFsdp())
    fsdp(make_batch(0, 0, 4))[0].backward()
    alone = FullyShardedDataParallel(nn.Linear(2, 2), process_group=dist.group.WORLD, device_id=CPU)
    return {
        "names": names,
        "misfits": (misfits.missing_keys, misfits.unexpected_keys),
        "same": same is kept and next(iter(kept)) == "kept" and all(k.startswith("y.") for k in list(kept)[1:]),
        "parameter": isinstance(kept["y.side.weight"], nn.Parameter),
        "shallow": shallow,
        "deep": all(n.startswith("p.model.over_arch") for n in deep) and len(deep) > 1,
        "bare": bare,
        "buffers": buffers,
        "fsdp": type(fsdp.module.model.dense_arch).__name__,
        "unwrapped": type(get_unwrapped_module(alone)).__name__,
        "wrapped": type(get_module(alone)).__name__,
    }


def test_names_prefixes_and_wrappers() -> None:
    for found in run_ranks(2, names_and_wrappers):
        assert found == {
            "names": ["first", "top.side.weight"],
            "misfits": ([], []),
            "same": True,
            "parameter": True,
            "shallow": [],
            "deep": True,
            "bare": ["b.side.weight"],
            "buffers": [],
            "fsdp": "FullyShardedDataParallel",
            "unwrapped": "Linear",
            "wrapped": "FullyShardedDataParallel",
        }


def left_on_meta(rank: int, world_size: int) -> list[bool]:
    model = make_model("meta").to("meta")
    plan = make_plan(model, world_size)
    dmp = DistributedModelParallel(
        model, plan=plan, sharders=[AnySharder()], init_parameters=False, init_data_parallel=False
    )
    rest = [p.is_meta for n, p in dmp.named_parameters() if "embedding_bags" not in n]
    tables = [p.is_meta for n, p in dmp.named_parameters() if "embedding_bags" in n]
    return [all(rest), not any(tables)]


def test_parameters_may_stay_on_meta() -> None:
    assert run_ranks(1, left_on_meta) == [[True, True]]


def trained(rank: int, world_size: int, options: dict[str, Any], skip: bool) -> dict[str, torch.Tensor]:
    dmp = sharded(rank, world_size, data_parallel_wrapper=DefaultDataParallelWrapper(**options))
    optimizer = optimizer_of(dmp)
    for step in range(2):
        optimizer.zero_grad()
        dmp(make_batch(step, rank * 12, (rank + 1) * 12))[0].backward()
        optimizer.step()
    return full_state(dmp.state_dict())


def test_how_replicas_are_averaged_changes_no_number() -> None:
    plain = run_ranks(2, trained, {}, False)[0]
    for options in (
        {"bucket_cap_mb": 1, "static_graph": False},
        {"static_graph": False, "find_unused_parameters": True},
        {"ddp_kwargs": {"broadcast_buffers": False}},
    ):
        found = run_ranks(2, trained, options, False)[0]
        for name, value in plain.items():
            torch.testing.assert_close(found[name], value)


# --------------------------------------------------------------------------------------------------- pipeline, collectives


def scripted(rank: int, world_size: int) -> Any:
    losses = []
    for apply_jit in (False, True):
        dmp = sharded(rank, world_size)
        pipeline = TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU, apply_jit=apply_jit)
        stream = iter([make_batch(step, rank * 12, (rank + 1) * 12) for step in range(3)])
        losses.append([float(pipeline.progress(stream)[0]) for _ in range(3)])
        kinds = [type(m).__name__ for m in dmp.module.modules()]
    return losses, any("ScriptModule" in kind for kind in kinds)


def test_dense_layers_may_be_scripted() -> None:
    for (plain, scripted_losses), compiled in run_ranks(2, scripted):
        assert scripted_losses == pytest.approx(plain, rel=1e-5)
        assert compiled


class NoScript(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def not_scriptable(rank: int, world_size: int) -> str:
    dmp = sharded(rank, world_size)
    dmp.module.model.dense_arch = NoScript()
    with pytest.raises(ConfigError) as caught:
        TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU, apply_jit=True).progress(iter([make_batch(0, 0, 4)]))
    return str(caught.value)


def test_what_cannot_be_scripted_is_named() -> None:
    assert "torch.jit.script fails for 'dense_arch', a NoScript" in run_ranks(1, not_scriptable)[0]


def staggered(rank: int, world_size: int) -> list[int]:
    """Four ranks as two hosts of two: with stagger, examples come in the order of local ranks."""
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([rank, 10 + rank]), lengths=torch.ones(2, dtype=torch.int64))
    splits = [1, 1, 0, 0]
    return KJTAllToAll(dist.group.WORLD, splits, stagger=2)(kjt).wait().wait().values().tolist()


def test_stagger_puts_hosts_side_by_side() -> None:
    found = run_ranks(4, staggered)
    assert found[:2] == [[0, 2, 1, 3], [10, 12, 11, 13]]
    assert found[2:] == [[], []]


def in_groups(rank: int, world_size: int) -> Any:
    """Collectives in a group of their own, on which the others do not wait."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = pairs[rank // 2], rank % 2
    rows = torch.full((2, 1 + place), float(rank))
    dims, starts = torch.tensor([1, 2]), torch.tensor([0, 1, 3])
    pooled = alltoall_pooled(rows, [1, 1], [1, 2], dims, starts, group=pair).wait()
    exchanged = alltoallv([rows], [1, 2], [1, 1], group=pair).wait()
    summed = reduce_scatter_pooled([torch.ones(1, 1), torch.ones(1, 1)], group=pair).wait()
    return pooled.tolist(), [e.tolist() for e in exchanged], summed.item()


def test_collectives_run_in_the_group_that_is_given() -> None:
    for rank, (pooled, exchanged, summed) in enumerate(run_ranks(4, in_groups)):
        first = float(rank // 2 * 2)
        assert pooled == [[first, first + 1, first + 1]]
        assert exchanged == [[[first]], [[first + 1, first + 1]]]
        assert summed == 2.0


def coded(rank: int, world_size: int) -> Any:
    torch.manual_seed(0)
    module = EmbeddingCollection([EmbeddingConfig(16, 8, "t", feature_names=["f"])])
    kjt = KeyedJaggedTensor(["f"], torch.arange(16), lengths=torch.tensor([16]))
    found = []
    for codecs in (None, get_qcomm_codecs_registry(QCommsConfig(CommType.BF16, CommType.BF16))):
        sharder = EmbeddingCollectionSharder(qcomm_codecs_registry=codecs)
        plan = EmbeddingModuleShardingPlan(
            construct_module_sharding_plan(module, {"t": table_wise(rank=1)}, sharder, 2, world_size, "cpu")
        )
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        found.append(sharder.shard(module, plan, env, CPU)(kjt)["f"].values().detach())
    return found


def test_unpooled_rows_travel_in_codecs() -> None:
    for plain, half in run_ranks(2, coded):
        assert not torch.equal(plain, half)
        assert torch.equal(plain.bfloat16().float(), half)


def weighted_bag(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(11, 4, mode="sum")
    ids, offsets, weights = torch.tensor([1, 2, 3]), torch.tensor([0, 2]), torch.tensor([2.0, 3.0, 5.0])
    want = [bag(ids, offsets, per_sample_weights=weights), bag(ids.view(1, 3))]
    sharder = EmbeddingBagSharder(get_params())
    plan = construct_module_sharding_plan(bag, {"weight": table_wise(rank=1)}, sharder, 2, world_size, "cpu")
    made = sharder.shard(bag, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)
    found = [made(ids, offsets=offsets, per_sample_weights=weights), made(ids.view(1, 3))]
    kept: dict[str, Any] = {}
    assert made.state_dict(destination=kept, prefix="a.", keep_vars=True) is kept and list(kept) == ["a.weight"]
    assert [n for n, _ in made.named_modules(prefix="m")] == ["m"]
    assert [(n, p.numel()) for n, p in made.named_parameters(prefix="m")] == [("m.weight", 44 if rank == 1 else 0)]
    assert not list(made.named_buffers(prefix="m"))
    assert "lookup" in repr(made._collection[0])
    return [torch.allclose(f.wait(), w) for f, w in zip(found, want)]


def get_params() -> dict[str, Any]:
    return {"learning_rate": 0.1}


def test_a_sharded_bag_takes_offsets_and_weights() -> None:
    assert run_ranks(2, weighted_bag) == [[True, True]] * 2


def test_settings_of_one_table_reach_its_kernel() -> None:
    plan = ParameterSharding("table_wise", "fused", [0], None, None, True, False)
    assert (plan.enforce_hbm, plan.stochastic_rounding, plan.bounds_check_mode) == (True, False, None)
    assert "enforce_hbm=True" in repr(plan) and "bounds_check_mode" not in repr(plan)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU, and counts the streams that it is kept for."""

    streams: list[Any]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def record_stream(self, stream: Any) -> None:  # type: ignore[override]
        self.streams.append(stream)


def on_gpu() -> OnGpu:
    made = torch.ones(2).as_subclass(OnGpu)
    made.streams = []
    return made


def test_contexts_keep_every_tensor_for_the_stream_that_uses_it() -> None:
    kept = {name: on_gpu() for name in ("divisor", "inverse", "sent", "weights", "recat", "lengths", "ids", "reverse")}
    route = WeightRoute(None, [1], [1], kept["recat"], kept["lengths"])  # type: ignore[arg-type]
    pooled = PooledContext(
        divisors=[kept["divisor"]],
        inverse_indices=kept["inverse"],
        sent_weights=kept["sent"],
        weights=kept["weights"],
        route=route,
    )
    EmbeddingBagCollectionContext([pooled, None, EmbeddingShardingContext()]).record_stream("s")  # type: ignore[arg-type]
    kjt = KeyedJaggedTensor.from_parts_unchecked(["f"], kept["ids"], torch.ones(2, dtype=torch.int64), stride=2)
    ListOfKJTList([KJTList([kjt])]).record_stream("s")
    rows = EmbeddingCollectionContext([SequenceShardingContext()], [], [kept["reverse"]])
    rows.record_stream("s")  # type: ignore[arg-type]
    assert {name: tensor.streams for name, tensor in kept.items()} == {name: ["s"] for name in kept}
    plain = KeyedJaggedTensor(["f"], torch.ones(1), lengths=torch.ones(1, dtype=torch.int64))
    KJTList([plain]).record_stream(None)  # on CPU there are no streams
    SequenceShardingContext(features_before_input_dist=plain).record_stream(None)  # type: ignore[arg-type]
