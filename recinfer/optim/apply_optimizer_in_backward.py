"""Runs an optimizer during the backward pass: by a hook for plain parameters, by the fused kernel for sharded
tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["apply_optimizer_in_backward"]


def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer], params: Iterable[nn.Parameter], optimizer_kwargs: dict[str, Any]
) -> None:
    """Step ``optimizer_class(params, **optimizer_kwargs)`` for each parameter as soon as its gradient is computed.

    The gradient is freed then. A module that is sharded afterwards takes the optimizer of its tables from here and runs
    it inside its lookup kernels: those follow the class's formula and defaults on the rows that a batch looks up, and leave
    the others, which a dense gradient of zeros would move by momentum and weight decay. An argument that no kernel has is
    refused as the module is sharded. Called twice, both optimizers step, one after the other; a kernel takes one.

    Args:
        optimizer_class: a class of torch.optim or :mod:`recinfer.optim`. Kernels exist for torch's SGD, Adagrad, Adam
            (without ``weight_decay``) and AdamW, and for all of recinfer's.
        params: the parameters.
        optimizer_kwargs: the optimizer's arguments (``{"lr": 0.1}``).
    """
    # A late import, because that package compiles eight optimizers at import, which takes half a second.
    from torch.distributed.optim import _apply_optimizer_in_backward

    # Torch's function does it, and notes class and arguments on the parameters (_optimizer_classes, _optimizer_kwargs),
    # which is where sharding looks.
    _apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
