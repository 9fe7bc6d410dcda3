"""The update formulas of the table optimizers, as functions on rows of weights, gradients and state.

These are the formulas of FBGEMM's fused kernels, written with torch: the reference that the kernels are tested against,
and the implementation where FBGEMM has no kernel. Rows are ``[R, D]`` in float32; row-wise state is ``[R]``; ``t``
counts steps from 1. With ``g`` the gradient and ``lr`` the rate:

    sgd                    w -= lr g
    adagrad                s += g^2                 w -= lr g / (sqrt(s) + eps)
    rowwise_adagrad        s += mean(g^2)           w -= lr g / (sqrt(s) + eps)
    adam                   m, v = EMAs of g, g^2    w -= lr (m' / (sqrt(v') + eps) + wd w),  m' = m / (1 - b1^t) ...
    partial_rowwise_adam   the same with v the EMA of mean(g^2)
    lamb                   r = Adam's bracket       w -= lr r |w| / |r|   (norms of rows)
    partial_rowwise_lamb   the same with v the EMA of mean(g^2)
    lars_sgd               a = lr eta |w| / (|g| + wd |w|)    m = momentum m + a (g + wd w)    w -= m

Weight decay ``wd``: the last five have it in their formula. For sgd and the Adagrads, ``"l2"`` adds ``wd w`` to the
gradient, also to the one that is accumulated, ``"decouple"`` shrinks ``w`` by ``lr wd w`` separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["UPDATES", "Hyper", "RowUpdate"]


@dataclass(frozen=True)
class Hyper:
    """The hyperparameters of a formula. ``weight_decay_mode`` is ``"none"``, ``"l2"`` or ``"decouple"``; ``max_norm`` 0
    is off."""

    lr: float
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.0
    weight_decay_mode: str = "none"
    momentum: float = 0.9
    eta: float = 0.001
    max_norm: float = 0.0


Rows = dict[str, Tensor]
_Step = Callable[[Tensor, Tensor, Rows, Hyper, int], Tensor]


@dataclass(frozen=True)
class RowUpdate:
    """The update formula of one optimizer.

    Attributes:
        states: the optimizer's states: name -> whether row-wise (``[R]``), else of the weights' shape.
        counts_steps: whether the formula needs the number of the step.
        step: ``(weights, gradients, states, hyper, t) -> new weights``; changes ``states`` in place.
    """

    states: dict[str, bool]
    counts_steps: bool
    step: _Step


def _with_l2(weight: Tensor, grad: Tensor, hyper: Hyper) -> Tensor:
    if hyper.weight_decay and hyper.weight_decay_mode == "l2":
        return grad + hyper.weight_decay * weight
    return grad


def _decayed(weight: Tensor, grad_step: Tensor, multiplier: Tensor | float, hyper: Hyper) -> Tensor:
    """``weight - multiplier * grad_step``, with the weight decay of sgd and the Adagrads."""
    grad_step = _with_l2(weight, grad_step, hyper)
    kept = weight
    if hyper.weight_decay and hyper.weight_decay_mode == "decouple":
        kept = weight * (1 - hyper.lr * hyper.weight_decay)
    return kept - multiplier * grad_step


def _sgd(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
    return _decayed(weight, grad, hyper.lr, hyper)


def _adagrad(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
    total = states["momentum1"].add_(_with_l2(weight, grad, hyper).square())
    return _decayed(weight, grad, hyper.lr / (total.sqrt() + hyper.eps), hyper)


def _rowwise_adagrad(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
    total = states["momentum1"].add_(_with_l2(weight, grad, hyper).square().mean(dim=1))
    new = _decayed(weight, grad, (hyper.lr / (total.sqrt() + hyper.eps)).unsqueeze(1), hyper)
    if hyper.max_norm > 0:
        norm = new.norm(dim=1, keepdim=True)
        new = new * (hyper.max_norm / (norm + hyper.eps)).clamp(max=1.0)
    return new


def _adam_direction(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int, rowwise: bool) -> Tensor:
    first, second = states["momentum1"], states["exp_avg_sq"]
    squares = grad.square().mean(dim=1) if rowwise else grad.square()
    first.mul_(hyper.beta1).add_(grad, alpha=1 - hyper.beta1)
    second.mul_(hyper.beta2).add_(squares, alpha=1 - hyper.beta2)
    root = (second / (1 - hyper.beta2**t)).sqrt() + hyper.eps
    root = root.unsqueeze(1) if rowwise else root
    return first / (1 - hyper.beta1**t) / root + hyper.weight_decay * weight


def _adam(rowwise: bool) -> _Step:
    def step(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
        return weight - hyper.lr * _adam_direction(weight, grad, states, hyper, t, rowwise)

    return step


def _lamb(rowwise: bool) -> _Step:
    def step(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
        direction = _adam_direction(weight, grad, states, hyper, t, rowwise)
        length = direction.norm(dim=1, keepdim=True)
        # A row without a direction is unchanged; the plain formula would divide by 0.
        ratio = torch.where(length > 0, weight.norm(dim=1, keepdim=True) / length, torch.zeros_like(length))
        return weight - hyper.lr * ratio * direction

    return step


def _lars(weight: Tensor, grad: Tensor, states: Rows, hyper: Hyper, t: int) -> Tensor:
    weight_norm = weight.norm(dim=1, keepdim=True)
    below = grad.norm(dim=1, keepdim=True) + hyper.weight_decay * weight_norm
    rate = torch.where(below > 0, hyper.lr * hyper.eta * weight_norm / below, torch.zeros_like(below))
    momentum = states["momentum1"].mul_(hyper.momentum).add_(rate * (grad + hyper.weight_decay * weight))
    return weight - momentum


UPDATES: dict[str, RowUpdate] = {
    "SGD": RowUpdate({}, False, _sgd),
    "ADAGRAD": RowUpdate({"momentum1": False}, False, _adagrad),
    "ROWWISE_ADAGRAD": RowUpdate({"momentum1": True}, False, _rowwise_adagrad),
    "ADAM": RowUpdate({"momentum1": False, "exp_avg_sq": False}, True, _adam(False)),
    "PARTIAL_ROWWISE_ADAM": RowUpdate({"momentum1": False, "exp_avg_sq": True}, True, _adam(True)),
    "LAMB": RowUpdate({"momentum1": False, "exp_avg_sq": False}, True, _lamb(False)),
    "PARTIAL_ROWWISE_LAMB": RowUpdate({"momentum1": False, "exp_avg_sq": True}, True, _lamb(True)),
    "LARS_SGD": RowUpdate({"momentum1": False}, False, _lars),
}
"""Every optimizer by the name of its :class:`recinfer.distributed.embedding_types.OptimType`."""
