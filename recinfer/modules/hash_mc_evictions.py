"""Names and settings of the eviction policies of hashed managed collisions (MPZCH), which act while training."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["HashZchEvictionConfig", "HashZchEvictionPolicyName"]


@enum.unique
class HashZchEvictionPolicyName(enum.Enum):
    """The rule by which a new id takes the slot of another."""

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    """Ids that were not seen for a number of hours leave."""
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    """Per feature, ids that were not seen for its number of hours leave."""
    LRU_EVICTION = "LRU_EVICTION"
    """The id of the visited slots that was not seen for the longest time leaves."""


@dataclass
class HashZchEvictionConfig:
    """Settings of a policy.

    Attributes:
        features: the features of the table.
        single_ttl: hours that an unseen id stays.
        per_feature_ttl: the same for each of ``features``.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None
