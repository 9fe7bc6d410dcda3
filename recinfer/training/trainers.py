"""Trainers for one process and for several ranks: model, optimizers, steps and checkpoints.

On one process the tables have sparse gradients and recinfer's row-wise Adagrad, without FBGEMM. On several ranks
the model is a DistributedModelParallel: tables are sharded and updated in the backward, and the exchange of ids runs
ahead in a training pipeline.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from recinfer.checkpoint import save_checkpoint
from recinfer.distributed.types import ShardingPlan, ShardingType
from recinfer.errors import ConfigError
from recinfer.models.dlrm import DLRM, DLRMTrain
from recinfer.modules.remapping import remapping
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad, sparse_gradients
from recinfer.streamable import move_to
from recinfer.training.batches import Batch

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract
    from recinfer.distributed.planner import Plan

__all__ = ["LocalTrainer", "ShardedTrainer", "Trainer"]

_EPS = 1e-8


class Trainer(abc.ABC):
    """A model in training.

    Attributes:
        model: the DLRM, sharded or not; names of its state are those of the checkpoint.
    """

    model: nn.Module

    def __init__(self, dense_lr: float, sparse_lr: float) -> None:
        self._peaks = {"dense": dense_lr, "sparse": sparse_lr}

    @abc.abstractmethod
    def step(self, batches: Iterator[Batch]) -> tuple[float, int]:
        """Train on the next batch; returns its mean loss and number of rows. Raises StopIteration after the last."""

    @abc.abstractmethod
    def logits(self, batch: Batch) -> Tensor:
        """The logits ``[B]`` on the CPU, without gradients; every rank takes part."""

    @abc.abstractmethod
    def _optimizers(self) -> Mapping[str, Any]:
        """``dense`` and ``sparse``."""

    def set_rate(self, part: float) -> None:
        """Set the learning rates to the fraction ``part`` of their peaks."""
        for kind, optimizer in self._optimizers().items():
            for group in optimizer.param_groups:
                group["lr"] = self._peaks[kind] * part

    @abc.abstractmethod
    def save(self, folder: Path, contract: FeatureContract, name: str) -> Path:
        """Write a checkpoint; every rank calls it. The folder appears under its name when it is complete."""

    @abc.abstractmethod
    def load(self, folder: Path) -> None:
        """Continue from a checkpoint of :meth:`save`, written on any number of ranks and with any sharding."""

    def close(self) -> None:
        """Detach training from the model and put it in eval mode."""
        self.model.eval()


class LocalTrainer(Trainer):
    """Training in this process alone.

    Args:
        model: the DLRM.
        dense_lr: peak learning rate of the MLPs (Adam).
        sparse_lr: peak learning rate of the tables (row-wise Adagrad).
        device: device of the model and of the computation; None: the CPU.
    """

    def __init__(self, model: DLRM, dense_lr: float, sparse_lr: float, device: torch.device | None = None) -> None:
        super().__init__(dense_lr, sparse_lr)
        self.device = device or torch.device("cpu")
        self.model = model.to(self.device)
        tables = list(model.sparse_arch.parameters())
        of_tables = {id(p) for p in tables}
        self._dense = torch.optim.Adam([p for p in model.parameters() if id(p) not in of_tables], lr=dense_lr)
        self._sparse = RowWiseAdagrad(tables, lr=sparse_lr, eps=_EPS)
        self._with_loss = DLRMTrain(model)
        self._with_loss.train()
        self._stack = ExitStack()
        self._stack.enter_context(sparse_gradients(model))

    def _optimizers(self) -> Mapping[str, Optimizer]:
        return {"dense": self._dense, "sparse": self._sparse}

    def step(self, batches: Iterator[Batch]) -> tuple[float, int]:
        """See :class:`Trainer`."""
        batch: Batch = move_to(next(batches), self.device)
        for optimizer in (self._dense, self._sparse):
            optimizer.zero_grad(set_to_none=True)
        loss, _ = self._with_loss(batch)
        loss.backward()
        for optimizer in (self._dense, self._sparse):
            optimizer.step()
        return loss.item(), batch.labels.numel()

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """See :class:`Trainer`."""
        self.model.eval()
        try:
            batch = move_to(batch, self.device)
            return self.model(batch.dense_features, batch.sparse_features).reshape(-1).float().cpu()
        finally:
            self.model.train()

    def save(self, folder: Path, contract: FeatureContract, name: str) -> Path:
        """See :class:`Trainer`."""
        optimizers = [self._dense, self._sparse]
        return save_checkpoint(folder, self.model, optimizer=optimizers, contract=contract, model_name=name)

    def load(self, folder: Path) -> None:
        """See :class:`Trainer`."""
        from recinfer.checkpoint import load_checkpoint

        load_checkpoint(folder, self.model, optimizer=[self._dense, self._sparse])

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._stack.close()
        super().close()


class ShardedTrainer(Trainer):
    """Training with every other rank of the default process group.

    Args:
        model: the DLRM; its tables may be on the meta device.
        dense_lr, sparse_lr: see :class:`LocalTrainer`.
        plan: a sharding made before; it names modules as the DLRM does.
        sharding: table -> sharding type, ``"*"`` for all others; the planner chooses among types for the rest.
        batch_size: rows of a rank in one step, for the planner.
        device: device of this rank.

    Raises:
        ConfigError: a model that takes raw ids.
    """

    def __init__(
        self,
        model: DLRM,
        dense_lr: float,
        sparse_lr: float,
        *,
        plan: Plan | None = None,
        sharding: Mapping[str, str] | None = None,
        batch_size: int = 512,
        device: torch.device | None = None,
    ) -> None:
        from recinfer.distributed.model_parallel import DistributedModelParallel
        from recinfer.distributed.train_pipeline import TrainPipelineSparseDist
        from recinfer.distributed.types import ShardingEnv
        from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
        from recinfer.optim.optimizers import in_backward_optimizer_filter

        super().__init__(dense_lr, sparse_lr)
        if (change := remapping(model.sparse_arch.embedding_bag_collection)) is not None:
            raise ConfigError(f"a DLRM with {change} trains in one process; leave out --world-size")
        group: Any = dist.group.WORLD
        self.device = device or torch.device("cpu")
        apply_optimizer_in_backward(RowWiseAdagrad, model.sparse_arch.parameters(), {"lr": sparse_lr, "eps": _EPS})
        with_loss = DLRMTrain(model)
        sharders = [_any_type_sharder()]
        made = _sharding_plan(with_loss, plan, sharding or {}, sharders, batch_size, self.device)
        for of_module in made.plan.values():
            for table in of_module.values():  # type: ignore[attr-defined]
                if table.compute_kernel == "dense":  # a replica, which learns by the same optimizer as the other tables
                    table.compute_kernel = "fused"
        self._dmp = DistributedModelParallel(
            with_loss,
            env=ShardingEnv.from_process_group(group),
            device=self.device,
            plan=made,
            sharders=sharders,
        )
        self.model = self._dmp.module.model  # type: ignore[assignment]
        dense = dict(in_backward_optimizer_filter(self._dmp.named_parameters()))
        self._dense = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=dense_lr))
        self._optimizer = CombinedOptimizer([self._dmp.fused_optimizer, self._dense])
        self._pipeline: Any = TrainPipelineSparseDist(self._dmp, self._optimizer, self.device)
        self._dmp.train()

    @property
    def plan(self) -> ShardingPlan:
        """How the tables are sharded."""
        return self._dmp.plan

    def _optimizers(self) -> Mapping[str, Any]:
        return {"dense": self._dense, "sparse": self._dmp.fused_optimizer}

    def step(self, batches: Iterator[Batch]) -> tuple[float, int]:
        """See :class:`Trainer`; the loss is this rank's."""
        loss, _, labels = self._pipeline.progress(batches)
        return loss.item(), labels.numel()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """See :class:`Trainer`."""
        self._pipeline.detach()
        self._dmp.eval()
        try:
            return self._dmp(move_to(batch, self.device))[1][1].reshape(-1).float().cpu()
        finally:
            self._dmp.train()

    def save(self, folder: Path, contract: FeatureContract, name: str) -> Path:
        """See :class:`Trainer`."""
        return save_checkpoint(folder, self.model, optimizer=self._optimizer, contract=contract, model_name=name)

    def load(self, folder: Path) -> None:
        """See :class:`Trainer`."""
        from recinfer.checkpoint import load_checkpoint

        load_checkpoint(folder, self.model, optimizer=self._optimizer)

    def close(self) -> None:
        """See :class:`Trainer`."""
        self._pipeline.detach()
        super().close()


