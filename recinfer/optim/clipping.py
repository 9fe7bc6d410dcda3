"""Gradient clipping by value or by norm over all ranks, as a wrapper of a keyed optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum, unique
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recinfer.errors import ConfigError
from recinfer.group_device import group_device
from recinfer.optim.keyed import KeyedOptimizer, OptimizerWrapper

__all__ = ["GradientClipping", "GradientClippingOptimizer"]


@unique
class GradientClipping(Enum):
    """The quantity that is clipped."""

    NORM = "norm"  # the norm of all gradients together
    VALUE = "value"  # every element
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients before each step of another optimizer.

    Args:
        optimizer: the optimizer to wrap.
        clipping: by norm, by value or not.
        max_gradient: the limit, 0 or more.
        norm_type: order of the norm: a number above 0 or ``"inf"``.
        enable_global_grad_clip: the norm counts the gradients of ``param_to_pgs`` on all their ranks. All ranks of the
            default group then have to step together, also those that hold no part of any such parameter.
        param_to_pgs: the process groups over which a parameter of this rank is sharded; one that is not in it is
            replicated and counts once.
        track_grad_norm: keep :attr:`last_total_grad_norm` also without clipping by norm.

    Parameters without a gradient (those that a fused kernel updates), or with one of no elements, are passed over.

    Raises:
        ConfigError: a negative limit, or an order that is not positive.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: dict[nn.Parameter, list[dist.ProcessGroup]] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._norm_type = float(norm_type)
        if not max_gradient >= 0 or not self._norm_type > 0:
            raise ConfigError(
                f"gradient clipping: max_gradient={max_gradient}, norm_type={norm_type}; expected a limit of 0 or more and "
                "an order above 0"
            )
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._global = enable_global_grad_clip
        self._pgs = {id(param): tuple(pgs) for param, pgs in (param_to_pgs or {}).items()}
        self._reductions: list[tuple[dist.ProcessGroup, ...]] | None = None
        self._track = track_grad_norm
        self._last: Tensor | None = None

    @property
    def last_total_grad_norm(self) -> Tensor | None:
        """The norm before the last clipping; None before the first."""
        return self._last

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, then step."""
        if self._clipping is GradientClipping.NORM:
            self.clip_grad_norm_()
        elif self._track:
            self._last, _ = self.compute_total_grad_norm()
        if self._clipping is GradientClipping.VALUE:
            for _, grad in self._gradients():
                _values(grad).clamp_(-self._max_gradient, self._max_gradient)
        super().step(closure)

    def compute_total_grad_norm(self) -> tuple[Tensor, list[Tensor]]:
        """The norm of all gradients, and the gradients."""
        found = self._gradients()
        by_ranks: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {pgs: [] for pgs in self._group_tuples()}
        for param, grad in found:
            pgs = self._pgs.get(id(param), ()) if self._global else ()
            by_ranks.setdefault(pgs, []).append(_values(grad))
        parts = [self._reduced(grads, pgs) for pgs, grads in by_ranks.items()]
        if not parts:
            return torch.zeros(()), []
        joined = torch.stack([part.to(parts[0].device) for part in parts])
        if math.isinf(self._norm_type):
            return joined.max(), [grad for _, grad in found]
        return joined.sum() ** (1 / self._norm_type), [grad for _, grad in found]

    def _group_tuples(self) -> list[tuple[dist.ProcessGroup, ...]]:
        """The process groups that this rank reduces over, in an order common to all ranks.

        A rank without a part of a parameter, or without a gradient in this step, still has to meet the others, and does
        not have them: the ranks exchange them once.
        """
        if self._reductions is None:
            self._reductions = _shared_group_tuples(set(self._pgs.values())) if self._global else []
        return self._reductions

    def _reduced(self, grads: Sequence[Tensor], pgs: tuple[dist.ProcessGroup, ...]) -> Tensor:
        """Sum of the elements' powers over the ranks of ``pgs``; the largest element for the infinite norm."""
        infinite = math.isinf(self._norm_type)
        if grads:
            norms = torch.stack([torch.linalg.vector_norm(grad.float(), self._norm_type) for grad in grads])
            total = norms.max() if infinite else (norms**self._norm_type).sum()
        else:
            total = torch.zeros((), device=self._device(pgs[0]))
        for pg in pgs:
            dist.all_reduce(total, dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=pg)
        return total

    def _device(self, pg: dist.ProcessGroup) -> torch.device:
        """The device of all ranks' gradients: the ranks of a group with several backends must use the same one."""
        for param in self.params.values():
            if isinstance(param, Tensor):
                return param.device
        return group_device(pg)

    @torch.no_grad()
    def clip_grad_norm_(self) -> Tensor:
        """Scale all gradients so that their norm is at most ``max_gradient``; returns the norm before."""
        self._last, grads = self.compute_total_grad_norm()
        scale = (self._max_gradient / (self._last + 1e-6)).clamp(max=1.0)
        for grad in grads:
            values = _values(grad)
            values.mul_(scale.to(values.device))
        return self._last

    def _gradients(self) -> list[tuple[Tensor, Tensor]]:
        # Plain tensors only: the gradient of a ShardedTensor does not exist, its rows are updated in the backward.
        params = [param for param in self.params.values() if isinstance(param, Tensor)]
        found: list[tuple[Tensor, Tensor]] = []
        seen: set[int] = set()
        for param in params:
            # A gradient without elements here (a rank without a part of the parameter) has no infinite norm.
            if param.grad is not None and id(param) not in seen and _values(param.grad).numel():
                seen.add(id(param))
                found.append((param, param.grad))
        return found


def _values(grad: Tensor) -> Tensor:
    """The local elements: a DTensor's local part, or a sparse gradient's values with duplicate rows added."""
    local = grad.to_local() if isinstance(grad, DTensor) else grad
    if not local.is_sparse:
        return local
    if not local.is_coalesced():
        coalesced = local.coalesce()
        local.sparse_resize_and_clear_(local.shape, local.sparse_dim(), local.dense_dim())
        local.add_(coalesced)._coalesced_(True)
    return local._values()


def _shared_group_tuples(own: set[tuple[dist.ProcessGroup, ...]]) -> list[tuple[dist.ProcessGroup, ...]]:
    """The tuples of groups on any rank that this rank belongs to, sorted by the groups' names."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return sorted(own, key=_names)
    named: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(named, sorted(_names(pgs) for pgs in own))
    known = {_names(pgs): pgs for pgs in own}
    found = []
    for names in sorted({names for of_rank in named for names in of_rank}):
        pgs = known.get(names) or tuple(pg for pg in map(_group_named, names) if pg is not None)
        if len(pgs) == len(names) and pgs:
            found.append(pgs)
    return found


def _names(pgs: Sequence[dist.ProcessGroup]) -> tuple[str, ...]:
    return tuple(pg.group_name for pg in pgs)


def _group_named(name: str) -> dist.ProcessGroup | None:
    """The group of that name; None if this rank is not a member."""
    resolve: Any = dist.distributed_c10d._resolve_process_group
    try:
        return resolve(name)
    except (LookupError, RuntimeError):
        return None
