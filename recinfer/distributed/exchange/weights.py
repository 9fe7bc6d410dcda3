"""Exchange of per-id weights with gradients: weights go to the ranks of the ids' rows, gradients come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer.distributed.comm.autograd import get_gradient_division
from recinfer.distributed.comm.collectives import alltoall_sequence
from recinfer.distributed.comm.transport import start_all_to_all

__all__ = ["WeightRoute", "send_weights"]


@dataclass(frozen=True)
class WeightRoute:
    """Sizes and order of one exchange of ids.

    Attributes:
        pg: the ranks.
        input_splits: ids that this rank sent to each rank.
        output_splits: ids that this rank received from each rank.
        recat: permutation of received pieces from (rank, feature) to (feature, rank); None when they were in order.
        lengths: ids of each (feature, rank, example) received.
    """

    pg: dist.ProcessGroup
    input_splits: list[int]
    output_splits: list[int]
    recat: Tensor | None
    lengths: Tensor

    @classmethod
    def of(cls, awaitable: Any, lengths: Tensor, pg: dist.ProcessGroup) -> WeightRoute:
        """The route that the tensors of ``awaitable``, a KJTAllToAllTensorsAwaitable, took."""
        return cls(pg, awaitable.input_splits["values"], awaitable.output_splits["values"], awaitable.recat, lengths)

    def back_order(self) -> Tensor | None:
        """The inverse of ``recat``."""
        return None if self.recat is None else torch.argsort(self.recat).to(torch.int32)

    @property
    def single_lengths(self) -> bool:
        """Whether ``recat`` permutes single lengths instead of pieces of a whole batch."""
        return self.recat is not None and self.recat.numel() == self.lengths.numel()


def send_weights(sent: Tensor, route: WeightRoute, received: Tensor | None = None) -> Tensor:
    """Send the weights to the ranks of their ids' rows; gradients flow back to ``sent``.

    The weights get the gradient of this rank's own loss, which, unlike the tables' gradients, is not divided by the
    number of ranks.

    Args:
        sent: float ``[ids sent]``, in the order sent.
        route: the route of the ids.
        received: the weights that were received with the ids; None to send them now.

    Returns:
        float ``[ids received]``, in the order of the ids.
    """
    out: Tensor = _SendWeights.apply(sent, route, received)
    return out


class _SendWeights(torch.autograd.Function):
    """Forward: sends weights to the ranks of their ids' rows. Backward: sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, route: WeightRoute, received: Tensor | None) -> Tensor:
        ctx.route = route
        return _exchange(sent, route) if received is None else received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        route: WeightRoute = ctx.route
        with torch.no_grad():
            home = alltoall_sequence(
                grad.contiguous().view(-1, 1),
                route.back_order(),
                route.recat,
                route.lengths,
                route.input_splits,
                route.output_splits,
                variable_batch_size=route.single_lengths,
                group=route.pg,
            ).wait()
        factor = route.pg.size() if get_gradient_division() else 1
        return home.view(-1) * factor, None, None


def _exchange(sent: Tensor, route: WeightRoute) -> Tensor:
    arrived = start_all_to_all(route.pg, sent.contiguous(), route.input_splits, route.output_splits).wait()
    if route.recat is None or not route.lengths.numel():
        return arrived
    back = route.back_order()
    assert back is not None
    pieces = route.lengths.view(-1) if route.single_lengths else route.lengths.view(route.recat.numel(), -1)
    permute = (
        torch.ops.fbgemm.permute_1D_sparse_data if route.single_lengths else torch.ops.fbgemm.permute_2D_sparse_data
    )
    _, ordered, _ = permute(route.recat, pieces.index_select(0, back.long()), arrived, None, arrived.numel())
    return ordered
