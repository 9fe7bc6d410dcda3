"""Exchange of KeyedJaggedTensors between the ranks of a process group: every rank receives all examples of the features
whose tables it has.

Two collectives send a batch. The first exchanges sizes; the second sends lengths, values, weights and batch sizes as
one buffer of bytes, since on most networks another collective costs more than the copy.

Shapes: ``W`` ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recinfer.distributed.comm.transport import start_all_to_all
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable, pack
from recinfer.distributed.types import Awaitable
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

_DTYPES = (torch.int32, torch.int64, torch.float32, torch.float16, torch.bfloat16, torch.float64)
_MOST_LABELS = 4  # lengths, values, strides, weights

__all__ = [
    "KJTAllToAll",
    "KJTAllToAllSplitsAwaitable",
    "KJTSplitsAllToAllMeta",
    "SplitsAllToAllAwaitable",
    "check_forms",
    "form_of",
    "sizes_to_send",
]


def form_of(labels: Sequence[str], tensors: Sequence[Tensor]) -> int:
    """A rank's form of batch as a number: the dtypes of lengths, values and weights, and whether the batch is
    variable."""
    known = {label: 1 + _DTYPES.index(t.dtype) if t.dtype in _DTYPES else 0 for label, t in zip(labels, tensors)}
    form = int("strides" in known)
    for label in ("lengths", "values", "weights"):
        form = form * 16 + known.get(label, 15)
    return form


def check_forms(mine: int, of_ranks: Sequence[int], pg: dist.ProcessGroup) -> None:
    """Raise InputError, before a batch is read, if a rank sends another form of batch than this rank; all ranks then
    raise."""
    for rank, form in enumerate(of_ranks):
        if form != mine:
            raise InputError(
                f"rank {rank} sends {_form_text(form)}, this rank ({pg.rank()}) {_form_text(mine)}; expected one form on all "
                "ranks: give stride_per_key_per_rank on all or on none, and the same dtypes"
            )


def sizes_to_send(input: KeyedJaggedTensor, splits: list[list[int]], form: int, ranks: int) -> list[list[int]]:
    """The numbers that are sent before a batch: its form, its batch size, and the ``splits`` of each label. Every form
    has equally many numbers, so that ranks with different forms can report them."""
    numbers = [[form] * ranks, [input.stride()] * ranks, *splits]
    return numbers + [[0] * ranks] * (_MOST_LABELS - len(splits))


def _form_text(form: int) -> str:
    parts: list[str] = []
    for label in ("weights", "values", "lengths"):
        form, number = divmod(form, 16)
        name = "no" if number == 15 else str(_DTYPES[number - 1]).removeprefix("torch.") if number else "unknown"
        parts.insert(0, f"{name} {label}")
    return f"a {'variable' if form else 'fixed'} batch with {', '.join(parts)}"


class SplitsAllToAllAwaitable(Awaitable[list[list[int]]]):
    """Exchanges integers: every rank receives its entry of every other rank's tensors.

    Args:
        input_tensors: integers ``[W]`` each, entry ``r`` for rank ``r``.
        pg: the process group.

    ``wait()`` returns, for each of ``input_tensors``, the entries of all ranks for this one:
    ``[len(input_tensors)][W]``.
    """

    def __init__(self, input_tensors: list[Tensor], pg: dist.ProcessGroup) -> None:
        super().__init__()
        self._start(torch.stack(input_tensors, dim=1).contiguous(), pg)

    @classmethod
    def of_lists(cls, numbers: list[list[int]], pg: dist.ProcessGroup, device: torch.device) -> SplitsAllToAllAwaitable:
        """Start the exchange of ``numbers``, a list of ``W`` integers per tensor, which are copied to ``device``
        without waiting."""
        self = cls.__new__(cls)
        Awaitable.__init__(self)
        by_rank = torch.tensor(list(zip(*numbers)), dtype=torch.int64, pin_memory=device.type == "cuda")
        self._start(by_rank.to(device, non_blocking=True), pg)
        return self

    def _start(self, by_rank: Tensor, pg: dist.ProcessGroup) -> None:
        sizes = [by_rank.shape[1]] * pg.size()
        self._pending = start_all_to_all(pg, by_rank.view(-1), sizes, sizes, then=lambda got: got.view_as(by_rank))

    def _wait_impl(self) -> list[list[int]]:
        return [list(numbers) for numbers in zip(*self._pending.wait().tolist())]


@dataclass
class KJTSplitsAllToAllMeta:
    """An exchange of features that has not started, so that several exchanges can send their sizes together.

    Args:
        pg: the ranks.
        _input: the features.
        splits: keys for each rank.
        splits_tensors: the sizes to exchange: the form of the batch, which ranks compare, the batch size, one tensor per
            label, and zeros up to the same number for every form.
        input_splits: entries for each rank, of each tensor.
        input_tensors: the tensors to send.
        labels: names of the tensors.
        keys: keys that this rank will receive.
        device: device of the results.
        stagger: see KJTAllToAll.
        splits_cumsum: running sum of ``splits``, from 0.
    """

    pg: dist.ProcessGroup
    _input: KeyedJaggedTensor
    splits: list[int]
    splits_tensors: list[Tensor]
    input_splits: list[list[int]]
    input_tensors: list[Tensor]
    labels: list[str]
    keys: list[str]
    device: torch.device
    stagger: int
    splits_cumsum: list[int] = field(default_factory=list)


class KJTAllToAllSplitsAwaitable(Awaitable[KJTAllToAllTensorsAwaitable]):
    """The first step: the exchange of sizes. ``wait()`` starts the second.

    Args:
        tensor_splits: for each label, the number of its tensor's entries for each rank.

    The other arguments are those of :class:`KJTAllToAllTensorsAwaitable`.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: list[int],
        labels: list[str],
        tensor_splits: list[list[int]],
        input_tensors: list[Tensor],
        keys: list[str],
        device: torch.device,
        stagger: int,
    ) -> None:
        super().__init__()
        self._pg = pg
        self._input = input
        self._splits = splits
        self._labels = labels
        self._input_splits = tensor_splits
        self._input_tensors = input_tensors
        self._keys = keys
        self._device = device
        self._stagger = stagger
        self._one_batch_size = not input.variable_stride_per_key()
        if pg.size() == 1:
            return
        self._form = form_of(labels, input_tensors)
        numbers = sizes_to_send(input, tensor_splits, self._form, pg.size())
        self._splits_awaitable = SplitsAllToAllAwaitable.of_lists(numbers, pg, device)
        self._packed = pack(input_tensors, tensor_splits)  # overlaps with the exchange of sizes

    def _wait_impl(self) -> KJTAllToAllTensorsAwaitable:
        if self._pg.size() == 1:
            output_splits = self._input_splits
            strides: list[int] | None = [self._input.stride()] if self._one_batch_size else None
        else:
            forms, batch_sizes, *output_splits = self._splits_awaitable.wait()
            check_forms(self._form, forms, self._pg)
            output_splits = output_splits[: len(self._labels)]
            strides = batch_sizes if self._one_batch_size else None
        return KJTAllToAllTensorsAwaitable(
            pg=self._pg,
            input=self._input,
            splits=self._splits,
            input_splits=self._input_splits,
            output_splits=output_splits,
            input_tensors=self._input_tensors,
            labels=self._labels,
            keys=self._keys,
            device=self._device,
            stagger=self._stagger,
            stride_per_rank=strides,
            packed=None if self._pg.size() == 1 else self._packed,
        )


