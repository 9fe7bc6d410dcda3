"""Re-exports the pipelines under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.train_pipeline.evaluation import EvalPipelineSparseDist
from recinfer.distributed.train_pipeline.pipelines import TrainPipeline, TrainPipelineBase, TrainPipelineSparseDist
from recinfer.distributed.train_pipeline.prefetch import PrefetchTrainPipelineSparseDist

__all__ = [
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
]
