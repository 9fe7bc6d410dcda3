"""TableFacts, the planner's data about one table, and the function that makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from recinfer.distributed.planner.constants import BIGINT_DTYPE
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.sharders import codec_bytes
from recinfer.distributed.types import CacheParams, CommOp, ModuleSharder
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, dtype_to_data_type

__all__ = ["TableFacts", "kjt_bytes", "per_feature", "table_facts"]

# Mean ids per bag, bags per sample and samples, a figure per feature.
PerFeature = tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class TableFacts:
    """The planner's data about one table; raises ConfigError for figures out of range."""

    module_path: str
    name: str
    rows: int
    cols: int
    element_bytes: float
    precision: DataType
    offers: tuple[tuple[str, str], ...]  # (sharding type, kernel), in the order they are enumerated
    input_lengths: tuple[float, ...] = (1.0,)
    num_poolings: tuple[float, ...] = (1.0,)
    batch_sizes: tuple[int, ...] = (512,)
    pooled: bool = True
    weighted: bool = False
    output_bytes: float = 4.0
    comm_bytes: tuple[float, float, float, float] = (4.0, 4.0, 4.0, 4.0)  # fwd/bwd all-to-all, fwd/bwd reduce-scatter
    min_partition: int | None = None
    cache_ratio: float | None = None
    misses: float = 0.0
    prefetch: bool = False
    optimizer_full: float = 0.0
    optimizer_row_bytes: float = 0.0
    id_row_bytes: float = 0.0
    colocate_with: str | None = None
    module: nn.Module | None = None
    tensor: torch.Tensor | None = None
    feature_names: tuple[str, ...] = ()
    constraints: ParameterConstraints | None = None
    sharder: Any = None

    def __post_init__(self) -> None:
        figures = (
            ("pooling_factors", self.input_lengths, "0 or more", lambda x: 0 <= x < math.inf),
            ("num_poolings", self.num_poolings, "0 or more", lambda x: 0 <= x < math.inf),
            ("batch_sizes", self.batch_sizes, "1 or more", lambda x: x >= 1),
            (
                "min_partition",
                self._given(self.min_partition),
                "a whole number of columns, 1 or more",
                lambda x: isinstance(x, Integral) and x >= 1,
            ),
            ("load_factor of the cache", self._given(self.cache_ratio), "0 to 1", lambda x: 0 <= x <= 1),
        )
        for name, values, expected, holds in figures:
            for value in values:
                if not (isinstance(value, Real) and holds(value)):
                    raise ConfigError(f"table {self.name!r}: {name} is {value!r}; expected {expected}")

    @staticmethod
    def _given(value: float | None) -> tuple[float, ...]:
        return () if value is None else (value,)

    @property
    def fqn(self) -> str:
        """``path.table``."""
        return f"{self.module_path}.{self.name}"

    @property
    def batch_inputs(self) -> float:
        """Ids of one batch."""
        return float(sum(n * p * b for n, p, b in zip(self.input_lengths, self.num_poolings, self.batch_sizes)))

    @property
    def batch_outputs(self) -> float:
        """Vectors of one batch, if the table is pooled."""
        return float(sum(p * b for p, b in zip(self.num_poolings, self.batch_sizes)))

    @property
    def filled_outputs(self) -> float:
        """Vectors of one batch without those of empty bags, as in TorchRec's training model."""
        return float(sum(min(n, 1) * p * b for n, p, b in zip(self.input_lengths, self.num_poolings, self.batch_sizes)))


def table_facts(
    path: str,
    name: str,
    module: nn.Module,
    *,
    config: BaseEmbeddingConfig | None,
    tensor: torch.Tensor | None = None,
    precision: DataType | None = None,
    sharder: ModuleSharder[Any] | None = None,
    offers: tuple[tuple[str, str], ...],
    limit: ParameterConstraints | None,
    features: Sequence[str],
    figures: PerFeature,
    pooled: bool,
    weighted: bool,
    id_row_bytes: float = 0.0,
) -> TableFacts:
    """The facts of a table ``name`` of the collection ``module`` at ``path``.

    Args:
        config: the table's config; None takes the size of ``tensor``.
        tensor: the table's weight; None for a table that exists only in packed form.
        precision: precision of the packed rows, if not the config's.
        sharder: the table's sharder, for settings and codecs.
        offers: (sharding type, kernel) to choose from.
        limit: the user's constraints.
        features, figures: features of the table, and their figures.
        id_row_bytes: bytes per row of what makes rows of raw ids or strings.
    """
    c = limit or ParameterConstraints()
    if not isinstance(c.output_dtype, DataType | None):
        raise ConfigError(f"table {name!r}: output_dtype is {c.output_dtype!r}; expected a DataType")
    quantized = any(kernel.startswith("quant") for _, kernel in offers)
    if config is not None:
        rows, cols, stored = config.num_embeddings, config.embedding_dim, config.data_type
    else:
        assert tensor is not None, f"table {name!r} has neither a config nor a weight"
        (rows, cols), stored = _shape(name, tensor), dtype_to_data_type(tensor.dtype)
    precision = precision or stored
    element = precision.bits / 8 if quantized or tensor is None else float(tensor.element_size())
    sent = 4.0 if quantized else element  # packed rows are looked up as FP32
    settings = getattr(sharder, "fused_params", None) or {}
    cache = c.cache_params or CacheParams()
    ratio = cache.load_factor if cache.load_factor is not None else settings.get("cache_load_factor")
    prefetch = cache.prefetch_pipeline
    full, per_row = _optimizer(tensor, settings)
    return TableFacts(
        module_path=path,
        name=name,
        rows=rows,
        cols=cols,
        element_bytes=element,
        precision=precision,
        offers=offers,
        input_lengths=figures[0],
        num_poolings=figures[1],
        batch_sizes=figures[2],
        pooled=pooled,
        weighted=weighted,
        output_bytes=sent if c.output_dtype is None else c.output_dtype.bits / 8,
        comm_bytes=_comm_bytes(sharder, sent, pooled),
        min_partition=c.min_partition,
        cache_ratio=ratio,
        misses=_misses(cache, ratio),
        prefetch=bool(settings.get("prefetch_pipeline", False) if prefetch is None else prefetch),
        optimizer_full=full,
        optimizer_row_bytes=per_row,
        id_row_bytes=id_row_bytes,
        colocate_with=c.colocate_with,
        module=module,
        tensor=tensor,
        feature_names=tuple(features),
        constraints=limit,
        sharder=sharder,
    )


