"""Reads a model: which tables its sharders can shard, and what the planner must know of each (a :class:`TableInfo`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recinfer.distributed.planner.constants import BIGINT_DTYPE, kernel_bw_lookup
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.estimates import KERNEL_CODES
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.sharders import codec_bytes, sharder_name
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.types import CacheParams, CommOp, ModuleSharder, ShardingType
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType, dtype_to_data_type

__all__ = ["TableInfo", "facts_of_option", "model_tables", "sharded_modules"]

_GUARDED_FOR_PROCESSORS = frozenset({"row_wise", "table_row_wise", "grid_shard"})
_QUANT = "quant"


@dataclass(frozen=True, eq=False)
class TableInfo:
    """All the planner knows of one table; raises ConfigError for figures that no table has."""

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
            ("min_partition", self._given(self.min_partition), "1 or more columns", lambda x: x >= 1),
            ("load_factor of the cache", self._given(self.cache_ratio), "0 to 1", lambda x: 0 <= x <= 1),
        )
        for name, values, expected, holds in figures:
            for value in values:
                if not holds(value):
                    raise ConfigError(f"table {self.name!r}: {name} is {value}; expected {expected}")

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
        """Vectors of one batch, if pooled."""
        return float(sum(p * b for p, b in zip(self.num_poolings, self.batch_sizes)))

    @property
    def filled_outputs(self) -> float:
        """Vectors of one batch that are not of empty bags, as TorchRec's training model counts them."""
        return float(sum(min(n, 1) * p * b for n, p, b in zip(self.input_lengths, self.num_poolings, self.batch_sizes)))


