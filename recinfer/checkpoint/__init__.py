"""Saves checkpoints, reads them in slices and loads them into modules, in torch.distributed.checkpoint's format with
TorchRec's keys."""

from __future__ import annotations

from recinfer.checkpoint.loading import LoadReport, load_into
from recinfer.checkpoint.model_json import ModelKind, register
from recinfer.checkpoint.reader import CheckpointReader
from recinfer.checkpoint.resolve import resolve_inputs, resolve_model
from recinfer.checkpoint.restore import load_checkpoint
from recinfer.checkpoint.writer import check_target, save_checkpoint, save_checkpoint_async

__all__ = [
    "CheckpointReader",
    "LoadReport",
    "ModelKind",
    "check_target",
    "load_checkpoint",
    "load_into",
    "register",
    "resolve_inputs",
    "resolve_model",
    "save_checkpoint",
    "save_checkpoint_async",
]
