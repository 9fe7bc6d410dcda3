"""Lists the sharding options of a model, as objects and (for the default search) as arrays."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import nn

from recinfer.distributed.planner.constants import BATCH_SIZE
from recinfer.distributed.planner.interfaces import Enumerator, ShardEstimator
from recinfer.distributed.planner.model.constraints import ParameterConstraints
from recinfer.distributed.planner.model.estimates import Estimate, FloatN, IntN, ShardArrays, inference_estimate
from recinfer.distributed.planner.model.facts import TableFacts
from recinfer.distributed.planner.model.options import Shard, ShardingOption, partition_by_of
from recinfer.distributed.planner.model.sharders import build_sharder_data_map, sharder_name
from recinfer.distributed.planner.model.tables import model_tables
from recinfer.distributed.planner.model.topology import Perf, Topology, storage_of
from recinfer.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from recinfer.distributed.planner.solve.space import SearchSpace, build_space, option_label
from recinfer.distributed.types import ModuleSharder
from recinfer.distributed.types.tiers import TIERS
from recinfer.errors import ConfigError

__all__ = ["EmbeddingEnumerator", "option_object"]


class EmbeddingEnumerator(Enumerator):
    """All options that the sharders offer and the constraints allow, estimated.

    Args:
        topology: hardware.
        batch_size: samples per rank.
        constraints: by table name.
        estimator: estimators of perf and storage; default: those of training, or those of inference for modules with
            only quantized kernels.
        use_exact_enumerate_order: does nothing (:mod:`recinfer.ignored`); options always come in the order of the modules.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int = BATCH_SIZE,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool | None = False,
    ) -> None:
        if not (isinstance(batch_size, Integral) and batch_size >= 1):
            raise ConfigError(f"batch_size {batch_size!r}; expected a whole number of at least 1")
        self._topology = topology
        self._batch_size = batch_size
        self._constraints = constraints
        self._given: list[ShardEstimator] | None = None
        if estimator is not None:
            self._given = [estimator] if isinstance(estimator, ShardEstimator) else list(estimator)
        self._sharder_map: dict[str, ModuleSharder[nn.Module]] = {}
        self._last: list[ShardingOption] | None = None
        self._tables: list[TableFacts] | None = None

    @property
    def last_tables(self) -> list[TableFacts] | None:
        """(ours) The tables of the last :meth:`space` or :meth:`enumerate`."""
        return self._tables

    @property
    def sharder_map(self) -> dict[str, ModuleSharder[nn.Module]]:
        """``sharder_name(module_type)`` -> sharder, of the last enumeration."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """The result of the last :meth:`enumerate`."""
        return self._last

    def space(self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> SearchSpace | None:
        """The options as arrays; None when the estimators only take objects, or there is nothing to shard.

        Raises:
            PlannerError: a table without any option.
            ConfigError: constraints that do not fit.
        """
        self._sharder_map = {sharder_name(s.module_type): s for s in sharders}
        self._tables = tables = model_tables(module, sharders, self._topology, self._batch_size, self._constraints)
        estimate = self.estimate_of(tables, self._topology) if tables else None
        if estimate is None:
            return None
        return build_space(tables, self._topology, estimate)

    def estimate_of(self, tables: Sequence[TableFacts], topology: Topology) -> Estimate | None:
        """The estimate function over arrays, for a topology; None when the estimators only take objects."""
        if self._given is None and all(k.startswith("quant") for t in tables for _, k in t.offers):
            return inference_estimate(topology)
        perf, storage = EmbeddingPerfEstimator(topology), EmbeddingStorageEstimator(topology)
        for given in self._given or ():  # compared by exact type, because a subclass may have changed estimate()
            if type(given) is EmbeddingPerfEstimator:
                perf = given
            elif type(given) is EmbeddingStorageEstimator:
                storage = given
            else:
                return None

        def both(arrays: ShardArrays) -> tuple[FloatN, IntN]:
            num_bytes = storage.estimate_arrays(arrays)
            return perf.estimate_arrays(arrays), num_bytes

        return both

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        """Valid options of every table, with perf and storage; an empty list when there is nothing to shard."""
        space = self.space(module, sharders)
        if not self._tables:
            self._last = []
            return []
        if space is None:
            space = build_space(self._tables, self._topology, _no_estimate)
            options = [option_object(space, o, self._batch_size, estimated=False) for o in range(space.num_options)]
            self.populate_estimates(options)
        else:
            options = [option_object(space, o, self._batch_size) for o in range(space.num_options)]
        self._last = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Estimate ``sharding_options`` (again), for example after changing their cache parameters.

        An estimator whose ``estimate`` names its second parameter ``sharder_data_map``, as TorchRec 1.8's does, gets
        :class:`~recinfer.distributed.planner.types.SharderData` by name; any other gets the sharders.
        """
        estimators = self._given
        if estimators is None:
            inference = all(o.compute_kernel.startswith("quant") for o in sharding_options)
            estimators = [
                EmbeddingPerfEstimator(self._topology, self._constraints, is_inference=inference),
                EmbeddingStorageEstimator(self._topology, self._constraints, is_inference=inference),
            ]
        for estimator in estimators:
            sharders: Any = self._sharder_map
            if "sharder_data_map" in inspect.signature(estimator.estimate).parameters:
                sharders = build_sharder_data_map(self._sharder_map)
            estimator.estimate(sharding_options, sharders)


def _no_estimate(arrays: ShardArrays) -> tuple[FloatN, IntN]:
    """An estimate function that gives 0 milliseconds and 0 bytes for every shard."""
    num = arrays.kind.size
    return np.zeros((num, 6)), np.zeros((len(TIERS), num), np.int64)


def option_object(
    space: SearchSpace,
    option: int,
    batch_size: int,
    ranks: IntN | None = None,
    *,
    estimated: bool = True,
) -> ShardingOption:
    """An option of the arrays as TorchRec's object, placed when ``ranks`` are given."""
    table = space.tables[int(space.option_table[option])]
    sharding_type, kernel = option_label(space, option)
    s = space.shards_of(option)
    shards = []
    for i, (r, h, c, w) in enumerate(space.rect[s].tolist()):
        shard = Shard([h, w], [r, c], rank=int(ranks[i]) if ranks is not None else None)
        if estimated:
            at = s.start + i
            shard.perf = Perf(*space.perf[at].tolist())
            shard.storage = storage_of(space.bytes[:, at].tolist())
        shards.append(shard)
    c_ = table.constraints or ParameterConstraints()
    tensor = table.tensor if table.tensor is not None else torch.empty(table.rows, table.cols, device="meta")
    return ShardingOption(
        name=table.name,
        tensor=tensor,
        module=(table.module_path, table.module if table.module is not None else nn.Module()),
        input_lengths=list(table.input_lengths),
        batch_size=batch_size,
        sharding_type=sharding_type,
        partition_by=partition_by_of(sharding_type),
        compute_kernel=kernel,
        shards=shards,
        cache_params=c_.cache_params,
        enforce_hbm=c_.enforce_hbm,
        stochastic_rounding=c_.stochastic_rounding,
        bounds_check_mode=c_.bounds_check_mode,
        dependency=table.colocate_with,
        is_pooled=table.pooled,
        feature_names=list(table.feature_names),
        output_dtype=c_.output_dtype,
        key_value_params=c_.key_value_params,
        num_poolings=list(table.num_poolings),
    )
