"""PrefetchTrainPipelineSparseDist: also prefetches rows of the next batch into the caches of tables in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext, on_stream
from recinfer.distributed.train_pipeline.forwards import PrefetchPipelinedForward
from recinfer.distributed.train_pipeline.pipelines import In, Out, TrainPipelineSparseDist
from recinfer.distributed.types import ShardedModule
from recinfer.errors import ConfigError

__all__ = ["PrefetchTrainPipelineSparseDist"]


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Four stages: those of :class:`TrainPipelineSparseDist`, and a prefetch of the next batch's rows into the caches.

    The prefetch runs between the forward and the backward of this batch, and overlaps with the backward: the caches
    must keep the rows of both batches, which needs the setting ``prefetch_pipeline``. Useful for tables with the kernel
    ``fused_uvm_caching``; without them the extra stage does nothing.

    Raises:
        ConfigError: at the first batch, for a model that cannot be traced, or a cache without ``prefetch_pipeline``.
    """

    _forward_type = PrefetchPipelinedForward
    _depth = 4
    _context: PrefetchTrainPipelineContext

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
    ) -> None:
        super().__init__(model, optimizer, device, execute_all_batches, apply_jit)
        self._prefetch_stream = self._stream()

    def attach(self) -> None:
        """Attach the pipeline (see :meth:`TrainPipelineSparseDist.attach`), and check the caches of the model."""
        super().attach()
        for module in self._pipelined:
            _check_caches(module)

    def detach(self) -> nn.Module:
        """Detach the pipeline (see :meth:`TrainPipelineSparseDist.detach`), and drop prefetched rows."""
        self._drop_prefetched()
        return super().detach()

    def _new_context(self) -> TrainPipelineContext:
        return PrefetchTrainPipelineContext()

    def _stage_stream(self) -> torch.cuda.Stream | None:
        return self._prefetch_stream

    def _prefetch(self) -> None:
        """Wait for the ids of the next batch and prefetch their rows."""
        context = self._context
        forward_stream = torch.cuda.current_stream(self._device) if self._on_gpu else None
        with on_stream(self._prefetch_stream):
            for module in self._pipelined:
                name = module.forward.name  # type: ignore[attr-defined]
                data = context.input_dist_tensors_requests.pop(name).wait()
                module_context = context.module_contexts.pop(name)
                if self._prefetch_stream is not None and self._data_dist_stream is not None:
                    self._prefetch_stream.wait_stream(self._data_dist_stream)
                    data.record_stream(self._prefetch_stream)
                module.prefetch(dist_input=data, forward_stream=forward_stream, ctx=module_context)
                context.module_input_post_prefetch[name] = data
                context.module_contexts_post_prefetch[name] = module_context

    # Between two calls of progress(), the first batch is prefetched and the sizes of the second are being exchanged.

    def _fill(self, dataloader_iter: Iterator[In]) -> None:
        super()._fill(dataloader_iter)
        context = self._context
        if self._batches and not context.module_input_post_prefetch:
            self._prefetch()
        # The second batch was started already, unless the pipeline was empty or its loader raised.
        if len(self._batches) > 1 and not (context.module_contexts_next_batch or context.module_contexts):
            self._start_sparse_data_dist(self._batches[1])

    def _before_forward(self) -> None:
        self._wait_sparse_data_dist()

    def _before_update(self) -> None:
        if len(self._batches) > 1:
            self._prefetch()
        if len(self._batches) > 2:
            self._start_sparse_data_dist(self._batches[2])

    def _forget(self) -> None:
        self._wait_sparse_data_dist()  # the other ranks have sent their sizes and wait for this rank's
        super()._forget()
        self._drop_prefetched()

    def _drop_prefetched(self) -> None:
        self._context.module_input_post_prefetch.clear()
        self._context.module_contexts_post_prefetch.clear()
        for module in self._pipelined:
            module.drop_prefetched()


def _check_caches(module: ShardedModule[Any, Any, Any, Any]) -> None:
    """Raise for a cache that may drop the rows of this batch before they are updated."""
    for lookup in getattr(module, "_lookups", []):
        for group in lookup.modules():
            if isinstance(group, TableGroup) and not group.keeps_prefetched:
                raise ConfigError(
                    "PrefetchTrainPipelineSparseDist prefetches before the rows of the previous batch are updated, "
                    f"and the cache of tables {[shape.name for shape in group.shapes]} may drop those; set "
                    "prefetch_pipeline=True in the sharder's fused_params, or in the tables' CacheParams"
                )
