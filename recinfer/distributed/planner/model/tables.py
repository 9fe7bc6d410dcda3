"""Reads the tables of a model, for sharders and for quantized inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.facts import TableFacts, per_feature, table_facts
from recinfer.distributed.planner.model.options import ShardingOption
from recinfer.distributed.planner.model.topology import Topology
from recinfer.distributed.planner.model.walk import embedding_tables, sharded_modules
from recinfer.distributed.types import ModuleSharder
from recinfer.distributed.types.kernels import kernels_where
from recinfer.distributed.types.sharding_types import packed_sharding_types, rule_of
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, DataType
from recinfer.modules.remapping import remapped_tables, trained_id_bytes
from recinfer.quant.formats.registry import ROW_FORMATS, find_row_format

__all__ = ["facts_of_option", "inference_tables", "model_tables"]

_INDEX_ID_BYTES = 16.0  # most bytes of an id and its row in the index of an archive


def model_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    topology: Topology,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None,
) -> list[TableFacts]:
    """Every table that ``sharders`` can shard; raises ConfigError for figures out of range."""
    limits = constraints or {}
    tables = []
    for path, child, sharder in sharded_modules(module, sharders):
        configs = _configs(child)
        for name, tensor in sharder.shardable_parameters(child).items():
            limit, config = limits.get(name), configs.get(name)
            if limit is not None and limit.device_group not in (None, topology.compute_device):
                continue
            c = limit or ParameterConstraints()
            features = c.feature_names or (config.feature_names if config is not None else [])
            facts = table_facts(
                path,
                name,
                child,
                config=config,
                tensor=tensor,
                sharder=sharder,
                offers=_offers(child, sharder, topology, limit),
                limit=limit,
                features=features,
                figures=per_feature(name, c, len(features), batch_size),
                pooled=ShardingOption.module_pooled(child, name),
                weighted=_is_weighted(child, c),
                id_row_bytes=trained_id_bytes(child, name),
            )
            tables.append(facts)
    return tables


def facts_of_option(
    option: ShardingOption, sharder: ModuleSharder[Any] | None, constraints: Mapping[str, ParameterConstraints] | None
) -> TableFacts:
    """The facts of one option object, for estimators that take objects; the option's own figures take precedence."""
    c = (constraints or {}).get(option.name) or ParameterConstraints()
    num = len(option.input_lengths)

    def spread(given: Sequence[float]) -> list[float]:
        return [float(x) for x in (given if len(given) == num else [given[0]] * num)]

    poolings = spread(option.num_poolings or c.num_poolings or [1.0])
    batches = spread(c.batch_sizes or [option.batch_size])
    return table_facts(
        option.path,
        option.name,
        option.module[1],
        config=_configs(option.module[1]).get(option.name),
        tensor=option.tensor,
        sharder=sharder,
        offers=((option.sharding_type, option.compute_kernel),),
        limit=replace(
            c,
            cache_params=option.cache_params or c.cache_params,
            output_dtype=option.output_dtype or c.output_dtype,
        ),
        features=option.feature_names or (),
        figures=(tuple(float(x) for x in option.input_lengths), tuple(poolings), tuple(int(b) for b in batches)),
        pooled=option.is_pooled,
        weighted=_is_weighted(option.module[1], c),
        id_row_bytes=trained_id_bytes(option.module[1], option.name),
    )


