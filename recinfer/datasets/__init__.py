"""Datasets of TorchRec's API: random batches, Criteo and MovieLens.

For training and serving from one contract of features see :mod:`recinfer.data`, which has readers of its own.
"""

from __future__ import annotations

from recinfer.datasets import criteo, movielens, random, utils

__all__ = ["criteo", "movielens", "random", "utils"]
