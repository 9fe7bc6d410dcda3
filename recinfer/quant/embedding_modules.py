"""Quantized EmbeddingBagCollection and EmbeddingCollection: packed tables in one buffer, one TBE call.

Names and signatures are TorchRec's (``torchrec.quant.embedding_modules``). Weights are uint8 packed rows (see
:mod:`recinfer.quant.rows`) and appear in ``state_dict`` as ``embedding_bags.<table>.weight`` or
``embeddings.<table>.weight``, views of the one buffer that the op reads.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.ignored import warn_ignored
from recinfer.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    dtype_to_data_type,
)
from recinfer.modules.mc_modules import ManagedCollisionCollection
from recinfer.quant.buffers import Placed
from recinfer.quant.collection import PackedTable, QuantizedCollection
from recinfer.quant.lookup import PooledLookup, SequenceLookup
from recinfer.quant.rows import OUTPUT_DTYPES
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recinfer.quant.tbe import IntNBitTableBatchedEmbeddingBagsCodegen

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "PackedTable",
    "QuantManagedCollisionEmbeddingBagCollection",
    "QuantManagedCollisionEmbeddingCollection",
    "chosen_data_types",
    "quant_prep_enable_cache_features_order",
]

C = TypeVar("C", bound=BaseEmbeddingConfig)


def chosen_data_types(
    configs: Sequence[BaseEmbeddingConfig], default: DataType, per_table: Mapping[str, DataType] | None = None
) -> dict[str, DataType]:
    """Precision of every table; raises ConfigError if ``per_table`` names an unknown table."""
    names = {config.name for config in configs}
    unknown = sorted(set(per_table or {}) - names)
    if unknown:
        raise ConfigError(f"unknown tables {', '.join(unknown)}; the tables are: {', '.join(sorted(names))}")
    return {name: (per_table or {}).get(name, default) for name in names}


class EmbeddingBagCollection(QuantizedCollection[EmbeddingBagConfig, PooledLookup]):
    """Quantized pooled tables.

    Args:
        tables: configs; ``data_type`` is the packed precision (``recinfer.quant.rows.PACKED_TYPES``), in any mix.
        is_weighted: ids carry weights.
        device: ``"cpu"``, a CUDA device, or ``"meta"`` (planning).
        output_dtype: float32, float16 or bfloat16.
        table_name_to_quantized_weights: table -> (codes [R, bytes], scale and bias [R, 4 bytes] or None for floats).
        register_tbes, quant_state_dict_split_scale_bias, cache_features_order: no effect (:mod:`recinfer.ignored`);
        :meth:`tbes` always returns the TBEs, and orders of keys are always cached.
        row_alignment: default 1 on CPU, 16 on a GPU.

    ``forward(features: KeyedJaggedTensor) -> KeyedTensor``: keys in module order, values [B, sum of dims]. Tables never
    initialised hold zeros. Raises InputError for missing features and out-of-range ids.
    """

    _tables_attribute = "embedding_bags"
    _is_weighted: bool

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        cache_features_order: bool = False,
    ) -> None:
        _warn_ignored("EmbeddingBagCollection", register_tbes, quant_state_dict_split_scale_bias)
        self.__dict__["_is_weighted"] = is_weighted  # the base class builds the lookup, which reads this
        super().__init__(tables, device, output_dtype, table_name_to_quantized_weights, row_alignment)

    def _make_lookup(self, pieces: Mapping[str, Sequence[Placed]]) -> PooledLookup:
        return PooledLookup(
            self._configs,
            pieces,
            self._storage,
            is_weighted=self._is_weighted,
            output_dtype=self._output_dtype,
        )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature."""
        return self._lookup.forward(features)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE module over the same bytes."""
        return [self._lookup.batch.fbgemm_module()]

    @classmethod
    def from_float(
        cls,
        module: Any,
        use_precomputed_fake_quant: bool = False,
        *,
        data_type: DataType | None = None,
        per_table: Mapping[str, DataType] | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> EmbeddingBagCollection:
        """Quantize a float collection (recinfer's, or any with ``embedding_bags[name].weight``), table by table.

        Args:
            module: the collection; its optional ``module.qconfig``, as in TorchRec, is a
                ``torch.ao.quantization.QConfig`` or TorchRec's QuantConfig.
            use_precomputed_fake_quant: no effect (:mod:`recinfer.ignored`).
            data_type: precision of all tables; None: what the weight observer of ``module.qconfig`` and its
                ``per_table_weight_dtype`` say, INT8 without them.
            per_table: table -> precision, where it differs.
            output_dtype: of the looked-up vectors; None: that of the activation observer of ``module.qconfig``,
                float32 without one.

        Raises:
            InputError: a weight that is not finite, naming table and row.
            ConfigError: an unknown table, or a type that lookups do not support.
        """
        of = "quant.embedding_modules.EmbeddingBagCollection.from_float"
        warn_ignored(of, "use_precomputed_fake_quant", use_precomputed_fake_quant)
        configs = list(module.embedding_bag_configs())
        types = _data_types(module, configs, data_type, per_table)
        output_dtype = output_dtype or _qconfig_output(module)
        tables = [_requantized(c, types[c.name], EmbeddingBagConfig) for c in configs]
        weights = {c.name: module.embedding_bags[c.name].weight for c in configs}
        return cls(tables, bool(module.is_weighted()), _device_of(weights), output_dtype)._holding(weights)


class EmbeddingCollection(QuantizedCollection[EmbeddingConfig, SequenceLookup]):
    """Quantized unpooled tables. Args as :class:`EmbeddingBagCollection`.

    ``forward(features) -> dict[str, JaggedTensor]`` in module order, values [N_f, dim]; with ``need_indices`` the
    JaggedTensors' weights are the ids.
    """

    _tables_attribute = "embeddings"
    _need_indices: bool

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        cache_features_order: bool = False,
    ) -> None:
        _warn_ignored("EmbeddingCollection", register_tbes, quant_state_dict_split_scale_bias)
        self.__dict__["_need_indices"] = need_indices  # the base class builds the lookup, which reads this
        super().__init__(tables, device, output_dtype, table_name_to_quantized_weights, row_alignment)

    def _make_lookup(self, pieces: Mapping[str, Sequence[Placed]]) -> SequenceLookup:
        return SequenceLookup(
            self._configs,
            pieces,
            self._storage,
            output_dtype=self._output_dtype,
            need_indices=self._need_indices,
        )

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """One vector per id of every feature."""
        return self._lookup.forward(features)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables, with their packed precision."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of the first table (TorchRec's collections have one width, recinfer's may have several)."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names, table by table."""
        names = iter(self._lookup.names)
        return [[next(names) for _ in config.feature_names] for config in self._configs]

    def need_indices(self) -> bool:
        """Whether outputs carry their ids."""
        return self._need_indices

    def tbes(self) -> list[IntNBitTableBatchedEmbeddingBagsCodegen]:
        """FBGEMM's TBE modules over the same bytes, one per width."""
        return [call.batch.fbgemm_module() for call in self._lookup.tables.calls]

    @classmethod
    def from_float(
        cls,
        module: Any,
        use_precomputed_fake_quant: bool = False,
        *,
        data_type: DataType | None = None,
        per_table: Mapping[str, DataType] | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> EmbeddingCollection:
        """Quantize like :meth:`EmbeddingBagCollection.from_float`, for ``embeddings[name].weight``."""
        of = "quant.embedding_modules.EmbeddingCollection.from_float"
        warn_ignored(of, "use_precomputed_fake_quant", use_precomputed_fake_quant)
        configs = list(module.embedding_configs())
        types = _data_types(module, configs, data_type, per_table)
        output_dtype = output_dtype or _qconfig_output(module)
        tables = [_requantized(c, types[c.name], EmbeddingConfig) for c in configs]
        weights = {c.name: module.embeddings[c.name].weight for c in configs}
        need_indices = bool(module.need_indices()) if hasattr(module, "need_indices") else False
        return cls(tables, _device_of(weights), need_indices, output_dtype)._holding(weights)


class _ManagedCollisions:
    """The managed collisions in front of a quantized collection; they only look ids up.

    Args:
        collisions: the managed collision modules of the collection's tables.
        configs: the collection's tables.
    """

    def _set_collisions(
        self, collisions: ManagedCollisionCollection | None, configs: Sequence[BaseEmbeddingConfig]
    ) -> None:
        names = [] if collisions is None else [config.name for config in collisions.embedding_configs()]
        if collisions is None or names != [config.name for config in configs]:
            raise ConfigError(
                f"{type(self).__name__}: managed collisions of tables {names}; expected a managed_collision_collection of "
                f"the tables {[config.name for config in configs]}"
            )
        for module in collisions._managed_collision_modules.values():
            module.eval()
            module.reset_inference_mode()  # type: ignore[operator]
        self._managed_collision_collection = collisions


class QuantManagedCollisionEmbeddingCollection(_ManagedCollisions, EmbeddingCollection):
    """Managed collisions in front of quantized unpooled tables. Args as :class:`EmbeddingCollection`.

    Args:
        managed_collision_collection: the managed collision modules of the same tables; required.
        return_remapped_features: no effect, as in TorchRec: forward always returns them.

    ``forward(features)`` takes raw ids and returns (the result of :class:`EmbeddingCollection`, the features with rows).
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        managed_collision_collection: ManagedCollisionCollection | None = None,
        return_remapped_features: bool = False,
        cache_features_order: bool = False,
    ) -> None:
        weights = table_name_to_quantized_weights
        super().__init__(tables, device, need_indices, output_dtype, weights, row_alignment=row_alignment)
        _warn_ignored("EmbeddingCollection", register_tbes, quant_state_dict_split_scale_bias)
        self._set_collisions(managed_collision_collection, tables)
        self._return_remapped_features = return_remapped_features

    def forward(self, features: KeyedJaggedTensor) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor]:  # type: ignore[override]
        """(One vector per raw id of every feature, the features with rows)."""
        rows = self._managed_collision_collection(features)
        return super().forward(rows), rows

    @classmethod
    def from_float(  # type: ignore[override]
        cls, module: Any, return_remapped_features: bool = False
    ) -> QuantManagedCollisionEmbeddingCollection:
        """Quantize a ManagedCollisionEmbeddingCollection by its ``qconfig``; its managed collisions are copied.

        Args:
            module: with ``module.qconfig``, as in :meth:`EmbeddingCollection.from_float`.
            return_remapped_features: no effect; see the class.
        """
        inner = module._embedding_module
        configs = list(inner.embedding_configs())
        types = _data_types(module, configs, None, None)
        weights = {c.name: inner.embeddings[c.name].weight for c in configs}
        return cls(
            [_requantized(c, types[c.name], EmbeddingConfig) for c in configs],
            _device_of(weights),
            bool(inner.need_indices()),
            _qconfig_output(module),
            managed_collision_collection=copy.deepcopy(module._managed_collision_collection),
            return_remapped_features=module._return_remapped_features,
        )._holding(weights)


class QuantManagedCollisionEmbeddingBagCollection(_ManagedCollisions, EmbeddingBagCollection):
    """Managed collisions in front of quantized pooled tables. Args as :class:`EmbeddingBagCollection`.

    Args:
        managed_collision_collection, return_remapped_features: see :class:`QuantManagedCollisionEmbeddingCollection`.

    ``forward(features)`` takes raw ids and returns (pooled vectors, the features with rows).
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device | str | None = None,
        output_dtype: torch.dtype = torch.float32,
        table_name_to_quantized_weights: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: int | None = None,
        managed_collision_collection: ManagedCollisionCollection | None = None,
        return_remapped_features: bool = False,
        cache_features_order: bool = False,
    ) -> None:
        weights = table_name_to_quantized_weights
        super().__init__(tables, is_weighted, device, output_dtype, weights, row_alignment=row_alignment)
        _warn_ignored("EmbeddingBagCollection", register_tbes, quant_state_dict_split_scale_bias)
        self._set_collisions(managed_collision_collection, tables)
        self._return_remapped_features = return_remapped_features

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, KeyedJaggedTensor]:  # type: ignore[override]
        """(Pooled vectors of every feature, the features with rows)."""
        rows = self._managed_collision_collection(features)
        return super().forward(rows), rows

    @classmethod
    def from_float(  # type: ignore[override]
        cls, module: Any, return_remapped_features: bool = False
    ) -> QuantManagedCollisionEmbeddingBagCollection:
        """Quantize a ManagedCollisionEmbeddingBagCollection; see :class:`QuantManagedCollisionEmbeddingCollection`."""
        inner = module._embedding_module
        configs = list(inner.embedding_bag_configs())
        types = _data_types(module, configs, None, None)
        weights = {c.name: inner.embedding_bags[c.name].weight for c in configs}
        return cls(
            [_requantized(c, types[c.name], EmbeddingBagConfig) for c in configs],
            bool(inner.is_weighted()),
            _device_of(weights),
            _qconfig_output(module),
            managed_collision_collection=copy.deepcopy(module._managed_collision_collection),
            return_remapped_features=module._return_remapped_features,
        )._holding(weights)


