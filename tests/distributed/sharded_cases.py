"""Functions that every rank runs in the tests of sharded modules; each takes (rank, world size) first."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from recinfer.distributed.comm_ops import get_gradient_division
from recinfer.distributed.dist_data import KJTAllToAll
from recinfer.distributed.embedding import EmbeddingCollectionSharder, get_ec_index_dedup, set_ec_index_dedup
from recinfer.distributed.embedding_sharding import (
    EmbeddingShardingContext,
    FusedKJTListSplitsAwaitable,
    KJTListSplitsAwaitable,
    KJTSplitsAllToAllMeta,
)
from recinfer.distributed.embedding_types import KJTList, OptimType
from recinfer.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    ShardedEmbeddingBagCollection,
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
)
from recinfer.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.types import (
    CommOp,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingPlan,
)
from recinfer.errors import InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.parity.training_cases import (
    Case,
    batch_of,
    check_state,
    close,
    loss_weights,
    module_plan,
    new_module,
    table_plan,
    with_gradients,
)

SGD = {"optimizer": OptimType.SGD, "learning_rate": 0.5}


def env() -> ShardingEnv:
    """This test's ranks."""
    return ShardingEnv.from_process_group(dist.group.WORLD)


def sharded(case: Case, world: int, module: nn.Module | None = None, **kwargs: Any) -> ShardedEmbeddingBagCollection:
    """The module of ``case``, sharded."""
    module = new_module(case) if module is None else module
    plan = module_plan(module.embedding_bag_configs(), case, world, world)
    return EmbeddingBagCollectionSharder(SGD, **kwargs).shard(module, plan, env(), torch.device("cpu"))


