"""Re-exports the pipelines' contexts and type variables under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext
from recinfer.distributed.train_pipeline.pipelines import In, Out

__all__ = ["In", "Out", "PrefetchTrainPipelineContext", "TrainPipelineContext"]
