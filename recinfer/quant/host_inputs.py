"""How ids on the host reach the device that looks them up: through page-locked memory, in one copy, on a stream of its own.

Shape suffixes: F keys, B batch, N ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HostInputs", "Room", "Staging"]


class Room(NamedTuple):
    """How many of each a lookup's inputs may be: ``F x B + 1`` offsets, N ids, and N weights where there are any."""

    offsets: int
    ids: int
    weighted: bool

    @property
    def ids_at(self) -> int:
        """The 8-byte word at which ids begin; even, as the weights', since Triton compiles anew for another alignment."""
        return self.offsets + self.offsets % 2

    @property
    def weights_at(self) -> int:
        """The same of the weights, two to a word."""
        return self.ids_at + self.ids + self.ids % 2

    @property
    def words(self) -> int:
        """Of all three."""
        return self.weights_at + (-(-self.ids // 2) if self.weighted else 0)


class HostInputs:
    """Room for the inputs of lookups, page-locked on the host and on the device. For one thread at a time.

    Both are int64 words: offsets, then ids, then float32 weights.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self.host = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.near = torch.empty(words, dtype=torch.int64, device=device)

    def put(self, room: Room, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """Write inputs on the host, no more than ``room`` says. The last copy to the device has to be over."""
        to_ids, to_offsets, to_weights = _views(self.host, room)
        to_offsets.copy_(offsets)
        to_ids[: ids.numel()].copy_(ids)
        if to_weights is not None and weights is not None:
            to_weights[: ids.numel()].copy_(weights)

    def copy(self, room: Room) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights on the device, copied on the current stream; the host does not wait."""
        self.near[: room.words].copy_(self.host[: room.words], non_blocking=True)
        return _views(self.near, room)


def _views(words: Tensor, room: Room) -> tuple[Tensor, Tensor, Tensor | None]:
    weights = words[room.weights_at : room.words].view(torch.float32)[: room.ids] if room.weighted else None
    return words[room.ids_at : room.ids_at + room.ids], words[: room.offsets], weights


class Staging:
    """Brings one thread's inputs to a device, whatever their size; the memory grows with the largest.

    The copy runs on a stream of its own, so that it overlaps with what earlier requests compute. Events keep the order: a
    lookup waits for the copy of its inputs, a copy waits for the lookup that reads the memory it overwrites.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = HostInputs(0, device)
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None
        self._read: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None

    def bring(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights on the device, in order with the current stream; they are good until the next call."""
        room = Room(offsets.numel(), ids.numel(), weights is not None)
        stream, copied, read = self._stream, self._copied, self._read
        if copied is not None:
            copied.synchronize()  # the host's memory is read; long over, unless requests follow one another unanswered
        if room.words > self._inputs.near.numel():
            if read is not None:
                read.synchronize()  # the memory that goes now is not read any more
            self._inputs = HostInputs(1 << room.words.bit_length(), self._device)
            if (
                stream is not None
            ):  # whose copies must not meet what the allocator's last owner of the memory still does
                stream.wait_stream(torch.cuda.current_stream(self._device))
        self._inputs.put(room, ids, offsets, weights)
        if stream is None or copied is None or read is None:
            return self._inputs.copy(room)
        with torch.cuda.stream(stream):
            stream.wait_event(read)
            found = self._inputs.copy(room)
            copied.record(stream)
        torch.cuda.current_stream(self._device).wait_event(copied)
        return found

    def looked_up(self) -> None:
        """Say that the lookup of what :meth:`bring` gave is on the current stream."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))
