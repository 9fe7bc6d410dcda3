"""The autograd functions of comm_ops: each collective is split into a request and a wait, so that computation runs in
between.

``<Name>_Req`` starts the collective and ``<Name>_Wait`` gives its result; in the backward the wait starts the inverse
collective and the request returns its result, so communication overlaps with the computation of other gradients.
:mod:`recinfer.distributed.comm.blocks` packs and unpacks the tensors.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from recinfer.distributed.comm.blocks import (
    Exchange,
    GatherExchange,
    PooledExchange,
    ReduceExchange,
    ReduceListExchange,
    ReduceRowsExchange,
    SequenceExchange,
    TablesExchange,
    VariableBatchExchange,
)
from recinfer.distributed.comm.shapes import (
    All2AllPooledInfo,
    All2AllSequenceInfo,
    All2AllVInfo,
    AllGatherBaseInfo,
    ReduceScatterBaseInfo,
    ReduceScatterInfo,
    ReduceScatterVInfo,
    VariableBatchAll2AllPooledInfo,
)
from recinfer.distributed.comm.transport import Pending
from recinfer.distributed.types import Awaitable

__all__ = [
    "All2All_Pooled_Req",
    "All2All_Pooled_Wait",
    "All2All_Seq_Req",
    "All2All_Seq_Req_Wait",
    "All2Allv_Req",
    "All2Allv_Wait",
    "AllGatherBase_Req",
    "AllGatherBase_Wait",
    "ReduceScatterBase_Req",
    "ReduceScatterBase_Wait",
    "ReduceScatterV_Req",
    "ReduceScatterV_Wait",
    "ReduceScatter_Req",
    "ReduceScatter_Wait",
    "Request",
    "Variable_Batch_All2All_Pooled_Req",
    "Variable_Batch_All2All_Pooled_Wait",
]

W = TypeVar("W")


class Request(Awaitable[W]):
    """A pending collective of a process group; ``wait()`` returns its result and may be called once.

    Args:
        pg: the process group.
        device: device of the tensors.

    Attributes:
        wait_function: the ``_Waiting`` function that gives the result.
        dummy_tensor: connects request and wait in the autograd graph.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.pg = pg
        self.wait_function: type[Function] | None = None
        self.dummy_tensor = torch.empty(1, device=device)
        self.exchange: Exchange | None = None
        self.pending: Pending | None = None
        self.pending_grad: Pending | None = None

    def _wait_impl(self) -> W:
        assert self.wait_function is not None and self.pending is not None, (
            "wait() of a collective may be called only once"
        )
        return self.wait_function.apply(self.pg, self, self.dummy_tensor)  # type: ignore[attr-defined]


def _request(ctx: Any, myreq: Request, exchange: Exchange, inputs: tuple[Tensor, ...]) -> Tensor:
    ctx.myreq = myreq
    ctx.num_inputs = len(inputs)
    myreq.exchange = exchange
    myreq.pending = exchange.send(inputs)
    return myreq.dummy_tensor


def _request_grad(ctx: Any) -> tuple[Tensor | None, ...]:
    myreq = ctx.myreq
    assert myreq.pending_grad is not None, "the backward of the wait did not run before the backward of its request"
    flat = myreq.pending_grad.wait()
    myreq.pending_grad = None
    return (None, None, None, *myreq.exchange.receive_grad(myreq.exchange.divide(flat)))


def _wait(ctx: Any, myreq: Request) -> Any:
    assert myreq.exchange is not None and myreq.pending is not None
    ctx.myreq = myreq
    flat = myreq.pending.wait()
    myreq.pending = None
    return myreq.exchange.receive(flat)


def _wait_grad(ctx: Any, grads: tuple[Tensor, ...]) -> tuple[None, None, Tensor]:
    myreq = ctx.myreq
    myreq.pending_grad = myreq.exchange.send_grad(grads)
    return None, None, torch.empty_like(myreq.dummy_tensor)


class _Starting(Function):
    """Starts a collective; its backward returns the gradients whose exchange its wait started."""

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients from the exchange that the wait started."""
        return _request_grad(ctx)


class _Waiting(Function):
    """Returns the result of a request; its backward starts the inverse collective."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, *dummy_tensor: Tensor) -> Any:  # type: ignore[override]
        """The result."""
        return _wait(ctx, myreq)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        """Start the exchange of gradients; the backward of the request returns them."""
        return _wait_grad(ctx, (grad_output,))


