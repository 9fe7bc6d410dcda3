"""Runs the Triton kernel behind the interface of ``TableBatch``."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from recinfer import env
from recinfer.errors import InputError, UnavailableError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.buffers import Buffers, Placed
from recinfer.quant.cuda_graphs import GraphedLookups
from recinfer.quant.host_inputs import Staging
from recinfer.quant.triton_lookup import Read, TritonTables

__all__ = ["TritonBatch"]


class _Own(threading.local):
    """The state of one thread for copies to a GPU."""

    staging: Staging | None = None


class TritonBatch:
    """One launch over packed tables of any precision and width; see :class:`recinfer.quant.tbe.TableBatch`.

    It differs in that columns have no padding, unpooled tables may have several widths, and ids may come from the host: a
    GPU then gets them in one copy, and small pooled lookups are CUDA graphs unless ``RECINFER_CUDA_GRAPHS`` is 0 or a table is
    in ``"cached"`` memory. Such tables have an empty cache at first, copies and pickles too.

    Ids out of range give zeros. The kernel counts them, and the count is looked at when it is there, at a later call, so
    that no call waits for the device.

    Args:
        means: as of :func:`recinfer.quant.kernels.table_batch`; all other arguments as of ``TableBatch``.

    Attributes:
        averages: ``means`` is heeded.
        counts_ids: a lookup of ids on the device needs no check before it.
        graphs: the recorded lookups of ids from the host; None: all are launched.
    """

    knows_rows = False
    averages = True
    counts_ids = True
    real_columns: Tensor | None = None

    def __init__(
        self,
        reads: Sequence[Placed],
        pooling: PoolingType,
        buffers: Buffers,
        *,
        output_dtype: torch.dtype = torch.float32,
        means: Sequence[bool] = (),
    ) -> None:
        self.reads, self.tables = tuple(reads), tuple(dict.fromkeys(reads))
        self.pooling, self.storage, self.output_dtype, self.weights = pooling, buffers, output_dtype, buffers.near
        self._means = tuple(means) or (False,) * len(self.reads)
        local = [
            Read(placed, key, PoolingType.MEAN if mean else pooling)
            for key, (placed, mean) in enumerate(zip(self.reads, self._means, strict=True))
        ]
        self._lookup = TritonTables(local, buffers, output_dtype=output_dtype)
        self.widths = [placed.rect.cols for placed in self.reads]
        self.total_dim = self._lookup.total_dim
        self._bad, self._seen = self._lookup.new_counter(), [0] * len(self.reads)
        # A recorded lookup would not take its turn at the cache.
        graphed = self._lookup.pooled and self._lookup.cache is None and env.cuda_graphs()
        self.graphs = self._new_graphs() if graphed else None
        self._own, self._lock = _Own(), threading.Lock()
        # The counts on the host, and the event of their copy; None: no copy is running.
        self._sent_counts: tuple[Tensor, torch.cuda.Event | None] | None = None

    def _new_graphs(self) -> GraphedLookups:
        lookup, bad = (
            self._lookup,
            self._bad,
        )  # not self: in a circle, tables would stay on the GPU until it is collected

        def run(ids: Tensor, offsets: Tensor, weights: Tensor | None, batch: int, out: Tensor) -> None:
            lookup(ids, offsets, weights, batch=batch, bad=bad, out=out)

        rows = min(read.rect.rows for read in self.reads)
        return GraphedLookups(run, len(self.reads), self.total_dim, self.output_dtype, rows, self.weights.device)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are built anew over their rows: addresses, and what a thread has under way, are not theirs."""
        again = partial(TritonBatch, output_dtype=self.output_dtype, means=self._means)
        return again, (self.reads, self.pooling, self.storage)

    def forward(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up pooled tables like ``TableBatch.forward``: ``[B, columns]``. The call never waits for a GPU.

        Raises:
            InputError: an earlier call had ids out of range; names tables and counts.
        """
        self._raise_if_counted()
        batch = (offsets.numel() - 1) // len(self.reads)
        device = self.weights.device
        with torch.cuda.device_of(self.weights):
            if indices.device == device:
                edges = offsets.to(device)
                weights = None if per_sample_weights is None else per_sample_weights.to(device)
                out = self._lookup(indices, edges, weights, batch=batch, bad=self._bad)
                self._send_counts()
            else:
                out = self._of_host(indices, offsets, per_sample_weights, batch)
        return out

    __call__ = forward
    traced = forward

    def rows_per_read(
        self, indices: Tensor, offsets: Tensor, edges: Sequence[int], *, traced: bool = False
    ) -> list[Tensor]:
        """Look up rows like ``TableBatch.rows_per_read``, in one launch for all widths. The call never waits for a GPU.

        Raises:
            InputError: as of :meth:`forward`.
        """
        self._raise_if_counted()
        batch = (offsets.numel() - 1) // len(self.reads)
        with torch.cuda.device_of(self.weights):
            if indices.device == self.weights.device:
                bags = offsets.to(indices.device)
                found = self._lookup.rows(indices, bags, batch=batch, bad=self._bad, edges=edges)
                self._send_counts()
                return found
            staging = self._staging()
            ids, bags, _ = staging.to_device(indices, offsets, None)
            found = self._lookup.rows(ids, bags, batch=batch, bad=self._bad, edges=edges)
            staging.record_lookup()
        return found

    def _staging(self) -> Staging:
        """The staging memory of this thread."""
        own = self._own
        if own.staging is None:
            own.staging = Staging(self.weights.device)
        return own.staging

    def _of_host(self, indices: Tensor, offsets: Tensor, weights: Tensor | None, batch: int) -> Tensor:
        """Look up inputs on the host, whose ids the caller has checked."""
        if self.graphs is not None:
            found = self.graphs(indices, offsets, weights, batch)
            if found is not None:
                return found
        staging = self._staging()
        ids, edges, near = staging.to_device(indices, offsets, weights)
        out = self._lookup(ids, edges, near, batch=batch, bad=self._bad)
        staging.record_lookup()
        return out

    def _send_counts(self) -> None:
        """Send the counts to the host, behind the lookup."""
        counts = torch.empty(self._bad.shape, dtype=self._bad.dtype, pin_memory=self._bad.is_cuda)
        counts.copy_(self._bad, non_blocking=True)
        copied = None
        if self._bad.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self._sent_counts = counts, copied

    def _raise_if_counted(self) -> None:
        sent = self._sent_counts
        if sent is None or not (sent[1] is None or sent[1].query()):
            return
        counts = self._since_last(sent[0].tolist())
        if any(counts):
            worst = [
                f"{count} of table {read.rect.table!r} (rows 0 to {read.rect.rows - 1})"
                for read, count in zip(self.reads, counts)
                if count
            ]
            raise InputError(
                f"an earlier lookup had ids out of range, and got zeros for them: {', '.join(worst)}. To have the lookup "
                "itself refused and the id named, give ids on the host"
            )

    def _since_last(self, counts: list[int]) -> list[int]:
        """The counts since they were last read."""
        with self._lock:
            self._sent_counts = None
            new = [max(0, now - before) for now, before in zip(counts, self._seen)]
            self._seen = [max(now, before) for now, before in zip(counts, self._seen)]
        return new

    def out_of_range(self) -> list[int]:
        """How many ids each read has skipped since the counts were last looked at. Waits for the device."""
        return self._since_last(self._bad.tolist())

    def without_padding(self, out_BD: Tensor) -> Tensor:
        """Returns ``out_BD``, which has no padding."""
        return out_BD

    def forget_cached(self) -> None:
        """Empty the cache after rows of ``"cached"`` tables were written other than by :meth:`Buffers.write`."""
        if self._lookup.cache is not None:
            self._lookup.cache.forget()

    def fbgemm_module(self) -> NoReturn:
        """Raises UnavailableError: Triton has no TBE module."""
        raise UnavailableError("the Triton kernel has no TBE module; set RECINFER_KERNEL=fbgemm")
