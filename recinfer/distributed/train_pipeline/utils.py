"""TorchRec's place of the tracer of pipelines and of the loading thread."""

from __future__ import annotations

from recinfer.distributed.train_pipeline.loading import DataLoadingThread
from recinfer.distributed.train_pipeline.tracing import ArgInfo, Tracer

__all__ = ["ArgInfo", "DataLoadingThread", "Tracer"]
