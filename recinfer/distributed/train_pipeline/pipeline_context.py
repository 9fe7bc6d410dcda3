"""TorchRec's place of the pipelines' contexts and of the type variables of their batches and outputs."""

from __future__ import annotations

from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext
from recinfer.distributed.train_pipeline.pipelines import In, Out

__all__ = ["In", "Out", "PrefetchTrainPipelineContext", "TrainPipelineContext"]
