"""Interfaces of batches that a pipeline moves to a device and uses on several CUDA streams."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

__all__ = ["Multistreamable", "Pipelineable"]

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