class KJTAllToAll(nn.Module):
    """Sends the features of every batch to the ranks that have their tables.

    Args:
        pg: the process group.
        splits: number of keys, in order, for each rank; the same on all ranks.
        stagger: number of hosts by which the examples of a feature are interleaved: with ``s`` hosts of ``l`` ranks,
            ranks come in the order 0, l, 2l, ..., 1, l + 1, ...

    ``forward(input).wait().wait()`` is the KeyedJaggedTensor of this rank's keys with the examples of rank 0, then rank
    1, and so on. All ranks need the same keys, dtypes, and weights or none; batch sizes may differ, also by key.

    Raises:
        InputError: not one split per rank, or the number of keys is not the sum of the splits.
    """

    def __init__(self, pg: dist.ProcessGroup, splits: list[int], stagger: int = 1) -> None:
        super().__init__()
        if len(splits) != pg.size():
            raise InputError(f"KJTAllToAll: got {len(splits)} splits; expected one for each of {pg.size()} ranks")
        self._pg = pg
        self._splits = splits
        self._stagger = stagger
        ends = list(accumulate(splits, initial=0))
        self._start = ends[pg.rank()]
        self._stop = ends[pg.rank() + 1]
        self._num_keys = ends[-1]

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[KJTAllToAllTensorsAwaitable]:
        """Start the first step; its ``wait()`` starts the second, whose ``wait()`` gives the KeyedJaggedTensor."""
        keys = input.keys()
        if len(keys) != self._num_keys:
            raise InputError(
                f"KJTAllToAll: got {len(keys)} keys {keys}; splits {self._splits} are for {self._num_keys} keys"
            )
        with torch.no_grad():
            return KJTAllToAllSplitsAwaitable(
                pg=self._pg,
                input=input,
                splits=self._splits,
                labels=input.dist_labels(),
                tensor_splits=input.dist_splits(self._splits),
                input_tensors=input.dist_tensors(),
                keys=keys[self._start : self._stop],
                device=input.device(),
                stagger=self._stagger,
            )

    @staticmethod
    def meta(
        pg: dist.ProcessGroup, splits: list[int], input: KeyedJaggedTensor, stagger: int = 1
    ) -> KJTSplitsAllToAllMeta:
        """The exchange of ``input``, not started, so that several exchanges can send their sizes together."""
        tensor_splits = input.dist_splits(splits)
        labels, tensors = input.dist_labels(), input.dist_tensors()
        numbers = sizes_to_send(input, tensor_splits, form_of(labels, tensors), pg.size())
        ends = list(accumulate(splits, initial=0))
        return KJTSplitsAllToAllMeta(
            pg=pg,
            _input=input,
            splits=splits,
            splits_tensors=[torch.tensor(row, device=input.device()) for row in numbers],
            input_splits=tensor_splits,
            input_tensors=tensors,
            labels=labels,
            keys=input.keys()[ends[pg.rank()] : ends[pg.rank() + 1]],
            device=input.device(),
            stagger=stagger,
            splits_cumsum=ends,
        )
