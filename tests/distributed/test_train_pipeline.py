"""Training pipelines train as the plain loop does, batch by batch, on real gloo ranks; and find inputs by tracing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from recinfer.distributed.dist_data import KJTAllToAll, SplitsAllToAllAwaitable
from recinfer.distributed.embedding_types import OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagSharder
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from recinfer.distributed.train_pipeline import (
    ArgInfo,
    BaseForward,
    FusedKJTListSplitsAwaitable,
    KJTAllToAllForward,
    KJTSplitsAllToAllMeta,
    PipelinedForward,
    PrefetchPipelinedForward,
    PrefetchTrainPipelineContext,
    PrefetchTrainPipelineSparseDist,
    Tracer,
    TrainPipeline,
    TrainPipelineBase,
    TrainPipelineContext,
    TrainPipelineSparseDist,
)
from recinfer.distributed.train_pipeline.tracing import build_args, find_sharded_calls
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.optim.keyed import KeyedOptimizerWrapper
from recinfer.optim.optimizers import in_backward_optimizer_filter
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import (
    EBC,
    TABLES,
    AnySharder,
    full_state,
    make_batch,
    optimizer_of,
    sharded,
)
from tests.parity.training_cases import table_plan

CPU = torch.device("cpu")
PIPELINES = {
    "base": TrainPipelineBase,
    "sparse_dist": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


def drain(pipeline: TrainPipeline, batches: list[Any]) -> list[float]:
    stream, losses = iter(batches), []
    while True:
        try:
            losses.append(float(pipeline.progress(stream)[0]))
        except StopIteration:
            return losses


def batches_of(rank: int, world_size: int, steps: int = 5) -> list[Any]:
    share = 24 // world_size
    return [make_batch(step, rank * share, (rank + 1) * share) for step in range(steps)]


def train(rank: int, world_size: int, kind: str | None, passes: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    dmp = sharded(rank, world_size)
    optimizer = optimizer_of(dmp)
    batches = batches_of(rank, world_size)
    losses: list[float] = []
    if kind is None:
        for batch in batches * passes:
            optimizer.zero_grad()
            loss, _ = dmp(batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    else:
        pipeline = PIPELINES[kind](dmp, optimizer, CPU)
        for _ in range(passes):  # a new iterator after the end of the last
            losses += drain(pipeline, batches)
    return losses, full_state(dmp.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_pipeline_trains_as_the_plain_loop(world_size: int) -> None:
    plain = run_ranks(world_size, train, None)
    for kind in PIPELINES:
        found = run_ranks(world_size, train, kind)
        for rank in range(world_size):
            assert found[rank][0] == pytest.approx(plain[rank][0], rel=1e-6), (kind, rank)
        for name, value in plain[0][1].items():
            torch.testing.assert_close(found[0][1][name], value, msg=lambda m, at=(kind, name): f"{at}: {m}")


class OneBag(nn.Module):
    """A model whose only table is torch's own nn.EmbeddingBag."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(9, 4, mode="sum")
        self.over = nn.Linear(4, 1)

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        loss = self.over(self.bag(batch["ids"]) * 1).square().mean()
        return loss, [loss.detach()]


def train_one_bag(rank: int, world_size: int, kind: str | None) -> tuple[list[float], torch.Tensor]:
    torch.manual_seed(0)
    model = OneBag()
    sharder = EmbeddingBagSharder({"optimizer": OptimType.SGD, "learning_rate": 0.5})
    config = EmbeddingBagConfig(9, 4, "weight")
    plan = EmbeddingModuleShardingPlan(weight=table_plan(config, "row_wise", world_size, world_size, 0, "fused"))
    dmp = DistributedModelParallel(model, device=CPU, plan=ShardingPlan({"bag": plan}), sharders=[sharder])
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), lambda p: torch.optim.SGD(p, lr=0.5)
    )
    generator = torch.Generator().manual_seed(rank)
    batches = [{"ids": torch.randint(9, (6, 2), generator=generator)} for _ in range(5)]
    losses = []
    if kind is not None:
        losses = drain(PIPELINES[kind](dmp, optimizer, CPU), batches)
    for batch in batches if kind is None else []:
        optimizer.zero_grad()
        loss, _ = dmp(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, full_state(dmp.state_dict())["bag.weight"]


def test_pipelines_take_an_embedding_bag_of_torch() -> None:
    plain = run_ranks(2, train_one_bag, None)
    for kind in ("sparse_dist", "prefetch"):
        found = run_ranks(2, train_one_bag, kind)
        for rank in range(2):
            assert found[rank][0] == pytest.approx(plain[rank][0], rel=1e-6)
        torch.testing.assert_close(found[0][1], plain[0][1])


def stages(rank: int, world_size: int) -> dict[str, Any]:
    """What is where while a pipeline runs, and after it."""
    dmp = sharded(rank, world_size)
    own_forward = dmp.module.get_submodule(EBC).forward
    pipeline = TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU)
    stream = iter(batches_of(rank, world_size))
    pipeline.progress(stream)
    ebc: Any = dmp.module.get_submodule(EBC)
    exchanges = [m for part in ebc._input_dists for m in part.modules() if isinstance(m, KJTAllToAll)]
    found = {
        "forward": type(ebc.forward),
        "args": [(a.input_attrs, a.is_getitems, a.name) for a in ebc.forward.args],
        "fused": {type(m.forward) for m in exchanges},
        "ahead": list(pipeline._context.input_dist_tensors_requests),
        "contexts": list(pipeline._context.module_contexts),
        "name": ebc.forward.name,
    }
    drain(pipeline, [])
    stopped = 0
    try:
        pipeline.progress(iter([]))
    except StopIteration:
        stopped = 1
    pipeline.detach()
    found["detached"] = stopped and ebc.forward == own_forward
    float(dmp(batches_of(rank, world_size)[0])[0])
    return found