def whole_tables(module: nn.Module) -> dict[str, Tensor]:
    """Every table put together from all ranks' shards."""
    result = {}
    for key, value in module.state_dict().items():
        if not isinstance(value, ShardedTensor):
            result[key] = value.clone()
            continue
        full = torch.zeros(value.metadata().size)
        for shard in value.local_shards():
            (r, c), (n, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            full[r : r + n, c : c + w] = shard.tensor
        dist.all_reduce(full)
        result[key] = full
    return result


# --------------------------------------------------------------------------------------------------- values and state


def first_values_do_not_depend_on_the_sharding(rank: int, world: int) -> None:
    """A module on meta has the same tables in every sharding; a reset draws new ones."""
    tables = []
    for kind in ("table_wise", "row_wise", "column_wise", "mixed", "data_parallel"):
        torch.manual_seed(3)
        configs = [EmbeddingBagConfig(3000, 512, f"t{i}", feature_names=[f"f{i}"]) for i in range(2)]
        configs.append(EmbeddingBagConfig(5, 8, "ones", feature_names=["f9"], init_fn=nn.init.ones_))
        module = sharded(Case(kind), world, EmbeddingBagCollection(configs, device=torch.device("meta")))
        tables.append(whole_tables(module))
    for other in tables[1:]:
        for key, table in tables[0].items():
            assert torch.equal(table, other[key]), key
    first = tables[0]
    assert torch.equal(first["embedding_bags.ones.weight"], torch.ones(5, 8))
    assert not torch.equal(first["embedding_bags.t0.weight"], first["embedding_bags.t1.weight"])
    bound = 3000**-0.5
    assert 0.99 * bound < float(first["embedding_bags.t0.weight"].abs().max()) <= bound
    assert first["embedding_bags.t0.weight"].unique().numel() > 0.9 * 3000 * 512 / 4  # no block repeats another
    module.reset_parameters()
    again = whole_tables(module)
    assert not torch.equal(again["embedding_bags.t0.weight"], first["embedding_bags.t0.weight"])


def state_goes_round(rank: int, world: int) -> None:
    """A state dict loads into the same sharding; whole tables load into any; another sharding's parts do not."""
    case = Case("mixed")
    module = sharded(case, world)
    state = {
        key: copy.deepcopy(value) if not isinstance(value, ShardedTensor) else value
        for key, value in module.state_dict().items()
    }
    other = sharded(case, world)
    other.reset_parameters()
    found = other.load_state_dict(state)
    assert not found.missing_keys
    assert not found.unexpected_keys
    unsharded = new_module(case)
    check_state(other, unsharded, "loaded")

    cut = sharded(Case("column_wise"), world)
    cut.reset_parameters()
    cut.load_state_dict(unsharded.state_dict())
    check_state(cut, unsharded, "loaded whole")

    if world > 1:
        try:
            cut.load_state_dict(sharded(Case("table_wise"), world).state_dict())
        except RuntimeError as error:
            assert "or a checkpoint, which is resharded" in str(error)
        else:
            raise AssertionError("parts of another sharding were taken")
    names = [name for name, _ in module.named_parameters()]
    assert set(names) <= {f"{key}{tail}" for key in state for tail in ("", "_1", "_2", "_3")}
    assert list(module.sharded_parameter_names()) == names
    assert all(not key.startswith("_") for key in module.state_dict())


def a_copy_trains_on_its_own(rank: int, world: int) -> None:
    """A copied model has tables of its own, which its parameters and state show when it trains."""
    case = Case("mixed")
    ebc = new_module(case)
    plan = module_plan(ebc.embedding_bag_configs(), case, world, world)
    model = DistributedModelParallel(
        nn.Sequential(ebc),
        env=env(),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": plan}),
        sharders=[EmbeddingBagCollectionSharder(SGD)],
    )
    copied = model.copy(torch.device("cpu"))
    before = whole_tables(model)
    copied(batch_of(rank, 0, case)).values().sum().backward()
    model_after, copied_after = whole_tables(model), whole_tables(copied)
    for key, table in before.items():
        assert torch.equal(model_after[key], table), key
        assert not torch.equal(copied_after[key], table), key
    assert all(hasattr(p, "_in_backward_optimizers") for p in copied.parameters())


def optimizer_has_its_state(rank: int, world: int) -> None:
    """The fused optimizer's keys are parameter names, and its state is sharded as the tables are."""
    module = new_module(Case("row_wise"))
    plan = module_plan(module.embedding_bag_configs(), Case("row_wise"), world, world)
    sharder = EmbeddingBagCollectionSharder({"optimizer": OptimType.ROWWISE_ADAGRAD, "learning_rate": 0.5})
    module = sharder.shard(module, plan, env(), torch.device("cpu"))
    module(batch_of(rank, 0, Case("row_wise"))).values().sum().backward()
    state = module.fused_optimizer.state_dict()["state"]
    assert "embedding_bags.t4.weight" in state
    assert set(state) <= set(module.state_dict())
    assert list(state["embedding_bags.t4.weight"]) == ["t4.momentum1"]
    assert [group["lr"] for group in module.fused_optimizer.param_groups] == [0.5] * len(
        module.fused_optimizer.param_groups
    )
    assert all(hasattr(p, "_in_backward_optimizers") for p in module.parameters())


# --------------------------------------------------------------------------------------------------- weights


def weights_learn(rank: int, world: int, kind: str, batch: str) -> None:
    """Weights with gradients get those of this rank's own loss, as the unsharded module gives them."""
    case = Case(kind, "MEAN" if batch == "uneven" else "SUM", True, batch)
    reference, module = new_module(case), sharded(case, world)
    grads = []
    for forward in (reference, module):
        features = batch_of(rank, 0, case)
        weights = features.weights().clone().requires_grad_()
        features._weights = weights
        out = forward(features).values()
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
        grads.append(weights.grad)
    close(grads[1], grads[0], f"{case}: gradient of the weights")
    assert get_gradient_division()


def weights_learn_on_a_host_without_tables(rank: int, world: int) -> None:
    """Ranks of the first host look up nothing, and still get their weights' gradients from the second."""
    tables = [EmbeddingBagConfig(7, 4, "t", feature_names=["f0"])]
    module = EmbeddingBagCollection(tables, is_weighted=True)
    plan = EmbeddingModuleShardingPlan({"t": table_plan(tables[0], "table_row_wise", world, world // 2, 1, "fused")})
    sharded = EmbeddingBagCollectionSharder(SGD).shard(copy.deepcopy(module), plan, env(), torch.device("cpu"))
    grads = []
    for forward in (module, sharded):
        weights = torch.ones(3, requires_grad=True)
        ids = KeyedJaggedTensor(["f0"], torch.arange(rank, rank + 3), weights, lengths=torch.tensor([1, 2]))
        (forward(ids).values() * (rank + 1)).sum().backward()
        grads.append(weights.grad)
    close(grads[1], grads[0], "gradient of the weights")


def processors_learn(rank: int, world: int, kind: str, batch: str) -> None:
    """Position weights in front of sharded tables: outputs, their gradients and the tables are the unsharded ones'."""
    case = Case(kind, weighted=True, batch=batch)
    lengths = {f"f{i}": 4 for i in range(6)}
    torch.manual_seed(5)
    processors = PositionWeightedModuleCollection(lengths)
    for p in processors.parameters():
        nn.init.uniform_(p)
    reference = FeatureProcessedEmbeddingBagCollection(new_module(case), processors)
    module = FeatureProcessedEmbeddingBagCollection(new_module(case), copy.deepcopy(processors))
    plan = module_plan(module.embedding_bag_collection().embedding_bag_configs(), case, world, world)
    sharder = FeatureProcessedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(SGD))
    module = sharder.shard(module, plan, env(), torch.device("cpu"))
    assert list(module.state_dict()) == list(reference.state_dict())
    processor_names = {n for n, _ in module.named_parameters()} - set(module.sharded_parameter_names())
    assert processor_names == {f"_feature_processors.position_weights.f{i}" for i in range(6)}
    features = [batch_of(r, 0, Case(kind, batch=batch)) for r in range(world)]
    mine = reference(features[rank]).values()
    got = module(features[rank]).values()
    close(got, mine, f"{case}: forward")
    for out in (mine, got):
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()
    for (name, want), (_, p) in zip(
        reference._feature_processors.named_parameters(), module._feature_processors.named_parameters()
    ):
        close(p.grad, want.grad, f"{case}: {name}.grad")
    reference.zero_grad()
    for r in range(world):
        out = reference(features[r]).values()
        ((out * torch.arange(out.numel()).view(out.shape).sin()).sum() / world).backward()
    with torch.no_grad():
        for p in reference.embedding_bag_collection().parameters():
            p -= 0.5 * p.grad
    check_state(module._embedding_bag_collection, reference.embedding_bag_collection(), str(case))
    assert all(key.startswith("_embedding_bag_collection.embedding_bags.") for key in module.fused_optimizer.params)


# --------------------------------------------------------------------------------------------------- other modules


def one_bag(rank: int, world: int, kind: str, mode: str) -> None:
    """nn.EmbeddingBag: its ways of giving input, its parameter's name, and a step."""
    torch.manual_seed(2)
    bag = nn.EmbeddingBag(11, 8, mode=mode)
    reference = copy.deepcopy(bag)
    config = EmbeddingBagConfig(11, 8, "weight")
    sharder = EmbeddingBagSharder(SGD)
    plan = EmbeddingModuleShardingPlan(weight=table_plan(config, kind, world, world, 0, "fused"))
    assert sharder.module_type is nn.EmbeddingBag
    assert list(sharder.shardable_parameters(bag)) == ["weight"]
    module = sharder.shard(bag, plan, env(), torch.device("cpu"))
    assert list(module.state_dict()) == ["weight"]
    assert {name for name, _ in module.named_parameters()} <= {"weight", "weight_1"}
    assert dict(module.named_modules()) == {"": module}
    assert not list(module.named_buffers())
    assert list(module.sharded_parameter_names("a")) == [f"a.{n}" for n, _ in module.named_parameters()]
    square = torch.randint(11, (3, 2))
    flat, offsets = torch.randint(11, (6,)), torch.tensor([0, 2, 2, 5])
    close(module(square), reference(square), "two dimensions")
    if mode == "sum":
        weights = torch.rand(6)
        close(module(flat, offsets, weights), reference(flat, offsets, weights), "weights")
    out = module(flat, offsets)
    close(out, reference(flat, offsets), "offsets")
    out.sum().backward()  # every rank the same: the mean is each one's
    reference(flat, offsets).sum().backward()
    want = reference.weight - 0.5 * reference.weight.grad
    for shard in module._state().shards():
        piece, rows = shard
        close(rows, want[piece.row_start : piece.row_stop, piece.col_start : piece.col_stop], "after a step")
    assert list(module.fused_optimizer.params) in (["weight"], [])
    module.load_state_dict({"weight": torch.ones(11, 8)})
    close(module(square), torch.full((3, 8), 2.0 if mode == "sum" else 1.0), "loaded")
    module.reset_parameters()


def codecs_shrink(rank: int, world: int) -> None:
    """Each collective has its codec: row pieces that add up have TorchRec's reduce-scatter codec."""
    from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

    registry = get_qcomm_codecs_registry(
        QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)
    )
    case = Case("mixed")
    module = sharded(case, world, qcomm_codecs_registry=registry)
    out = module(batch_of(rank, 0, case)).values()
    want = new_module(case)(batch_of(rank, 0, case)).values()
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert world == 1 or not torch.equal(out, want)
    out.sum().backward()

    class Marked(QuantizedCommCodecs):
        pass

    reduce = Marked()
    module = sharded(case, world, qcomm_codecs_registry={CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name: reduce})
    sorts = [{i.param_sharding.sharding_type for i in g.layout.infos} for g in module._shardings]
    assert {"row_wise", "grid_shard"} in sorts
    close(module(batch_of(rank, 0, case)).values(), want, "no-op codecs")


def dedup_by_default(rank: int, world: int) -> None:
    """set_ec_index_dedup reaches modules built afterwards; fewer ids are sent."""
    assert not get_ec_index_dedup()
    set_ec_index_dedup(True)
    try:
        torch.manual_seed(1)
        module = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["a", "b"])], need_indices=True)
        plan = EmbeddingModuleShardingPlan(
            t=table_plan(module.embedding_configs()[0], "row_wise", world, world, 0, "fused")
        )
        deduped = EmbeddingCollectionSharder(SGD).shard(module, plan, env(), torch.device("cpu"))
    finally:
        set_ec_index_dedup(False)
    features = KeyedJaggedTensor(["b", "a"], torch.tensor([7, 7, 7, 1, 9, 9, 9, 9]), lengths=torch.tensor([3, 1, 2, 2]))
    ctx = deduped.create_context()
    received = deduped.input_dist(ctx, features).wait().wait()
    assert sum(ctx.sharding_contexts[0].sent_ids.sizes) == 3
    got, want = deduped.compute_and_output_dist(ctx, received), module(features)
    assert list(got.keys()) == ["a", "b"]
    for name in want:
        close(got[name].values(), want[name].values(), name)
        assert torch.equal(got[name].weights(), want[name].weights())


