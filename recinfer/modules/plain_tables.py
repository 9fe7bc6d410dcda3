"""Tables of a model without embedding collections: its torch.nn.Embedding and EmbeddingBag; configs of described tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from recinfer.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)

if TYPE_CHECKING:
    from recinfer.capture import EmbeddingModule

__all__ = ["is_plain", "plain_collection", "table_configs"]


def is_plain(module: nn.Module) -> bool:
    """Whether a module of :func:`recinfer.distributed.planner.plan.embedding_tables` is a model without collections."""
    return not hasattr(module, "embedding_bag_configs") and not hasattr(module, "embedding_configs")


def plain_collection(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[BaseEmbeddingConfig], bool]]:
    """(path, module, table configs, pooled) of :func:`recinfer.capture.plain_tables`, whose module is the model."""
    from recinfer.capture import plain_tables  # most models have collections, whose plans need no traces

    about = plain_tables(model)
    if about is not None:
        yield about.path, model, table_configs(about), about.pooled


def table_configs(about: EmbeddingModule) -> list[BaseEmbeddingConfig]:
    """The configs of the tables of a module that a trace describes."""
    configs: list[BaseEmbeddingConfig] = []
    for table in about.tables:
        common: dict[str, Any] = {
            "num_embeddings": table.rows,
            "embedding_dim": table.dim,
            "name": table.name,
            "feature_names": list(table.features),
            "data_type": DataType.parse(table.data_type),
        }
        if about.pooled:
            configs.append(EmbeddingBagConfig(pooling=PoolingType(table.pooling.upper()), **common))
        else:
            configs.append(EmbeddingConfig(**common))
    return configs
