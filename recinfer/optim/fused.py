"""The public interface of optimizers that run in the backward of a lookup."""

from __future__ import annotations

import abc
from typing import Any

from torch import nn

from recinfer.optim.keyed import KeyedOptimizer

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule", "mark_fused"]


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose updates have happened when ``backward`` returns.

    ``step`` and ``zero_grad`` change no parameter. There are no gradients: to see them, use another kernel.
    """

    @abc.abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing is left to do: the backward has updated the rows."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing to clear: there are no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Nothing to make: the state is there from the start."""


class EmptyFusedOptimizer(FusedOptimizer):
    """A fused optimizer of no parameters; on a parameter's ``_in_backward_optimizers`` it says that a kernel updates it."""

    def __init__(self) -> None:
        super().__init__({}, {}, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Nothing."""


def mark_fused(parameter: nn.Parameter) -> None:
    """Say on ``parameter`` that its kernel steps it: in_backward_optimizer_filter then keeps it from other optimizers."""
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]


class FusedOptimizerModule(abc.ABC):
    """A module that updates its parameters in the backward."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that does it."""
