"""recinfer: from a recommendation model's checkpoint to a quantized, sharded, running service."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["KeyedJaggedTensor", "load"]

if TYPE_CHECKING:
    from recinfer.inference.predictor import load
    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor


def __getattr__(name: str) -> Any:
    # Lazy, so that ``import recinfer`` (and ``recinfer --help``) costs no torch import.
    if name == "load":
        from recinfer.inference.predictor import load

        return load
    if name == "KeyedJaggedTensor":
        from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

        return KeyedJaggedTensor
    raise AttributeError(f"module 'recinfer' has no attribute {name!r}")
