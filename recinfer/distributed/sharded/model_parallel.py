"""DistributedModelParallel: a model whose embedding modules are sharded by a plan and whose rest is replicated.

Names, arguments and meaning are TorchRec's (``torchrec.distributed.model_parallel``). Sharding takes three steps. Every
module that the plan names is replaced by the one that its sharder builds. Parameters on the meta device are allocated
on this rank's device. All parameters that the sharded modules do not synchronise themselves go into one
DistributedDataParallel.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys
from torch.nn.parallel import DistributedDataParallel

from recinfer.distributed.comm.ranks import divide_cores, get_local_size
from recinfer.distributed.sharded.copying import copied_to
from recinfer.distributed.sharded.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recinfer.distributed.sharded.model_tree import fused_optimizers, join, materialise, some_of
from recinfer.distributed.types import ModuleSharder, ShardedModule, ShardingEnv, ShardingPlan
from recinfer.distributed.types.default_sharders import get_default_sharders
from recinfer.distributed.types.embedding_modules import ShardedEmbeddingModule
from recinfer.errors import CheckpointError, ConfigError
from recinfer.group_device import group_device
from recinfer.module_tree import missing_keys, module_names, named_children
from recinfer.optim.fused import FusedOptimizerModule
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer

if TYPE_CHECKING:
    from recinfer.distributed.types import EmbeddingModuleShardingPlan

__all__ = [
    "DistributedModelParallel",
    "get_module",
    "get_unwrapped_module",
]


class DistributedModelParallel(nn.Module, FusedOptimizerModule):
    """Shard a model's embedding modules and replicate the rest.

    On CPU the ranks of one host divide its cores, unless ``OMP_NUM_THREADS`` is set.

    Args:
        module: the model; its tables may be on the meta device, where they need no memory.
        env: world size, this rank and process group; default: those of the default process group.
        device: device of this rank; default: ``cpu``, or ``cuda:<local rank>`` under an nccl group, unless
            ``init_process_group(device_id=...)`` or ``torch.cuda.set_device`` named another GPU.
        plan: the sharding; default: ``EmbeddingShardingPlanner().collective_plan``, the same on every rank.
        sharders: a sharder for every class of module to shard; default: all of recinfer's.
        init_data_parallel: wrap the replicated part now; otherwise call :meth:`init_data_parallel` later, for example
            after loading weights.
        init_parameters: allocate and initialise parameters on the meta device.
        data_parallel_wrapper: the wrapper of the replicated part; default :class:`DefaultDataParallelWrapper`.

    Raises:
        ConfigError: no process group, a plan that names modules which do not exist or have no sharder.

    Example::

        dmp = DistributedModelParallel(model, sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})])
        dense = KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(dmp.named_parameters())), torch.optim.Adam)
        optimizer = CombinedOptimizer([dmp.fused_optimizer, dense])
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        plan: ShardingPlan | None = None,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
    ) -> None:
        super().__init__()
        self.init_parameters = init_parameters
        self._env = env if env is not None else _default_env()
        self.device = torch.device(device) if device is not None else _default_device(self._env)
        if self.device.type == "cpu":
            divide_cores()
        self.sharders = sharders if sharders is not None else get_default_sharders()
        self._sharder_map = {sharder.module_type: sharder for sharder in self.sharders}
        self._data_parallel_wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        self._plan = plan if plan is not None else self._make_plan(module)
        self._check_plan(module)
        self._dmp_wrapped_module: nn.Module = self._shard_modules(module, module_names(module), {})
        if init_parameters:
            materialise(self._dmp_wrapped_module, self.device)
        self._ddp_done = False
        if init_data_parallel:
            self.init_data_parallel()
        self._optim = CombinedOptimizer(fused_optimizers(get_module(self)))

    # ------------------------------------------------------------------------------------------------- building

    def _make_plan(self, module: nn.Module) -> ShardingPlan:
        from recinfer.distributed.planner import EmbeddingShardingPlanner, Topology

        world_size, group = self._env.world_size, self._env.process_group
        topology = Topology(
            world_size=world_size, local_world_size=get_local_size(world_size), compute_device=self.device.type
        )
        planner = EmbeddingShardingPlanner(topology=topology)
        return (
            planner.plan(module, self.sharders)
            if group is None
            else planner.collective_plan(module, self.sharders, group)
        )

    def _check_plan(self, module: nn.Module) -> None:
        paths = dict(module.named_modules(remove_duplicate=False))
        for path in self._plan.plan:
            if path not in paths:
                known = ", ".join(repr(p) for p, m in paths.items() if type(m) in self._sharder_map) or "none"
                raise ConfigError(
                    f"the plan names module {path!r}, which the model does not have; modules that can be sharded: "
                    f"{known}"
                )
            if type(paths[path]) not in self._sharder_map:
                kinds = ", ".join(sorted(t.__name__ for t in self._sharder_map))
                raise ConfigError(
                    f"the plan shards module {path!r}, a {type(paths[path]).__name__}, but there is no sharder for "
                    f"that class; sharders given are for: {kinds}"
                )

    def _shard_modules(self, module: nn.Module, names: dict[int, list[str]], done: dict[int, nn.Module]) -> nn.Module:
        """``module`` with every planned module in it replaced under all its names; each module is sharded once."""
        if id(module) in done:
            return done[id(module)]
        paths = names.get(id(module), [])
        path = next((p for p in paths if self._plan.get_plan_for_module(p) is not None), None)
        if path is not None and not isinstance(module, ShardedModule):
            sharder = self._sharder_map[type(module)]
            params = cast("EmbeddingModuleShardingPlan", self._plan.get_plan_for_module(path))
            sharded = sharder.shard(module, params, self._env, self.device, path)
            done[id(module)] = sharded
            return sharded
        done[id(module)] = module
        for name, child in list(named_children(module)):
            replaced = self._shard_modules(child, names, done)
            if replaced is not child:
                module.register_module(name, replaced)
        return module

    def init_data_parallel(self) -> None:
        """Wrap the replicated part and broadcast rank 0's values. Further calls have no effect."""
        if not self._ddp_done:
            self._data_parallel_wrapper.wrap(self, self._env, self.device)
            self._ddp_done = True

    # ------------------------------------------------------------------------------------------------- running

    @property
    def module(self) -> nn.Module:
        """The sharded model without this wrapper and DistributedDataParallel."""
        return get_unwrapped_module(self)

    @property
    def plan(self) -> ShardingPlan:
        """The sharding."""
        return self._plan

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizers that run inside the backward of the sharded modules, as one; keys are parameter names."""
        return self._optim

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self._dmp_wrapped_module(*args, **kwargs)

    def copy(self, device: torch.device) -> DistributedModelParallel:
        """A copy on ``device`` with the same process groups; the original does not change.

        The copy is not wrapped for data parallelism: call :meth:`init_data_parallel` before training it.

        Raises:
            ConfigError: between host and GPU, with tables for training: their kernels are for the device that they were
                sharded for.
        """
        device = torch.device(device)
        if (device.type == "cuda") != (self.device.type == "cuda"):
            trained = [p for p, m in get_module(self).named_modules() if isinstance(m, ShardedEmbeddingModule)]
            if trained:
                raise ConfigError(
                    f"copy to {device}: modules {trained} were sharded for {self.device} and use its kernels; build "
                    f"DistributedModelParallel(device=torch.device({device.type!r})) of the model, and load this "
                    "one's state_dict() into it"
                )
        other = copy.copy(self)
        other._modules = dict(self._modules)
        other._dmp_wrapped_module = copied_to(get_module(self), device)
        other.device = device
        other._ddp_done = False
        other._optim = CombinedOptimizer(fused_optimizers(get_module(other)))  # type: ignore[arg-type]
        return other

    # ------------------------------------------------------------------------------------------------- state

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """The state with the model's own names, without prefixes of wrappers; sharded tables are ShardedTensors."""
        destination = OrderedDict() if destination is None else destination
        _state_dict(get_module(self), destination, prefix, keep_vars)
        return destination

    def load_state_dict(  # type: ignore[override]
        self, state_dict: OrderedDict[str, Tensor], prefix: str = "", strict: bool = True
    ) -> _IncompatibleKeys:
        """Load a state of :meth:`state_dict` with the same sharding.

        Raises:
            CheckpointError: with ``strict``, missing or unexpected keys.
        """
        missing, unexpected = _load_state_dict(get_module(self), state_dict, prefix)
        if missing:  # TorchRec loads a module by one of its names
            own = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
            names = missing_keys(get_module(self), [key.removeprefix(prefix) for key in missing], own)
            missing = [prefix + name for name in names]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the state does not fit the model: {len(missing)} keys are missing ({some_of(missing)}), "
                f"{len(unexpected)} are unexpected ({some_of(unexpected)}); strict=False loads the others"
            )
        return _IncompatibleKeys(missing, unexpected)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with the model's own names, including the local parts of sharded ones.

        Every rank names every table: a table that only other ranks hold is an empty parameter on this rank, as in
        TorchRec.
        """
        seen: set[int] = set()
        for name, parameter in _named_parameters(get_module(self), prefix, recurse):
            if not remove_duplicate or id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def bare_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with their names in the module tree, including prefixes of wrappers."""
        seen: set[int] = set()
        for name, parameter in _named_parameters(self._dmp_wrapped_module, prefix, recurse, strip=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Buffers with the model's own names."""
        seen: set[int] = set()
        for name, buffer in _named_buffers(get_module(self), prefix, recurse):
            if not remove_duplicate or id(buffer) not in seen:
                seen.add(id(buffer))
                yield name, buffer

    def sparse_grad_parameter_names(self, destination: list[str] | None = None, prefix: str = "") -> list[str]:
        """Names of parameters whose gradients are sparse tensors."""
        destination = [] if destination is None else destination
        _sparse_grad_names(get_module(self), destination, prefix)
        return destination


def get_module(module: nn.Module) -> nn.Module:
    """``module`` without its outer wrappers, DistributedModelParallel and DistributedDataParallel."""
    while True:
        if isinstance(module, DistributedModelParallel):
            module = module._dmp_wrapped_module
        elif isinstance(module, DistributedDataParallel):
            module = module.module
        else:
            return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """``module`` without its outer wrappers, including FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = get_module(module)
    while isinstance(module, FullyShardedDataParallel):
        module = get_module(module.module)
    return module


# --------------------------------------------------------------------------------------------------- defaults


def _default_env() -> ShardingEnv:
    if not dist.is_initialized() or dist.group.WORLD is None:
        raise ConfigError(
            "DistributedModelParallel needs a process group; call torch.distributed.init_process_group() first, or "
            "pass env=ShardingEnv.from_process_group(...)"
        )
    return ShardingEnv.from_process_group(dist.group.WORLD)


def _default_device(env: ShardingEnv) -> torch.device:
    return torch.device("cpu") if env.process_group is None else group_device(env.process_group)


# --------------------------------------------------------------------------------------------------- walking the tree


def _state_dict(module: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
    module = get_module(module)
    if isinstance(module, ShardedModule):
        module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        return
    module._save_to_state_dict(destination, prefix, keep_vars)
    for name, child in named_children(module):
        _state_dict(child, destination, join(prefix, name), keep_vars)


def _load_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> tuple[list[str], list[str]]:
    """Load the state; returns the missing keys, and the keys under ``prefix`` that no module loaded."""
    module = get_module(module)
    missing: list[str] = []
    unexpected: list[str] = []
    if isinstance(module, ShardedModule):
        own = OrderedDict((k.removeprefix(prefix), v) for k, v in state_dict.items() if k.startswith(prefix))
        found = module.load_state_dict(own, strict=False)
        return [prefix + k for k in found.missing_keys], [prefix + k for k in found.unexpected_keys]
    errors: list[str] = []
    module._load_from_state_dict(state_dict, prefix, {}, True, missing, unexpected, errors)
    if errors:
        raise CheckpointError("the state does not fit the model: " + "; ".join(errors))
    for name, child in named_children(module):
        more = _load_state_dict(child, state_dict, join(prefix, name))
        missing += more[0]
        unexpected += more[1]
    return missing, unexpected


def _named_parameters(
    module: nn.Module, prefix: str, recurse: bool, strip: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    module = get_module(module) if strip else module
    if isinstance(module, ShardedModule):
        yield from module.named_parameters(prefix, recurse)
        return
    yield from module.named_parameters(prefix, recurse=False)
    if recurse:
        for name, child in named_children(module):
            yield from _named_parameters(child, f"{prefix}.{name}" if prefix else name, recurse, strip)


def _named_buffers(module: nn.Module, prefix: str, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    module = get_module(module)
    if isinstance(module, ShardedModule):
        yield from module.named_buffers(prefix, recurse)
        return
    yield from module.named_buffers(prefix, recurse=False)
    if recurse:
        for name, child in named_children(module):
            yield from _named_buffers(child, f"{prefix}.{name}" if prefix else name, recurse)


def _sparse_grad_names(module: nn.Module, destination: list[str], prefix: str) -> None:
    module = get_module(module)
    if isinstance(module, ShardedModule):
        own = getattr(module, "sparse_grad_parameter_names", None)
        if own is not None:
            own(destination, prefix)
        return
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        destination.append(f"{prefix}.weight" if prefix else "weight")
    for name, child in named_children(module):
        _sparse_grad_names(child, destination, f"{prefix}.{name}" if prefix else name)
