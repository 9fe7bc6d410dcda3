"""Takes a recommendation model from a training checkpoint to a quantized, sharded, running service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recinfer.compiled import check_compiled
from recinfer.lazy import lazy_names
from recinfer.version import __version__ as __version__

check_compiled()

__all__ = [
    "AsyncInferenceClient",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "InferenceClient",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "PoolingType",
    "export",
    "load",
    "plan",
    "serve",
    "verify",
]

if TYPE_CHECKING:
    from recinfer.api import export, load, plan, verify
    from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
    from recinfer.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollection,
    )
    from recinfer.serving.app.running import serve
    from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
    from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
    from recinfer.streamable import Multistreamable, Pipelineable

# Lazy, so that ``import recinfer`` (and ``recinfer --help``) costs no torch import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "AsyncInferenceClient": "recinfer.serving.client.client",
        "DataType": "recinfer.modules.embedding_configs",
        "EmbeddingBagCollection": "recinfer.modules.embedding_modules",
        "EmbeddingBagCollectionInterface": "recinfer.modules.embedding_modules",
        "EmbeddingBagConfig": "recinfer.modules.embedding_configs",
        "EmbeddingCollection": "recinfer.modules.embedding_modules",
        "EmbeddingConfig": "recinfer.modules.embedding_configs",
        "InferenceClient": "recinfer.serving.client.client",
        "JaggedTensor": "recinfer.sparse.jagged_tensor",
        "KeyedJaggedTensor": "recinfer.sparse.jagged_tensor",
        "KeyedTensor": "recinfer.sparse.jagged_tensor",
        "Multistreamable": "recinfer.streamable",
        "Pipelineable": "recinfer.streamable",
        "PoolingType": "recinfer.modules.embedding_configs",
        "export": "recinfer.api",
        "load": "recinfer.api",
        "plan": "recinfer.api",
        "serve": "recinfer.serving.app.running",
        "verify": "recinfer.api",
    },
    # The modules that TorchRec's ``import torchrec`` makes reachable by attribute, and recinfer's packages that docs/
    # names.
    modules=(
        "archive",
        "checkpoint",
        "columns",
        "data",
        "datasets",
        "distributed",
        "errors",
        "fx",
        "inference",
        "models",
        "modules",
        "optim",
        "quant",
        "serving",
        "sparse",
        "streamable",
        "training",
        "types",
    ),
)
