"""Float embedding modules: EmbeddingBagCollection (pooled) and EmbeddingCollection (unpooled), in plain torch.

Shapes: ``B`` batch, ``N`` ids of a feature, ``D`` embedding dim.
"""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    check_table_name,
)
from recinfer.sparse.checks import MissingKeyError, check_id_dtype, is_plain
from recinfer.sparse.full_batch import full_batch
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recinfer.sparse.opaque import Opaque

C = TypeVar("C", bound=BaseEmbeddingConfig)

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "get_embedding_names_by_table",
    "process_pooled_embeddings",
    "reorder_inverse_indices",
]

_FLOAT_DTYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """Names of the outputs of each table: the feature, or ``feature@table`` if several tables read the feature."""
    shared = Counter(feature for table in tables for feature in table.feature_names)
    return [[f"{f}@{t.name}" if shared[f] > 1 else f for f in t.feature_names] for t in tables]


def reorder_inverse_indices(inverse_indices: tuple[list[str], Tensor] | None, feature_names: list[str]) -> Tensor:
    """The rows of the inverse indices ``[keys, B]`` of ``feature_names``; an empty tensor without inverse indices.

    Raises:
        InputError: a feature that has no inverse indices.
    """
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices = inverse_indices
    places = {key: i for i, key in enumerate(keys)}
    missing = [f for f in feature_names if f not in places]
    if missing:
        raise InputError(f"no inverse indices for features {missing}; they are given for {keys}")
    order = torch.tensor([places[f] for f in feature_names], dtype=torch.int64, device=indices.device)
    return indices.index_select(0, order)


def process_pooled_embeddings(pooled_embeddings: list[Tensor], inverse_indices: Tensor) -> Tensor:
    """Concatenate to ``[B, sum(D)]``; in a variable batch, each feature's rows are first expanded to the full batch."""
    if inverse_indices.numel():
        pooled_embeddings = [e.index_select(0, i) for e, i in zip(pooled_embeddings, inverse_indices.unbind(0))]
    return torch.cat(pooled_embeddings, dim=1)


def _check_tables(what: str, tables: Sequence[BaseEmbeddingConfig]) -> None:
    seen: set[str] = set()
    for table in tables:
        check_table_name(what, table.name)
        if table.name in seen:
            raise ConfigError(f"{what}: duplicate table name {table.name!r}; every table needs a different name")
        seen.add(table.name)
        if table.data_type not in _FLOAT_DTYPES:
            known = ", ".join(str(t) for t in _FLOAT_DTYPES)
            raise ConfigError(
                f"{what}: table {table.name!r} is {table.data_type}; a float module holds one of {known} "
                "(quantize it afterwards)"
            )


def _with_features(tables: list[C]) -> list[C]:
    """``tables``, where a table without ``feature_names`` reads the feature of its own name, as in TorchRec."""
    for table in tables:
        if not table.feature_names:
            table.feature_names = [table.name]
    return tables


def _new_weight(table: BaseEmbeddingConfig, device: torch.device | None) -> Tensor:
    return torch.empty(table.num_embeddings, table.embedding_dim, dtype=_FLOAT_DTYPES[table.data_type], device=device)


@torch.no_grad()
def _fill(table: BaseEmbeddingConfig, weight: Tensor) -> None:
    if weight.is_meta:
        return
    if table.init_fn is not None:
        table.init_fn(weight)
    else:
        weight.uniform_(table.get_weight_init_min(), table.get_weight_init_max())


