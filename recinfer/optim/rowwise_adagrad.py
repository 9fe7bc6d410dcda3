"""Row-wise Adagrad: one accumulator per table row.

The update of TorchRec's and FBGEMM's default for tables (EXACT_ROWWISE_ADAGRAD). For the gradient ``g`` of one row of
``D`` columns: ``s += mean(g^2)``, then ``w -= lr * g / (sqrt(s) + eps)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recinfer.errors import ConfigError

__all__ = ["RowWiseAdagrad", "sparse_gradients"]

_HOW_TORCH_RUNS = frozenset({"capturable", "differentiable", "foreach", "fused"})


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator per row (state ``sum``, float32 ``[rows, 1]``, and ``step``).

    Gradients may be sparse (only their rows are read and written, also by ``weight_decay``) or dense (all rows).

    Args:
        params: tables, ``[rows, D]`` each; a parameter of one dimension has one accumulator per element.
        lr: the rate.
        lr_decay: the rate of step ``t``, from 1, is ``lr / (1 + (t - 1) * lr_decay)``.
        weight_decay: times the weights, added to the gradient.
        initial_accumulator_value: first value of ``sum``.
        eps: added to the root of the accumulator.
        maximize: go up the gradient.
        unused: options of torch's Adagrad without effect here (``foreach``, ``fused``, ``differentiable``).

    Raises:
        ConfigError: negative numbers, or other arguments.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        **unused: Any,
    ) -> None:
        unknown = sorted(unused.keys() - _HOW_TORCH_RUNS)
        if unknown:
            raise ConfigError(
                f"RowWiseAdagrad: unknown {unknown}; RowWiseAdagrad has no such parameters, leave them out"
            )
        numbers: dict[str, Any] = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        negative = {name: value for name, value in numbers.items() if not value >= 0}
        if negative:
            raise ConfigError(f"RowWiseAdagrad: {negative}; expected numbers of at least 0")
        super().__init__(params, {**numbers, "maximize": maximize})
        for group in self.param_groups:
            for table in group["params"]:
                start = torch.full((*table.shape[:1], 1), group["initial_accumulator_value"], dtype=torch.float32)
                self.state[table].update(step=torch.zeros(()), sum=start.to(table.device))

    def share_memory(self) -> None:
        """Move the accumulators to shared memory."""
        for group in self.param_groups:
            for table in group["params"]:
                self.state[table]["sum"].share_memory_()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every table that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None and table.numel():  # a table on other ranks is empty here
                    _update(table, table.grad, self.state[table], group)
        return loss


def _update(table: Tensor, grad: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> None:
    state["step"] += 1
    rate = float(group["lr"]) / (1 + (float(state["step"]) - 1) * group["lr_decay"])
    weights = table.view(table.shape[0], -1) if table.dim() else table.view(1, 1)
    sums = state["sum"].view(weights.shape[0], 1)
    if not grad.is_sparse:
        change = _change(weights, grad.reshape(weights.shape).float(), sums, group)
        weights.add_(change.to(table.dtype), alpha=-rate)
        return
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values().float()
    touched = sums[rows]
    change = _change(weights[rows] if group["weight_decay"] else weights, values, touched, group)
    sums[rows] = touched
    weights.index_add_(0, rows, change.to(table.dtype), alpha=-rate)


def _change(weights: Tensor, grad: Tensor, sums: Tensor, group: dict[str, Any]) -> Tensor:
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"]:
        grad = grad + group["weight_decay"] * weights
    sums.add_(grad.square().mean(dim=1, keepdim=True))
    return grad / (sums.sqrt() + group["eps"])


@contextmanager
def sparse_gradients(model: nn.Module) -> Iterator[None]:
    """Inside the block, every embedding bag of ``model`` computes sparse gradients; afterwards the modules are as
    before."""
    bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    before = [bag.sparse for bag in bags]
    try:
        for bag in bags:
            bag.sparse = True
        yield
    finally:
        for bag, sparse in zip(bags, before):
            bag.sparse = sparse
