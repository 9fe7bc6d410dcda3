"""Eviction policies of sorted managed collisions, and the filters of ids that are too rare to admit.

:mod:`recinfer.modules.mc_modules` offers these names, as TorchRec does. Shapes: ``Z`` slots of a table, ``N`` ids of the
history, ``U`` distinct ids of the history.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "average_threshold_filter",
    "dynamic_threshold_filter",
    "probabilistic_threshold_filter",
]

ThresholdFilter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
_COUNTS = "counts"
_LAST_ACCESS = "last_access_iter"
_MOST = torch.iinfo(torch.int64).max


@torch.no_grad()
def dynamic_threshold_filter(id_counts: Tensor, threshold_skew_multiplier: float = 10.0) -> tuple[Tensor, Tensor]:
    """Admit ids whose count exceeds ``threshold_skew_multiplier`` times the mean count.

    Args:
        id_counts: int64 ``[U]``.

    Returns:
        (bool ``[U]``, the threshold).
    """
    share = 1 / max(id_counts.numel(), 1) * threshold_skew_multiplier
    threshold = share * id_counts.sum()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Admit ids whose count exceeds the mean count; see :func:`dynamic_threshold_filter` for shapes."""
    counts = id_counts.float()
    threshold = counts.mean()
    return counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(id_counts: Tensor, per_id_probability: float = 0.01) -> tuple[Tensor, Tensor]:
    """Admit each id with probability ``1 - (1 - per_id_probability) ** count``.

    Draws one number per id from torch's global generator; see :func:`dynamic_threshold_filter` for shapes.

    Returns:
        (bool ``[U]``, the drawn thresholds ``[U]``).
    """
    stays_out = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float)
    scores = 1 - torch.pow(stays_out, id_counts)
    drawn = torch.rand(id_counts.size(), device=id_counts.device)
    return scores > drawn, drawn


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number that a policy keeps.

    Attributes:
        metadata_name: its name; the module's buffer is ``_mch_<name>``.
        is_mch_metadata: kept for each slot, int64 ``[Z]``.
        is_history_metadata: kept for each id of the history, int64 ``[N]``.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


class MCHEvictionPolicy(abc.ABC):
    """Decides which ids leave a table and which ids of the history take their slots.

    Args:
        metadata_info: the numbers that the policy keeps.
        threshold_filtering_func: chooses the ids of the history that may enter, by their counts; None admits all.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    @abc.abstractmethod
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """The numbers that the policy keeps."""

    @abc.abstractmethod
    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Write the numbers of a batch's ids into the history.

        Args:
            current_iter: number of the batch.
            incoming_ids: int64 ``[N]``.
            history_metadata: name -> int64 ``[N]``, written in place.
        """

    @abc.abstractmethod
    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """One number per distinct id from the numbers of the history.

        Args:
            history_metadata: name -> int64 ``[N]``.
            unique_ids_counts: int64 ``[U]``.
            unique_inverse_mapping: int64 ``[N]``, the distinct id of each id.
            additional_ids: ids behind the history that are in the mapping too, seen in ``current_iter``.
            threshold_mask: bool ``[U]``, the ids to keep.

        Returns:
            name -> int64 ``[U]`` (or as many as the mask keeps).
        """

    @abc.abstractmethod
    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Update the numbers of the slots and choose the ids to replace.

        The last slot belongs to missing ids and is never chosen.

        Args:
            mch_size: ``Z``.
            coalesced_history_argsort_mapping: int64 ``[U]``, sorts the distinct ids by falling count.
            coalesced_history_sorted_unique_ids_counts: int64 ``[U]``, sorted so.
            coalesced_history_mch_matching_elements_mask: bool ``[U]``, the sorted ids that have a slot.
            coalesced_history_mch_matching_indices: their slots.
            mch_metadata: name -> int64 ``[Z]``, updated in place.
            coalesced_history_metadata: name -> int64 ``[U]``, not sorted yet.

        Returns:
            (slots whose ids leave, positions of the ids that enter among the sorted ids without a slot); equally many.
        """

    def _compute_selected_eviction_and_replacement_indices(
        self, pivot: int, eviction_scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Keep the ``pivot`` best scores; the first ``pivot`` scores are of slots, the others of ids that may enter."""
        order = torch.argsort(eviction_scores, descending=True, stable=True)
        kept, dropped = order[:pivot], order[pivot:]
        return dropped[dropped < pivot], kept[kept >= pivot] - pivot


