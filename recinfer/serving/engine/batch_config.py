"""Bounds of the queue and of merged runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from recinfer.errors import ConfigError

__all__ = ["BatchConfig"]


@dataclass(frozen=True)
class BatchConfig:
    """Bounds of the queue and of merged runs.

    Attributes:
        max_batch: samples in a merged run; a single request may have more, and then runs on its own.
        max_queue: requests that may wait; a further request is refused at once.
    """

    max_batch: int = 1024
    max_queue: int = 512

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 31:
                raise ConfigError(f"batching: {item.name}: got {value!r}, expected an integer from 1 to 2^31 - 1")
