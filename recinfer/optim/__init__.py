"""Optimizers: keyed by parameter names, fused into the backward, with warm-up and clipping."""

from __future__ import annotations

from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.clipping import GradientClipping, GradientClippingOptimizer
from recinfer.optim.fused import FusedOptimizer, FusedOptimizerModule
from recinfer.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from recinfer.optim.optimizers import LAMB, SGD, Adagrad, Adam, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad
from recinfer.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
]
