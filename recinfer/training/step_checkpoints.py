"""Keeps the last checkpoints of a running training, each with its position in the run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recinfer.errors import CheckpointError
from recinfer.files import write_file

__all__ = ["StepCheckpoints", "resume_folder"]

_POSITION = "train.json"
_KEPT = 2


def resume_folder(out: str | os.PathLike[str]) -> Path:
    """The folder of a run's step checkpoints, for a run that writes to ``out``: ``<out>.steps``."""
    target = Path(out).absolute()
    return target.with_name(f"{target.name}.steps")


class StepCheckpoints:
    """The checkpoints ``step-NNNNNNNNN`` in ``folder``, which is created with the first of them.

    A checkpoint is complete if it has its position, which is written last and removed first.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, step: int, save: Callable[[Path], None], position: dict[str, Any], *, first: bool) -> None:
        """Write a checkpoint with ``save``; every rank calls this, and the ``first`` also writes the position and
        removes old checkpoints."""
        target = self.folder / f"step-{step:09d}"
        if first:
            target.parent.mkdir(parents=True, exist_ok=True)
        save(target)
        if first:
            write_file(target / _POSITION, json.dumps(position).encode())
            for old in self._whole()[:-_KEPT]:
                _remove(old)

    def last(self) -> tuple[Path, dict[str, Any]]:
        """The last complete checkpoint, and its position.

        Raises:
            CheckpointError: there is none.
        """
        found = self._whole()
        if not found:
            raise CheckpointError(f"{self.folder}: found no complete checkpoint to resume from; train without resume")
        position: dict[str, Any] = json.loads((found[-1] / _POSITION).read_text(encoding="utf-8"))
        return found[-1], position

    def forget(self) -> None:
        """Remove all step checkpoints, and the folder if it is then empty."""
        if self.folder.is_dir():
            for old in self._whole():
                _remove(old)
            if not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _whole(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(p for p in self.folder.iterdir() if p.name.startswith("step-") and (p / _POSITION).is_file())


def _remove(folder: Path) -> None:
    (folder / _POSITION).unlink()  # first, so that half a folder is never taken for a whole one
    shutil.rmtree(folder, ignore_errors=True)
