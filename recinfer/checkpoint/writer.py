"""Writes a checkpoint: torch.distributed.checkpoint files with TorchRec's keys, and ``model.json``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.optim import Optimizer

from recinfer.checkpoint.dcp import METADATA_FILE
from recinfer.checkpoint.model_json import MODEL_FORMAT, MODEL_JSON, describe_model
from recinfer.checkpoint.restore import keyed_optimizer, own_names
from recinfer.checkpoint.shard_state import state_of_all_ranks
from recinfer.distributed.sharded.copying import copied_to
from recinfer.errors import CheckpointError, UnavailableError
from recinfer.files import put, sync_folder
from recinfer.optim.local_tensors import local_tensors

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["check_target", "partial_of", "save_checkpoint", "save_checkpoint_async"]


def save_checkpoint(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    contract: FeatureContract | None = None,
    model_name: str = "model",
    model_version: str = "1",
) -> Path:
    """Write ``model`` and its model.json. The folder appears under its name when it is complete.

    Tensors are stored under ``model.<key of the state dict>``, the optimizer's under
    ``optim.state.<parameter>.<state>``, so ``dcp.load({"model": module.state_dict()}, checkpoint_id=folder)`` reads it
    back too (give what it filled to ``module.load_state_dict`` where tables are behind a cache of rows, which keeps old
    ones otherwise). With a process group every rank calls this, with the same folder on a shared file system, and
    writes its own shards.

    Args:
        folder: the folder to write, which replaces an earlier checkpoint there.
        model: no tensor on meta; its state may hold ShardedTensors.
        optimizer: an optimizer, or several, over the model's parameters: torch's or keyed optimizers.
        contract: the feature contract, by which raw rows become the model's inputs.
        model_name, model_version: under which the model is served.

    Raises:
        CheckpointError: tensors on meta, or ``folder`` holds files that are not a checkpoint.
        UnavailableError: the disk is full, or the folder cannot be written; what was written is removed.
    """
    saving = _Saving(folder, model, optimizer, contract, model_name, model_version)
    with saving.writing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        saving.begin()
        dcp.save(saving.state, storage_writer=_Writer(saving.partial), no_dist=not saving.together)
        saving.finish()
    if saving.together:
        dist.barrier()
    return saving.target


def save_checkpoint_async(
    folder: str | os.PathLike[str],
    model: nn.Module,
    *,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    contract: FeatureContract | None = None,
    model_name: str = "model",
    model_version: str = "1",
) -> Future[Path]:
    """Write a checkpoint like :func:`save_checkpoint`, in a thread while training continues, from a copy of the state.

    With a process group every rank calls this and gets its own future; the first rank's is done when the folder has its
    name. Wait for one save before the next, and before the process ends.
    """
    saving = _Saving(folder, model, optimizer, contract, model_name, model_version)
    result: Future[Path] = Future()
    with saving.writing(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        saving.begin()
        # The saving thread has a separate group, so that its collectives do not mix with those of training.
        group = dist.new_group(backend="gloo") if saving.together else None
        done: Any = dcp.async_save(
            saving.state,
            storage_writer=_Writer(saving.partial),
            process_group=group,
            no_dist=not saving.together,
            async_stager=_CopyOnCpu(),
        )

    def finish(finished: Any) -> None:
        try:
            with saving.writing():
                finished.result()
                saving.finish()
            if group is not None:
                dist.destroy_process_group(group)
            result.set_result(saving.target)
        except BaseException as error:
            result.set_exception(error)

    getattr(done, "upload_completion", done).add_done_callback(finish)
    return result


class _Writer(dcp.FileSystemWriter):
    """Raises the operating system's error instead of the error that torch's serializer raises after it. The errors of
    all ranks are pickled to the first rank, which loses the causes of errors.
    """

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _system_error(error) or error from None


def _system_error(error: BaseException | None) -> OSError | None:
    """The OSError that ``error`` is or was caused by."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


