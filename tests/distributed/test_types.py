"""The vocabulary of sharding: awaitables that wait by themselves, contexts, plans and the sharder's defaults."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.distributed.types import (
    Awaitable,
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    CommOp,
    ComputeKernel,
    DataType,
    EmbeddingModuleShardingPlan,
    GenericMeta,
    LazyAwaitable,
    LazyNoWait,
    ModuleSharder,
    ModuleShardingPlan,
    Multistreamable,
    NoWait,
    NullShardedModuleContext,
    NullShardingContext,
    ParameterSharding,
    ParameterStorage,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from recinfer.errors import ConfigError


class Counted(Awaitable[int]):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _wait_impl(self) -> int:
        self.waits += 1
        return 3


def test_an_awaitable_runs_its_callbacks_in_order() -> None:
    counted = Counted()
    counted.callbacks.append(lambda n: n + 1)
    counted.callbacks.append(lambda n: n * 10)
    assert counted.wait() == 40 and counted.waits == 1
    assert NoWait("here").wait() == "here"


class Lazy(LazyAwaitable[torch.Tensor]):
    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _wait_impl(self) -> torch.Tensor:
        self.waits += 1
        return torch.tensor([1.0, 2.0, 4.0])


def test_a_lazy_awaitable_waits_once_when_it_is_used() -> None:
    lazy = Lazy()
    assert lazy.waits == 0
    assert torch.cat([lazy, torch.zeros(1)]).tolist() == [1, 2, 4, 0]  # type: ignore[list-item]
    assert lazy.shape == (3,) and lazy[1].item() == 2 and len(lazy) == 3 and [x.item() for x in lazy] == [1, 2, 4]
    assert lazy.waits == 1


def test_operators_of_a_lazy_awaitable() -> None:
    lazy: Any = Lazy()
    assert (lazy + 1).tolist() == [2, 3, 5] and (1 - lazy).tolist() == [0, -1, -3]
    assert (
        (lazy * lazy).tolist() == [1, 4, 16] and (lazy / 2).tolist() == [0.5, 1, 2] and (2**lazy).tolist() == [2, 4, 16]
    )
    assert (lazy @ torch.ones(3)).item() == 7 and (-lazy).tolist() == [-1, -2, -4] and abs(lazy).tolist() == [1, 2, 4]
    assert (lazy > 1).tolist() == [False, True, True] and (lazy == 2).tolist() == [False, True, False]
    number: Any = LazyNoWait(6)
    assert (number << 1, number & 3, 1 | number, number ^ 2, ~number, number // 4, number % 4) == (
        12,
        2,
        7,
        4,
        -7,
        1,
        2,
    )
    assert {lazy: "hash by identity"}[lazy]


def test_a_lazy_awaitable_is_no_mapping_of_special_methods() -> None:
    lazy = LazyNoWait({"a": 1})
    with pytest.raises(AttributeError):
        _ = lazy.__fspath__  # a special name is not asked of the value
    assert lazy["a"] == 1 and lazy.get("b", 2) == 2 and "a" in lazy
    assert copy.copy(lazy).wait() == {"a": 1}
    assert issubclass(GenericMeta, type)


def test_a_lazy_awaitable_without_its_first_steps_says_so() -> None:
    class Forgetful(LazyAwaitable[int]):
        def __init__(self) -> None:
            pass

        def _wait_impl(self) -> int:
            return 1

    for use in (Forgetful.wait, lambda lazy: lazy + 1, lambda lazy: lazy.real, lambda lazy: lazy.callbacks):
        with pytest.raises(RuntimeError, match=r"Forgetful .* super\(\).__init__\(\)"):
            use(Forgetful())


def test_contexts_that_hold_nothing() -> None:
    for context in (NullShardingContext(), NullShardedModuleContext()):
        assert isinstance(context, Multistreamable)
        context.record_stream(None)


class LinearSharder(ModuleSharder[nn.Linear]):
    def shard(
        self, module: nn.Linear, params: Any, env: ShardingEnv, device: Any = None, module_fqn: Any = None
    ) -> Any:
        return module

    @property
    def module_type(self) -> type[nn.Linear]:
        return nn.Linear


def test_what_a_sharder_offers_unless_it_says_otherwise() -> None:
    sharder, linear = LinearSharder(), nn.Linear(2, 3)
    assert sharder.sharding_types("cpu") == [ShardingType.DATA_PARALLEL.value]
    assert sharder.compute_kernels("data_parallel", "cpu") == [ComputeKernel.DEFAULT.value]
    assert list(sharder.shardable_parameters(linear)) == ["weight", "bias"]
    assert sharder.storage_usage(linear.weight, "cpu", "default") == {ParameterStorage.DDR.value: 24}
    assert sharder.storage_usage(linear.weight, "cuda", "default") == {ParameterStorage.HBM.value: 24}
    assert sharder.qcomm_codecs_registry is None and sharder.module_type is nn.Linear
    with pytest.raises(TypeError, match="abstract"):
        ModuleSharder()  # type: ignore[abstract]


def test_plans_find_modules_and_print_tables() -> None:
    module = EmbeddingModuleShardingPlan({"t": ParameterSharding("table_wise", "fused", [0])})
    assert isinstance(module, ModuleShardingPlan)
    plan = ShardingPlan({"sparse.ebc": module})
    assert plan.get_plan_for_module("sparse.ebc") is module and plan.get_plan_for_module("other") is None
    assert "module: sparse.ebc" in str(plan) and "table_wise" in str(plan)
    sharding = module["t"]
    assert (sharding.sharding_spec, sharding.cache_params, sharding.enforce_hbm) == (None, None, None)
    assert (sharding.stochastic_rounding, sharding.bounds_check_mode) == (None, None)


def test_cache_params_are_keys() -> None:
    params = CacheParams(CacheAlgorithm.LFU, load_factor=0.2, precision=DataType.FP16)
    assert hash(params) == hash(CacheParams(CacheAlgorithm.LFU, load_factor=0.2, precision=DataType.FP16))
    assert params != CacheParams(CacheAlgorithm.LRU, load_factor=0.2, precision=DataType.FP16)


def test_values_are_torchrec_s() -> None:
    assert [m.value for m in BoundsCheckMode] == [0, 1, 2, 3]
    assert next(op.value for op in CommOp) == "pooled_embeddings_all_to_all"
    assert {t.name for t in DataType} >= {"FP32", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "INT4", "INT2"}


def test_an_environment_needs_its_rank() -> None:
    env = ShardingEnv.from_local(2, 1)
    assert (env.world_size, env.rank, env.process_group) == (2, 1, None)
    with pytest.raises(ConfigError, match="rank 2 is outside the world of 2 ranks"):
        ShardingEnv(2, 2)
