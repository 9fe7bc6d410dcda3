"""Training: a dataset to a trained DLRM and its checkpoint. Nothing that serves imports this package."""

from __future__ import annotations

from recinfer.training.loop import TrainResult, train

__all__ = ["TrainResult", "train"]
