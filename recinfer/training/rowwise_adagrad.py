"""Moved to :mod:`recinfer.optim.rowwise_adagrad`."""

from __future__ import annotations

from recinfer.optim.rowwise_adagrad import RowWiseAdagrad, sparse_gradients

__all__ = ["RowWiseAdagrad", "sparse_gradients"]
