"""Interfaces of batches that a pipeline moves to a device and uses on several CUDA streams."""

from __future__ import annotations

import abc
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from recinfer.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["Multistreamable", "Pipelineable", "move_to"]

P = TypeVar("P", bound="Pipelineable")


class Multistreamable(abc.ABC):
    """Interface of objects that several CUDA streams use."""

    @abc.abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""


class Pipelineable(Multistreamable):
    """Interface of batches that can be moved to a device while another batch trains."""

    @abc.abstractmethod
    def to(self: P, device: Any, non_blocking: bool = False) -> P:
        """The batch on ``device``."""

    def pin_memory(self: P) -> P:
        """The batch in page-locked memory; the base class returns it unchanged."""
        return self


def move_to(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """``batch`` on ``device``. On the way to a GPU it passes through page-locked memory: from other memory each copy blocks.

    Raises:
        InputError: a batch without ``to(device, non_blocking)``.
    """
    if batch is None or device.type == "cpu":
        return batch
    move = getattr(batch, "to", None)
    if move is None:
        raise InputError(
            f"a batch of class {type(batch).__name__} has no to(device, non_blocking); a pipeline on {device} needs it"
        )
    pin = getattr(batch, "pin_memory", None)
    if device.type == "cuda" and non_blocking and pin is not None:
        with suppress(RuntimeError):  # the batch is on a GPU already, or page-locked memory is exhausted
            move = pin().to
    return move(device=device, non_blocking=non_blocking)
