"""Small lookups as CUDA graphs: the copy of the inputs and the kernel are recorded once, and a request replays both with one call.

The first lookup records graphs for all powers of two up to 256 samples; a load replays a stored request, so that this happens there
and not in a client's request. Every graph is replayed once on other inputs and compared with the launched lookup before it is used.
On CPU there is nothing to record: a replay launches, which is how the tests run this module.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recinfer.quant.host_inputs import HostInputs, InputSizes

__all__ = ["Bucket", "GraphedLookups", "Run", "buckets_for", "padded_offsets"]

_MOST_BATCH, _MOST_IDS = 256, 1 << 14  # beyond, launching costs little compared with the lookup
_LEAST_IDS, _NEXT = 64, 8  # ids of the smallest bucket, and the factor between neighbours

_log = logging.getLogger(__name__)

Run = Callable[[Tensor, Tensor, "Tensor | None", int, Tensor], object]
"""Looks up (ids, offsets, weights, batch) on the device into the last argument, ``[batch, columns]``."""

_recording = threading.Lock()  # torch records one graph at a time in a process
# Graphs whose recording failed. torch's allocators may go on to ask such a graph whether a stream is being recorded, so it must
# not be freed; and as they may take it for unfinished, nothing more is recorded in this process.
_failed: list[torch.cuda.CUDAGraph] = []


class Bucket(NamedTuple):
    """The sizes that a recorded lookup has room for."""

    batch: int
    ids: int
    weighted: bool


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def buckets_for(keys: int, weighted: bool) -> list[Bucket]:
    """For each power of two of samples: room for two ids of each of ``keys`` a sample, for 16, and so on."""
    found = []
    for batch in (1 << n for n in range(_MOST_BATCH.bit_length())):
        ids = max(_LEAST_IDS, _power_of_two(2 * batch * keys))
        while ids < _MOST_IDS:
            found.append(Bucket(batch, ids, weighted))
            ids *= _NEXT
        found.append(Bucket(batch, _MOST_IDS, weighted))
    return found


def padded_offsets(offsets: Tensor, keys: int, batch: int, padded: int) -> Tensor:
    """Offsets ``[keys x padded + 1]`` of the same bags, each key's followed by empty ones; ``offsets`` is
    ``[keys x batch + 1]`` on the host."""
    if batch == padded:
        return offsets
    starts = offsets[:-1].view(keys, batch)
    ends = offsets[batch::batch].view(keys, 1).expand(keys, padded - batch)
    return torch.cat([torch.cat([starts, ends], dim=1).reshape(-1), offsets[-1:]])


def _trial(bucket: Bucket, keys: int, rows: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids below ``rows``, offsets and weights of a lookup that a bucket has room for: about three ids a bag."""
    bags = keys * bucket.batch
    ids = min(bucket.ids, 3 * bags + 1)
    places = torch.arange(ids)
    weights = (1 + places % 5).float() / 4 if bucket.weighted else None
    return places * 7919 % rows, torch.arange(bags + 1) * ids // bags, weights


