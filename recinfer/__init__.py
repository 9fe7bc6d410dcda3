"""recinfer: from a recommendation model's checkpoint to a quantized, sharded, running service."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recinfer.compiled import check_compiled

check_compiled()

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


def __getattr__(name: str) -> Any:
    # Lazy, so that ``import recinfer`` (and ``recinfer --help``) costs no torch import.
    if name not in _HOMES:
        raise AttributeError(f"module 'recinfer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
