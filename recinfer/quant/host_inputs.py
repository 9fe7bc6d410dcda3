"""Copies ids from the host to the device that looks them up: from page-locked memory, in one copy, on a separate stream.

Shape suffixes: F keys, B batch, N ids.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HostInputs", "InputSizes", "Staging"]


class InputSizes(NamedTuple):
    """The largest numbers of a lookup's inputs: ``F x B + 1`` offsets, N ids, and N weights if there are any."""

    offsets: int
    ids: int
    weighted: bool

    @property
    def ids_at(self) -> int:
        """The 8-byte word at which ids begin."""
        return self.offsets

    @property
    def weights_at(self) -> int:
        """The 8-byte word at which weights begin; two weights share a word."""
        return self.ids_at + self.ids

    @property
    def words(self) -> int:
        """The words of all three."""
        return self.weights_at + (-(-self.ids // 2) if self.weighted else 0)


class HostInputs:
    """Memory for the inputs of lookups, page-locked on the host and on the device. For one thread at a time.

    Both are int64 words: offsets, then ids, then float32 weights.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # later lookups may write it outside of that mode
            self.host_words = torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda")
            self.device_words = torch.empty(words, dtype=torch.int64, device=device)

    def put(self, sizes: InputSizes, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> None:
        """Write inputs on the host, no more than ``sizes``. The last copy to the device has to be over."""
        to_ids, to_offsets, to_weights = _views(self.host_words, sizes)
        to_offsets.copy_(offsets)
        to_ids[: ids.numel()].copy_(ids)
        if to_weights is not None and weights is not None:
            to_weights[: ids.numel()].copy_(weights)

    def copy(self, sizes: InputSizes) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights on the device, copied on the current stream; the host does not wait."""
        self.device_words[: sizes.words].copy_(self.host_words[: sizes.words], non_blocking=True)
        return _views(self.device_words, sizes)


def _views(words: Tensor, sizes: InputSizes) -> tuple[Tensor, Tensor, Tensor | None]:
    weights = words[sizes.weights_at : sizes.words].view(torch.float32)[: sizes.ids] if sizes.weighted else None
    return words[sizes.ids_at : sizes.ids_at + sizes.ids], words[: sizes.offsets], weights


class Staging:
    """Brings one thread's inputs to a device, whatever their size; the memory grows with the largest.

    The copy runs on a stream of its own, so that it overlaps with what earlier requests compute. Events keep the order: a
    lookup waits for the copy of its inputs, a copy waits for the lookup that reads the memory it overwrites.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inputs = HostInputs(0, device)
        on_gpu = device.type == "cuda"
        # torch gives out 32 streams of a priority in turn. Graphs are recorded on those of priority 0 while other threads copy, and a
        # copy on the same stream would become a part of the graph.
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        self._copied: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None
        self._read: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None

    def to_device(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Ids, offsets and weights on the device, in order with the current stream; they are good until the next call."""
        sizes = InputSizes(offsets.numel(), ids.numel(), weights is not None)
        stream, copied, read = self._stream, self._copied, self._read
        if copied is not None:
            copied.synchronize()  # the last copy has read the host's memory; seldom waits
        if sizes.words > self._inputs.device_words.numel():
            if read is not None:
                read.synchronize()  # no lookup reads the old memory any more
            self._inputs = HostInputs(1 << sizes.words.bit_length(), self._device)
            # The allocator may have taken the memory from a tensor that the current stream still uses.
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(self._device))
        self._inputs.put(sizes, ids, offsets, weights)
        if stream is None or copied is None or read is None:
            return self._inputs.copy(sizes)
        with torch.cuda.stream(stream):
            stream.wait_event(read)
            found = self._inputs.copy(sizes)
            copied.record(stream)
        torch.cuda.current_stream(self._device).wait_event(copied)
        return found

    def record_lookup(self) -> None:
        """Record that the lookup of the last inputs is on the current stream; :meth:`to_device` waits for it before it overwrites them."""
        if self._read is not None:
            self._read.record(torch.cuda.current_stream(self._device))
