"""EvalPipelineSparseDist: runs a model without training it; a thread copies batches to the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from recinfer.distributed.train_pipeline.loading import DataLoadingThread
from recinfer.distributed.train_pipeline.pipelines import TrainPipelineSparseDist
from recinfer.errors import ConfigError

__all__ = ["EvalPipelineSparseDist"]

In = TypeVar("In")
Out = TypeVar("Out")


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """The stages of :class:`TrainPipelineSparseDist` without backward and optimizer, whatever mode the model is in.

    A separate thread takes batches from the iterator and copies them to the device. The thread reads an iterator to its
    end; after StopIteration :meth:`progress` accepts another. Call it under ``torch.no_grad()`` to save the memory of
    the graph.

    Args:
        model: takes a batch and returns (loss, output); a DistributedModelParallel.
        optimizer: does nothing (:mod:`recinfer.ignored`).
        device: device of the model.
        apply_jit: compile the modules that are not sharded with torch.jit.script.

    Raises:
        ConfigError: at the first batch, for a model that cannot be traced; for a second iterator before the end of the
            first.
    """

    _loader: DataLoadingThread[In] | None = None
    _source: Iterator[In] | None = None

    def __init__(self, model: nn.Module, optimizer: Optimizer, device: torch.device, apply_jit: bool = False) -> None:
        super().__init__(model, optimizer, device, execute_all_batches=True, apply_jit=apply_jit)

    def _trains(self) -> bool:
        return False

    def _take(self, dataloader_iter: Iterator[In]) -> In | None:
        if self._loader is None:
            self._source = dataloader_iter
            self._loader = DataLoadingThread(
                self._device, dataloader_iter, to_device_non_blocking=True, memcpy_stream=self._memcpy_stream
            )
            self._loader.start()
        elif self._source is not dataloader_iter:
            raise ConfigError(
                "progress() was called with another iterator before the end of the first, in which a thread reads "
                "ahead. Call progress() until StopIteration, or detach() to drop the first iterator"
            )
        batch = self._loader.get_next_batch()
        if batch is None:
            self._stop_loading()
        return batch

    def _stop_loading(self) -> None:
        if self._loader is not None:
            self._loader.stop()
        self._loader = self._source = None

    def detach(self) -> nn.Module:
        """Detach the pipeline (see :meth:`TrainPipelineSparseDist.detach`) and stop reading the iterator."""
        self._stop_loading()
        return super().detach()

    def __del__(self) -> None:
        self._stop_loading()