def a_key_comes_twice(rank: int, world: int) -> None:
    """Every sharded module refuses a batch in which a feature comes twice, as it could not say which one is meant."""
    tables = [("t", ["a"]), ("u", ["b"])]
    bags = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, name, feature_names=names) for name, names in tables])
    rows = EmbeddingCollection([EmbeddingConfig(10, 4, name, feature_names=names) for name, names in tables])
    processors = PositionWeightedModuleCollection({"a": 4, "b": 4})
    weighted = EmbeddingBagCollection(bags.embedding_bag_configs(), is_weighted=True)
    processed = FeatureProcessedEmbeddingBagCollection(weighted, processors)
    twice = KeyedJaggedTensor(["a", "b", "a"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64))
    once = KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    for kind in ("table_wise", "row_wise", "data_parallel"):
        plan = EmbeddingModuleShardingPlan(
            {c.name: table_plan(c, kind, world, world, i, "fused") for i, c in enumerate(bags.embedding_bag_configs())}
        )
        for module, sharder in (
            (bags, EmbeddingBagCollectionSharder(SGD)),
            (rows, EmbeddingCollectionSharder(SGD)),
            (rows, EmbeddingCollectionSharder(SGD, use_index_dedup=True)),
            (processed, FeatureProcessedEmbeddingBagCollectionSharder(fused_params=SGD)),
        ):
            cut = sharder.shard(copy.deepcopy(module), plan, env(), torch.device("cpu"))
            for _ in range(2):  # also after a good batch
                with pytest.raises(InputError, match=r"\['a'\] occur more than once"):
                    cut(twice)
                cut(once)


