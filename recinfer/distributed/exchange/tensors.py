"""The second step of exchanging a KeyedJaggedTensor: all its tensors as one buffer of bytes, after sizes were
exchanged.

Shapes: ``W`` ranks, ``F`` features of this rank's tables, ``B`` examples of a rank. Received data is ordered by (rank,
feature, example), a KeyedJaggedTensor by (feature, rank, example).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul

import torch
import torch.distributed as dist
from torch import Tensor

from recinfer import fbgemm  # noqa: F401  registers the ops
from recinfer.distributed.comm.transport import Pending, start_all_to_all
from recinfer.distributed.types import Awaitable
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.sparse.offsets import gather_segments, segment_sums

__all__ = ["KJTAllToAllTensorsAwaitable", "pack"]


class KJTAllToAllTensorsAwaitable(Awaitable[KeyedJaggedTensor]):
    """The second step: sends the tensors, all in one buffer.

    Args:
        pg: the process group.
        input: the KeyedJaggedTensor that is sent.
        splits: number of its keys for each rank.
        input_splits: for each label, the number of its tensor's entries for each rank.
        output_splits: for each label, the number of entries from each rank.
        input_tensors: the tensors, one per label.
        labels: names of the tensors: ``lengths``, ``values``, ``strides`` (batch size of each key), ``weights``.
        keys: the keys that this rank receives.
        device: device of the result.
        stagger: number of hosts by which the examples of a feature are interleaved.
        stride_per_rank: batch size of each rank; None when each key has a separate one.
        packed: the buffer of ``input_tensors`` that :func:`pack` returns, if the caller made it already.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: list[int],
        input_splits: list[list[int]],
        output_splits: list[list[int]],
        input_tensors: list[Tensor],
        labels: list[str],
        keys: list[str],
        device: torch.device,
        stagger: int,
        stride_per_rank: list[int] | None,
        packed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._world_size = pg.size()
        self._input = input
        self._keys = keys
        self._stagger = stagger
        self._dtypes = [tensor.dtype for tensor in input_tensors]
        self._labels = labels
        self._input_splits = input_splits
        self._output_splits = output_splits
        self._stride_per_rank = stride_per_rank
        self._recat: Tensor | None = None
        if self._world_size > 1:
            self._pending: Pending | None = self._start(
                pg, pack(input_tensors, input_splits) if packed is None else packed
            )
            if stride_per_rank is not None:
                strides = [stride for stride in stride_per_rank for _ in keys]
                self._recat = _recat(strides, len(keys), stagger, device)

    @property
    def input_splits(self) -> dict[str, list[int]]:
        """Label -> entries that go to each rank."""
        return dict(zip(self._labels, self._input_splits))

    @property
    def output_splits(self) -> dict[str, list[int]]:
        """Label -> entries that come from each rank."""
        return dict(zip(self._labels, self._output_splits))

    @property
    def stride_per_rank(self) -> list[int] | None:
        """Batch size of each rank; None when each key has its own."""
        return self._stride_per_rank

    @property
    def recat(self) -> Tensor | None:
        """int32: position of each received piece; None when they are in order.

        A piece is the lengths of a (rank, key) when all batch sizes are the same, else a single length. With a batch
        size per key, the positions are known after the wait.
        """
        return self._recat

    def _start(self, pg: dist.ProcessGroup, sent: Tensor) -> Pending:
        widths = [dtype.itemsize for dtype in self._dtypes]
        self._sizes = [[count * width for count, width in zip(of, widths)] for of in zip(*self._output_splits)]
        send = [sum(map(mul, of_rank, widths)) for of_rank in zip(*self._input_splits)]
        return start_all_to_all(pg, sent, send, [sum(of_rank) for of_rank in self._sizes])

    def _wait_impl(self) -> KeyedJaggedTensor:
        if self._world_size == 1:
            return self._input
        assert self._pending is not None
        sections = self._pending.wait().split([size for of_rank in self._sizes for size in of_rank])
        self._pending = None  # frees the memory before this awaitable ends
        step = len(self._labels)
        return self._arrange({label: sections[at::step] for at, label in enumerate(self._labels)})

    def _joined(self, parts: Sequence[Tensor], label: str) -> Tensor:
        """Bytes of pieces as one tensor; a copy, so that it is aligned."""
        return torch.cat(list(parts)).view(self._dtypes[self._labels.index(label)])

    def _arrange(self, sections: dict[str, Sequence[Tensor]]) -> KeyedJaggedTensor:
        """From (rank, key, example) to (key, rank, example); sections are bytes, one per rank."""
        num_keys, world_size = len(self._keys), self._world_size
        lengths = self._joined(sections["lengths"], "lengths")
        strides_FW: list[list[int]] | None = None
        if self._stride_per_rank is not None:
            strides = [stride for stride in self._stride_per_rank for _ in range(num_keys)]
        else:
            strides = self._joined(sections["strides"], "strides").tolist()
            self._recat = _recat(strides, num_keys, self._stagger, lengths.device)
            ordered = [strides[piece] for piece in _piece_order(num_keys, world_size, self._stagger)]
            strides_FW = [ordered[at : at + world_size] for at in range(0, len(ordered), world_size)]
        moved: list[str] = [label for label in ("values", "weights") if label in sections]
        tensors: dict[str, Tensor] = {}
        if self._recat is None or not lengths.numel():
            tensors = {label: self._joined(sections[label], label) for label in moved}
        elif lengths.is_cuda:
            lengths, tensors = self._permuted_on_device(lengths, sections, moved)
        else:
            order = _piece_order(num_keys, world_size, self._stagger)
            counts = segment_sums(lengths, strides)
            lengths = gather_segments(lengths, strides, order)
            for label in moved:
                width = self._dtypes[self._labels.index(label)].itemsize
                sizes = [count * width for count in counts]
                pieces = [
                    piece
                    for rank, section in enumerate(sections[label])
                    for piece in section.split(sizes[rank * num_keys : (rank + 1) * num_keys])
                ]
                tensors[label] = self._joined([pieces[at] for at in order], label)
        return KeyedJaggedTensor.from_parts_unchecked(
            self._keys,
            tensors["values"],
            lengths,
            weights=tensors.get("weights"),
            stride=None if self._stride_per_rank is None else sum(self._stride_per_rank),
            stride_per_key_per_rank=strides_FW,
        )

    def _permuted_on_device(
        self, lengths: Tensor, sections: dict[str, Sequence[Tensor]], moved: list[str]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Permute the pieces with FBGEMM's kernels, which read the sizes on the device, so that the host does not
        wait."""
        assert self._recat is not None
        tensors = [self._joined(sections[label], label) for label in moved]
        one_a_length = self._recat.numel() == lengths.numel()
        permute = torch.ops.fbgemm.permute_1D_sparse_data if one_a_length else torch.ops.fbgemm.permute_2D_sparse_data
        lengths, values, weights = permute(
            self._recat,
            lengths if one_a_length else lengths.view(self._recat.numel(), -1),
            tensors[0],
            tensors[1] if len(tensors) > 1 else None,
            tensors[0].numel(),
        )
        return lengths.view(-1), dict(zip(moved, (values, weights)))


def pack(tensors: list[Tensor], splits: list[list[int]]) -> Tensor:
    """All tensors as one buffer of bytes, by rank: ``splits[t][r]`` entries of each tensor ``t`` for rank ``r``."""
    pieces = [
        tensor.reshape(-1).view(torch.uint8).split([count * tensor.element_size() for count in counts])
        for tensor, counts in zip(tensors, splits)
    ]
    return torch.cat([piece for of_rank in zip(*pieces) for piece in of_rank])


def _rank_order(world_size: int, stagger: int) -> list[int]:
    """Ranks host by host, or with ``stagger`` hosts the first rank of each host, then the second of each."""
    step = world_size // stagger
    return [first + step * host for first in range(step) for host in range(stagger)]


@lru_cache(maxsize=256)
def _piece_order(num_keys: int, world_size: int, stagger: int) -> list[int]:
    """Index of the (rank, key) piece at each (key, rank) position."""
    order = _rank_order(world_size, stagger)
    return [rank * num_keys + key for key in range(num_keys) for rank in order]


def _recat(strides: list[int], num_keys: int, stagger: int, device: torch.device) -> Tensor | None:
    """:attr:`KJTAllToAllTensorsAwaitable.recat` for the batch sizes of all (rank, key) pieces; None when in order."""
    if num_keys == 0 or (num_keys == 1 and stagger == 1):
        return None
    world_size = len(strides) // num_keys
    if len(set(strides)) == 1:
        return _recat_of_pieces(num_keys, world_size, stagger, device)
    starts = list(accumulate(strides, initial=0))
    order = _piece_order(num_keys, world_size, stagger)
    sizes = torch.tensor([strides[piece] for piece in order])
    shift = torch.tensor([starts[piece] for piece in order]) - (sizes.cumsum(0) - sizes)
    recat = torch.arange(starts[-1]) + torch.repeat_interleave(shift, sizes)
    return recat.to(device=device, dtype=torch.int32)


@lru_cache(maxsize=256)
def _recat_of_pieces(num_keys: int, world_size: int, stagger: int, device: torch.device) -> Tensor:
    return torch.tensor(_piece_order(num_keys, world_size, stagger), dtype=torch.int32, device=device)
