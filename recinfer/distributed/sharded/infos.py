"""Makes one info per table of a module and its plan: config, plan, values, kernel settings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from recinfer.distributed.fused_params import names_optimizer
from recinfer.distributed.sharded.kernel_settings import (
    add_params_from_parameter_sharding,
    has_optimizer_in_backward,
    optimizer_fused_params,
)
from recinfer.distributed.types import ParameterSharding
from recinfer.distributed.types.kernels import EmbeddingComputeKernel
from recinfer.distributed.types.shardings import EmbeddingShardingInfo
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingTableConfig, PoolingType
from recinfer.modules.embedding_modules import get_embedding_names_by_table

__all__ = ["by_sharding_type", "table_infos"]

logger = logging.getLogger(__name__)


def table_infos(
    configs: Sequence[BaseEmbeddingConfig],
    parameters: Mapping[str, Tensor],
    table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
    fused_params: Mapping[str, Any] | None,
    is_weighted: bool,
) -> list[EmbeddingShardingInfo]:
    """An info per table, in module order.

    Args:
        configs: the tables.
        parameters: the values of each, or meta tensors; with the attributes that apply_optimizer_in_backward set on
            them.
        table_name_to_parameter_sharding: the plan.
        fused_params: kernel settings of all tables; those of a table's optimizer and plan take precedence. They are for
            fused kernels: the caller's own optimizer steps a table that the plan keeps dense, with a warning if an
            optimizer was requested in its backward.
        is_weighted: ids carry weights.

    Raises:
        ConfigError: a table has no plan, or the plan names a table that does not exist.
    """
    names = [config.name for config in configs]
    missing = [name for name in names if name not in table_name_to_parameter_sharding]
    unknown = sorted(table_name_to_parameter_sharding.keys() - set(names))
    if missing or unknown:
        raise ConfigError(
            f"the plan lacks tables {missing} and names unknown tables {unknown}; expected a sharding for each of "
            f"{names}"
        )
    infos, unused = [], []
    for config, outputs in zip(configs, get_embedding_names_by_table(configs)):
        sharding, parameter = table_name_to_parameter_sharding[config.name], parameters[config.name]
        if sharding.compute_kernel == EmbeddingComputeKernel.DENSE.value:
            settings = dict(fused_params or {})
            if names_optimizer(settings) or has_optimizer_in_backward(parameter):
                unused.append(config.name)
        else:
            settings = optimizer_fused_params(parameter, fused_params)
        infos.append(
            EmbeddingShardingInfo(
                embedding_config=_table_config(config, outputs, is_weighted),
                param_sharding=sharding,
                param=parameter,
                fused_params=add_params_from_parameter_sharding(settings, sharding),
            )
        )
    if unused:
        logger.warning(
            "tables %s: the plan keeps them dense, so the optimizer requested in their backward does not run; pass "
            "their parameters to an optimizer (in_backward_optimizer_filter lists them), or plan them with the "
            "kernel fused",
            ", ".join(unused),
        )
    return infos


def _table_config(config: BaseEmbeddingConfig, outputs: list[str], is_weighted: bool) -> EmbeddingTableConfig:
    return EmbeddingTableConfig(
        num_embeddings=config.num_embeddings,
        embedding_dim=config.embedding_dim,
        name=config.name,
        data_type=config.data_type,
        feature_names=list(config.feature_names),
        weight_init_max=config.weight_init_max,
        weight_init_min=config.weight_init_min,
        init_fn=config.init_fn,
        need_pos=config.need_pos,
        pooling=getattr(config, "pooling", PoolingType.NONE),
        is_weighted=is_weighted,
        embedding_names=outputs,
    )


def by_sharding_type(infos: Iterable[EmbeddingShardingInfo]) -> dict[str, list[EmbeddingShardingInfo]]:
    """Sharding type -> its tables, in order."""
    result: dict[str, list[EmbeddingShardingInfo]] = {}
    for info in infos:
        result.setdefault(info.param_sharding.sharding_type, []).append(info)
    return result
