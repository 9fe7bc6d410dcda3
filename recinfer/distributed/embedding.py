"""Sharded EmbeddingCollection for training, and its sharder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recinfer.distributed.exchange.dedup import deduplicated
from recinfer.distributed.exchange.sequence import SequenceShardingContext
from recinfer.distributed.sharded.collection import ShardedCollection
from recinfer.distributed.sharded.infos import by_sharding_type, table_infos
from recinfer.distributed.sharded.sharding import SequenceSharding
from recinfer.distributed.sharded.typed_sharder import TypedSharder
from recinfer.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder
from recinfer.distributed.types.kjt_lists import KJTList
from recinfer.distributed.types.sharding_types import types_where
from recinfer.distributed.types.shardings import EmbeddingSharding, EmbeddingShardingInfo, ShardedCollectionContext
from recinfer.modules.embedding_configs import EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingCollection, EmbeddingCollectionInterface
from recinfer.sparse.checks import MissingKeyError, check_distinct_keys
from recinfer.sparse.full_batch import bags_of, inverse_of
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "EmbeddingCollectionAwaitable",
    "EmbeddingCollectionContext",
    "EmbeddingCollectionSharder",
    "ShardedEmbeddingCollection",
    "create_embedding_sharding",
    "create_sharding_infos_by_sharding",
    "get_ec_index_dedup",
    "set_ec_index_dedup",
]

_index_dedup = False


def get_ec_index_dedup() -> bool:
    """Whether new sharded EmbeddingCollections send each distinct id only once."""
    return _index_dedup


def set_ec_index_dedup(val: bool) -> None:
    """Make sharded EmbeddingCollections that are built from now on send each distinct id once, or not."""
    global _index_dedup
    _index_dedup = val


@dataclass
class EmbeddingCollectionContext(ShardedCollectionContext[SequenceShardingContext]):
    """The context of one forward, passed between its steps.

    Args:
        sharding_contexts: one per sharding.
        input_features: a list of the input alone.
        reverse_indices: with index dedup, for each id, feature by feature, the position of the same id among those
            sent.
    """

    input_features: list[KeyedJaggedTensor] = field(default_factory=list)
    reverse_indices: list[Tensor] = field(default_factory=list)

    def places_of_ids(self, names: Sequence[str]) -> dict[str, Tensor] | None:
        """For each id of the features ``names``, its position among the distinct ids of the feature, int64 ``[ids]``; None
        without index dedup."""
        if not self.reverse_indices:
            return None
        features = self.input_features[0]
        sizes = dict(zip(features.keys(), features.length_per_key()))
        distinct = self.sharding_contexts[0].features_before_input_dist
        assert distinct is not None
        starts = dict(zip(distinct.keys(), distinct.offset_per_key()))
        result, at = {}, 0
        for name in dict.fromkeys(names):
            result[name] = self.reverse_indices[0][at : at + sizes[name]] - starts[name]
            at += sizes[name]
        return result

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the tensors alive until ``stream`` has finished with them."""
        super().record_stream(stream)
        for features in self.input_features:
            features.record_stream(stream)  # type: ignore[arg-type]
        for tensor in self.reverse_indices:
            if tensor.is_cuda:
                tensor.record_stream(stream)  # type: ignore[arg-type]