def steps_by_hand(rank: int, world: int) -> None:
    """The documented steps of one sharding type, and of a module, called one by one."""
    case = Case("column_wise")
    module = new_module(case)
    plan = module_plan(module.embedding_bag_configs(), case, world, world)
    infos = create_sharding_infos_by_sharding(module, plan, "embedding_bags.", SGD)
    assert list(infos) == ["column_wise"]
    sharding = create_embedding_bag_sharding("column_wise", infos["column_wise"], env(), torch.device("cpu"))
    features = batch_of(rank, 0, case)
    want = module(features)
    ctx = sharding.create_context(features)
    received = sharding.create_input_dist()(features, ctx).wait()
    ctx.sizes_known(received)
    kjt = received.wait()
    ctx.received(kjt)
    assert kjt.keys() == sharding.feature_names_per_rank()[rank]
    lookup = sharding.create_lookup()
    out = sharding.create_output_dist()(lookup(kjt), ctx).wait()
    close(out, want.values(), "the steps of a sharding")
    assert sharding.embedding_names() == want.keys()
    assert sharding.embedding_dims() == want.length_per_key()
    assert sum(sharding.features_per_rank()) == len(sharding.embedding_shard_metadata())
    assert [len(names) for names in sharding.embedding_names_per_rank()] == sharding.features_per_rank()
    assert {t.name for t in sharding.embedding_tables()} <= {c.name for c in module.embedding_bag_configs()}

    whole = sharded(Case("mixed"), world)
    context = whole.create_context()
    parts = whole.input_dist(context, features).wait().wait()
    embeddings = whole.compute(context, parts)
    close(whole.output_dist(context, embeddings).values(), want.values(), "the steps of a module")
    assert set(whole.shardings) == {"row_wise", "table_wise", "data_parallel", "column_wise", "grid_shard"}
    assert "input_dist" in repr(whole)
    whole.prefetch(parts)