def _device_of(weights: Mapping[str, Tensor]) -> torch.device:
    return next(iter(weights.values())).device


def _data_types(
    module: Any,
    configs: Sequence[BaseEmbeddingConfig],
    data_type: DataType | None,
    per_table: Mapping[str, DataType] | None,
) -> dict[str, DataType]:
    """Precision of every table: the argument, else ``module.qconfig``, else INT8."""
    qconfig = getattr(module, "qconfig", None)
    if data_type is not None or qconfig is None:
        return chosen_data_types(configs, data_type or DataType.INT8, per_table)
    # One qconfig serves several modules, so it may name tables of others.
    by_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
    of_qconfig = {c.name: dtype_to_data_type(by_table[c.name]) for c in configs if c.name in by_table}
    return chosen_data_types(configs, dtype_to_data_type(qconfig.weight().dtype), {**of_qconfig, **(per_table or {})})


def _qconfig_output(module: Any) -> torch.dtype:
    """The output element type of ``module.qconfig``: its activation's; float32 without one."""
    qconfig = getattr(module, "qconfig", None)
    # Weight-only qconfigs have an activation that observes nothing and has no type.
    dtype: torch.dtype = getattr(qconfig.activation(), "dtype", torch.float32) if qconfig else torch.float32
    if dtype not in OUTPUT_DTYPES:
        raise ConfigError(
            f"qconfig: the activation is {dtype}; expected one of {sorted(map(str, OUTPUT_DTYPES))}: set "
            f"activation=PlaceholderObserver.with_args(dtype=torch.float32)"
        )
    return dtype


def _warn_ignored(name: str, register_tbes: bool, split_scale_bias: bool) -> None:
    of = f"quant.embedding_modules.{name}"
    warn_ignored(of, "register_tbes", register_tbes, stacklevel=4)
    warn_ignored(of, "quant_state_dict_split_scale_bias", split_scale_bias, stacklevel=4)


def _requantized(config: Any, data_type: DataType, kind: type[C]) -> C:
    """A recinfer config with the packed precision, from a config of recinfer or TorchRec (read by attributes)."""
    fields: dict[str, Any] = {
        "num_embeddings": config.num_embeddings,
        "embedding_dim": config.embedding_dim,
        "name": config.name,
        "data_type": data_type,
        "feature_names": list(config.feature_names),
    }
    if kind is EmbeddingBagConfig:
        fields["pooling"] = PoolingType(config.pooling.value)
    return kind(**fields)


def quant_prep_enable_cache_features_order(module: nn.Module, module_types: list[type[nn.Module]]) -> None:
    """No effect: TorchRec's switch for caching the order of features between batches, which recinfer always does."""