class _Seen:
    """The sorted history of one update, split into ids with a slot and ids without."""

    def __init__(self, order: Tensor, matching: Tensor, slots: Tensor) -> None:
        self._order = order
        self._matching = matching
        self._slots = slots

    def add_counts(self, counts_Z: Tensor, sorted_counts_U: Tensor) -> Tensor:
        """Add the counts of ids with a slot to ``counts_Z``; returns the counts of the others."""
        counts_Z[self._slots] += sorted_counts_U[self._matching]
        return sorted_counts_U[~self._matching]

    def set_accesses(self, accesses_Z: Tensor, accesses_U: Tensor) -> Tensor:
        """Write the accesses of ids with a slot to ``accesses_Z``; returns those of the others."""
        accesses_U = accesses_U[self._order]
        accesses_Z[self._slots] = accesses_U[self._matching]
        return accesses_U[~self._matching]


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """The least frequent ids leave. Args as :class:`MCHEvictionPolicy`."""

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([MCHEvictionPolicyMetadataInfo(_COUNTS, True, False)], threshold_filtering_func)

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """Counts of slots."""
        return self._metadata_info

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """No effect: counts follow from the ids."""

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """No numbers."""
        return {}

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The score is the count."""
        seen = _Seen(
            coalesced_history_argsort_mapping,
            coalesced_history_mch_matching_elements_mask,
            coalesced_history_mch_matching_indices,
        )
        counts = mch_metadata[_COUNTS]
        new_counts = seen.add_counts(counts, coalesced_history_sorted_unique_ids_counts)
        counts[mch_size - 1] = _MOST
        out, entering = self._compute_selected_eviction_and_replacement_indices(
            mch_size, torch.cat([counts, new_counts])
        )
        counts[out] = new_counts[entering]
        return out, entering


class _ByAccess(MCHEvictionPolicy):
    """A policy that keeps the batch in which each id was last seen.

    Args:
        decay_exponent: the power to which the age of an id is raised.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        decay_exponent: float,
        threshold_filtering_func: ThresholdFilter | None,
    ) -> None:
        accesses = MCHEvictionPolicyMetadataInfo(_LAST_ACCESS, True, True)
        super().__init__([*metadata_info, accesses], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """Last accesses of slots and of the history, and the policy's other numbers."""
        return self._metadata_info

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """All ids of the batch are seen in ``current_iter``."""
        history_metadata[_LAST_ACCESS][:] = current_iter

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The last access of each distinct id."""
        accesses = history_metadata[_LAST_ACCESS]
        if additional_ids is not None:
            accesses = torch.cat([accesses, torch.full_like(additional_ids, current_iter)])
        last = torch.zeros_like(unique_ids_counts).scatter_reduce_(
            0, unique_inverse_mapping, accesses, reduce="amax", include_self=False
        )
        return {_LAST_ACCESS: last if threshold_mask is None else last[threshold_mask]}

    def _ages(self, current_iter: int, accesses: Tensor) -> Tensor:
        """float32 ages, at least 1, with the decay exponent."""
        return torch.pow(current_iter - accesses + 1, self._decay_exponent)


class LRU_EvictionPolicy(_ByAccess):
    """The ids that were not seen for the longest time leave.

    Args:
        decay_exponent: power of the age; it changes the order of no two ages.
        threshold_filtering_func: as :class:`MCHEvictionPolicy`.
    """

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([], decay_exponent, threshold_filtering_func)

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The score is the negative age."""
        seen = _Seen(
            coalesced_history_argsort_mapping,
            coalesced_history_mch_matching_elements_mask,
            coalesced_history_mch_matching_indices,
        )
        accesses = mch_metadata[_LAST_ACCESS]
        new_accesses = seen.set_accesses(accesses, coalesced_history_metadata[_LAST_ACCESS])
        accesses[mch_size - 1] = current_iter
        scores = torch.neg(self._ages(current_iter, torch.cat([accesses, new_accesses])))
        out, entering = self._compute_selected_eviction_and_replacement_indices(mch_size, scores)
        accesses[out] = new_accesses[entering]
        return out, entering


class DistanceLFU_EvictionPolicy(_ByAccess):
    """The ids with the lowest count per age leave.

    Args:
        decay_exponent: power of the age: 0 ignores it, larger values prefer recent ids.
        threshold_filtering_func: as :class:`MCHEvictionPolicy`.
    """

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        counts = MCHEvictionPolicyMetadataInfo(_COUNTS, True, False)
        super().__init__([counts], decay_exponent, threshold_filtering_func)

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The score is the count divided by the age."""
        seen = _Seen(
            coalesced_history_argsort_mapping,
            coalesced_history_mch_matching_elements_mask,
            coalesced_history_mch_matching_indices,
        )
        counts, accesses = mch_metadata[_COUNTS], mch_metadata[_LAST_ACCESS]
        new_counts = seen.add_counts(counts, coalesced_history_sorted_unique_ids_counts)
        new_accesses = seen.set_accesses(accesses, coalesced_history_metadata[_LAST_ACCESS])
        counts[mch_size - 1] = _MOST
        accesses[mch_size - 1] = current_iter
        ages = self._ages(current_iter, torch.cat([accesses, new_accesses]))
        scores = torch.div(torch.cat([counts, new_counts]), ages)
        out, entering = self._compute_selected_eviction_and_replacement_indices(mch_size, scores)
        counts[out] = new_counts[entering]
        accesses[out] = new_accesses[entering]
        return out, entering