def sizes_of_several_modules_go_together(rank: int, world: int) -> None:
    """Exchanges that have not begun share the exchange of their sizes."""
    pg = dist.group.WORLD
    keys = [f"k{i}" for i in range(world + 1)]
    splits = [1] * (world - 1) + [2]
    requests, contexts, wanted = [], [], []
    for batch in (2, 3 + rank):
        kjt = KeyedJaggedTensor(
            keys, torch.arange(batch * len(keys)) + 100 * rank, lengths=torch.ones(batch * len(keys), dtype=torch.int64)
        )
        wanted.append(KJTAllToAll(pg, splits)(kjt).wait().wait())

        ctx = EmbeddingBagCollectionContext([EmbeddingShardingContext(), EmbeddingShardingContext()])
        meta = KJTAllToAll.meta(pg, splits, kjt)
        assert isinstance(meta, KJTSplitsAllToAllMeta)
        requests.append(KJTListSplitsAwaitable([meta, KJTAllToAll(pg, splits)(kjt)], ctx))
        contexts.append(ctx)
    lists = FusedKJTListSplitsAwaitable(requests, contexts, pg).wait()
    for awaitable, want, ctx, batches in zip(lists, wanted, contexts, ([2] * world, [3 + r for r in range(world)])):
        got = awaitable.wait()
        assert isinstance(got, KJTList)
        for kjt in got:
            assert kjt.keys() == want.keys()
            assert torch.equal(kjt.values(), want.values())
            assert torch.equal(kjt.lengths(), want.lengths())
        assert [c.batch_size_per_rank for c in ctx.sharding_contexts] == [batches, batches]


