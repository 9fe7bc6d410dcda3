"""The sharders of recinfer's embedding modules, for callers that pass none."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from recinfer.distributed.types.sharders import ModuleSharder
from recinfer.modules.remapping import SHARDERS

__all__ = ["get_default_sharders", "get_module_to_default_sharders"]

# By name: a planner takes sharders from its caller, and imports kernels only for a caller that passes none.
_SHARDERS = (
    ("recinfer.distributed.embeddingbag", "EmbeddingBagCollectionSharder"),
    ("recinfer.distributed.fp_embeddingbag", "FeatureProcessedEmbeddingBagCollectionSharder"),
    ("recinfer.distributed.embedding", "EmbeddingCollectionSharder"),
    *SHARDERS,
    ("recinfer.distributed.quant_embeddingbag", "QuantEmbeddingBagCollectionSharder"),
    ("recinfer.distributed.quant_embedding", "QuantEmbeddingCollectionSharder"),
)


def get_default_sharders() -> list[ModuleSharder[nn.Module]]:
    """A sharder for every embedding module, float ones before quantized ones.

    The list includes the sharders of EmbeddingCollection on a machine without GPUs too, where TorchEasyRec's function
    of this name omits them.
    """
    sharders: list[Any] = [getattr(importlib.import_module(module), name)() for module, name in _SHARDERS]
    return sharders


def get_module_to_default_sharders() -> dict[type[nn.Module], ModuleSharder[nn.Module]]:
    """Module class -> its default sharder."""
    return {sharder.module_type: sharder for sharder in get_default_sharders()}