class _Recorded:
    """One bucket's memory, and its graph where the device has graphs. Any thread may call; calls take turns."""

    def __init__(
        self, run: Run, bucket: Bucket, keys: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bucket, self.keys = bucket, keys
        self._sizes = InputSizes(keys * bucket.batch + 1, bucket.ids, bucket.weighted)
        self._inputs = HostInputs(self._sizes.words, device)
        self._out = torch.empty(bucket.batch, columns, dtype=dtype, device=device)
        self._run, self._device, self._lock = run, device, threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._read: torch.cuda.Event | None = torch.cuda.Event() if device.type == "cuda" else None

    def record(self, rows: int) -> None:
        """Record, and compare a replay with a launch on ids below ``rows``.

        Raises:
            RuntimeError: the device refused, or the replay gave other bits.
        """
        trial = _trial(self.bucket, self.keys, rows)
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        if stream is not None:
            # The allocator may have taken this memory from a tensor that the current stream still uses.
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            self._inputs.put(self._sizes, *trial)
            self._once()  # compiles the kernel, which a recording cannot
            launched = self._out.clone()
            if stream is not None:
                stream.synchronize()
                self._inputs.host_words.zero_()  # so that a replay has to read the memory anew
                self._graph = _graph_of(self._once)
            self._inputs.device_words.zero_()
            self._out.fill_(math.nan)
            self._inputs.put(self._sizes, *trial)
            self._replay()
            same = torch.equal(self._out.view(torch.uint8), launched.view(torch.uint8))  # waits for the stream
        if not same:
            raise RuntimeError("a replay gave other vectors than the launched lookup")

    def _once(self) -> None:
        ids, offsets, weights = self._inputs.copy(self._sizes)
        self._run(ids, offsets, weights, self.bucket.batch, self._out)

    def _replay(self) -> None:
        if self._graph is None:
            self._once()
        else:
            self._graph.replay()

    def takes(self, batch: int, ids: int, weighted: bool) -> bool:
        """Whether it is for ``batch`` samples, rounded up, and has room for the ids."""
        return batch == self.bucket.batch and ids <= self.bucket.ids and weighted == self.bucket.weighted

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
        offsets = padded_offsets(offsets, self.keys, batch, self.bucket.batch)
        with self._lock:
            if self._read is None:
                self._inputs.put(self._sizes, ids, offsets, weights)
                self._replay()
                return self._out[:batch].clone()
            stream = torch.cuda.current_stream(self._device)
            self._read.synchronize()  # the host's memory is read
            self._inputs.put(self._sizes, ids, offsets, weights)
            stream.wait_event(self._read)
            self._replay()
            found = self._out[:batch].clone()  # the next replay overwrites the bucket's
            self._read.record(stream)
        return found


def _graph_of(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``run`` on the current stream as a graph. It may allocate nothing.

    ``torch.cuda.graph`` would wait for the whole device and give back all cached memory first, and leave this thread on its stream
    after an error.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        graph.capture_begin(capture_error_mode="thread_local")  # other threads go on meanwhile
        try:
            run()
        finally:
            graph.capture_end()
    except BaseException:
        _failed.append(graph)
        raise
    return graph


class GraphedLookups:
    """The recorded lookups of one operator call, for all threads.

    Args:
        run: looks up.
        keys, columns, dtype: F, the output's columns, and their type.
        rows: of the smallest table.
        device: of the tables.
    """

    def __init__(self, run: Run, keys: int, columns: int, dtype: torch.dtype, rows: int, device: torch.device) -> None:
        self._keys, self._rows = keys, rows
        self._make = lambda bucket: _Recorded(run, bucket, keys, columns, dtype, device)
        self._recorded: list[_Recorded] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._recorded or ())

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor | None:
        """``[batch, columns]`` of inputs on the host; None where there is no graph for them and the caller looks up itself:
        no samples, large lookups, and all where recording failed."""
        if batch == 0:
            return None
        if self._recorded is None:
            with self._lock:
                if self._recorded is None:
                    self._recorded = self._record(buckets_for(self._keys, weights is not None))
        size = _power_of_two(batch)
        for recorded in self._recorded:
            if recorded.takes(size, ids.numel(), weights is not None):
                return recorded(ids, offsets, weights, batch)
        return None

    def _record(self, buckets: list[Bucket]) -> list[_Recorded]:
        """Graphs of all buckets, in their order; none where one of them failed."""
        found: list[_Recorded] = []
        with _recording, torch.inference_mode(False):  # later lookups may write its memory outside of that mode
            if _failed:
                return []
            for bucket in buckets:
                try:
                    recorded = self._make(bucket)
                    recorded.record(self._rows)
                except Exception as error:  # the lookup itself works without
                    _log.warning("lookups run without CUDA graphs: %s: %s: %s", bucket, type(error).__name__, error)
                    return []
                found.append(recorded)
        return found