class EmbeddingBagCollectionInterface(Opaque, abc.ABC, nn.Module):
    """The interface of collections of pooled tables: float or quantized, sharded or not."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors of every feature."""

    @abc.abstractmethod
    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""

    @abc.abstractmethod
    def is_weighted(self) -> bool:
        """Whether ids come with weights."""


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """Tables whose rows are pooled: every bag of ids becomes one vector.

    Parameters are ``embedding_bags.<table>.weight``. Set ``embedding_bags[table].sparse = True`` for sparse gradients.

    Args:
        tables: the tables; names are unique.
        is_weighted: multiply each row by its id's weight. MEAN still divides by the number of ids of the bag.
        device: device of the weights; meta works.

    Raises:
        ConfigError: duplicate, empty or dotted table names, a data type that is not a float, pooling NONE.
    """

    def __init__(
        self, tables: list[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__()
        _check_tables("EmbeddingBagCollection", tables)
        self._is_weighted = is_weighted
        self._embedding_bag_configs = _with_features(tables)
        self.embedding_bags = nn.ModuleDict()
        for table in tables:
            if table.pooling not in (PoolingType.SUM, PoolingType.MEAN):
                raise ConfigError(f"table {table.name!r}: pooling {table.pooling!r}; expected PoolingType SUM or MEAN")
            self.embedding_bags[table.name] = nn.EmbeddingBag(
                table.num_embeddings,
                table.embedding_dim,
                mode="sum" if table.pooling is PoolingType.SUM else "mean",
                include_last_offset=True,
                _weight=_new_weight(table, device),
            )
        self._embedding_names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._lengths_per_embedding = [t.embedding_dim for t in tables for _ in t.feature_names]
        self._features = [f for t in tables for f in t.feature_names]
        self._device = torch.device(device) if device is not None else torch.get_default_device()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weights with their initial values; no effect on the meta device."""
        for table in self._embedding_bag_configs:
            _fill(table, self.embedding_bags[table.name].weight)  # type: ignore[arg-type]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool.

        Args:
            features: at least the features of the tables, in any order.

        Returns:
            KeyedTensor: float32 ``[B, sum(D)]``, tables in order, in a table its features in order; empty bags are
            zeros.

        Raises:
            MissingKeyError: a feature is not in ``features``.
            InputError: no weights though the collection is weighted; a variable batch without inverse indices; ids that
                are not int32 or int64; an id that is not in the table (on the CPU).
        """
        check_id_dtype(features.values())
        by_name = features.to_dict()
        pooled = [
            _pool(self.embedding_bags[table.name], name, _feature(by_name, name), self._is_weighted)  # type: ignore[arg-type]
            for table in self._embedding_bag_configs
            for name in table.feature_names
        ]
        inverse = torch.empty(0)
        if features.variable_stride_per_key():
            if features.inverse_indices_or_none() is not None:
                inverse = reorder_inverse_indices(features.inverse_indices(), self._features)
            elif len({p.shape[0] for p in pooled}) > 1:
                raise InputError(
                    f"features have batch sizes {features.stride_per_key()} and no inverse indices; give "
                    f"inverse_indices, which map every example to its row"
                )
        values = (
            process_pooled_embeddings(pooled, inverse)
            if pooled
            else features.values().new_zeros((features.stride(), 0), dtype=torch.float32)
        )
        return KeyedTensor(self._embedding_names, self._lengths_per_embedding, values)

    def is_weighted(self) -> bool:
        """Whether ids come with weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables."""
        return self._embedding_bag_configs

    @property
    def device(self) -> torch.device:
        """Device of the weights; the constructor's device if there are no weights."""
        for weight in self.parameters():
            return weight.device
        return self._device


def _feature(by_name: dict[str, JaggedTensor], name: str) -> JaggedTensor:
    found = by_name.get(name)
    if found is None:
        raise MissingKeyError(f"feature {name!r} is not in the input; it has {sorted(by_name)}")
    return found


def _refuse_bad_ids(name: str, ids: Tensor, rows: int, error: Exception) -> None:
    # The ids are checked only after torch has refused the lookup, so that valid batches cost no time.
    if not is_plain(ids):
        return
    bad = ((ids < 0) | (ids >= rows)).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise InputError(
            f"feature {name!r}: id {int(ids[at])} at position {at} is not in its table; expected 0 to {rows - 1}"
        ) from error


def _pool(bag: nn.EmbeddingBag, name: str, feature: JaggedTensor, weighted: bool) -> Tensor:
    weights = feature.weights().to(bag.weight.dtype) if weighted else None
    offsets = feature.offsets()
    ids = feature.values()
    # embedding_bag requires ids and offsets of one dtype.
    if ids.dtype != offsets.dtype:
        ids, offsets = ids.long(), offsets.long()
    try:
        pooled = F.embedding_bag(
            ids,
            bag.weight,
            offsets,
            mode="sum" if weighted else bag.mode,
            sparse=bag.sparse,
            per_sample_weights=weights,
            include_last_offset=True,
        ).float()
    except (IndexError, RuntimeError) as error:
        _refuse_bad_ids(name, ids, bag.num_embeddings, error)
        raise
    if weighted and bag.mode == "mean":
        # embedding_bag has no weighted mean. The sum is divided by the number of ids of the bag, as in FBGEMM.
        pooled = pooled / feature.lengths().clamp(min=1).unsqueeze(1)
    return pooled


class EmbeddingCollectionInterface(Opaque, abc.ABC, nn.Module):
    """The interface of collections of unpooled tables: float or quantized, sharded or not."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """One vector per id, for every feature."""

    @abc.abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""

    @abc.abstractmethod
    def need_indices(self) -> bool:
        """Whether outputs carry the ids as weights."""

    @abc.abstractmethod
    def embedding_dim(self) -> int:
        """Columns of every table."""

    @abc.abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the outputs of each table."""


class EmbeddingCollection(EmbeddingCollectionInterface):
    """Tables whose rows are not pooled: every id becomes one vector.

    Parameters are ``embeddings.<table>.weight``.

    Args:
        tables: the tables; names are unique, dims equal.
        device: device of the weights; meta works.
        need_indices: put the ids into the weights of the outputs.
        use_gather_select, use_gather_select_per_sharding: kept for sharded modules; they change no result.

    Raises:
        ConfigError: duplicate, empty or dotted table names, different dims, a data type that is not a float.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
    ) -> None:
        super().__init__()
        _check_tables("EmbeddingCollection", tables)
        self._embedding_configs = _with_features(tables)
        self._need_indices = need_indices
        self._use_gather_select = use_gather_select
        self._use_gather_select_per_sharding = use_gather_select_per_sharding
        self._embedding_dim = tables[0].embedding_dim if tables else -1
        self.embeddings = nn.ModuleDict()
        for table in tables:
            if table.embedding_dim != self._embedding_dim:
                raise ConfigError(
                    f"EmbeddingCollection: table {table.name!r} has dim {table.embedding_dim}, "
                    f"{tables[0].name!r} has {self._embedding_dim}; all tables of one collection need the same"
                )
            self.embeddings[table.name] = nn.Embedding(
                table.num_embeddings, table.embedding_dim, _weight=_new_weight(table, device)
            )
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self._device = torch.device(device) if device is not None else torch.get_default_device()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weights with their initial values; no effect on the meta device."""
        for table in self._embedding_configs:
            _fill(table, self.embeddings[table.name].weight)  # type: ignore[arg-type]

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up one vector per id.

        Args:
            features: at least the features of the tables, in any order.

        Returns:
            dict[str, JaggedTensor]: values float32 ``[N, D]`` and the lengths of the input, tables in order. A
            variable batch with inverse indices is expanded to the full batch, as the sharded module does (TorchRec's unsharded
            one returns the rows of the distinct bags).

        Raises:
            MissingKeyError: a feature is not in ``features``.
            InputError: ids that are not int32 or int64; an id that is not in the table (on the CPU).
        """
        check_id_dtype(features.values())
        if features.variable_stride_per_key() and features.inverse_indices_or_none() is not None:
            needed = [feature for table in self._embedding_configs for feature in table.feature_names]
            features = full_batch(features, list(dict.fromkeys(needed)))
        by_name = features.to_dict()
        result = {}
        for table, names in zip(self._embedding_configs, self._embedding_names_by_table):
            weight = self.embeddings[table.name].weight
            for feature_name, name in zip(table.feature_names, names):
                feature = _feature(by_name, feature_name)
                ids = feature.values()
                try:
                    rows = F.embedding(ids, weight).float()  # type: ignore[arg-type]
                except (IndexError, RuntimeError) as error:
                    _refuse_bad_ids(feature_name, ids, table.num_embeddings, error)
                    raise
                result[name] = JaggedTensor.from_parts_unchecked(
                    rows, ids if self._need_indices else None, feature.lengths()
                )
        return result

    def need_indices(self) -> bool:
        """Whether outputs carry the ids as weights."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """The constructor's argument."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """The constructor's argument."""
        return self._use_gather_select_per_sharding

    def embedding_dim(self) -> int:
        """Columns of every table."""
        return self._embedding_dim

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The tables."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the outputs of each table."""
        return self._embedding_names_by_table

    @property
    def device(self) -> torch.device:
        """Device of the weights; the constructor's device if there are no weights."""
        for weight in self.parameters():
            return weight.device
        return self._device
