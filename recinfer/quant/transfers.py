"""Copies of tensors between the host and a GPU that keep the host waiting as little as possible.

torch's allocators of page-locked and of GPU memory keep what is freed, and give page-locked memory out again only when the copies that
read it are over. A call here therefore allocates nothing after the first few, and its tensors may be dropped at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["to_device", "to_host"]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``, ready where the current stream is; the host does not wait for a copy to a GPU."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # From memory that is not page-locked the copy would wait for all that is on the stream.
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``tensors`` on the CPU. What is on one GPU is copied to page-locked memory, and the host waits once for all of it."""
    found = list(tensors)
    there = [number for number, tensor in enumerate(found) if tensor.device.type == "cuda"]
    if not there:
        return found
    device = found[there[0]].device
    with torch.cuda.device(device):
        for number in there:
            tensor = found[number]
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found[number] = copy.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(device))
    copied.synchronize()
    return found
