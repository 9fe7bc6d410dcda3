"""Trains a DLRM on a dataset and writes its checkpoint. Serving code does not import this package."""

from __future__ import annotations

from recinfer.training.loop import TrainResult, train

__all__ = ["TrainResult", "train"]