def inference_tables(
    model: nn.Module,
    *,
    compute_device: str,
    precision: DataType,
    per_table_precision: Mapping[str, DataType] | None = None,
    batch_size: int = BATCH_SIZE,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    indexed: Mapping[str, int] | None = None,
) -> list[TableFacts]:
    """The tables of ``model`` with their options for quantized inference.

    Raises:
        ConfigError: no embedding collection, a precision without quantized kernels, constraints for another kind of
            device, or a name of a table (in ``constraints`` or ``per_table_precision``) that the model does not have.
    """
    chosen, limits = dict(per_table_precision or {}), dict(constraints or {})
    tables = []
    remapped = remapped_tables(model)
    for path, module, configs, pooled in embedding_tables(model):
        for config in configs:
            full_name = f"{path}.{config.name}" if path else config.name
            kind = chosen.get(full_name, chosen.get(config.name, precision))
            if find_row_format(kind) is None:
                known = [str(rows.data_type) for rows in ROW_FORMATS]
                raise ConfigError(f"table {config.name!r}: precision {kind}; expected one of {known}")
            limit = limits.get(config.name)
            if limit is not None and limit.device_group not in (None, compute_device):
                raise ConfigError(
                    f"table {config.name!r}: device_group {limit.device_group!r} in a plan for {compute_device!r}; "
                    "plan_inference puts every table on one kind of device; omit device_group, or set "
                    "compute_device to it"
                )
            # The features of one table share an index, as a rule.
            ids = max(((indexed or {}).get(feature, 0) for feature in config.feature_names), default=0)
            if config.name in remapped.get(id(module), {}):
                ids = config.num_embeddings
            c, method = limit or ParameterConstraints(), getattr(module, "is_weighted", None)
            facts = table_facts(
                path,
                config.name,
                module,
                config=config,
                precision=kind,
                offers=_inference_offers(compute_device, c),
                limit=limit,
                features=config.feature_names,
                figures=per_feature(config.name, c, len(config.feature_names), batch_size),
                pooled=pooled,
                weighted=c.is_weighted or not callable(method) or bool(method()),
                id_row_bytes=_INDEX_ID_BYTES * ids / config.num_embeddings,
            )
            tables.append(facts)
    if not tables:
        raise ConfigError(
            f"{type(model).__name__} has no tables: expected an EmbeddingBagCollection or EmbeddingCollection, or a "
            "torch.nn.Embedding or EmbeddingBag without max_norm"
        )
    full_names = {f"{t.module_path}.{t.name}" if t.module_path else t.name for t in tables}
    names = {t.name for t in tables}
    for what, unknown in (
        ("precisions are given for", set(chosen) - names - full_names),
        ("constraints name", set(limits) - names),
    ):
        if unknown:
            raise ConfigError(f"{what} tables {sorted(unknown)}; the model has {sorted(full_names)[:20]}")
    return tables


def _configs(module: nn.Module) -> dict[str, BaseEmbeddingConfig]:
    """Table configs by name; a feature-processed ``module`` gives the configs of its collection."""
    for holder in (module, getattr(module, "_embedding_bag_collection", None)):
        for method in ("embedding_bag_configs", "embedding_configs"):
            get = getattr(holder, method, None)
            if callable(get):
                return {c.name: c for c in get()}
    return {}


def _offers(
    module: nn.Module, sharder: ModuleSharder[Any], topology: Topology, limit: ParameterConstraints | None
) -> tuple[tuple[str, str], ...]:
    device = topology.compute_device
    asked_types = limit.sharding_types if limit is not None else None
    asked_kernels = limit.compute_kernels if limit is not None else None
    processed = _has_processor(module)
    runnable = kernels_where(lambda rule: device in rule.devices)
    offers = []
    for kind in sharder.sharding_types(device):
        if asked_types is not None and kind not in asked_types:
            continue
        # A grid, which has many shards, and cuts by rows behind feature processors are offered only if the constraints
        # ask for them, as in TorchRec.
        rule = rule_of(kind)
        if asked_types is None and (rule.on_request or (processed and rule.cuts_rows)):
            continue
        for kernel in sharder.compute_kernels(kind, device):
            if asked_kernels is not None and kernel not in asked_kernels:
                continue
            if kernel in runnable:
                offers.append((kind, kernel))
    return tuple(offers)


def _inference_offers(compute_device: str, c: ParameterConstraints) -> tuple[tuple[str, str], ...]:
    return tuple(
        (kind, kernel)
        for kind in packed_sharding_types()
        if not c.sharding_types or kind in c.sharding_types
        for kernel in kernels_where(lambda rule: rule.packed and compute_device in rule.devices)
        if not c.compute_kernels or kernel in c.compute_kernels
    )


def _has_processor(module: nn.Module) -> bool:
    return hasattr(module, "_feature_processors")


def _is_weighted(module: nn.Module, c: ParameterConstraints) -> bool:
    method = getattr(module, "is_weighted", None)
    if callable(method) and not _has_processor(module):
        return bool(method())
    return c.is_weighted