def test_the_stages_of_the_sparse_pipeline() -> None:
    for found in run_ranks(2, stages):
        assert found["forward"] is PipelinedForward
        assert found["args"] == [(["sparse_features"], [False], None)]
        assert found["fused"] == {KJTAllToAllForward}
        assert found["ahead"] == found["contexts"] == [EBC]  # the next batch's ids are under way
        assert found["name"] == EBC
        assert found["detached"]


def leaves_batches(rank: int, world_size: int) -> list[int]:
    counts = []
    for execute_all in (True, False):
        dmp = sharded(rank, world_size)
        pipeline = TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU, execute_all_batches=execute_all)
        counts.append(len(drain(pipeline, batches_of(rank, world_size, 4))))
    return counts


def test_batches_left_at_the_end_may_be_dropped() -> None:
    for whole, cut in run_ranks(2, leaves_batches):
        assert whole == 4 and 0 < cut < 4


def evaluates(rank: int, world_size: int) -> bool:
    dmp = sharded(rank, world_size)
    before = full_state(dmp.state_dict())
    dmp.eval()
    with torch.no_grad():
        drain(TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU), batches_of(rank, world_size))
    after = full_state(dmp.state_dict())
    return rank != 0 or all(torch.equal(before[name], after[name]) for name in before)


def test_in_eval_mode_nothing_is_updated() -> None:
    assert run_ranks(2, evaluates) == [True, True]


def calls_the_model(rank: int, world_size: int, kind: str) -> str:
    dmp = sharded(rank, world_size)
    pipeline = PIPELINES[kind](dmp, optimizer_of(dmp), CPU)
    batches = batches_of(rank, world_size)
    drain(pipeline, batches)
    with pytest.raises(ConfigError) as raised:
        dmp(batches[0])
    pipeline.detach()
    dmp(batches[0])
    return str(raised.value)


@pytest.mark.parametrize("kind", ["sparse_dist", "prefetch"])
def test_a_model_in_a_pipeline_is_not_called_directly(kind: str) -> None:
    assert "with progress(), or call the pipeline's detach()" in run_ranks(1, calls_the_model, kind)[0]


def switches(rank: int, world_size: int, kind: str) -> Any:
    """Losses of five batches without a switch, and with attempts to evaluate in their middle; what was refused."""
    found, refused = [], []
    for tries in (False, True):
        dmp = sharded(rank, world_size)
        pipeline = PIPELINES[kind](dmp, optimizer_of(dmp), CPU)
        stream, losses = iter(batches_of(rank, world_size)), []
        losses += [float(pipeline.progress(stream)[0]) for _ in range(2)]
        if tries:
            dmp.eval()
            with pytest.raises(ConfigError) as error:
                pipeline.progress(iter(batches_of(rank, world_size, 1)))
            refused.append(str(error.value))
            dmp.train()
        losses += drain(pipeline, list(stream))
        trained = full_state(dmp.state_dict())
        dmp.eval()  # nothing is in the pipeline now
        with torch.no_grad():
            evaluated = drain(pipeline, batches_of(rank, world_size, 3))
            pipeline.progress(iter(batches_of(rank, world_size, 3)))
        if tries:
            dmp.train()
            with pytest.raises(ConfigError) as error:
                pipeline.progress(iter(batches_of(rank, world_size, 1)))
            refused.append(str(error.value))
        after = full_state(dmp.state_dict())
        assert rank != 0 or all(torch.equal(trained[name], after[name]) for name in trained)
        found.append((losses, evaluated))
    return found, refused


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_switch_of_the_mode_waits_until_the_pipeline_is_empty(kind: str) -> None:
    for found, refused in run_ranks(2, switches, kind):
        assert found[0] == found[1] and [len(part) for part in found[1]] == [5, 3]
        assert "from train to eval mode with" in refused[0] and "from eval to train mode with" in refused[1]