def create_sharding_infos_by_sharding(
    module: EmbeddingCollectionInterface,
    table_name_to_parameter_sharding: dict[str, ParameterSharding],
    fused_params: dict[str, Any] | None,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """The tables of a module by sharding type: sharding type -> infos, tables in module order.

    Raises:
        ConfigError: a table has no plan, or the plan names a table that does not exist.
    """
    return by_sharding_type(_infos(module, table_name_to_parameter_sharding, fused_params))


def _infos(
    module: EmbeddingCollectionInterface, plan: dict[str, ParameterSharding], fused_params: dict[str, Any] | None
) -> list[EmbeddingShardingInfo]:
    state = module.state_dict(keep_vars=True)
    configs = module.embedding_configs()
    parameters = {config.name: state[f"embeddings.{config.name}.weight"] for config in configs}
    return table_infos(configs, parameters, plan, fused_params, is_weighted=False)


def create_embedding_sharding(
    sharding_type: str,
    sharding_infos: list[EmbeddingShardingInfo],
    env: ShardingEnv,
    device: torch.device | None = None,
    qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
) -> EmbeddingSharding[Any, KeyedJaggedTensor, Tensor, Any]:
    """The sharding of unpooled tables of one type.

    Args:
        sharding_type: data_parallel, table_wise, column_wise or row_wise.
        sharding_infos: the tables.
        env: the ranks.
        device: device of rows and buffers.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.

    Raises:
        ConfigError: an unknown type, or tables of another type.
    """
    from recinfer.distributed.sharded.by_type import sequence_sharding_of

    return sequence_sharding_of(sharding_type)(sharding_infos, env, device, qcomm_codecs_registry)


class EmbeddingCollectionAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """Awaitable of the rows, feature -> JaggedTensor, which waits when the result is first used.

    Args:
        awaitables: for each sharding, the column pieces of its outputs.
        pieces: for each output (sharding, number of column pieces).
        names: names of the outputs, in module order.
        features: the feature of each output.
        ctx: the input, and how it was deduplicated.
        need_indices: put the ids into the weights of the outputs.
    """

    def __init__(
        self,
        awaitables: Sequence[Awaitable[list[Tensor]]],
        pieces: Sequence[tuple[int, int]],
        names: list[str],
        features: list[str],
        ctx: EmbeddingCollectionContext,
        need_indices: bool = False,
    ) -> None:
        super().__init__()
        self._awaitables = awaitables
        self._pieces = pieces
        self._names = names
        self._features = features
        self._ctx = ctx
        self._need_indices = need_indices

    def _wait_impl(self) -> dict[str, JaggedTensor]:
        parts = [iter(awaitable.wait()) for awaitable in self._awaitables]
        features = self._ctx.input_features[0]
        reverse = self._ctx.places_of_ids(self._features)
        by_name = features.to_dict()
        expands = features.variable_stride_per_key() and features.inverse_indices_or_none() is not None
        result = {}
        for name, feature, (sharding, count) in zip(self._names, self._features, self._pieces):
            columns = [next(parts[sharding]) for _ in range(count)]
            rows = columns[0] if count == 1 else torch.cat(columns, dim=1)
            if reverse is not None:
                rows = rows.index_select(0, reverse[feature])
            asked = by_name[feature]
            ids = asked.values() if self._need_indices else None
            found = JaggedTensor.from_parts_unchecked(rows, ids, asked.lengths(), asked.offsets())
            result[name] = bags_of(found, inverse_of(features, feature)) if expands else found
        return result


class ShardedEmbeddingCollection(ShardedCollection[dict[str, JaggedTensor], EmbeddingCollectionContext]):
    """An EmbeddingCollection whose tables are sharded over the ranks of a process group.

    Args:
        module: the collection. The collection's values are kept. Values on the meta device are initialised, with the
            same values for any sharding if all ranks have the same seed.
        table_name_to_parameter_sharding: the plan of every table.
        env: the ranks.
        fused_params: settings of the fused kernels.
        device: device of rows and buffers; default CPU.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        use_index_dedup: send each distinct id of a feature once.

    ``forward(features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]``: each rank passes its own batch
    and gets a row ``[D]`` for each of its ids, outputs in module order. The gradient of a row is the mean of the ranks'
    gradients.

    Raises:
        ConfigError: a table has no plan, or its shards do not tile it.
    """

    tables_attribute = "embeddings"
    sharding_class = SequenceSharding

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        module_fqn: str | None = None,
    ) -> None:
        infos = _infos(module, table_name_to_parameter_sharding, fused_params)
        super().__init__(infos, env, device, qcomm_codecs_registry)
        self._embedding_configs = module.embedding_configs()
        self._embedding_names_by_table = module.embedding_names_by_table()
        self._embedding_dim = module.embedding_dim()
        self._need_indices = module.need_indices()
        self._use_index_dedup = use_index_dedup or get_ec_index_dedup()
        self._feature_names = [f for config in self._embedding_configs for f in config.feature_names]
        self._pieces = self._column_pieces()
        self.module_sharding_plan = table_name_to_parameter_sharding

    def _column_pieces(self) -> list[tuple[int, int]]:
        """Index of the sharding and number of column pieces of each output, in module order."""
        counts = {
            (id(info), name): (g, len(self._shardings[g].layout.sums[at]))
            for g, info, name, at in self._outputs_of_shardings()
        }
        return [counts[id(info), name] for info in self._infos for name in info.names()]

    def create_context(self) -> EmbeddingCollectionContext:
        """A new context for one forward."""
        return EmbeddingCollectionContext()

    def input_dist(self, ctx: EmbeddingCollectionContext, features: KeyedJaggedTensor) -> Awaitable[Awaitable[KJTList]]:
        """Start sending ids to the ranks that hold their rows.

        Raises:
            MissingKeyError: a feature of the tables is not in ``features``.
            InputError: a key occurs twice.
        """
        ctx.input_features.append(features)
        if self._use_index_dedup:
            check_distinct_keys(features.keys())  # each key occurs once below
            names = list(dict.fromkeys(self._feature_names))
            missing = [name for name in names if name not in features.index_per_key()]
            if missing:
                raise MissingKeyError(f"features {missing} are not in the input; it has {features.keys()}")
            features, reverse = deduplicated(features, names)
            ctx.reverse_indices.append(reverse)
        return self._begin(ctx, features)

    def _outputs(
        self, ctx: EmbeddingCollectionContext, awaitables: list[Awaitable[list[Tensor]]]
    ) -> EmbeddingCollectionAwaitable:
        return EmbeddingCollectionAwaitable(
            awaitables, self._pieces, self._names, self._feature_names, ctx, self._need_indices
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the unsharded tables."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the outputs of each table."""
        return self._embedding_names_by_table

    def embedding_dim(self) -> int:
        """Columns of every table, whole."""
        return self._embedding_dim

    def need_indices(self) -> bool:
        """Whether outputs carry the ids as weights."""
        return self._need_indices


class EmbeddingCollectionSharder(
    BaseEmbeddingSharder[EmbeddingCollection], TypedSharder[EmbeddingCollection, ShardedEmbeddingCollection]
):
    """Shards a float EmbeddingCollection.

    Args:
        fused_params: settings of the fused kernels.
        qcomm_codecs_registry: ``CommOp`` name -> codecs.
        use_index_dedup: send each distinct id of a feature once.
    """

    _takes, _makes = EmbeddingCollection, ShardedEmbeddingCollection

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"use_index_dedup": self._use_index_dedup}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types for unpooled tables: all types that need no sum inside a host."""
        return types_where(lambda rule: rule.unpooled)
