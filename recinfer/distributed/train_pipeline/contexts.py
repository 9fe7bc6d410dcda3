"""Contexts of training pipelines: pending exchanges and contexts of the sharded modules; the stream of a stage."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from recinfer.distributed.exchange.kjt_lists import FusedKJTListSplitsAwaitable
from recinfer.distributed.types import Awaitable, Multistreamable

__all__ = ["PrefetchTrainPipelineContext", "TrainPipelineContext", "on_stream"]


@dataclass
class TrainPipelineContext:
    """State of :class:`~recinfer.distributed.train_pipeline.TrainPipelineSparseDist`; keys are module paths.

    Attributes:
        input_dist_splits_requests: exchanges of sizes that have started, for the next batch.
        input_dist_tensors_requests: exchanges of ids that have started.
        module_contexts: contexts of the batch whose ids are being exchanged or have arrived.
        module_contexts_next_batch: contexts of the batch whose sizes are being exchanged.
        fused_splits_awaitables: one exchange of sizes for several modules, with the modules' paths.
    """

    input_dist_splits_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    input_dist_tensors_requests: dict[str, Awaitable[Any]] = field(default_factory=dict)
    module_contexts: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_next_batch: dict[str, Multistreamable] = field(default_factory=dict)
    fused_splits_awaitables: list[tuple[list[str], FusedKJTListSplitsAwaitable]] = field(default_factory=list)


@dataclass
class PrefetchTrainPipelineContext(TrainPipelineContext):
    """State of :class:`~recinfer.distributed.train_pipeline.PrefetchTrainPipelineSparseDist`.

    Attributes:
        module_input_post_prefetch: ids whose rows are in the caches.
        module_contexts_post_prefetch: their contexts.
    """

    module_input_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)
    module_contexts_post_prefetch: dict[str, Multistreamable] = field(default_factory=dict)


def on_stream(stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
    """``torch.cuda.stream(stream)``. None has no effect and skips torch's search for devices, which takes 3 % of a step
    on CPU."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)
