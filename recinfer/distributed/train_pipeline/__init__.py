"""Training pipelines, which overlap the exchange of ids for the next batch with forward and backward of the current
one."""

from __future__ import annotations

from recinfer.distributed.exchange.kjt import KJTSplitsAllToAllMeta, SplitsAllToAllAwaitable
from recinfer.distributed.exchange.kjt_lists import FusedKJTListSplitsAwaitable
from recinfer.distributed.train_pipeline.contexts import PrefetchTrainPipelineContext, TrainPipelineContext
from recinfer.distributed.train_pipeline.evaluation import EvalPipelineSparseDist
from recinfer.distributed.train_pipeline.forwards import (
    BaseForward,
    KJTAllToAllForward,
    PipelinedForward,
    PrefetchPipelinedForward,
)
from recinfer.distributed.train_pipeline.loading import DataLoadingThread
from recinfer.distributed.train_pipeline.pipelines import TrainPipeline, TrainPipelineBase, TrainPipelineSparseDist
from recinfer.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist
from recinfer.distributed.train_pipeline.tracing import ArgInfo, Tracer

__all__ = [
    "ArgInfo",
    "BaseForward",
    "DataLoadingThread",
    "EvalPipelineSparseDist",
    "FusedKJTListSplitsAwaitable",
    "KJTAllToAllForward",
    "KJTSplitsAllToAllMeta",
    "PipelinedForward",
    "PrefetchPipelinedForward",
    "PrefetchTrainPipelineContext",
    "PrefetchTrainPipelineSparseDist",
    "SplitsAllToAllAwaitable",
    "Tracer",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineContext",
    "TrainPipelineSparseDist",
]
