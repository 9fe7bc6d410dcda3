"""ParameterConstraints, the user's constraints on a table, and PlannerError, the error when no plan fits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from recinfer.distributed.types import BoundsCheckMode, CacheParams, DataType, KeyValueParams
from recinfer.errors import ConfigError, RecinferError

__all__ = ["ParameterConstraints", "PlannerError", "PlannerErrorType"]


@dataclass
class ParameterConstraints:
    """Constraints and known figures of one table.

    Args:
        sharding_types: allow only these.
        compute_kernels: allow only these.
        min_partition: minimum columns of a column piece.
        pooling_factors: mean ids per bag, one per feature (default 1).
        num_poolings: bags per sample, one per feature (default 1).
        batch_sizes: batch of each feature when it differs from the planner's.
        is_weighted: ids have weights; for modules that do not define it, such as nn.EmbeddingBag.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode: passed on to the kernel.
        feature_names: the table's features, if the module does not name them.
        output_dtype: element type of the looked-up vectors.
        device_group: kind of device the table must live on, for mixed plans.
        key_value_params: does nothing (:mod:`recinfer.ignored`).
        use_virtual_table: not supported: an error, as in the tables' configs.
        colocate_with: tables with the same value share all their ranks (ours). Such a table is placed whole.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [1.0])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    feature_names: list[str] | None = None
    output_dtype: DataType | None = None
    device_group: str | None = None
    key_value_params: KeyValueParams | None = None
    use_virtual_table: bool = False
    colocate_with: str | None = None

    def __post_init__(self) -> None:
        if self.use_virtual_table:
            raise ConfigError(
                "use_virtual_table=True: a table has all its rows from the start here, and none is allocated or "
                "evicted while it trains. Omit it, and map ids to rows before the lookup (docs/how-to/raw-ids.md)"
            )

    def __hash__(self) -> int:
        lists = (self.sharding_types, self.compute_kernels, self.pooling_factors, self.num_poolings, self.batch_sizes)
        return hash(
            (
                *(tuple(x) if x is not None else None for x in lists),
                self.min_partition,
                self.is_weighted,
                self.cache_params,
                self.enforce_hbm,
                self.stochastic_rounding,
                self.bounds_check_mode,
                tuple(self.feature_names or ()),
                self.output_dtype,
                self.device_group,
                self.colocate_with,
            )
        )


class PlannerErrorType(Enum):
    """Reasons why there is no plan."""

    INSUFFICIENT_STORAGE = "insufficient_storage"
    STRICT_CONSTRAINTS = "strict_constraints"
    PARTITION = "partition"
    OTHER = "other"
    PLANNER_INPUT_CONTEXT_MISMATCH = "planner_input_context_mismatch"
    PLAN_LOADING_FAILED = "plan_loading_failed"
    INVALID_RANK_ASSIGNMENT = "invalid_rank_assignment"
    INPUT_VALIDATION = "input_validation"
    MISSING_MODULE_IN_PLAN = "missing_module_in_plan"
    INVALID_COMPUTE_KERNEL = "invalid_compute_kernel"


class PlannerError(RecinferError, ValueError):
    """There is no plan. ``error_type`` is the reason; the message names the limiting memory and a change that helps."""

    def __init__(self, message: str, error_type: PlannerErrorType = PlannerErrorType.OTHER) -> None:
        super().__init__(message)
        self.error_type = error_type