def _shape(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.dim() != 2:
        raise ConfigError(f"parameter {name!r} has shape {tuple(tensor.shape)}; a table has two dimensions")
    return tensor.shape[0], tensor.shape[1]


def per_feature(name: str, c: ParameterConstraints, num: int, batch_size: int) -> PerFeature:
    """The user's figures for a table's ``num`` features; raises ConfigError for another number of figures.

    A single figure applies to every feature. (TorchRec drops the features beyond the list.) Pooling factors beyond the
    number of features count too, as in TorchRec.
    """
    num = max(num, len(c.pooling_factors or ()), 1)

    def spread(what: str, given: Sequence[float] | None, default: float) -> tuple[float, ...]:
        wrong = [x for x in given or () if not isinstance(x, Real)]
        if wrong:
            raise ConfigError(f"table {name!r}: {what} has {wrong[0]!r}; expected numbers")
        values = [float(x) for x in given or [default]]
        if len(values) not in (1, num):
            raise ConfigError(
                f"table {name!r}: {what} has {len(values)} figures for {num} features; expected one, or one for each"
            )
        return tuple(values if len(values) == num else values * num)

    lengths = spread("pooling_factors", c.pooling_factors, 1.0)
    poolings = spread("num_poolings", c.num_poolings, 1.0)
    batches = tuple(int(b) for b in spread("batch_sizes", c.batch_sizes, batch_size))
    return lengths, poolings, batches


def _comm_bytes(sharder: ModuleSharder[Any] | None, default: float, pooled: bool) -> tuple[float, float, float, float]:
    registry = getattr(sharder, "qcomm_codecs_registry", None) or {}
    to_all = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL if pooled else CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    sizes = []
    for op in (to_all, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER):
        codecs = registry.get(op.name) or registry.get(op.value)
        for codec in (codecs.forward, codecs.backward) if codecs is not None else (None, None):
            size = codec_bytes(codec)
            sizes.append(default if size is None else size)
    return sizes[0], sizes[1], sizes[2], sizes[3]


def _misses(cache: CacheParams, ratio: float | None) -> float:
    if cache.stats is None or ratio is None:
        return 0.0
    return cache.stats.expected_lookups * cache.stats.expected_miss_rate(ratio)


def _optimizer(tensor: torch.Tensor | None, fused: Mapping[str, Any]) -> tuple[float, float]:
    """Optimizer state: (copies of the table, bytes per row), from the optimizer attached to the parameter or fused."""
    attached = getattr(tensor, "_optimizer_classes", None) or []
    chosen = attached[0] if attached else fused.get("optimizer_class", fused.get("optimizer"))
    if chosen is None:
        return 0.0, 0.0
    name = str(getattr(chosen, "__name__", getattr(chosen, "name", getattr(chosen, "value", chosen))))
    name = name.lower().replace("_", "").removeprefix("exact")
    if name == "sgd":  # LARS, another SGD, keeps a momentum
        return 0.0, 0.0
    if "rowwise" in name and "adagrad" in name:
        return 0.0, 4.0
    if "partialrowwise" in name:  # Adam or LAMB with one second moment a row
        return 1.0, 4.0
    if "adam" in name or "lamb" in name:
        return 2.0, 0.0
    return 1.0, 0.0


def kjt_bytes(tables: Sequence[TableFacts]) -> int:
    """Bytes of the ids of one batch for all features of ``tables``, each feature once."""
    seen: dict[str, float] = {}
    anonymous = 0.0
    for t in tables:
        for i, (n, p, b) in enumerate(zip(t.input_lengths, t.num_poolings, t.batch_sizes)):
            if i < len(t.feature_names):
                seen[t.feature_names[i]] = n * p * b
            else:
                anonymous += n * p * b
    return int((sum(seen.values()) + anonymous) * BIGINT_DTYPE)
