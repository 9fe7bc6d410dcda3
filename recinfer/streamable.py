"""What a batch offers so that a pipeline can move it to a device and use it on several CUDA streams."""

from __future__ import annotations

import abc
from typing import Any, TypeVar

__all__ = ["Multistreamable", "Pipelineable"]

P = TypeVar("P", bound="Pipelineable")


class Multistreamable(abc.ABC):
    """Something that several CUDA streams use."""

    @abc.abstractmethod
    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""


class Pipelineable(Multistreamable):
    """A batch: it can be moved to a device while another one trains."""

    @abc.abstractmethod
    def to(self: P, device: Any, non_blocking: bool = False) -> P:
        """The batch on ``device``."""

    def pin_memory(self: P) -> P:
        """The batch in page-locked memory; the base gives it back as it is."""
        return self