def all_of(rank: int, world: int, calls: list[tuple[Any, tuple[Any, ...]]]) -> None:
    """Runs several of these functions in one call, so that ranks are started once."""
    for function, args in calls:
        function(rank, world, *args)


# --------------------------------------------------------------------------------------------------- kinds of plans


def clipped_gradients_are_those_of_any_sharding(rank: int, world: int) -> None:
    """gradient_clipping limits the gradients of the mean loss, also those of replicas and of the ids' weights."""
    tables = {}
    for kind in ("table_wise", "row_wise", "column_wise", "data_parallel"):
        case = Case(kind, weighted=True, batch="uneven")
        plan = module_plan(new_module(case).embedding_bag_configs(), case, world, world)
        settings = SGD | {"gradient_clipping": True, "max_gradient": 0.3}
        module = EmbeddingBagCollectionSharder(settings).shard(new_module(case), plan, env(), torch.device("cpu"))
        features = with_gradients(batch_of(rank, 0, case))
        out = module(features).values()
        (out * loss_weights(rank, 0, out)).sum().backward()
        tables[kind] = whole_tables(module) | {"gradient of the weights": features.weights().grad}
    whole, reference = batch_of(rank, 0, case), new_module(case)
    whole._weights = whole.weights().requires_grad_()
    out = reference(whole).values()
    limits = (loss_weights(rank, 0, out) / world).clamp(-0.3, 0.3) * world
    (out * limits).sum().backward()
    tables["unsharded"] = tables["table_wise"] | {"gradient of the weights": whole.weights().grad}
    for kind, found in tables.items():
        for key, table in tables["table_wise"].items():
            close(found[key], table, f"{kind}: {key}")


def unpooled_pieces(world: int, settings: dict[str, Any] = SGD) -> tuple[EmbeddingCollection, nn.Module]:
    """A table, and the same in column pieces of 3, 2 and 2 columns on the first two ranks."""
    torch.manual_seed(2)
    module = EmbeddingCollection([EmbeddingConfig(7, 7, "t", feature_names=["f"])])
    places = [(0, 3, 0), (3, 2, min(1, world - 1)), (5, 2, 0)]
    spec = EnumerableShardingSpec([ShardMetadata([0, c], [7, w], f"rank:{r}/cpu") for c, w, r in places])
    ranks = [r for _, _, r in places]
    plan = EmbeddingModuleShardingPlan({"t": ParameterSharding("column_wise", "fused", ranks, spec)})
    return module, EmbeddingCollectionSharder(settings).shard(module, plan, env(), torch.device("cpu"))


def unpooled_pieces_of_several_widths_leave_a_rank_idle(rank: int, world: int) -> None:
    """A rank without a piece takes part in the exchanges."""
    module, sharded = unpooled_pieces(world)
    ids = KeyedJaggedTensor(["f"], torch.arange(rank, rank + 3), lengths=torch.tensor([1, 2]))
    close(sharded(ids)["f"].values(), module(ids)["f"].values(), "rows")


def unpooled_pieces_of_several_widths_count_their_steps(rank: int, world: int) -> None:
    """A table's pieces are in kernels by width; all of them go on with the loaded count of Adam's steps."""
    settings = {"optimizer": OptimType.ADAM, "learning_rate": 0.5}
    (_, one), (_, two) = unpooled_pieces(world, settings), unpooled_pieces(world, settings)
    ids = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([1, 2]))

    def step(module: nn.Module) -> None:
        out = module(ids)["f"].values()
        (out * torch.arange(out.numel()).view(out.shape).sin()).sum().backward()

    step(one)
    two.load_state_dict(one.state_dict())
    two.fused_optimizer.load_state_dict(one.fused_optimizer.state_dict())
    step(one)
    step(two)
    for key, table in whole_tables(one).items():
        close(whole_tables(two)[key], table, key)
