"""Every parameter of sharders, sharded modules, pipelines and fused settings changes the result, warns, or is an error."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from recinfer.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from recinfer.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    EmbeddingBagSharder,
    ShardedEmbeddingBag,
    ShardedEmbeddingBagCollection,
)
from recinfer.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from recinfer.distributed.fp_embeddingbag import (
    FeatureProcessedEmbeddingBagCollectionSharder,
    ShardedFeatureProcessedEmbeddingBagCollection,
)
from recinfer.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from recinfer.distributed.train_pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from recinfer.distributed.types import ParameterSharding, ShardingEnv
from recinfer.ignored import IGNORED
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.optim.local_tensors import local_tensors
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.distributed.plans import sharding
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import AnySharder, make_batch, make_model, make_plan, optimizer_of
from tests.distributed.test_model_parallel import sharded as sharded_model
from tests.planner.test_every_parameter import changes

Call = Callable[..., Any]


def silent(of: Any, call: Call, given: dict[str, Any], base: dict[str, Any] | None = None) -> list[str]:
    """Parameters of ``of`` with which ``call`` gives the same result, without a word.

    Args:
        of: a constructor; :data:`IGNORED` may list parameters of it.
        call: takes them; returns what can be compared.
        given: for each parameter another value than its default.
        base: values of others, with which they have an effect.
    """
    names = {
        name for row in IGNORED for one in row.of if one.rsplit(".", 1)[-1] == of.__name__ for name in row.parameters
    }
    quiet = {row.parameters for row in IGNORED if row.happens == "nothing"}
    nothing = {name for names_of in quiet for name in names_of} & names
    missing = set(inspect.signature(of).parameters) - set(given) - nothing - {"self"}
    assert not missing, f"{of.__name__}: no value to try for {sorted(missing)}"
    base = base or {}
    return [
        f"{of.__name__}: {name}"
        for name, value in given.items()
        if not changes(lambda: call(**base), lambda name=name, value=value: call(**{**base, name: value}))
    ]


def plain(value: Any) -> Any:
    """``value`` with lists in place of tensors, which can be compared."""
    if isinstance(value, ShardedTensor | DTensor):
        return type(value).__name__, [plain(rows) for rows in local_tensors(value)]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.device.type, None if value.is_meta else value.tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


# --------------------------------------------------------------------------------------- training, on two ranks

BAGS = [EmbeddingBagConfig(12, 8, "t", feature_names=["f"])]
ROWS = [EmbeddingConfig(12, 8, "t", feature_names=["f"])]
SGD = {"optimizer": "SGD", "learning_rate": 0.5}


def features(weighted: bool = True) -> KeyedJaggedTensor:
    weights = torch.arange(1, 7) / 4 if weighted else None
    return KeyedJaggedTensor(["f"], torch.tensor([1, 1, 7, 3, 11, 1]), weights, lengths=torch.tensor([2, 3, 1]))


def bags(seed: int = 0) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    return EmbeddingBagCollection(tables=BAGS, is_weighted=True)


def rows(seed: int = 0) -> EmbeddingCollection:
    torch.manual_seed(seed)
    return EmbeddingCollection(tables=ROWS)


def processed(seed: int = 0) -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(bags(seed), PositionWeightedModuleCollection({"f": 4}))


def alone(seed: int = 0) -> nn.EmbeddingBag:
    torch.manual_seed(seed)
    return nn.EmbeddingBag(12, 8, mode="sum")


def plan_of(table: str, kind: str = "row_wise") -> dict[str, ParameterSharding]:
    placed = sharding(BAGS[0], kind, [1] if kind == "table_wise" else [0, 1])
    return {table: dataclasses.replace(placed, compute_kernel="fused")}


def trained(module: Any, inputs: tuple[Any, ...]) -> Any:
    """The ids and weights that arrive, the output, and the state and rate after one step."""
    ctx = module.create_context()
    arrived = module.input_dist(ctx, *inputs).wait().wait()
    parts = [arrived] if isinstance(arrived, KeyedJaggedTensor) else arrived
    sent = [(part.values(), part.weights_or_none()) for part in parts]
    out = module.compute_and_output_dist(ctx, arrived).wait()
    out = out if isinstance(out, torch.Tensor) else out["f"].values() if isinstance(out, dict) else out.values()
    (out * out).sum().backward()
    rate = [group["lr"] for group in module.fused_optimizer.param_groups]
    return plain([sent, out.detach(), dict(module.state_dict()), rate])


def silent_in_sharded_modules(rank: int, world_size: int) -> list[str]:
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    tensors = ShardingEnv(world_size, rank, dist.group.WORLD, output_dtensor=True)
    codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.FP16, CommType.BF16))
    settings = {"fused_params": {**SGD, "learning_rate": 0.25}, "qcomm_codecs_registry": codecs}
    input_of_bag = features().values(), torch.tensor([0, 2, 5])
    kinds: list[tuple[Any, Any, Any, str, tuple[Any, ...], dict[str, Any], dict[str, Any]]] = [
        (ShardedEmbeddingBagCollection, EmbeddingBagCollectionSharder, bags, "t", (features(),), {}, {"weights_later": True}),
        (ShardedEmbeddingCollection, EmbeddingCollectionSharder, rows, "t", (features(False),), {"use_index_dedup": True}, {}),
        (ShardedEmbeddingBag, EmbeddingBagSharder, alone, "weight", input_of_bag, {}, {}),
        (
            ShardedFeatureProcessedEmbeddingBagCollection,
            FeatureProcessedEmbeddingBagCollectionSharder,
            processed,
            "t",
            (features(False),),
            {},
            {"module_fqn": None},
        ),
    ]  # fmt: skip
    found = []
    for made, sharder, make, table, inputs, of_both, of_module in kinds:

        def build(made: Any = made, make: Any = make, table: str = table, inputs: Any = inputs, **given: Any) -> Any:
            arguments = {
                "module": make(),
                "table_name_to_parameter_sharding": plan_of(table),
                "env": env,
                "fused_params": SGD,
            }
            if "device" in given:
                with pytest.raises(ValueError, match="shard tensor device: meta"):  # torch's, for the plan of a CPU
                    made(**(arguments | given))
                return "refused"
            return trained(made(**(arguments | given)), inputs)

        def shard(
            sharder: Any = sharder, make: Any = make, table: str = table, inputs: Any = inputs, **given: Any
        ) -> Any:
            return trained(sharder(**({"fused_params": SGD} | given)).shard(make(), plan_of(table), env), inputs)

        module = {"module": make(1), "table_name_to_parameter_sharding": plan_of(table, "table_wise")}
        places = {"env": tensors, "device": torch.device("meta")}
        passed_on = [name for name, value in of_module.items() if value is None]
        found += [
            name
            for name in silent(made, build, module | places | settings | of_both | of_module)
            if name.split()[-1] not in passed_on
        ]
        of_sharder = {"ebc_sharder": EmbeddingBagCollectionSharder({**SGD, "learning_rate": 0.75})}
        of_sharder = of_sharder if sharder is FeatureProcessedEmbeddingBagCollectionSharder else {}
        found += silent(sharder, shard, settings | of_both | of_sharder)
    return found


def silent_in_models(rank: int, world_size: int) -> list[str]:
    def run(**given: Any) -> Any:
        """Types, names and devices of a model, and its gradients' average after a step on different batches."""
        if "module" not in given and "sharders" not in given:
            model = sharded_model(rank, world_size, **given)
        else:
            module = given.pop("module", None) or make_model()
            plan = make_plan(module, world_size)
            model = DistributedModelParallel(module, sharders=given.pop("sharders", [AnySharder()]), plan=plan, **given)
        core = model._dmp_wrapped_module
        found = [type(core).__name__, str(model.device), sorted({str(p.device) for p in model.parameters()})]
        found += [plain({name: p.detach() for name, p in model.named_parameters()}), type(model.state_dict()).__name__]
        return [
            *found,
            plain(dict(model.state_dict())),
            str(sorted(model.plan.plan)),
            getattr(core, "static_graph", None),
        ]

    group = dist.group.WORLD
    meta = {"device": torch.device("meta")}
    found = silent(
        DistributedModelParallel,
        lambda **given: run(**given),
        {
            "module": make_model(seed=1),
            "env": ShardingEnv(world_size, rank, group, output_dtensor=True),
            "plan": type(make_plan(make_model(), world_size))(plan={}),
            "sharders": [],
            "init_data_parallel": False,
            "data_parallel_wrapper": DefaultDataParallelWrapper(static_graph=False),
            **meta,
            "init_parameters": None,
        },
    )
    found = [name for name in found if not name.endswith("init_parameters")]  # below: with a model on meta
    kept = []
    for on in (True, False):
        empty = make_model("meta").to("meta")
        plan = make_plan(empty, world_size)
        given: dict[str, Any] = {"init_parameters": on, "init_data_parallel": False, "device": torch.device("cpu")}
        kept.append(DistributedModelParallel(empty, plan=plan, sharders=[AnySharder()], **given))
    if [any(p.is_meta for p in model.parameters()) for model in kept] != [False, True]:
        found.append("DistributedModelParallel: init_parameters")

    def steps(kind: Any, **given: Any) -> Any:
        """How many batches are trained, and what the dense parts are then."""
        if "device" in given:
            with pytest.raises(RuntimeError, match="nowhere"):
                kind(given.get("model"), None, given["device"])
            return "refused"
        model = sharded_model(rank, world_size)
        pipeline = kind(**({"model": model, "optimizer": optimizer_of(model), "device": torch.device("cpu")} | given))
        batches = iter([make_batch(step, 12 * rank, 12 * rank + 12) for step in range(4)])
        outputs = []
        while True:
            try:
                outputs.append(plain(pipeline.progress(batches)[1].detach()))
            except StopIteration:
                break
        scripted = any(isinstance(m, torch.jit.ScriptModule) for m in model.modules())
        return outputs, scripted, plain(dict(pipeline._model.state_dict()))

    def idle() -> Any:
        return optimizer_of(sharded_model(rank, world_size))  # of another model: this one's dense part stays

    for kind, more in (
        (TrainPipelineBase, {}),
        (TrainPipelineSparseDist, {"execute_all_batches": False, "apply_jit": True}),
        (PrefetchTrainPipelineSparseDist, {"execute_all_batches": False, "apply_jit": True}),
        (EvalPipelineSparseDist, {"apply_jit": True}),
    ):
        other = sharded_model(rank, world_size)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(2)
        given = {"model": other, "device": "nowhere", **more}
        if kind is not EvalPipelineSparseDist:
            given["optimizer"] = idle()
        found += silent(kind, lambda kind=kind, **given: steps(kind, **given), given)
    return found


@pytest.mark.parametrize("check", [silent_in_sharded_modules, silent_in_models])
def test_in_training(check: Callable[[int, int], list[str]]) -> None:
    first, second = run_ranks(2, check)
    assert set(first) & set(second) == set()
