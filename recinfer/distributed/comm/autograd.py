"""The autograd functions of collectives: each collective is split into a start and a wait, so that computation runs in
between.

:class:`Start` starts a collective and :class:`Wait` gives its result; in the backward the wait starts the inverse
collective and the start returns its result, so communication overlaps with the computation of other gradients.
:mod:`recinfer.distributed.comm.blocks` packs and unpacks the tensors. TorchRec has a pair of classes for each
collective; here they are the same two functions under those names.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from recinfer.distributed.comm.blocks import Exchange, exchange_of
from recinfer.distributed.comm.transport import Pending
from recinfer.distributed.types import Awaitable, QuantizedCommCodecs

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
    "Start",
    "Variable_Batch_All2All_Pooled_Req",
    "Variable_Batch_All2All_Pooled_Wait",
    "Wait",
    "get_gradient_division",
    "set_gradient_division",
]

W = TypeVar("W")

_gradient_division = True


def get_gradient_division() -> bool:
    """Whether the backward of a collective divides gradients by the number of ranks (default True)."""
    return _gradient_division


def set_gradient_division(val: bool) -> None:
    """Choose whether the backward of a collective divides gradients by the number of ranks.

    With division, a table has the gradient of the mean of the ranks' losses, as in DistributedDataParallel; without
    division, of their sum.
    """
    global _gradient_division
    _gradient_division = val


def _divide(flat: Tensor, world_size: int) -> Tensor:
    """Divide ``flat`` in place by the number of ranks if :func:`get_gradient_division` is set."""
    if not _gradient_division:
        return flat
    if world_size & (world_size - 1):
        return flat.div_(world_size)
    return flat.mul_(1.0 / world_size)  # exact for a power of two, in half the time


class Request(Awaitable[W]):
    """A pending collective of a process group; ``wait()`` returns its result and may be called once.

    Args:
        pg: the process group.
        device: device of the tensors.

    Attributes:
        wait_function: the :class:`Wait` that gives the result.
        dummy_tensor: connects start and wait in the autograd graph.
    """

    def __init__(self, pg: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self.pg = pg
        self.wait_function: type[Function] | None = None
        self.dummy_tensor = torch.empty(1, device=device)
        self.codecs: QuantizedCommCodecs | None = None
        self.exchange: Exchange | None = None
        self.pending: Pending | None = None
        self.pending_grad: Pending | None = None

    def _wait_impl(self) -> W:
        assert self.wait_function is not None and self.pending is not None, (
            "wait() of a collective may be called only once"
        )
        return self.wait_function.apply(self.pg, self, self.dummy_tensor)  # type: ignore[attr-defined]


class Start(Function):
    """Starts a collective; its backward returns the gradients whose exchange its wait started."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, info: Any, *inputs: Tensor) -> Tensor:  # type: ignore[override]
        """Start the collective of ``info``, whose class decides it. An argument per input, as autograd ignores lists."""
        ctx.myreq = myreq
        myreq.codecs = info.codecs
        myreq.exchange = exchange_of(pg, info)
        codec = info.codecs.forward if info.codecs is not None else None
        myreq.pending = myreq.exchange.transports[0](myreq.exchange.pack(inputs), codec)
        return myreq.dummy_tensor

    @staticmethod
    def backward(ctx: Any, *unused: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradients from the exchange that the wait started."""
        myreq = ctx.myreq
        assert myreq.pending_grad is not None, "the backward of the wait did not run before the backward of its start"
        flat = myreq.pending_grad.wait()
        myreq.pending_grad = None
        return (None, None, None, *myreq.exchange.unpack_grads(_divide(flat, myreq.pg.size())))


class Wait(Function):
    """Returns the result of a request; its backward starts the inverse collective."""

    @staticmethod
    def forward(ctx: Any, pg: dist.ProcessGroup, myreq: Request, *dummy_tensor: Tensor) -> Any:  # type: ignore[override]
        """The result."""
        assert myreq.exchange is not None and myreq.pending is not None
        ctx.myreq = myreq
        flat = myreq.pending.wait()
        myreq.pending = None
        return myreq.exchange.unpack(flat)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, Tensor]:  # type: ignore[override]
        """Start the exchange of gradients; the backward of the start returns them."""
        myreq = ctx.myreq
        codec = myreq.codecs.backward if myreq.codecs is not None else None
        myreq.pending_grad = myreq.exchange.transports[1](myreq.exchange.pack_grads(grad_outputs), codec)
        return None, None, torch.empty_like(myreq.dummy_tensor)


def _named(function: Callable[..., Any], parameters: str) -> Any:
    """The static method ``function`` with ``parameters`` as the names in its signature."""

    def named(*args: Any) -> Any:
        return function(*args)

    kinds = {True: Parameter.VAR_POSITIONAL, False: Parameter.POSITIONAL_OR_KEYWORD}
    given = [Parameter(name.lstrip("*"), kinds[name.startswith("*")]) for name in parameters.split()]
    named.__doc__, named.__signature__ = function.__doc__, Signature(given)  # type: ignore[attr-defined]
    return staticmethod(named)


def _pair(names: str) -> tuple[type[Start], type[Wait]]:
    """Start and wait of one collective under TorchRec's names: start, its info and inputs; wait, its gradient."""
    first, info, inputs, last, grad = names.split()
    starts = {
        "__doc__": f"Starts a collective; {last} returns its result, and the backward the gradients of its inputs.",
        "forward": _named(Start.forward, f"ctx pg myreq {info} {inputs}"),
        "backward": _named(Start.backward, "ctx *unused"),
    }
    waits = {
        "__doc__": f"Returns the result of {first}; its backward starts the inverse collective.",
        "forward": _named(Wait.forward, "ctx pg myreq *dummy_tensor"),
        "backward": _named(Wait.backward, f"ctx {grad}"),
    }
    make: Any = type(Function)
    return make(first, (Start,), starts), make(last, (Wait,), waits)


All2All_Pooled_Req, All2All_Pooled_Wait = _pair(
    "All2All_Pooled_Req a2ai input_embeddings All2All_Pooled_Wait grad_output"
)
All2All_Seq_Req, All2All_Seq_Req_Wait = _pair(
    "All2All_Seq_Req a2ai sharded_input_embeddings All2All_Seq_Req_Wait sharded_grad_output"
)
All2Allv_Req, All2Allv_Wait = _pair("All2Allv_Req a2ai *inputs All2Allv_Wait *grad_outputs")
AllGatherBase_Req, AllGatherBase_Wait = _pair("AllGatherBase_Req agi input AllGatherBase_Wait grad_outputs")
ReduceScatter_Req, ReduceScatter_Wait = _pair("ReduceScatter_Req rsi *inputs ReduceScatter_Wait grad_output")
ReduceScatterBase_Req, ReduceScatterBase_Wait = _pair(
    "ReduceScatterBase_Req rsi inputs ReduceScatterBase_Wait grad_output"
)
ReduceScatterV_Req, ReduceScatterV_Wait = _pair("ReduceScatterV_Req rsi input ReduceScatterV_Wait grad_output")
Variable_Batch_All2All_Pooled_Req, Variable_Batch_All2All_Pooled_Wait = _pair(
    "Variable_Batch_All2All_Pooled_Req a2ai input_embeddings Variable_Batch_All2All_Pooled_Wait grad_output"
)
