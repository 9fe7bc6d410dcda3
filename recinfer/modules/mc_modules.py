"""Managed collisions: modules that map raw 64-bit ids to rows of a table and, while training, admit and evict ids.

Names, buffers and keys of the state are TorchRec's (``torchrec.modules.mc_modules``). Shapes: ``Z`` slots of a table,
``N`` ids.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from recinfer.errors import CheckpointError, ConfigError, InputError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.mc_evictions import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)
from recinfer.sparse.checks import MissingKeyError, check_id_dtype
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from recinfer.sparse.opaque import Opaque

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]

Features = dict[str, JaggedTensor]
HashFunction = Callable[[Tensor, int], Tensor]

_MAX_SEGMENTS = 1024
_EMPTY = torch.iinfo(torch.int64).max  # the id of a slot without one


@fx.wrap
def apply_mc_method_to_jt_dict(mc_module: nn.Module, method: str, features_dict: Features) -> Features:
    """The result of ``mc_module``'s method of that name for ``features_dict``; a single node in graphs of torch.fx."""
    return cast(Features, getattr(mc_module, method)(features_dict))


class ManagedCollisionModule(nn.Module, abc.ABC):
    """Maps the raw ids of one table to its rows.

    Args:
        device: device of the buffers; meta works.
        output_segments: the first row of each segment, and the row behind the last: the rows that the ranks of a
            training job hold. Modules of other ranks can take over whole segments.
        skip_state_validation: keep no segments in the state.
        read_only_suffix, enable_per_feature_lookups: features whose names end so are looked up but not recorded.

    Raises:
        ConfigError: more than 1,024 segments.
    """

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self._device = torch.device(device)
        self._enable_per_feature_lookups = enable_per_feature_lookups
        self._read_only_suffix = read_only_suffix
        if skip_state_validation:
            return
        if len(output_segments) > _MAX_SEGMENTS + 1:
            raise ConfigError(
                f"{type(self).__name__}: {len(output_segments) - 1} segments; expected at most {_MAX_SEGMENTS}"
            )
        padded = output_segments + [-1] * (_MAX_SEGMENTS + 1 - len(output_segments))
        self.register_buffer("_output_segments_tensor", torch.tensor(padded, dtype=torch.int64, device=device))
        self.register_buffer("_current_iter_tensor", torch.tensor([0], dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(_validate_loaded)

    @property
    def readable_suffix(self) -> str:
        """The end of names of features that are looked up but not recorded."""
        return self._read_only_suffix

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._device

    @abc.abstractmethod
    def preprocess(self, features: Features) -> Features:
        """The features whose ids the module looks up: hashed, if it has a hash function."""

    @abc.abstractmethod
    def evict(self) -> Tensor | None:
        """Rows whose ids were replaced since the last call, int64 ``[n]``; None if there was no eviction. The caller
        resets these rows."""

    @abc.abstractmethod
    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> Features:
        """The features with rows instead of ids."""

    @abc.abstractmethod
    def profile(self, features: Features) -> Features:
        """Record the ids while training, and evict if it is time; returns ``features``."""

    @abc.abstractmethod
    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Preprocess, profile and remap."""

    @abc.abstractmethod
    def output_size(self) -> int:
        """Number of rows."""

    @abc.abstractmethod
    def input_size(self) -> int:
        """Number of ids: raw ids are expected in 0 to this number."""

    @abc.abstractmethod
    def buckets(self) -> int:
        """Number of segments of equal numbers of ids."""

    @abc.abstractmethod
    def validate_state(self) -> None:
        """Check and order a state that was just loaded."""

    @abc.abstractmethod
    def open_slots(self) -> Tensor:
        """Number of slots without an id, int64 ``[1]``."""

    @abc.abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """A new module for rows ``output_id_range`` (first, and behind the last), with this one's settings."""


def _validate_loaded(module: nn.Module, incompatible_keys: Any) -> None:
    cast(ManagedCollisionModule, module).validate_state()


class ManagedCollisionCollection(Opaque, nn.Module):
    """The managed collision modules of several tables.

    Args:
        managed_collision_modules: table -> its module.
        embedding_configs: the tables; each feature belongs to one of them.
        need_preprocess: stored for sharded modules.

    Raises:
        ConfigError: a table without a module, or a module of another number of rows than its table's.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        self._managed_collision_modules = nn.ModuleDict(managed_collision_modules)
        self._embedding_configs = embedding_configs
        self.need_preprocess = need_preprocess
        self._table_to_features = {config.name: config.feature_names for config in embedding_configs}
        self._feature_to_table = {f: config.name for config in embedding_configs for f in config.feature_names}
        self._table_feature_splits = [len(features) for features in self._table_to_features.values()]
        self._table_name_to_config = {config.name: config for config in embedding_configs}
        self._feature_names = [f for config in embedding_configs for f in config.feature_names]
        for name, config in self._table_name_to_config.items():
            if name not in managed_collision_modules:
                raise ConfigError(
                    f"ManagedCollisionCollection: table {name!r} has no managed collision module; there are modules for "
                    f"{', '.join(sorted(managed_collision_modules))}"
                )
            size = managed_collision_modules[name].output_size()
            if size != config.num_embeddings:
                raise ConfigError(
                    f"ManagedCollisionCollection: the module of table {name!r} gives rows 0 to {size - 1}; expected "
                    f"{config.num_embeddings} rows, the table's num_embeddings"
                )

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """The tables."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Table -> number of segments of its ids."""
        return {table: self._module(table).buckets() for table in self._managed_collision_modules}

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """The tables' features, in their order, with rows instead of ids.

        Args:
            features: at least the tables' features, in any order.
            mutate_miss_lengths: where a module drops ids without a row, shorten their bags too.

        Raises:
            MissingKeyError: a feature is not in ``features``.
            InputError: ids that are not int32 or int64; weighted ids of a module that drops ids.
        """
        check_id_dtype(features.values())
        features = self._ordered(features)
        parts = []
        for (table, names), part in zip(self._table_to_features.items(), features.split(self._table_feature_splits)):
            # One call per table; policies that know features read the number of ids of each from the weights.
            ids = JaggedTensor.from_parts_unchecked(
                part.values(), torch.tensor(part.length_per_key()) if names else None, part.lengths()
            )
            parts.append(self._module(table)({table: ids}, mutate_miss_lengths=mutate_miss_lengths)[table])
        weights = features.weights_or_none()
        rows = torch.cat([part.values() for part in parts]) if parts else features.values()
        if weights is not None and rows.shape != features.values().shape:
            raise InputError(
                f"ManagedCollisionCollection: {features.values().numel() - rows.numel()} ids have no row, and weighted ids "
                "cannot be dropped; build the module with disable_fallback=False"
            )
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=rows,
            lengths=torch.cat([part.lengths() for part in parts]) if parts else features.lengths(),
            weights=weights,
            stride=None if features.variable_stride_per_key() else features.stride(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
            inverse_indices=features.inverse_indices_or_none(),
        )

    def evict(self) -> dict[str, Tensor | None]:
        """Table -> rows to reset, see :meth:`ManagedCollisionModule.evict`."""
        return {table: self._module(table).evict() for table in self._managed_collision_modules}

    def open_slots(self) -> dict[str, Tensor]:
        """Table -> number of slots without an id."""
        return {table: self._module(table).open_slots() for table in self._managed_collision_modules}

    def _module(self, table: str) -> ManagedCollisionModule:
        return cast(ManagedCollisionModule, self._managed_collision_modules[table])

    def _ordered(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The tables' features, in their order."""
        keys = features.keys()
        if keys == self._feature_names:
            return features
        places = {key: i for i, key in enumerate(keys)}
        missing = [name for name in self._feature_names if name not in places]
        if missing:
            raise MissingKeyError(f"feature {missing[0]!r} is not in the input; it has {sorted(keys)}")
        return features.permute([places[name] for name in self._feature_names])


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Managed collisions by a sorted list of ids; the last row belongs to all ids without a slot.

    Training mode records the ids of ``eviction_interval`` batches, then gives slots to those that the policy prefers.

    Args:
        zch_size: ``Z``, the number of rows.
        device: device of the buffers.
        eviction_policy: chooses the ids that leave and enter.
        eviction_interval: number of batches between two evictions.
        input_hash_size: number of raw ids, by which sharded modules share them among ranks, and the second argument of
            ``input_hash_func``.
        input_hash_func: hashes ids, int64 ``[N]`` to int64 ``[N]``, before they are recorded or looked up.
        mch_size, mch_hash_func: no effect, as in TorchRec.
        name: name of the table.
        output_global_offset: the first row, in a module of one rank.
        output_segments: see :class:`ManagedCollisionModule`; by default the rows of this module.
        buckets: number of segments of a sharded table.

    Attributes:
        num_admitted, num_evicted: ids that got a row and that lost theirs, since this object was made.

    Raises:
        ConfigError: a size or an interval below 1.
    """

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor
    _mch_slots: Tensor
    _delimiter: Tensor
    _output_segments_tensor: Tensor
    _current_iter_tensor: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = (2**63) - 1,
        input_hash_func: HashFunction | None = None,
        mch_size: int | None = None,
        mch_hash_func: HashFunction | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        for what, given in (("zch_size", zch_size), ("eviction_interval", eviction_interval)):
            if given < 1:
                raise ConfigError(f"MCHManagedCollisionModule: {what} is {given}; expected at least 1")
        own_segments = output_segments or [output_global_offset, output_global_offset + zch_size]
        super().__init__(device=device, output_segments=own_segments)
        self._own_segments = own_segments
        self._name = name
        self._zch_size = zch_size
        self._output_global_offset = output_global_offset
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self._eviction_interval = eviction_interval
        self._eviction_policy = eviction_policy
        self._buckets = buckets
        self._register(device)
        self.num_admitted = self.num_evicted = 0
        self._mch_metadata: dict[str, Tensor] = {}
        self._refresh_metadata()
        self._history_metadata: dict[str, Tensor] = {}
        self._history_accumulator: Tensor | None = None
        self._input_history_buffer_size = -1
        self._current_history_buffer_offset = 0
        self._current_iter = -1
        self._last_eviction_iter = -1
        self._evicted = False
        self._evicted_emb_indices = torch.empty(0, dtype=torch.int64, device=_real(device))

    def _register(self, device: torch.device) -> None:
        def filled(size: int, value: int, device: torch.device = device) -> Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=device)

        held = _real(device)  # no checkpoint holds these two
        first = self._output_global_offset
        rows = torch.arange(first, first + self._zch_size, dtype=torch.int64, device=device)
        self.register_buffer("_mch_sorted_raw_ids", filled(self._zch_size, _EMPTY))
        self.register_buffer("_mch_slots", filled(1, self._zch_size - 1, held), persistent=False)
        self.register_buffer("_delimiter", filled(1, _EMPTY, held), persistent=False)
        self.register_buffer("_mch_remapped_ids_mapping", rows)
        for info in self._eviction_policy.metadata_info:
            if info.is_mch_metadata:
                self.register_buffer(f"_mch_{info.metadata_name}", filled(self._zch_size, 0))

    def _refresh_metadata(self) -> None:
        """Let the policy's numbers be the module's buffers, which moves and loads may have replaced."""
        for info in self._eviction_policy.metadata_info:
            if info.is_mch_metadata:
                self._mch_metadata[info.metadata_name] = getattr(self, f"_mch_{info.metadata_name}")

    def _apply(self, fn: Any, recurse: bool = True) -> MCHManagedCollisionModule:
        super()._apply(fn, recurse)
        self._refresh_metadata()
        self._device = self._mch_sorted_raw_ids.device
        self._evicted_emb_indices = fn(self._evicted_emb_indices)
        if self._history_accumulator is not None:
            self._history_accumulator = fn(self._history_accumulator)
            self._history_metadata = {name: fn(numbers) for name, numbers in self._history_metadata.items()}
        return self

    def preprocess(self, features: Features) -> Features:
        """The features with hashed ids; ``features`` without a hash function."""
        hashed = self._input_hash_func
        if hashed is None:
            return features
        return {
            name: _with_values(feature, hashed(feature.values(), self._input_hash_size))
            for name, feature in features.items()
        }

    def reset_inference_mode(self) -> None:
        """Forget pending evictions."""
        self._evicted = False
        self._last_eviction_iter = -1

    @torch.no_grad()
    def profile(self, features: Features) -> Features:
        """Record the ids in training mode, and evict every ``eviction_interval`` batches; returns ``features``.

        The history has room for 1.25 times the ids of ``eviction_interval`` batches as large as the first; later ids
        are not recorded.
        """
        if not self.training:
            return features
        if self._current_iter == -1:
            self._current_iter = self._last_eviction_iter = int(self._current_iter_tensor.item())
        self._current_iter += 1
        self._current_iter_tensor += 1
        if self._input_history_buffer_size == -1:
            self._start_history(sum(feature.values().numel() for feature in features.values()))
        for feature in features.values():
            self._record(feature.values())
        if self._current_iter - self._last_eviction_iter == self._eviction_interval:
            self._coalesce_history()
            self._last_eviction_iter = self._current_iter
        return features

    def _start_history(self, batch: int) -> None:
        size = self._input_history_buffer_size = int(batch * self._eviction_interval * 1.25)
        self._history_accumulator = torch.empty(size, dtype=torch.int64, device=self.device)
        for info in self._eviction_policy.metadata_info:
            if info.is_history_metadata:
                self._history_metadata[info.metadata_name] = torch.zeros_like(self._history_accumulator)

    def _record(self, ids: Tensor) -> None:
        start = self._current_history_buffer_offset
        ids = ids[: self._input_history_buffer_size - start]
        stop = self._current_history_buffer_offset = start + ids.shape[0]
        assert self._history_accumulator is not None
        self._history_accumulator[start:stop] = ids
        self._eviction_policy.record_history_metadata(
            self._current_iter, ids, {name: numbers[start:stop] for name, numbers in self._history_metadata.items()}
        )

    @torch.no_grad()
    def _coalesce_history(self) -> None:
        """Admit and evict by the history, and empty it."""
        policy = self._eviction_policy
        stop, self._current_history_buffer_offset = self._current_history_buffer_offset, 0
        assert self._history_accumulator is not None
        ids, inverse, counts = torch.unique(self._history_accumulator[:stop], return_inverse=True, return_counts=True)
        mask = None
        if policy._threshold_filtering_func is not None:
            mask, _ = policy._threshold_filtering_func(counts)
        metadata = policy.coalesce_history_metadata(
            self._current_iter,
            {name: numbers[:stop] for name, numbers in self._history_metadata.items()},
            counts,
            inverse,
            threshold_mask=mask,
        )
        if mask is not None:
            ids, counts = ids[mask], counts[mask]
        self._update_and_evict(ids, counts, metadata)

    @torch.no_grad()
    def _update_and_evict(
        self, uniq_ids: Tensor, uniq_ids_counts: Tensor, uniq_ids_metadata: dict[str, Tensor]
    ) -> None:
        order = torch.argsort(uniq_ids_counts, descending=True, stable=True)
        ids = uniq_ids[order]
        matching, slots = self._match_indices(self._mch_sorted_raw_ids, ids)
        out, entering = self._eviction_policy.update_metadata_and_generate_eviction_scores(
            self._current_iter,
            self._zch_size,
            order,
            uniq_ids_counts[order],
            matching,
            slots,
            self._mch_metadata,
            uniq_ids_metadata,
        )
        new = ids[~matching][entering]
        self.num_evicted += int((self._mch_sorted_raw_ids[out] != _EMPTY).sum())
        self.num_admitted += new.numel()
        self._mch_sorted_raw_ids[out] = new
        rows = self._mch_remapped_ids_mapping[out]
        # Rows of an earlier eviction that no caller has reset yet are kept.
        self._evicted_emb_indices = (
            torch.unique(torch.cat([self._evicted_emb_indices, rows])) if self._evicted else rows
        )
        self._evicted = True
        self._sort_mch_buffers()

    @torch.no_grad()
    def _match_indices(self, sorted_sequence: Tensor, search_values: Tensor) -> tuple[Tensor, Tensor]:
        """Mask of the values that are in the sequence, bool ``[N]``, and the places of those that are."""
        # The last slot never has an id, and a search behind all others ends there.
        places = torch.searchsorted(sorted_sequence[:-1], search_values)
        matching = sorted_sequence[places] == search_values
        return matching, places[matching]

    @torch.no_grad()
    def _sort_mch_buffers(self) -> None:
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        for buffer in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._mch_metadata.values()):
            buffer.copy_(buffer[order])

    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> Features:
        """The features with rows; ids without a slot get the last row.

        Args:
            mutate_miss_lengths, write_weights: not used by this module.
        """
        remapped = {}
        for name, feature in features.items():
            ids = feature.values().long()
            matching, places = self._match_indices(self._mch_sorted_raw_ids, ids)
            rows = torch.full_like(ids, self._output_global_offset + self._zch_size - 1)
            rows[matching] = self._mch_remapped_ids_mapping[places]
            remapped[name] = _with_values(feature, rows)
        return remapped

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Preprocess, profile and remap."""
        return self.remap(self.profile(self.preprocess(features)))

    def output_size(self) -> int:
        """``Z``."""
        return self._zch_size

    def buckets(self) -> int:
        """The constructor's argument."""
        return self._buckets

    def input_size(self) -> int:
        """The constructor's ``input_hash_size``."""
        return self._input_hash_size

    def open_slots(self) -> Tensor:
        """Number of slots without an id, int64 ``[1]``; the last is not counted."""
        return self._mch_slots - torch.searchsorted(self._mch_sorted_raw_ids, self._delimiter)

    @torch.no_grad()
    def evict(self) -> Tensor | None:
        """Rows whose ids were replaced since the last call, int64 ``[n]``; None if there was no eviction."""
        if not self._evicted:
            return None
        self._evicted = False
        return self._evicted_emb_indices

    @torch.no_grad()
    def validate_state(self) -> None:
        """Order a loaded state; its segments become this module's.

        Raises:
            CheckpointError: the state's segments do not begin and end with this module's rows.
        """
        self._refresh_metadata()
        if self._mch_sorted_raw_ids.is_meta:
            return
        first = self._output_global_offset
        held = self._output_segments_tensor.tolist()
        if first not in held or first + self._zch_size not in held:
            known = [start for start in held if start >= 0]
            raise CheckpointError(
                f"managed collisions of table {self._name or '?'}: rows {first} to {first + self._zch_size - 1} are not whole "
                f"segments of the checkpoint, whose segments begin at {known}; use a number of ranks that divides theirs"
            )
        padding = [-1] * (len(held) - len(self._own_segments))
        self._output_segments_tensor.copy_(torch.tensor([*self._own_segments, *padding]))
        self._sort_mch_buffers()

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> MCHManagedCollisionModule:
        """A new module for rows ``output_id_range`` (first, and behind the last), with this one's settings."""
        first, stop = output_id_range
        return type(self)(
            zch_size=stop - first,
            device=device or self.device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=first,
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
        )


def _real(device: torch.device) -> torch.device:
    """``device``, or the CPU instead of the meta device."""
    return torch.device("cpu") if torch.device(device).type == "meta" else torch.device(device)


def _with_values(feature: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor.from_parts_unchecked(
        values, feature.weights_or_none(), feature.lengths_or_none(), feature.offsets_or_none()
    )
