"""Small lookups as CUDA graphs: copy of the inputs and kernel are recorded once a size, and a request replays them.

Sizes are rounded up to buckets, whose memory is fixed: the bags that a bucket has too many are empty. On CPU a bucket runs
what it would record, which is how the tests see it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recinfer.quant.host_inputs import HostInputs, InputSizes

__all__ = ["Bucket", "GraphedLookups", "Run", "bucket_of", "padded_offsets"]

_MOST_BATCH, _MOST_IDS = 256, 1 << 14  # beyond, launching costs little compared with the lookup
_LEAST_IDS = 64
_MOST_GRAPHS = 24  # of one thread

_log = logging.getLogger(__name__)

Run = Callable[[Tensor, Tensor, "Tensor | None", int, Tensor], object]
"""Looks up (ids, offsets, weights, batch) on the device into the last argument, ``[batch, columns]``."""


class Bucket(NamedTuple):
    """The sizes that a recorded lookup can take."""

    batch: int
    ids: int
    weighted: bool


def bucket_of(batch: int, ids: int, weighted: bool) -> Bucket | None:
    """The smallest bucket that a lookup fits in; None for an empty one and for one that is large."""
    if not 0 < batch <= _MOST_BATCH or ids > _MOST_IDS:
        return None
    return Bucket(1 << (batch - 1).bit_length(), max(_LEAST_IDS, 1 << max(0, ids - 1).bit_length()), weighted)


def padded_offsets(offsets: Tensor, keys: int, batch: int, padded: int) -> Tensor:
    """Offsets ``[keys x padded + 1]`` of the same bags, each key's followed by empty ones; ``offsets`` is
    ``[keys x batch + 1]`` on the host."""
    if batch == padded:
        return offsets
    starts = offsets[:-1].view(keys, batch)
    ends = offsets[batch::batch].view(keys, 1).expand(keys, padded - batch)
    return torch.cat([torch.cat([starts, ends], dim=1).reshape(-1), offsets[-1:]])


class _Recorded:
    """One bucket's memory, and its graph where the device has graphs."""

    def __init__(
        self, run: Run, bucket: Bucket, keys: int, columns: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.bucket, self.keys = bucket, keys
        self._sizes = InputSizes(keys * bucket.batch + 1, bucket.ids, bucket.weighted)
        self._inputs = HostInputs(self._sizes.words, device)
        self._out = torch.empty(bucket.batch, columns, dtype=dtype, device=device)
        self._run, self._device = run, device
        on_gpu = device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = self._recorded(device) if on_gpu else None
        self._read: torch.cuda.Event | None = torch.cuda.Event() if on_gpu else None

    def _once(self) -> None:
        ids, offsets, weights = self._inputs.copy(self._sizes)
        self._run(ids, offsets, weights, self.bucket.batch, self._out)

    def _recorded(self, device: torch.device) -> torch.cuda.CUDAGraph:
        self._inputs.host_words.zero_()  # empty bags
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self._once()  # compiles the kernel, which a recording cannot
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):  # other threads go on meanwhile
            self._once()
        return graph

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
        offsets = padded_offsets(offsets, self.keys, batch, self.bucket.batch)
        if self._graph is None or self._read is None:
            self._inputs.put(self._sizes, ids, offsets, weights)
            self._once()
            return self._out[:batch].clone()
        stream = torch.cuda.current_stream(self._device)
        self._read.synchronize()  # the host's memory is read
        self._inputs.put(self._sizes, ids, offsets, weights)
        stream.wait_event(self._read)
        self._graph.replay()
        found = self._out[:batch].clone()  # the next replay overwrites the bucket's
        self._read.record(stream)
        return found


class GraphedLookups:
    """The recorded lookups of one thread, by bucket.

    Args:
        run: looks up.
        keys, columns, dtype: F, the output's columns, and their type.
        device: of the tables.
    """

    def __init__(self, run: Run, keys: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self._make = lambda bucket: _Recorded(run, bucket, keys, columns, dtype, device)
        self._by_bucket: dict[Bucket, _Recorded] = {}
        self._refused = False

    def __len__(self) -> int:
        return len(self._by_bucket)

    def __call__(self, ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor | None:
        """``[batch, columns]`` of inputs on the host; None where there is no graph for them and the caller looks up itself:
        large lookups, sizes beyond the first few, and all once a recording has failed."""
        bucket = bucket_of(batch, ids.numel(), weights is not None)
        if bucket is None:
            return None
        recorded = self._by_bucket.get(bucket)
        if recorded is None:
            if self._refused or len(self._by_bucket) >= _MOST_GRAPHS:
                return None
            try:
                recorded = self._by_bucket[bucket] = self._make(bucket)
            except RuntimeError as error:
                self._refused = True
                _log.warning("lookups run without CUDA graphs: recording %s failed: %s", bucket, error)
                return None
        return recorded(ids, offsets, weights, batch)
