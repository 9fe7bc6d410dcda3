"""Hashed managed collisions (MPZCH): ids keep their slots in a hash table with linear probing.

Names, buffers and keys of the state are TorchRec's (``torchrec.modules.hash_mc_modules``). Modules look ids up; ids are
admitted and evicted only by TorchRec on GPUs. Shapes: ``Z`` slots, ``N`` ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from recinfer.modules.mc_modules import Features, ManagedCollisionModule
from recinfer.modules.mc_slots import segments_of, zero_collision_hash
from recinfer.sparse.jagged_tensor import JaggedTensor
from recinfer.sparse.offsets import lengths_to_offsets

__all__ = ["HashZchEvictionConfig", "HashZchEvictionPolicyName", "HashZchManagedCollisionModule"]

_MOST_RESERVED = 100  # per cent


class HashZchManagedCollisionModule(ManagedCollisionModule):
    """Maps ids to slots of a hash table that consists of buckets.

    The bucket of an id is :func:`recinfer.modules.mc_slots.segments_of` it; the search in the bucket is
    :func:`recinfer.modules.mc_slots.zero_collision_hash`.

    Args:
        zch_size: ``Z``, the number of slots of this module.
        device: device of the buffers; meta works.
        total_num_buckets: number of buckets of the whole table.
        max_probe: slots that a search visits.
        input_hash_size: number of raw ids; 0 for any id.
        output_segments: the first slot of each bucket, and the slot behind the last; by default equal buckets.
        is_inference: as after :meth:`reset_inference_mode`.
        name: name of the table.
        tb_logging_frequency: no effect: the module logs nothing.
        eviction_policy_name, eviction_config: of training; with a policy the state has metadata.
        inference_dispatch_div_train_world_size: search for ids divided by the number of buckets (without an
            ``input_hash_size``) or counted within their bucket.
        start_bucket, end_bucket: the buckets of this module, in a module of one rank.
        opt_in_prob, percent_reserved_slots: with a probability in 1 to 100, the last slots of each bucket are shared by
            ids without a slot.
        disable_fallback: drop ids without a slot instead of giving them the slot of their hash.
        track_id_freq, write_runtime_meta_dim: the state has one counter, or so many numbers, per slot.
        read_only_suffix, enable_per_feature_lookups: see :class:`ManagedCollisionModule`.
        no_bag: dropped ids stay as row 0.
        persist_hash_zch_bucket: whether the state has the number of buckets.

    Raises:
        ConfigError: slots that are not equal buckets, reserved slots that do not fit, no reserved slots with
            ``opt_in_prob``.
    """

    IDENTITY_BUFFER = "_hash_zch_identities"
    METADATA_BUFFER = "_hash_zch_metadata"
    BUCKET_BUFFER = "_hash_zch_bucket"
    RUNTIME_META_BUFFER = "_hash_zch_runtime_meta"

    _hash_zch_identities: nn.Parameter
    _hash_zch_metadata: Tensor | None
    _hash_zch_bucket: Tensor
    _hash_zch_runtime_meta: nn.Parameter | None

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,
        name: str | None = None,
        tb_logging_frequency: int = 0,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        inference_dispatch_div_train_world_size: bool = False,
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        disable_fallback: bool = False,
        track_id_freq: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
        no_bag: bool = False,
        write_runtime_meta_dim: int = 0,
        persist_hash_zch_bucket: bool = True,
    ) -> None:
        if output_segments is None:
            output_segments = _equal_buckets(zch_size, total_num_buckets)
        super().__init__(device, output_segments, True, read_only_suffix, enable_per_feature_lookups)
        self._settings: dict[str, Any] = {  # arguments for modules of other buckets
            "total_num_buckets": total_num_buckets,
            "max_probe": max_probe,
            "input_hash_size": input_hash_size,
            "output_segments": output_segments,
            "name": name,
            "tb_logging_frequency": tb_logging_frequency,
            "eviction_policy_name": eviction_policy_name,
            "eviction_config": eviction_config,
            "inference_dispatch_div_train_world_size": inference_dispatch_div_train_world_size,
            "opt_in_prob": opt_in_prob,
            "percent_reserved_slots": percent_reserved_slots,
            "disable_fallback": disable_fallback,
            "track_id_freq": track_id_freq,
            "read_only_suffix": read_only_suffix,
            "enable_per_feature_lookups": enable_per_feature_lookups,
            "no_bag": no_bag,
            "write_runtime_meta_dim": write_runtime_meta_dim,
            "persist_hash_zch_bucket": persist_hash_zch_bucket,
        }
        self._zch_size = zch_size
        self._name = name
        self._buckets = total_num_buckets
        self._max_probe = max_probe
        self._input_hash_size = input_hash_size
        self._output_segments = output_segments
        self._start_bucket = start_bucket
        self._end_bucket = total_num_buckets if end_bucket is None else end_bucket
        self._divided = inference_dispatch_div_train_world_size
        self._opt_in_prob = opt_in_prob
        self._percent_reserved_slots = percent_reserved_slots
        self._disable_fallback = disable_fallback
        self._no_bag = no_bag
        self._is_inference = False
        self._check()
        self._register(device, eviction_policy_name is not None, 1 if track_id_freq else write_runtime_meta_dim)
        self.register_load_state_dict_pre_hook(_without_metadata)
        if is_inference:
            self.reset_inference_mode()

    def _check(self) -> None:
        what = f"HashZchManagedCollisionModule of table {self._name or '?'}"
        if not 0 <= self._percent_reserved_slots < _MOST_RESERVED:
            raise ConfigError(
                f"{what}: percent_reserved_slots is {self._percent_reserved_slots}; expected 0 or more and below 100"
            )
        if self._opt_in_prob != -1 and not (0 < self._opt_in_prob <= 100 and self.get_reserved_slots_per_bucket() > 0):
            raise ConfigError(
                f"{what}: opt_in_prob is {self._opt_in_prob} with {self.get_reserved_slots_per_bucket()} reserved slots per "
                f"bucket; expected a probability in 1 to 100 and a percent_reserved_slots that reserves at least one slot"
            )
        segments, stop = self._output_segments, self._end_bucket
        if len(segments) != self._buckets + 1 or segments[stop] - segments[self._start_bucket] != self._zch_size:
            raise ConfigError(
                f"{what}: {len(segments) - 1} segments, of which {self._start_bucket} to {stop - 1} are this module's, for "
                f"{self._buckets} buckets and {self._zch_size} slots; expected one segment per bucket, from the first slot on"
            )
        if min(b - a for a, b in pairwise(segments)) <= max(self.get_reserved_slots_per_bucket(), 0):
            raise ConfigError(f"{what}: a bucket has no slots for ids: segments begin at {segments[:8]}")

    def _register(self, device: torch.device, evicts: bool, numbers: int) -> None:
        identities = torch.full((self._zch_size, 1), -1, dtype=torch.int64, device=device)
        self._hash_zch_identities = nn.Parameter(identities, requires_grad=False)
        metadata = torch.full((self._zch_size, 1), -1, dtype=torch.int32, device=device) if evicts else None
        self.register_buffer(self.METADATA_BUFFER, metadata)
        self._hash_zch_runtime_meta = None
        if numbers:
            counters = torch.zeros((self._zch_size, numbers), dtype=torch.int64, device=device)
            self._hash_zch_runtime_meta = nn.Parameter(counters, requires_grad=False)
        persists = self._settings["persist_hash_zch_bucket"]
        self.register_buffer(self.BUCKET_BUFFER, torch.tensor([[self._buckets]]), persistent=persists)

    @property
    def device(self) -> torch.device:
        """Device of the identities."""
        return self._hash_zch_identities.device

    @property
    def max_probe(self) -> int:
        """The constructor's argument."""
        return self._max_probe

    @property
    def disable_fallback(self) -> bool:
        """The constructor's argument."""
        return self._disable_fallback

    @property
    def is_sharded(self) -> bool:
        """Whether the module holds only some of the table's buckets."""
        return self._end_bucket - self._start_bucket < self._buckets

    def reset_inference_mode(self) -> None:
        """Look ids up only: evaluation mode, without metadata of evictions."""
        self.eval()
        self._is_inference = True
        self._hash_zch_metadata = None

    def preprocess(self, features: Features) -> Features:
        """``features``."""
        return features

    def profile(self, features: Features) -> Features:
        """``features``."""
        return features

    def evict(self) -> Tensor | None:
        """None: a lookup evicts nothing."""
        return None

    def get_reserved_slots_per_bucket(self) -> int:
        """Slots at the end of each bucket for ids without a slot; -1 without ``opt_in_prob``."""
        if self._opt_in_prob == -1:
            return -1
        of_a_bucket = self._zch_size * self._percent_reserved_slots / 100 / (self._end_bucket - self._start_bucket)
        return math.floor(of_a_bucket)

    def slots_of(self, ids_N: Tensor) -> Tensor:
        """The slot of each id in the whole table, int64 ``[N]``; -1 for an id without one, with ``disable_fallback``.

        Raises:
            InputError: an id of a bucket that another module holds.
        """
        bucket = segments_of(ids_N, self._input_hash_size, self._buckets)
        if ids_N.numel() and not self._start_bucket <= int(bucket.min()) <= int(bucket.max()) < self._end_bucket:
            raise InputError(
                f"managed collisions of table {self._name or '?'}: got ids of buckets {int(bucket.min())} to "
                f"{int(bucket.max())}; this module holds buckets {self._start_bucket} to {self._end_bucket - 1}"
            )
        if self._divided:
            block = -(-self._input_hash_size // self._buckets)
            ids_N = ids_N % block if block else ids_N // self._buckets
        starts = torch.tensor(self._output_segments, device=ids_N.device)
        first = self._output_segments[self._start_bucket]
        slots = zero_collision_hash(
            ids_N,
            self._hash_zch_identities.data[:, 0].to(ids_N.device),
            starts.diff()[bucket],
            starts[bucket] - first,
            self._max_probe,
            max(self.get_reserved_slots_per_bucket(), 0),
            fallback=not self._disable_fallback,
        )
        return torch.where(slots < 0, slots, slots + first)

    @torch.no_grad()
    def remap(
        self, features: Features, mutate_miss_lengths: bool = True, write_weights: Tensor | None = None
    ) -> Features:
        """The features with slots; see ``disable_fallback`` and ``no_bag`` for ids without one.

        Args:
            mutate_miss_lengths: shorten the bags of dropped ids.
            write_weights: not used by lookups.

        Raises:
            UnavailableError: training mode: recinfer admits no ids to this kind of table.
            ConfigError: dropped ids stay, by ``no_bag``, and their bags would be shortened, or the other way round.
        """
        if self.training:
            raise UnavailableError(
                f"managed collisions of table {self._name or '?'}: recinfer looks ids up in a table of "
                f"HashZchManagedCollisionModule and does not train it; call eval(), or train MCHManagedCollisionModule"
            )
        if self._disable_fallback and self._no_bag == mutate_miss_lengths:
            raise ConfigError(
                f"HashZchManagedCollisionModule of table {self._name or '?'}: disable_fallback with no_bag={self._no_bag} and "
                f"mutate_miss_lengths={mutate_miss_lengths} gives lengths that do not fit the ids; expected one of the two"
            )
        return {name: self._remapped(feature) for name, feature in features.items()}

    def _remapped(self, feature: JaggedTensor) -> JaggedTensor:
        slots = self.slots_of(feature.values())
        lengths, weights = feature.lengths(), feature.weights_or_none()
        if not self._disable_fallback:
            return JaggedTensor.from_parts_unchecked(slots, weights, lengths, feature.offsets_or_none())
        if self._no_bag:
            return JaggedTensor.from_parts_unchecked(slots.clamp(min=0), weights, lengths, feature.offsets_or_none())
        hits = slots >= 0
        before = lengths_to_offsets(hits.long())[feature.offsets().long()]
        return JaggedTensor.from_parts_unchecked(slots[hits], weights, before.diff().to(lengths.dtype))

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """See :meth:`remap`."""
        return self.remap(features, mutate_miss_lengths)

    def output_size(self) -> int:
        """``Z``."""
        return self._zch_size

    def input_size(self) -> int:
        """The constructor's ``input_hash_size``."""
        return self._input_hash_size

    def buckets(self) -> int:
        """The constructor's ``total_num_buckets``."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """0, int64 ``[1]``, as in TorchRec."""
        return torch.tensor([0])

    def validate_state(self) -> None:
        """No effect: the state has no order."""

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int] | None = None,
        device: torch.device | None = None,
    ) -> HashZchManagedCollisionModule:
        """A new module for slots ``output_id_range`` (first, and behind the last), with this one's settings.

        Raises:
            ConfigError: the slots are not whole buckets.
        """
        first, stop = output_id_range
        segments = self._output_segments
        if first not in segments or stop not in segments:
            raise ConfigError(
                f"HashZchManagedCollisionModule of table {self._name or '?'}: slots {first} to {stop - 1} are not whole "
                f"buckets, which begin at {segments[:8]}; plan a number of ranks that divides {self._buckets} buckets"
            )
        return type(self)(
            zch_size=stop - first,
            device=device or self.device,
            is_inference=self._is_inference,
            start_bucket=segments.index(first),
            end_bucket=segments.index(stop),
            **self._settings,
        )


def _equal_buckets(size: int, buckets: int) -> list[int]:
    if buckets < 1 or size % buckets:
        raise ConfigError(
            f"HashZchManagedCollisionModule: {size} slots are not {buckets} equal buckets; give a zch_size that is a multiple "
            f"of total_num_buckets, or output_segments"
        )
    return [bucket * (size // buckets) for bucket in range(buckets + 1)]


def _without_metadata(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *others: Any) -> None:
    """Leave the metadata of evictions out of a state that a module for lookups loads."""
    assert isinstance(module, HashZchManagedCollisionModule) and isinstance(state_dict, dict)
    if module._is_inference:
        state_dict.pop(f"{prefix}{module.METADATA_BUFFER}", None)
