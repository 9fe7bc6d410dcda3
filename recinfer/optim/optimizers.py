"""The table optimizers as torch optimizers, with the same formulas as the fused kernels.

Pass them to :func:`recinfer.optim.apply_optimizer_in_backward.apply_optimizer_in_backward` to run the fused kernel of
the same name in a sharded module; stepped on their own they update parameters with sparse gradients (only the rows that
have one) or dense ones (all rows). State: ``step`` and, as the formula has them, ``momentum1`` and ``exp_avg_sq``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recinfer.errors import ConfigError
from recinfer.optim.row_updates import UPDATES, Hyper

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "in_backward_optimizer_filter",
]


def in_backward_optimizer_filter(
    named_parameters: Iterator[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without an optimizer in the backward pass; with ``include``, the parameters with one."""
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter


class _RowOptimizer(Optimizer):
    """Applies one formula of :mod:`recinfer.optim.row_updates`.

    Args:
        params: parameters; those with more or fewer than two dimensions count as one row.
        lr: the rate.
        kwargs: the numbers of the formula, as :class:`recinfer.optim.row_updates.Hyper` or torch name them
            (``eps``, ``betas`` or ``beta1`` and ``beta2``, ``weight_decay``, ``momentum``, ``eta``).

    Raises:
        ConfigError: numbers that the formula does not have, or negative ones.
    """

    update: str
    numbers: frozenset[str]

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01, **kwargs: Any) -> None:
        if "betas" in kwargs:
            kwargs["beta1"], kwargs["beta2"] = kwargs.pop("betas")
        unknown = sorted(kwargs.keys() - self.numbers)
        if unknown:
            raise ConfigError(f"{type(self).__name__}: unknown {unknown}; expected some of {sorted(self.numbers)}")
        numbers: dict[str, Any] = {"lr": lr, **{n: getattr(Hyper, n) for n in sorted(self.numbers)}, **kwargs}
        negative = {name: value for name, value in numbers.items() if not value >= 0}
        if negative:
            raise ConfigError(f"{type(self).__name__}: {negative}; expected numbers of at least 0")
        super().__init__(params, numbers)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        weights = parameter if parameter.dim() == 2 else parameter.view(1, -1)
        state, update = self._state(parameter, weights), UPDATES[self.update]
        state["step"] += 1
        if grad.is_sparse:
            coalesced = grad.coalesce()
            rows: Any = coalesced.indices()[0]
            values = coalesced.values()
        else:
            rows, values = slice(None), grad.reshape(weights.shape)
        tables = {n: state[n] if rowwise else state[n].view(weights.shape) for n, rowwise in update.states.items()}
        touched = {name: table[rows] for name, table in tables.items()}
        # The mode applies to sgd and adagrad; other formulas have their own decay.
        numbers = {name: group[name] for name in self.numbers}
        hyper = Hyper(lr=float(group["lr"]), weight_decay_mode="l2", **numbers)
        weights[rows] = update.step(weights[rows].float(), values.float(), touched, hyper, int(state["step"])).to(
            weights.dtype
        )
        for name, table in tables.items():
            table[rows] = touched[name]

    def _state(self, parameter: Tensor, weights: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            for name, rowwise in UPDATES[self.update].states.items():
                shape = weights.shape[:1] if rowwise else parameter.shape
                state[name] = torch.zeros(shape, dtype=torch.float32, device=parameter.device)
        return state


_ADAM = frozenset({"eps", "beta1", "beta2", "weight_decay"})


class SGD(_RowOptimizer):
    """``w -= lr (g + weight_decay w)``."""

    update, numbers = "SGD", frozenset({"weight_decay"})


class Adagrad(_RowOptimizer):
    """Adagrad with one accumulator per element."""

    update, numbers = "ADAGRAD", frozenset({"eps", "weight_decay"})


class Adam(_RowOptimizer):
    """Adam with decoupled weight decay, multiplied by the learning rate."""

    update, numbers = "ADAM", _ADAM


class PartialRowWiseAdam(_RowOptimizer):
    """Adam with one second moment per row."""

    update, numbers = "PARTIAL_ROWWISE_ADAM", _ADAM


class LAMB(_RowOptimizer):
    """LAMB: Adam's step, scaled by the norm of each row."""

    update, numbers = "LAMB", _ADAM


class PartialRowWiseLAMB(_RowOptimizer):
    """LAMB with one second moment per row."""

    update, numbers = "PARTIAL_ROWWISE_LAMB", _ADAM


class LarsSGD(_RowOptimizer):
    """LARS: SGD with momentum and a learning rate per row from the norms of the row and its gradient."""

    update, numbers = "LARS_SGD", frozenset({"momentum", "eta", "weight_decay"})
