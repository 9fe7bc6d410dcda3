"""Datasets of TorchRec's API: random batches, Criteo and MovieLens.

For training and serving with one feature contract see :mod:`recinfer.data`, which has its own readers.
"""

from __future__ import annotations

from recinfer.datasets import criteo, movielens, random, utils

__all__ = ["criteo", "movielens", "random", "utils"]
