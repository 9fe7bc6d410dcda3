"""The pipeline that also brings the rows of the next batch into the caches of tables in host memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext
from recinfer.distributed.train_pipeline.forwards import PrefetchPipelinedForward
from recinfer.distributed.train_pipeline.pipelines import In, Out, TrainPipelineSparseDist

__all__ = ["PrefetchTrainPipelineSparseDist"]


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Four stages: as :class:`TrainPipelineSparseDist`, and the rows of the next batch are brought into the caches.

    Worth it for tables of the kernel ``fused_uvm_caching``; with none the extra stage does nothing.
    """

    _forward_type = PrefetchPipelinedForward
    _depth = 3
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

    def _new_context(self) -> TrainPipelineContext:
        return PrefetchTrainPipelineContext()

    def _stage_stream(self) -> torch.cuda.Stream | None:
        return self._prefetch_stream

    def _prefetch(self) -> None:
        """Wait for the ids of the coming batch and bring their rows in."""
        context = self._context
        forward_stream = torch.cuda.current_stream(self._device) if self._on_gpu else None
        with torch.cuda.stream(self._prefetch_stream):
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

    def _fill(self, dataloader_iter: Iterator[In]) -> None:
        super()._fill(dataloader_iter)
        # Ids that arrived and are not prefetched: of a first batch, also where the loader raised after it.
        if self._context.input_dist_tensors_requests:
            self._prefetch()

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """Train (or, in eval mode, run) one batch."""
        output = super().progress(dataloader_iter)
        if self._batches:
            self._prefetch()  # after the update, so that the cache takes in rows as they now are
        return output

    def _forget(self) -> None:
        super()._forget()
        self._context.module_input_post_prefetch.clear()
        self._context.module_contexts_post_prefetch.clear()
