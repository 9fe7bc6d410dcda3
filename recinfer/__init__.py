"""recinfer: from a recommendation model's checkpoint to a quantized, sharded, running service."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "PoolingType",
    "load",
]

if TYPE_CHECKING:
    from recinfer.inference.predictor import load
    from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

_HOMES = {
    "EmbeddingBagCollection": "recinfer.modules.embedding_modules",
    "EmbeddingBagConfig": "recinfer.modules.embedding_configs",
    "EmbeddingCollection": "recinfer.modules.embedding_modules",
    "EmbeddingConfig": "recinfer.modules.embedding_configs",
    "JaggedTensor": "recinfer.sparse.jagged_tensor",
    "KeyedJaggedTensor": "recinfer.sparse.jagged_tensor",
    "KeyedTensor": "recinfer.sparse.jagged_tensor",
    "PoolingType": "recinfer.modules.embedding_configs",
    "load": "recinfer.inference.predictor",
}

_COMPILED = ("quant/_rows", "quant/_tables", "serving/_ranks", "serving/_wire")


def _check_compiled() -> None:
    """A source tree that was never built says so at its import, not where a request needs what is missing."""
    folder = os.path.dirname(__file__)
    for name in _COMPILED:
        path = os.path.join(folder, name)
        if not any(os.path.exists(path + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES):
            root = os.path.dirname(folder)
            raise ImportError(
                f"recinfer in {root} is a source tree that was not built ({name}.c is not compiled): run `pip install -e .` "
                "there, or `make install`; that needs a C compiler and Python's headers."
            )


_check_compiled()


def __getattr__(name: str) -> Any:
    # Lazy, so that ``import recinfer`` (and ``recinfer --help``) costs no torch import.
    if name not in _HOMES:
        raise AttributeError(f"module 'recinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