def _any_type_sharder() -> Any:
    """The sharder of EmbeddingBagCollection with all sharding types also on the CPU, since gloo supports them."""
    from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder

    class Sharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [t.value for t in ShardingType]

    return Sharder()


def _sharding_plan(
    model: nn.Module,
    plan: Plan | None,
    sharding: Mapping[str, str],
    sharders: list[Any],
    batch_size: int,
    device: torch.device,
) -> ShardingPlan:
    from recinfer import env
    from recinfer.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

    world_size = dist.get_world_size()
    if plan is not None:
        if plan.world_size != world_size:
            raise ConfigError(
                f"the plan is for {plan.world_size} ranks, but training has {world_size}; run recinfer plan "
                f"--world-size {world_size}"
            )
        made = plan.to_sharding_plan()
        return ShardingPlan(plan={f"model.{path}": of_module for path, of_module in made.plan.items()})
    core: Any = model.model
    tables = [config.name for config in core.sparse_arch.embedding_bag_collection.embedding_bag_configs()]
    constraints = {}
    for table, kind in sharding.items():
        if kind not in {t.value for t in ShardingType}:
            raise ConfigError(
                f"sharding of {table!r}: got {kind!r}; expected one of {', '.join(t.value for t in ShardingType)}"
            )
        if table != "*" and table not in tables:
            raise ConfigError(f"sharding: no table {table!r}; the model has {', '.join(tables)}")
    for table in tables:
        chosen = sharding.get(table, sharding.get("*"))
        if chosen is not None:
            constraints[table] = ParameterConstraints(sharding_types=[chosen])
    topology = Topology(
        world_size=world_size,
        local_world_size=min(world_size, env.local_world_size(world_size)),
        compute_device=device.type,
    )
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=batch_size, constraints=constraints)
    return planner.collective_plan(model, sharders, dist.group.WORLD)
