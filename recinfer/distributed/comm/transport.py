"""Asynchronous collectives on flat buffers with one block per rank, optionally compressed by a codec.

Every function starts a collective and returns :class:`Pending`; its ``wait()`` returns the received numbers as float32
or in the dtype that was sent. Blocks are given as numbers of elements, block ``r`` for (or from) rank ``r`` of the
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from recinfer.distributed.types import NoOpQuantizedCommCodec, QuantizedCommCodec
from recinfer.errors import UnavailableError
from recinfer.group_device import has_nccl

__all__ = ["Pending", "start_all_gather", "start_all_to_all", "start_reduce_scatter"]


class Pending:
    """A pending collective.

    Args:
        work: the work handle of torch.distributed.
        buffer: the receive buffer.
        sent: the tensors that are sent; kept alive until the collective is done.
        finish: applied to the received buffer.
    """

    def __init__(
        self, work: Any, buffer: Tensor, sent: Tensor, finish: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._work = work
        self._buffer = buffer
        self._sent: Tensor | None = sent
        self._finish = finish

    def wait(self) -> Tensor:
        """The received data. On CUDA the current stream waits, not the host.

        Raises:
            UnavailableError: other ranks did not take part in time, or have ended.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise UnavailableError(
                f"an exchange between ranks failed on rank {dist.get_rank()}: {str(error).strip().splitlines()[0]}. If no "
                "other rank shows an error, ranks ran unequal numbers of batches: give each rank the same number (drop the "
                "last ones, or pad), or end the loop on all ranks together"
            ) from error
        buffer, sent = self._buffer, self._sent
        if buffer.is_cuda and sent is not None:
            # The buffers may have been allocated on another stream, which would reuse their memory too early.
            stream = torch.cuda.current_stream(buffer.device)
            buffer.record_stream(stream)
            sent.record_stream(stream)
        self._sent = None
        return buffer if self._finish is None else self._finish(buffer)


