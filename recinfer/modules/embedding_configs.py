"""Configs of embedding tables: element type, pooling, and one checked dataclass per kind of table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from numbers import Integral
from typing import Any, NamedTuple

import torch

from recinfer.errors import ConfigError
from recinfer.ignored import warn_ignored

__all__ = [
    "DATA_TYPE_NUM_BITS",
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "PoolingType",
    "QuantConfig",
    "check_table_name",
    "data_type_to_dtype",
    "dtype_to_data_type",
]


@unique
class DataType(Enum):
    """Element type of a table. Values and names are TorchRec's."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"

    def __str__(self) -> str:
        return self.value

    @property
    def bits(self) -> int:
        """Bits per element."""
        return DATA_TYPE_NUM_BITS[self]

    @classmethod
    def parse(cls, text: str | DataType) -> DataType:
        """The type named by ``text`` in any case (``"int8"``); raises ConfigError listing the known names."""
        if isinstance(text, DataType):
            return text
        try:
            return cls(str(text).upper())
        except ValueError:
            known = ", ".join(t.value.lower() for t in cls)
            raise ConfigError(f"unknown data type {text!r}; expected one of: {known}") from None


DATA_TYPE_NUM_BITS: dict[DataType, int] = {
    DataType.FP32: 32,
    DataType.FP16: 16,
    DataType.BF16: 16,
    DataType.INT64: 64,
    DataType.INT32: 32,
    DataType.INT8: 8,
    DataType.UINT8: 8,
    DataType.INT4: 4,
    DataType.INT2: 2,
}

_TORCH_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """The torch dtype of a table of ``data_type`` (``quint4x2``/``quint2x4`` for INT4/INT2, as in TorchRec)."""
    return _TORCH_DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """The inverse of :func:`data_type_to_dtype`; ``torch.qint8`` reads as INT8. Raises ConfigError otherwise."""
    if dtype == torch.qint8:
        return DataType.INT8
    for data_type, known in _TORCH_DTYPES.items():
        if known == dtype:
            return data_type
    raise ConfigError(f"no table data type for {dtype}; expected one of {sorted(map(str, _TORCH_DTYPES.values()))}")


@unique
class PoolingType(Enum):
    """How the rows of one bag become one vector. Values and names are TorchRec's."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


_DYNAMIC_ROWS = (
    "total_num_buckets",
    "use_virtual_table",
    "virtual_table_eviction_policy",
    "enable_embedding_update",
    "stash_weights",
)


@dataclass
class BaseEmbeddingConfig:
    """The config of one table.

    Args:
        num_embeddings: rows.
        embedding_dim: columns.
        name: the table's name, unique in its collection.
        data_type: element type of the float table.
        feature_names: the features that look rows up in this table (several share it). A collection that is built with
            none reads the feature of the table's own name.
        weight_init_max, weight_init_min: bounds of the uniform initial values; default ``±1/sqrt(num_embeddings)``.
        num_embeddings_post_pruning: no effect (:mod:`recinfer.ignored`): tables are not pruned.
        init_fn: fills the weight in place instead of the uniform values.
        need_pos: the features carry positions (position-weighted processors).
        input_dim, total_num_buckets, use_virtual_table, virtual_table_eviction_policy, enable_embedding_update,
            stash_weights: TorchRec's settings of tables that allocate, evict or move rows while they train. recinfer
                allocates all rows at the start and accepts only the defaults (and ``input_dim`` equal to the rows).

    Raises:
        ConfigError: rows or dim that are no whole numbers of at least 1; bounds that fall; a setting of tables that allocate rows while they train.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: Callable[[torch.Tensor], torch.Tensor | None] | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: Any | None = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        sizes = (self.num_embeddings, self.embedding_dim)
        if not all(isinstance(size, Integral) and size >= 1 for size in sizes):
            raise ConfigError(
                f"table {self.name!r}: got num_embeddings={self.num_embeddings!r}, "
                f"embedding_dim={self.embedding_dim!r}; both must be whole numbers of at least 1"
            )
        if self.init_fn is None and not self.get_weight_init_min() <= self.get_weight_init_max():
            raise ConfigError(
                f"table {self.name!r}: initial values from {self.get_weight_init_min()} (weight_init_min) to "
                f"{self.get_weight_init_max()} (weight_init_max); expected a range that rises"
            )
        asked = [name for name in _DYNAMIC_ROWS if getattr(self, name)]
        if self.input_dim not in (None, self.num_embeddings):
            asked.append("input_dim")
        if asked:
            given = ", ".join(f"{name}={getattr(self, name)!r}" for name in asked)
            raise ConfigError(
                f"table {self.name!r}: got {given}; recinfer allocates all rows of a table at the start and never "
                f"evicts or moves them. Leave this out, and map ids to 0 ... {self.num_embeddings - 1} before the "
                f"lookup (docs/how-to/raw-ids.md)"
            )
        of = "modules.embedding_configs.BaseEmbeddingConfig"
        warn_ignored(of, "num_embeddings_post_pruning", self.num_embeddings_post_pruning, stacklevel=4)

    def get_weight_init_max(self) -> float:
        """Upper bound of the initial values."""
        return 1 / math.sqrt(self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower bound of the initial values."""
        return -1 / math.sqrt(self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Number of features that read this table."""
        return len(self.feature_names)


class QuantConfig(NamedTuple):
    """The quantization settings that ``from_float`` of the quantized collections reads from ``module.qconfig``.

    Attributes:
        activation: a factory of an object whose ``dtype`` is that of the outputs.
        weight: a factory of an object whose ``dtype`` is that of the packed rows (``qint8``, ``quint4x2``,
            ``quint2x4``, ``float16`` ...).
        per_table_weight_dtype: table -> precision, where it differs.
    """

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


def check_table_name(what: str, name: str) -> None:
    """Raise ConfigError for a name that cannot be a key of ``nn.ModuleDict``, which collections keep tables in (as in
    TorchRec).

    Raises:
        ConfigError: an empty name, a dot, or a name that ModuleDict uses itself (``items``, ``keys`` ...).
    """
    if not name or "." in name or hasattr(torch.nn.ModuleDict(), name):
        raise ConfigError(
            f"{what}: table name {name!r}; expected a non-empty name without dots that is not an attribute of "
            f"torch.nn.ModuleDict (such as items, keys or values)"
        )


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A pooled table: every bag of ids becomes one vector. ``pooling`` is SUM or MEAN."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """An unpooled (sequence) table: every id becomes one vector."""


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """The config of one table in a sharded module, for pooled and unpooled tables.

    Args:
        pooling: NONE for an unpooled table.
        is_weighted: ids have weights. has_feature_processor: whether a feature processor computes the weights.
        embedding_names: names of the outputs, one per feature.
    """

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)