class Two(nn.Module):
    """Two sharded collections: one reads the batch, the other what the model makes of it."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        make = lambda: EmbeddingBagCollection(tables=TABLES[1:], device=torch.device(device))  # noqa: E731
        self.direct, self.derived, self.also = make(), make(), make()
        self.over = nn.Linear(72, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        kjt = batch["inner"].sparse_features
        changed = KeyedJaggedTensor(keys=kjt.keys(), values=kjt.values() * 1, lengths=kjt.lengths())
        parts = [
            self.direct(features=kjt).values(),
            self.derived(changed).values(),
            self.also(batch["inner"].sparse_features).values(),
        ]
        logits = self.over(torch.cat(parts, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["inner"].labels), logits


def traced(rank: int, world_size: int) -> Any:
    model = Two()
    plan = {}
    for path in ("direct", "derived", "also"):
        plans = {"t1": row_wise(), "t2": table_wise(rank=0), "t3": table_wise(rank=world_size - 1)}
        plan[path] = construct_module_sharding_plan(
            getattr(model, path), plans, AnySharder(), local_size=world_size, world_size=world_size, device_type="cpu"
        )
    dmp = DistributedModelParallel(model, plan=ShardingPlan(plan), sharders=[AnySharder()])
    calls = find_sharded_calls(dmp.module)
    found = {name: [(a.input_attrs, a.is_getitems, a.name) for a in args] for name, args in calls.items()}
    leaf = Tracer(leaf_modules=["over"]).is_leaf_module(dmp.module.over, "over")
    pipeline = TrainPipelineSparseDist(dmp, torch.optim.SGD(dmp.module.over.parameters(), lr=0.1), CPU)
    batches = [{"inner": batch} for batch in batches_of(rank, world_size)]
    stream = iter(batches)
    pipeline.progress(stream)
    pipeline._start_sparse_data_dist({"inner": make_batch(9, 0, 2)})
    fused = [(names, type(a)) for names, a in pipeline._context.fused_splits_awaitables]
    dist.barrier()
    return found, leaf, fused


def test_inputs_are_found_in_items_and_attributes_and_sizes_go_together() -> None:
    steps = (["inner", "sparse_features"], [True, False])
    for found, leaf, fused in run_ranks(2, traced):
        assert found == {"direct": [(*steps, "features")], "also": [(*steps, None)]}
        assert leaf
        assert fused == [(["direct", "also"], FusedKJTListSplitsAwaitable)]


class Untraceable(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        return self.inner(batch) if batch.labels.sum() > 0 else None


def untraceable(rank: int, world_size: int) -> str:
    dmp = sharded(rank, world_size)
    dmp._dmp_wrapped_module = Untraceable(dmp.module)
    with pytest.raises(ConfigError) as caught:
        TrainPipelineSparseDist(dmp, optimizer_of(dmp), CPU).progress(iter(batches_of(rank, world_size)))
    return str(caught.value)


def test_a_model_that_does_not_trace_is_named() -> None:
    message = run_ranks(1, untraceable)[0]
    assert "Untraceable cannot be traced" in message and "TrainPipelineBase" in message


def test_a_model_without_loss_and_output_is_refused() -> None:
    pipeline = TrainPipelineBase(nn.Linear(2, 1), torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1), CPU)
    with pytest.raises(ConfigError, match=r"returns \(loss, output\)"):
        pipeline.progress(iter([torch.zeros(3, 2)]))
    with pytest.raises(StopIteration):
        TrainPipelineBase(nn.Linear(2, 1), pipeline._optimizer, CPU).progress(iter([]))


def test_args_are_built_from_a_batch() -> None:
    infos = [ArgInfo(["a", 0], [True, True], None), ArgInfo([], [], None), ArgInfo(["a"], [True], "k")]
    assert build_args(infos, {"a": [7, 8]}) == ([7, None], {"k": [7, 8]})
    with pytest.raises(InputError, match=r"has no batch\['a'\]\.b"):
        ArgInfo(["a", "b"], [True, False], None).value({"a": 1})


def metas(rank: int, world_size: int) -> Any:
    group = dist.group.WORLD
    kjt = KeyedJaggedTensor(keys=["x", "y"], values=torch.arange(4), lengths=torch.tensor([1, 1, 2, 0]))
    meta = KJTAllToAllForward(group, [1, 1])(kjt)
    sizes = SplitsAllToAllAwaitable(meta.splits_tensors, group).wait()
    return isinstance(meta, KJTSplitsAllToAllMeta), meta.keys, len(sizes) == len(meta.splits_tensors)


def test_an_exchange_can_be_described_before_it_begins() -> None:
    assert run_ranks(2, metas) == [(True, ["x"], True), (True, ["y"], True)]


def test_contexts_start_empty() -> None:
    context = PrefetchTrainPipelineContext()
    assert isinstance(context, TrainPipelineContext)
    assert (context.module_input_post_prefetch, context.fused_splits_awaitables) == ({}, [])
    assert issubclass(PrefetchPipelinedForward, BaseForward)
    assert EmbeddingBagConfig is type(TABLES[0])