class All2All_Pooled_Req(_Starting):
    """Starts the all-to-all of pooled embeddings; its backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, pg: dist.ProcessGroup, myreq: Request, a2ai: All2AllPooledInfo, input_embeddings: Tensor
    ) -> Tensor:  # type: ignore[override]
        """Start it; :class:`All2All_Pooled_Wait` returns the result."""
        return _request(ctx, myreq, PooledExchange(pg, a2ai), (input_embeddings,))


class All2All_Pooled_Wait(_Waiting):
    """Returns the result of :class:`All2All_Pooled_Req`; its backward starts the inverse collective."""


class Variable_Batch_All2All_Pooled_Req(_Starting):
    """Starts the all-to-all of pooled embeddings of a variable batch; its backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, pg: dist.ProcessGroup, myreq: Request, a2ai: VariableBatchAll2AllPooledInfo, input_embeddings: Tensor
    ) -> Tensor:  # type: ignore[override]
        """Start it; :class:`Variable_Batch_All2All_Pooled_Wait` returns the result."""
        return _request(ctx, myreq, VariableBatchExchange(pg, a2ai), (input_embeddings,))


class Variable_Batch_All2All_Pooled_Wait(_Waiting):
    """Returns the result of :class:`Variable_Batch_All2All_Pooled_Req`; its backward starts the inverse collective."""


class All2All_Seq_Req(_Starting):
    """Starts the all-to-all of sequence embeddings; its backward returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any, pg: dist.ProcessGroup, myreq: Request, a2ai: All2AllSequenceInfo, sharded_input_embeddings: Tensor
    ) -> Tensor:  # type: ignore[override]
        """Start it; :class:`All2All_Seq_Req_Wait` returns the result."""
        return _request(ctx, myreq, SequenceExchange(pg, a2ai), (sharded_input_embeddings,))


class All2All_Seq_Req_Wait(_Waiting):
    """Returns the result of :class:`All2All_Seq_Req`; its backward starts the inverse collective."""

    @staticmethod
    def backward(ctx: Any, sharded_grad_output: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        """Start the exchange of gradients; the backward of :class:`All2All_Seq_Req` returns them."""
        return _wait_grad(ctx, (sharded_grad_output,))


class All2Allv_Req(_Starting):
    """Starts the all-to-all of a list of tables' embeddings; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, a2ai: All2AllVInfo, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Start the exchange of ``inputs``, an argument per table because autograd ignores lists."""
        return _request(ctx, myreq, TablesExchange(pg, a2ai), inputs)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients from the exchange that :class:`All2Allv_Wait` started."""
        return _request_grad(ctx)


class All2Allv_Wait(_Waiting):
    """Returns the result of :class:`All2Allv_Req`; its backward starts the inverse collective."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        """Start the exchange of gradients; the backward of :class:`All2Allv_Req` returns them."""
        return _wait_grad(ctx, grad_outputs)


class ReduceScatter_Req(_Starting):
    """Starts the reduce-scatter of a list of partial sums; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, rsi: ReduceScatterInfo, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Start it; :class:`ReduceScatter_Wait` returns the result."""
        return _request(ctx, myreq, ReduceListExchange(pg, rsi), inputs)


class ReduceScatter_Wait(_Waiting):
    """Returns the result of :class:`ReduceScatter_Req`; its backward starts the inverse collective."""


class ReduceScatterBase_Req(_Starting):
    """Starts the reduce-scatter of partial sums; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, rsi: ReduceScatterBaseInfo, inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Start it; :class:`ReduceScatterBase_Wait` returns the result."""
        return _request(ctx, myreq, ReduceExchange(pg, rsi), (inputs,))


class ReduceScatterBase_Wait(_Waiting):
    """Returns the result of :class:`ReduceScatterBase_Req`; its backward starts the inverse collective."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, *dummy_Tensor: Tensor) -> Tensor:  # type: ignore[override]
        """The result."""
        return _wait(ctx, myreq)


class AllGatherBase_Req(_Starting):
    """Starts the all-gather of rows; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, agi: AllGatherBaseInfo, input: Tensor) -> Tensor:  # type: ignore[override]
        """Start it; :class:`AllGatherBase_Wait` returns the result."""
        return _request(ctx, myreq, GatherExchange(pg, agi), (input,))


class AllGatherBase_Wait(_Waiting):
    """Returns the result of :class:`AllGatherBase_Req`; its backward starts the inverse collective."""

    @staticmethod
    def backward(ctx: Any, grad_outputs: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        """Start the exchange of gradients; the backward of :class:`AllGatherBase_Req` returns them."""
        return _wait_grad(ctx, (grad_outputs,))


class ReduceScatterV_Req(_Starting):
    """Starts the reduce-scatter of partial sums with rows for each rank; its backward returns their gradients."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, rsi: ReduceScatterVInfo, input: Tensor) -> Tensor:  # type: ignore[override]
        """Start it; :class:`ReduceScatterV_Wait` returns the result."""
        return _request(ctx, myreq, ReduceRowsExchange(pg, rsi), (input,))


class ReduceScatterV_Wait(_Waiting):
    """Returns the result of :class:`ReduceScatterV_Req`; its backward starts the inverse collective."""
