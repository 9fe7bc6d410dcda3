"""Replacements of the forward of sharded modules in a pipeline: they look up ids that were sent ahead."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from recinfer.distributed.exchange.kjt import KJTAllToAll, KJTSplitsAllToAllMeta
from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext, on_stream
from recinfer.distributed.train_pipeline.tracing import ArgInfo
from recinfer.distributed.types import ShardedModule
from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["BaseForward", "KJTAllToAllForward", "PipelinedForward", "PrefetchPipelinedForward"]


class BaseForward:
    """Base of replacements for the forward of ``module``.

    Args:
        name: path of the module in the model.
        args: positions of the module's arguments in a batch.
        module: the sharded module.
        context: context of the pipeline.
        stream: CUDA stream on which the ids are received; None without CUDA.
    """

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule,
        context: TrainPipelineContext,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._name = name
        self._args = args
        self._module = module
        self._context = context
        self._stream = stream

    @property
    def name(self) -> str:
        """Path of the module in the model."""
        return self._name

    @property
    def args(self) -> list[ArgInfo]:
        """Positions of the arguments in a batch."""
        return self._args

    def _of_batch(self, started: dict[str, Any]) -> Any:
        """Take what the pipeline has started for this module's batch.

        Raises:
            ConfigError: the pipeline has started nothing: the model was called directly.
        """
        if self._name not in started:
            raise ConfigError(
                f"module {self._name!r} belongs to a training pipeline, which sends its ids before the forward; run batches "
                "with progress(), or call the pipeline's detach() before the model is called directly"
            )
        return started.pop(self._name)

    def _use_on_current_stream(self, *used: Any) -> None:
        """Let the current stream wait for ``stream`` and keep ``used`` alive on it."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for thing in used:
            thing.record_stream(current)


class PipelinedForward(BaseForward):
    """Waits for the ids of the current batch, which were sent during the previous one, and looks them up."""

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        request = self._of_batch(self._context.input_dist_tensors_requests)
        with on_stream(self._stream):
            data = request.wait()
        context = self._context.module_contexts.pop(self._name)
        self._use_on_current_stream(data, context)
        return self._module.compute_and_output_dist(context, data)


class PrefetchPipelinedForward(BaseForward):
    """Looks up ids whose rows were prefetched to the cache.

    Args: as :class:`BaseForward`; ``prefetch_stream`` is the CUDA stream of the prefetch.
    """

    def __init__(
        self,
        name: str,
        args: list[ArgInfo],
        module: ShardedModule,
        context: PrefetchTrainPipelineContext,
        prefetch_stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(name, args, module, context, prefetch_stream)
        self._context: PrefetchTrainPipelineContext = context

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        data = self._of_batch(self._context.module_input_post_prefetch)
        context = self._context.module_contexts_post_prefetch.pop(self._name)
        self._use_on_current_stream(data, context)
        return self._module.compute_and_output_dist(context, data)


class KJTAllToAllForward:
    """Replaces the forward of a :class:`~recinfer.distributed.dist_data.KJTAllToAll`, without sending.

    The replacement returns an exchange that has not started, so that several modules can exchange sizes together.

    Args:
        pg: process group.
        splits: features for each rank.
        stagger: see KJTAllToAll.
    """

    def __init__(self, pg: dist.ProcessGroup, splits: list[int], stagger: int = 1) -> None:
        self._pg = pg
        self._splits = splits
        self._stagger = stagger

    def __call__(self, input: KeyedJaggedTensor) -> KJTSplitsAllToAllMeta:
        """The exchange of ``input``, not started."""
        return KJTAllToAll.meta(self._pg, self._splits, input, self._stagger)
