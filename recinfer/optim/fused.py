"""Interfaces of optimizers that run in the backward pass of a lookup."""

from __future__ import annotations

import abc
from typing import Any

from torch import nn

from recinfer.optim.keyed import KeyedOptimizer

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule", "mark_fused"]


class FusedOptimizer(KeyedOptimizer, abc.ABC):
    """A keyed optimizer whose updates are complete when ``backward`` returns.

    ``step`` and ``zero_grad`` change no parameter. There are no gradients: to see them, use another kernel.
    """

    @abc.abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No effect: the backward pass has updated the rows."""

    @abc.abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect: there are no gradients."""

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """No effect: the state exists from the start."""


class EmptyFusedOptimizer(FusedOptimizer):
    """A fused optimizer of no parameters; in a parameter's ``_in_backward_optimizers`` it marks that a kernel updates
    the parameter."""

    def __init__(self) -> None:
        super().__init__({}, {}, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """No effect."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """No effect."""


def mark_fused(parameter: nn.Parameter) -> None:
    """Mark ``parameter`` as updated by its kernel; in_backward_optimizer_filter then excludes it from other
    optimizers."""
    parameter._in_backward_optimizers = [EmptyFusedOptimizer()]  # type: ignore[attr-defined]


class FusedOptimizerModule(abc.ABC):
    """A module that updates its parameters in the backward pass."""

    @property
    @abc.abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer that updates them."""