class _CopyOnCpu(AsyncStager):
    """A copy of the state on the CPU; torch's own stagers do not support DTensors of sharded tables."""

    _synchronize_after_execute = False

    def stage(self, state_dict: Any) -> Any:
        return copied_to(state_dict, torch.device("cpu"))

    def synchronize_staging(self) -> None:
        return None

    def close(self) -> None:
        return None


class _Saving:
    """A checkpoint that is being written: its state, its temporary folder and its target."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        contract: FeatureContract | None,
        model_name: str,
        model_version: str,
    ) -> None:
        self.target = check_target(folder)
        self.partial = partial_of(self.target)
        self.state: dict[str, Any] = {"model": model.state_dict()}
        tensors = {k: v for k, v in self.state["model"].items() if isinstance(v, Tensor | ShardedTensor)}
        stuck = [key for key, value in tensors.items() if any(t.is_meta for t in local_tensors(value))]
        if stuck:
            raise CheckpointError(
                f"{', '.join(stuck[:8])}: on the meta device, so there are no values to save; load the weights first"
            )
        if optimizer is not None:
            keyed = keyed_optimizer(model, optimizer)
            names = own_names(model, keyed)
            states = state_of_all_ranks(keyed, names, self.state["model"])
            self.state["optim"] = {"state": {names[n]: v for n, v in states.items()}}
        description = {
            "format": MODEL_FORMAT,
            "name": model_name,
            "version": model_version,
            "model": describe_model(model),
            "contract": None if contract is None else contract.to_dict(),
        }
        self._text = json.dumps(description, indent=1, allow_nan=False) + "\n"
        self.together = dist.is_available() and dist.is_initialized()
        self._first = not self.together or dist.get_rank() == 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Remove the written files if the block fails; raises UnavailableError for errors of the operating system."""
        try:
            yield
        except BaseException as error:
            if self._first:
                shutil.rmtree(self.partial, ignore_errors=True)
            failures = error.failures if isinstance(error, CheckpointException) else {None: (error, None)}
            for rank, (failure, _) in failures.items():
                if isinstance(failure, KeyboardInterrupt):  # torch takes that for a failure of the rank too
                    raise KeyboardInterrupt from None
                if isinstance(failure, OSError):
                    where = f" on rank {rank}" if self.together and rank is not None else ""
                    reason = failure.strerror or failure
                    message = f"cannot write the checkpoint {str(self.target)!r}{where}: {reason}"
                    raise UnavailableError(message) from error
            raise

    def begin(self) -> None:
        """Create the empty folder that all ranks write to."""
        if self._first:
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        if self.together:
            dist.barrier()

    def finish(self) -> None:
        """Rename the folder to its target on the first rank, after all ranks have flushed their files."""
        if self._first:
            with open(self.partial / MODEL_JSON, "w", encoding="utf-8") as file:
                file.write(self._text)
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self.partial)
            put(self.partial, self.target, replace=True)


def partial_of(target: Path) -> Path:
    """The temporary folder of the checkpoint ``target``."""
    return target.with_name(f".{target.name}.partial")


def check_target(folder: str | os.PathLike[str]) -> Path:
    """``folder`` as a path; raises CheckpointError unless a checkpoint may be written there. Check this before hours of
    training.

    Raises:
        CheckpointError: ``folder`` is a file, or a folder with other content than a checkpoint, or is where this process may
            not write.
    """
    target = Path(folder).absolute()
    above = next(parent for parent in target.parents if os.path.exists(parent))
    if not os.access(above, os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot write the checkpoint {str(target)!r}: no files may be made in {str(above)!r}")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointError(f"{target}: is not a folder; expected a new folder or an earlier checkpoint")
    if target.is_dir() and any(target.iterdir()) and not (target / METADATA_FILE).exists():
        raise CheckpointError(
            f"{target}: holds files that are not a checkpoint; expected a new folder or an earlier checkpoint to "
            f"replace"
        )
    return target
