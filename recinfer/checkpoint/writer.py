"""Writes a checkpoint: torch.distributed.checkpoint files with TorchRec's key names, and ``model.json`` beside them."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import Optimizer

from recinfer.checkpoint.dcp import METADATA_FILE
from recinfer.checkpoint.model_json import MODEL_FORMAT, MODEL_JSON, describe_model
from recinfer.errors import CheckpointError

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["check_target", "save_checkpoint"]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    contract: FeatureContract | None = None,
    model_name: str = "model",
    model_version: str = "1",
) -> Path:
    """Write ``model`` and how to build it again. The folder appears under its name when it is whole.

    Tensors lie under ``model.<key of the state dict>``, the optimizer's under ``optim.``, so
    ``dcp.load({"model": module.state_dict()}, checkpoint_id=folder)`` reads it back too. With a process group every
    rank calls this, with the same folder on a shared file system.

    Args:
        folder: where to; an earlier checkpoint there is replaced.
        model: no tensor on meta.
        optimizer: one or several over the model's parameters.
        contract: how raw rows become the model's inputs.
        model_name, model_version: under which the model is served.

    Raises:
        CheckpointError: tensors on meta, or ``folder`` holds something that is no checkpoint.
    """
    target = check_target(folder)
    state: dict[str, Any] = {"model": model.state_dict()}
    stuck = [key for key, tensor in state["model"].items() if getattr(tensor, "is_meta", False)]
    if stuck:
        raise CheckpointError(f"{', '.join(stuck[:8])}: on meta, there is nothing to save; load the weights first")
    if optimizer is not None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state["optim"] = get_optimizer_state_dict(model, optimizers, options=options)
    description = {
        "format": MODEL_FORMAT,
        "name": model_name,
        "version": model_version,
        "model": describe_model(model),
        "contract": None if contract is None else contract.to_dict(),
    }
    text = json.dumps(description, indent=1, allow_nan=False) + "\n"
    partial = target.with_name(f".{target.name}.partial")
    together = dist.is_available() and dist.is_initialized()
    first = not together or dist.get_rank() == 0
    if first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    if together:
        dist.barrier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(partial), no_dist=not together)
    if first:
        (partial / MODEL_JSON).write_text(text, encoding="utf-8")
        _put(partial, target)
    if together:
        dist.barrier()
    return target


def check_target(folder: str | os.PathLike[str]) -> Path:
    """``folder`` as a path, if a checkpoint may be written there; worth asking before hours of training.

    Raises:
        CheckpointError: it is a file, or a folder with something else in it.
    """
    target = Path(folder).absolute()
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target}: is not a folder; expected a new folder or an earlier checkpoint")
    if target.is_dir() and any(target.iterdir()) and not (target / METADATA_FILE).exists():
        raise CheckpointError(
            f"{target}: holds files that are no checkpoint; expected a new folder or an earlier checkpoint to replace"
        )
    return target


def _put(partial: Path, target: Path) -> None:
    """Give ``partial`` the name ``target``; what was there goes once the new one is in place."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)
