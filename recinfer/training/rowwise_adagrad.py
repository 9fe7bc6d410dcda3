"""Row-wise Adagrad: one accumulator a row of a table, and only the rows of a batch are touched.

The update of TorchRec's and FBGEMM's default for tables (EXACT_ROWWISE_ADAGRAD), on torch's sparse gradients. For the
gradient ``g`` of one row of ``D`` columns: ``s += mean(g^2)``, then ``w -= lr * g / (sqrt(s) + eps)``.
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


class RowWiseAdagrad(Optimizer):
    """Adagrad with one accumulator a row (state ``sum``, float32 ``[rows]``).

    Gradients may be sparse (only their rows are read and written) or dense (all rows).

    Args:
        params: tables, ``[rows, D]`` each.
        lr: the step size, above 0.
        eps: added to the root of the accumulator.

    Raises:
        ConfigError: lr or eps that is not positive, or parameters that are no tables.
    """

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05, eps: float = 1e-8) -> None:
        if not lr > 0 or not eps > 0:
            raise ConfigError(f"RowWiseAdagrad: lr={lr}, eps={eps}; expected both above 0")
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for table in group["params"]:
                if table.dim() != 2:
                    raise ConfigError(
                        f"RowWiseAdagrad: got a parameter of shape {tuple(table.shape)}; expected tables [rows, D]"
                    )
                self.state[table]["sum"] = torch.zeros(table.shape[0], dtype=torch.float32, device=table.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every table that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    _update(table, table.grad, self.state[table]["sum"], group["lr"], group["eps"])
        return loss


def _update(table: Tensor, grad: Tensor, sums: Tensor, lr: float, eps: float) -> None:
    if not grad.is_sparse:
        sums += grad.float().square().mean(dim=1)
        table -= (lr * grad / (sums.sqrt() + eps).unsqueeze(1)).to(table.dtype)
        return
    grad = grad.coalesce()
    rows, values = grad.indices()[0], grad.values().float()
    touched = sums[rows] + values.square().mean(dim=1)
    sums[rows] = touched
    table.index_add_(0, rows, (values / (touched.sqrt() + eps).unsqueeze(1)).to(table.dtype), alpha=-lr)


@contextmanager
def sparse_gradients(model: nn.Module) -> Iterator[None]:
    """Inside, every embedding bag of ``model`` gives sparse gradients; afterwards the modules are as before."""
    bags = [m for m in model.modules() if isinstance(m, nn.EmbeddingBag | nn.Embedding)]
    before = [bag.sparse for bag in bags]
    try:
        for bag in bags:
            bag.sparse = True
        yield
    finally:
        for bag, sparse in zip(bags, before):
            bag.sparse = sparse