def sharded_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module that a sharder takes, outermost first, not looking inside it."""
    exact = {sharder_name(s.module_type): s for s in sharders}
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        path, child = stack.pop()
        sharder = exact.get(sharder_name(type(child)))
        if sharder is None:
            sharder = next((s for s in sharders if isinstance(child, s.module_type)), None)
        if sharder is not None:
            yield path, child, sharder
            continue
        prefix = f"{path}." if path else ""
        stack.extend(reversed([(prefix + name, inner) for name, inner in child.named_children()]))


def model_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> list[TableInfo]:
    """Every table that ``sharders`` can shard; raises ConfigError for constraints of tables that are not there."""
    limits = constraints or {}
    tables = []
    for path, child, sharder in sharded_modules(module, sharders):
        configs = _configs(child)
        for name, tensor in sharder.shardable_parameters(child).items():
            limit = limits.get(name)
            if limit is not None and limit.device_group not in (None, topology.compute_device):
                continue
            tables.append(_table(path, child, sharder, name, tensor, configs.get(name), topology, batch_size, limit))
    return tables


def _configs(module: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    """Table configs by name; of the collection inside when ``module`` is a feature-processed one."""
    for holder in (module, getattr(module, "_embedding_bag_collection", None)):
        for method in ("embedding_bag_configs", "embedding_configs"):
            get = getattr(holder, method, None)
            if callable(get):
                return {c.name: c for c in get()}
    return {}


def _table(
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[Any],
    name: str,
    tensor: torch.Tensor,
    config: BaseEmbeddingConfig | None,
    topology: Topology,
    batch_size: int,
    limit: ParameterConstraints | None,
) -> TableInfo:
    c = limit or ParameterConstraints()
    features = list(c.feature_names or (config.feature_names if config is not None else ()))
    lengths, poolings, batches = _per_feature(name, c, max(len(features), 1), batch_size)
    offers = _offers(module, sharder, topology, limit)
    quantized = any(kernel.startswith(_QUANT) for _, kernel in offers)
    rows, cols = (config.num_embeddings, config.embedding_dim) if config is not None else _shape(name, tensor)
    precision = config.data_type if config is not None else dtype_to_data_type(tensor.dtype)
    element = precision.bits / 8 if quantized else float(tensor.element_size())
    pooled = ShardingOption.module_pooled(module, name)
    fused = getattr(sharder, "fused_params", None) or {}
    cache = c.cache_params or CacheParams()
    full, per_row = _optimizer(tensor, fused)
    ratio = cache.load_factor if cache.load_factor is not None else fused.get("cache_load_factor")
    prefetch = cache.prefetch_pipeline if cache.prefetch_pipeline is not None else fused.get("prefetch_pipeline", False)
    output = element if not quantized else 4.0
    return TableInfo(
        module_path=path,
        name=name,
        rows=rows,
        cols=cols,
        element_bytes=element,
        precision=precision,
        offers=offers,
        input_lengths=lengths,
        num_poolings=poolings,
        batch_sizes=batches,
        pooled=pooled,
        weighted=_is_weighted(module, c),
        output_bytes=output if c.output_dtype is None else c.output_dtype.bits / 8,
        comm_bytes=_comm_bytes(sharder, element if not quantized else 4.0, pooled),
        min_partition=c.min_partition,
        cache_ratio=ratio,
        misses=_misses(cache, ratio),
        prefetch=bool(prefetch),
        optimizer_full=full,
        optimizer_row_bytes=per_row,
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


def _per_feature(
    name: str, c: ParameterConstraints, num: int, batch_size: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    # A single figure stands for every feature. (TorchRec drops the features beyond the list.) More pooling factors than
    # features count all, as in TorchRec: the table is looked up that often.
    num = max(num, len(c.pooling_factors or ()))

    def spread(what: str, given: Sequence[float] | None, default: float) -> tuple[float, ...]:
        values = [float(x) for x in given or [default]]
        if len(values) not in (1, num):
            raise ConfigError(
                f"table {name!r}: {what} has {len(values)} figures for {num} features; give one, or one each"
            )
        return tuple(values if len(values) == num else values * num)

    lengths = spread("pooling_factors", c.pooling_factors, 1.0)
    poolings = spread("num_poolings", c.num_poolings, 1.0)
    batches = tuple(int(b) for b in spread("batch_sizes", c.batch_sizes, batch_size))
    return lengths, poolings, batches


def _offers(
    module: nn.Module, sharder: ModuleSharder[Any], topology: Topology, limit: ParameterConstraints | None
) -> tuple[tuple[str, str], ...]:
    device = topology.compute_device
    asked_types = limit.sharding_types if limit is not None else None
    asked_kernels = limit.compute_kernels if limit is not None else None
    processed = _has_processor(module)
    offers = []
    for kind in sharder.sharding_types(device):
        if asked_types is not None and kind not in asked_types:
            continue
        # A grid has many shards; it is offered on request only, as in TorchRec.
        if asked_types is None and kind == ShardingType.GRID_SHARD.value:
            continue
        if processed and kind in _GUARDED_FOR_PROCESSORS:
            continue
        for kernel in sharder.compute_kernels(kind, device):
            if asked_kernels is not None and kernel not in asked_kernels:
                continue
            if kernel in KERNEL_CODES and kernel_bw_lookup(device, kernel, 1.0, 1.0, 1.0) is not None:
                offers.append((kind, kernel))
    return tuple(offers)


def _has_processor(module: nn.Module) -> bool:
    return hasattr(module, "_feature_processors")


def _is_weighted(module: nn.Module, c: ParameterConstraints) -> bool:
    method = getattr(module, "is_weighted", None)
    if callable(method) and not _has_processor(module):
        return bool(method())
    return c.is_weighted


def _comm_bytes(sharder: ModuleSharder[Any], default: float, pooled: bool) -> tuple[float, float, float, float]:
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


def _optimizer(tensor: torch.Tensor, fused: Mapping[str, Any]) -> tuple[float, float]:
    """Optimizer state: (copies of the table, bytes a row), from the optimizer attached to the parameter or fused."""
    attached = getattr(tensor, "_optimizer_classes", None) or []
    chosen = attached[0] if attached else fused.get("optimizer_class", fused.get("optimizer"))
    if chosen is None:
        return 0.0, 0.0
    name = str(getattr(chosen, "__name__", getattr(chosen, "name", getattr(chosen, "value", chosen))))
    name = name.lower().replace("_", "").removeprefix("exact")
    if "sgd" in name:
        return 0.0, 0.0
    if "rowwise" in name and "adagrad" in name:
        return 0.0, 4.0
    if "partialrowwise" in name:  # Adam or LAMB with one second moment a row
        return 1.0, 4.0
    if "adam" in name or "lamb" in name:
        return 2.0, 0.0
    return 1.0, 0.0


def facts_of_option(
    option: ShardingOption,
    sharder: ModuleSharder[Any] | None,
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> TableInfo:
    """The facts behind one option object, for estimators that are called with objects."""
    limit = (constraints or {}).get(option.name)
    c = limit or ParameterConstraints()
    num = len(option.input_lengths)
    poolings = [float(x) for x in option.num_poolings or c.num_poolings or [1.0]]
    batches = [float(x) for x in c.batch_sizes or [option.batch_size]]
    quantized = option.compute_kernel.startswith(_QUANT)
    config = _configs(option.module[1]).get(option.name)
    rows, cols = (
        (config.num_embeddings, config.embedding_dim) if config is not None else _shape(option.name, option.tensor)
    )
    precision = config.data_type if config is not None else dtype_to_data_type(option.tensor.dtype)
    element = precision.bits / 8 if quantized else float(option.tensor.element_size())
    fused = (getattr(sharder, "fused_params", None) or {}) if sharder is not None else {}
    cache = option.cache_params or c.cache_params or CacheParams()
    ratio = cache.load_factor if cache.load_factor is not None else fused.get("cache_load_factor")
    full, per_row = _optimizer(option.tensor, fused)
    output_dtype: DataType | None = option.output_dtype or c.output_dtype
    default = element if not quantized else 4.0
    comm = _comm_bytes(sharder, default, option.is_pooled) if sharder is not None else (default,) * 4
    prefetch = cache.prefetch_pipeline if cache.prefetch_pipeline is not None else fused.get("prefetch_pipeline", False)
    return TableInfo(
        module_path=option.path,
        name=option.name,
        rows=rows,
        cols=cols,
        element_bytes=element,
        precision=precision,
        offers=((option.sharding_type, option.compute_kernel),),
        input_lengths=tuple(float(x) for x in option.input_lengths),
        num_poolings=tuple(poolings if len(poolings) == num else poolings[:1] * num),
        batch_sizes=tuple(int(b) for b in (batches if len(batches) == num else batches[:1] * num)),
        pooled=option.is_pooled,
        weighted=_is_weighted(option.module[1], c),
        output_bytes=default if output_dtype is None else output_dtype.bits / 8,
        comm_bytes=comm,
        cache_ratio=ratio,
        misses=_misses(cache, ratio),
        prefetch=bool(prefetch),
        optimizer_full=full,
        optimizer_row_bytes=per_row,
        colocate_with=c.colocate_with,
        module=option.module[1],
        tensor=option.tensor,
        feature_names=tuple(option.feature_names or ()),
        constraints=limit,
        sharder=sharder,
    )


def kjt_bytes(tables: Sequence[TableInfo]) -> int:
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