class _Wire:
    """Wire format of float32 blocks: unchanged, or encoded with each block padded to whole rows of the codec."""

    def __init__(self, codec: QuantizedCommCodec | None) -> None:
        self._codec = None if codec is None or isinstance(codec, NoOpQuantizedCommCodec) else codec
        self._context = None if self._codec is None else self._codec.create_context()
        # A row-wise codec (int8) keeps one scale per row; a block that ends within a row is padded to its end.
        self._row = int(getattr(self._context, "row_dim", 1) or 1)

    @property
    def encodes(self) -> bool:
        return self._codec is not None

    def size(self, block: int) -> int:
        """Elements on the wire of a block of ``block`` elements."""
        if self._codec is None:
            return block
        return int(self._codec.calc_quantized_size(self._padded(block), self._context))

    def _padded(self, block: int) -> int:
        return -(-block // self._row) * self._row

    def encode(self, flat: Tensor, blocks: Sequence[int]) -> Tensor:
        if self._codec is None:
            return flat
        if any(block % self._row for block in blocks):
            parts = flat.split(list(blocks))
            flat = torch.cat([F.pad(part, (0, -part.numel() % self._row)) for part in parts])
        return self._codec.encode(flat.float(), self._context).view(-1)

    def decode(self, wire: Tensor, blocks: Sequence[int]) -> Tensor:
        if self._codec is None:
            return wire
        flat = self._codec.decode(wire, self._context).view(-1)
        if any(block % self._row for block in blocks):
            parts = flat.split([self._padded(block) for block in blocks])
            flat = torch.cat([part[:block] for part, block in zip(parts, blocks)])
        return flat

    def finish(
        self, blocks: Sequence[int], then: Callable[[Tensor], Tensor] | None = None
    ) -> Callable[[Tensor], Tensor] | None:
        """The ``finish`` of :class:`Pending`: decode the received buffer, then apply ``then``."""
        if self._codec is None:
            return then
        if then is None:
            return lambda wire: self.decode(wire, blocks)
        return lambda wire: then(self.decode(wire, blocks))


def _is_nccl(pg: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Whether NCCL transfers ``tensor``; gloo supports GPU tensors too."""
    return tensor.is_cuda and has_nccl(pg)


def start_all_to_all(
    pg: dist.ProcessGroup,
    flat: Tensor,
    send: Sequence[int],
    receive: Sequence[int],
    codec: QuantizedCommCodec | None = None,
    then: Callable[[Tensor], Tensor] | None = None,
) -> Pending:
    """Block ``r`` of ``flat`` (1-D, contiguous) goes to rank ``r``; the received blocks are concatenated by rank.

    Args:
        send: elements of each block of ``flat``.
        receive: elements that each rank sends to this one.
        codec: compresses the data that is sent.
        then: applied to what was received, in ``wait()``.
    """
    wire = _Wire(codec)
    sent = wire.encode(flat, send)
    sizes = [wire.size(n) for n in receive] if wire.encodes else list(receive)
    buffer = torch.empty(sum(sizes), dtype=sent.dtype, device=sent.device)
    work = dist.all_to_all_single(
        buffer,
        sent,
        output_split_sizes=sizes,
        input_split_sizes=[wire.size(n) for n in send] if wire.encodes else list(send),
        group=pg,
        async_op=True,
    )
    return Pending(work, buffer, sent, wire.finish(receive, then))


def start_all_gather(
    pg: dist.ProcessGroup, flat: Tensor, sizes: Sequence[int], codec: QuantizedCommCodec | None = None
) -> Pending:
    """Every rank gets ``flat`` (1-D, contiguous, ``sizes[this rank]`` elements) of every rank, concatenated."""
    wire = _Wire(codec)
    sent = wire.encode(flat, [flat.numel()])
    wire_sizes = [wire.size(n) for n in sizes]
    buffer = torch.empty(sum(wire_sizes), dtype=sent.dtype, device=sent.device)
    if len(set(sizes)) == 1:
        work = dist.all_gather_single(buffer, sent, group=pg, async_op=True)
    elif _is_nccl(pg, sent):
        # An all-to-all that sends the same block to every rank needs no copy and no padding.
        work = dist.all_to_all(list(buffer.split(wire_sizes)), [sent] * len(wire_sizes), group=pg, async_op=True)
    else:
        # gloo takes unequal sizes in one tensor only.
        ranks = len(wire_sizes)
        sent = sent.repeat(ranks)
        work = dist.all_to_all_single(
            buffer, sent, wire_sizes, [wire_sizes[pg.rank()]] * ranks, group=pg, async_op=True
        )
    return Pending(work, buffer, sent, wire.finish(sizes))


def start_reduce_scatter(
    pg: dist.ProcessGroup, flat: Tensor, sizes: Sequence[int], codec: QuantizedCommCodec | None = None
) -> Pending:
    """Rank ``r`` gets the sum over ranks of block ``r`` of ``flat`` (1-D, contiguous).

    Without a codec NCCL's own operation runs. Otherwise blocks are exchanged by all-to-all, which transfers the same
    bytes, and summed here: gloo's reduce-scatter is slower, and encoded numbers would lose precision with every partial
    sum (int8 cannot be added at all).
    """
    mine = sizes[pg.rank()]
    if not _Wire(codec).encodes and _is_nccl(pg, flat):
        buffer = torch.empty(mine, dtype=flat.dtype, device=flat.device)
        if len(set(sizes)) == 1:
            work = dist.reduce_scatter_single(buffer, flat, group=pg, async_op=True)
        else:
            work = dist.reduce_scatter(buffer, list(flat.split(list(sizes))), group=pg, async_op=True)
        return Pending(work, buffer, flat)
    return start_all_to_all(pg, flat, sizes, [mine] * len(sizes), codec, lambda got: _sum_blocks(got, len(sizes)))


def _sum_blocks(flat: Tensor, num_blocks: int) -> Tensor:
    blocks = flat.view(num_blocks, -1)
    if flat.is_cuda or flat.dtype != torch.float32:
        return blocks.sum(0)  # a single kernel, which adds half precision in float32
    total = blocks[0]
    for block in blocks[1:]:
        total.add_(block)
    return total
