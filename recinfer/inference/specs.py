"""Specifications of a model's inputs and outputs, without a torch import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["FeatureSpec", "Outputs"]


@dataclass(frozen=True)
class FeatureSpec:
    """One output of lookup: its name, its table, and whether its feature is optional in a prediction.

    ``missing``: a prediction without the feature fails (``"reject"``), or uses no ids (``"empty"``) or this id in every
    sample. A lookup may leave out any feature. ``weighted``: whether requests may bring weights for its ids.
    """

    name: str
    table: str
    rows: int
    dim: int
    pooled: bool
    missing: str | int = "reject"
    weighted: bool = False


class Outputs(dict[str, Any]):
    """The model's outputs by name, float32 ``[B, ...]``: tensors, or numpy arrays from a client.

    Attributes:
        missing: ranks whose hosts did not respond; the vectors of their rows were zero.
    """

    missing: tuple[int, ...]

    def __init__(self, *args: Any, missing: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.missing = missing
