"""Random tables and features that the quantized tests share."""

from __future__ import annotations

import torch

from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

SHAPES = [("a", 40, 8, ["f0"]), ("b", 1, 16, ["f1"]), ("c", 300, 24, ["f2", "f3"]), ("d", 77, 8, ["f4"])]


def bag_configs(
    pooling: list[PoolingType] | None = None, shapes: list[tuple[str, int, int, list[str]]] = SHAPES
) -> list[EmbeddingBagConfig]:
    poolings = pooling or [PoolingType.SUM] * len(shapes)
    return [
        EmbeddingBagConfig(num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features), pooling=p)
        for (name, rows, dim, features), p in zip(shapes, poolings, strict=True)
    ]


def float_bags(
    pooling: list[PoolingType] | None = None, is_weighted: bool = False, shapes: list = SHAPES
) -> EmbeddingBagCollection:
    torch.manual_seed(1)
    return EmbeddingBagCollection(tables=bag_configs(pooling, shapes), is_weighted=is_weighted)


def quantized_sequences(per_table: dict[str, DataType], shapes: list = SHAPES) -> QuantEmbeddingCollection:
    """Unpooled tables, whose widths may differ (the float collection, like TorchRec's, wants one width)."""
    torch.manual_seed(2)
    configs = [
        EmbeddingConfig(
            num_embeddings=rows, embedding_dim=dim, name=name, feature_names=list(features), data_type=per_table[name]
        )
        for name, rows, dim, features in shapes
    ]
    module = QuantEmbeddingCollection(configs)
    for config in configs:
        module.load_float(config.name, torch.randn(config.num_embeddings, config.embedding_dim))
    return module


def random_features(
    configs: list,
    batch: int,
    *,
    seed: int = 0,
    weighted: bool = False,
    longest: int = 5,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """Every feature of the tables, bags of 0 to ``longest`` ids."""
    generator = torch.Generator().manual_seed(seed)
    keys, lengths, values = [], [], []
    for config in configs:
        for name in config.feature_names:
            n = torch.randint(0, longest + 1, (batch,), generator=generator)
            keys.append(name)
            lengths.append(n)
            values.append(torch.randint(0, config.num_embeddings, (int(n.sum()),), generator=generator))
    ids = torch.cat(values).to(dtype)
    weights = torch.rand(len(ids), generator=generator) if weighted else None
    return KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.cat(lengths).to(dtype), weights=weights)


MIXED = {"a": DataType.INT8, "b": DataType.INT4, "c": DataType.FP16, "d": DataType.INT2}
