"""Copies of inputs and outputs between the devices of one process: from one device to all, and from all to one.

With all ranks in one process, copies to other devices replace collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recinfer.distributed.types import rank_device
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.errors import InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["EmbeddingsAllToOne", "EmbeddingsAllToOneReduce", "KJTOneToAll", "SeqEmbeddingsAllToOne", "sent_to"]


class KJTOneToAll(nn.Module):
    """Sends every device of this process the features of its tables.

    Args:
        splits: number of keys, in order, for each device.
        world_size: number of devices.
        device: its type determines the devices: ``cuda`` means ``cuda:0``, ``cuda:1`` and so on, ``cpu`` that all are
            the CPU. Default: CUDA where there is some, else CPU.

    Raises:
        InputError: not one split per device.
    """

    def __init__(self, splits: list[int], world_size: int, device: torch.device | None = None) -> None:
        super().__init__()
        if len(splits) != world_size:
            raise InputError(f"KJTOneToAll: got {len(splits)} splits; expected one for each of {world_size} devices")
        self._splits = splits
        kind = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        self._devices = [rank_device(kind, rank) if kind != "meta" else device for rank in range(world_size)]

    def forward(self, kjt: KeyedJaggedTensor) -> KJTList:
        """One KeyedJaggedTensor per device; on the device where ``kjt`` is, a view of it.

        Raises:
            InputError: the number of keys is not the sum of the splits.
        """
        return sent_to(kjt, self._splits, self._devices)


def sent_to(kjt: KeyedJaggedTensor, splits: list[int], devices: Sequence[torch.device | None]) -> KJTList:
    """The first ``splits[0]`` keys on the first device, and so on; keys for device None are not copied. The host waits
    for no copy to a GPU."""

    def sent(part: KeyedJaggedTensor, device: torch.device | None) -> KeyedJaggedTensor:
        if device is None or part.device() == device:
            return part
        if device.type == "cuda" and part.device().type == "cpu":
            part = part.pin_memory()  # a copy from pageable memory would make the host wait
        return part.to(device, non_blocking=True)

    return KJTList([sent(part, device) for part, device in zip(kjt.split(splits), devices)])


class SeqEmbeddingsAllToOne(nn.Module):
    """Brings the embeddings of all devices of this process to one of them.

    Args:
        device: the target.
        world_size: number of devices that send.
    """

    def __init__(self, device: torch.device, world_size: int) -> None:
        super().__init__()
        self._device = device
        self._world_size = world_size

    def set_device(self, device_str: str) -> None:
        """Change the target device."""
        self._device = torch.device(device_str)

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors on the device, in order.

        Raises:
            InputError: not one tensor per device.
        """
        return _copied_to(type(self).__name__, tensors, self._device, self._world_size)


class EmbeddingsAllToOne(nn.Module):
    """Brings the embeddings of all devices of this process to one of them, concatenated.

    Args:
        device: the target.
        world_size: number of devices that send.
        cat_dim: the dimension of the concatenation: 1 for pooled embeddings, 0 for rows of ids.
    """

    def __init__(self, device: torch.device, world_size: int, cat_dim: int) -> None:
        super().__init__()
        self._device = device
        self._world_size = world_size
        self._cat_dim = cat_dim

    def set_device(self, device_str: str) -> None:
        """Change the target device."""
        self._device = torch.device(device_str)

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The concatenated tensors, on the device."""
        return torch.cat(_copied_to(type(self).__name__, tensors, self._device, self._world_size), dim=self._cat_dim)


class EmbeddingsAllToOneReduce(nn.Module):
    """Brings the embeddings of all devices of this process to one of them, summed: each device has partial sums of all
    bags.

    Args:
        device: the target.
        world_size: number of devices that send.
        cat_dim: does nothing (:mod:`recinfer.ignored`): a sum concatenates nothing.
    """

    def __init__(self, device: torch.device, world_size: int, cat_dim: int = 0) -> None:
        super().__init__()
        self._device = device
        self._world_size = world_size

    def forward(self, tensors: list[Tensor]) -> Tensor:
        """The sum, on the device."""
        first, *rest = _copied_to(type(self).__name__, tensors, self._device, self._world_size)
        if not rest:
            return first
        total = first + rest[0]
        for tensor in rest[1:]:
            total += tensor
        return total


def _copied_to(what: str, tensors: Sequence[Tensor], device: torch.device, world_size: int) -> list[Tensor]:
    if len(tensors) != world_size:
        raise InputError(f"{what}: got {len(tensors)} tensors; expected one from each of {world_size} devices")
    # Between GPUs, torch orders the copy after the kernels that write the tensor and before the kernels that read it.
    return [tensor.to(device, non_blocking=True) for tensor in tensors]
