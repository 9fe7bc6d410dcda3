"""The tables of sharding types and compute kernels: complete, and enough for code that reads them."""

from __future__ import annotations

import pytest

from recinfer.distributed.sharded import by_type
from recinfer.distributed.sharded.sharding import PooledSharding, SequenceSharding
from recinfer.distributed.types import ShardingType
from recinfer.distributed.types.kernels import (
    KERNEL_RULES,
    EmbeddingComputeKernel,
    EmbeddingLocation,
    compute_kernel_to_embedding_location,
)
from recinfer.distributed.types.sharding_types import SHARDING_RULES, packed_sharding_types, rule_of
from recinfer.errors import ConfigError


def test_every_type_and_every_kernel_has_one_row() -> None:
    """The planner's arrays number them by the order of the rows, which is that of the enums."""
    assert [rule.kind for rule in SHARDING_RULES] == list(ShardingType)
    assert [rule.kernel for rule in KERNEL_RULES] == list(EmbeddingComputeKernel)
    assert len({rule.short for rule in SHARDING_RULES}) == len(SHARDING_RULES)


def test_the_memory_of_a_kernel_is_in_its_name() -> None:
    suffixes = {"_uvm": EmbeddingLocation.MANAGED, "_uvm_caching": EmbeddingLocation.MANAGED_CACHING}
    for rule in KERNEL_RULES:
        _, uvm, rest = rule.kernel.value.partition("_uvm")
        assert compute_kernel_to_embedding_location(rule.kernel) is suffixes.get(uvm + rest, EmbeddingLocation.DEVICE)
        assert rule.packed == rule.kernel.value.startswith("quant")


def test_quantized_tables_are_offered_whole_rows_first() -> None:
    assert packed_sharding_types() == ["table_wise", "row_wise", "column_wise"]


@pytest.mark.parametrize("kind", list(ShardingType))
def test_a_type_needs_no_class_of_its_own(kind: ShardingType, monkeypatch: pytest.MonkeyPatch) -> None:
    own = by_type.pooled_sharding_of(kind.value)
    assert own.kind is kind and own.__name__.endswith("PooledEmbeddingSharding")
    monkeypatch.setattr(by_type, "_POOLED", {})
    monkeypatch.setattr(by_type, "_UNPOOLED", {})
    made = by_type.pooled_sharding_of(kind.value)
    assert issubclass(made, PooledSharding) and made.kind is kind
    if rule_of(kind.value).unpooled:
        rows = by_type.sequence_sharding_of(kind.value)
        assert issubclass(rows, SequenceSharding) and rows.kind is kind
    else:
        with pytest.raises(ConfigError, match="for unpooled tables"):
            by_type.sequence_sharding_of(kind.value)


def test_an_unknown_type_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'diagonal'; expected one of .*'column_wise'"):
        rule_of("diagonal")
