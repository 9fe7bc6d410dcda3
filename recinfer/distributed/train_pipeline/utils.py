"""Re-exports the pipelines' tracer and loading thread under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.train_pipeline.loading import DataLoadingThread
from recinfer.distributed.train_pipeline.tracing import ArgInfo, Tracer

__all__ = ["ArgInfo", "DataLoadingThread", "Tracer"]
