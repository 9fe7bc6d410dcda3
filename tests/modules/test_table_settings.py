"""TorchRec's settings of tables that allocate rows while they train: their defaults are taken, the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_the_defaults_are_taken(kind: Any) -> None:
    table = kind(
        num_embeddings=10, embedding_dim=4, name="t", total_num_buckets=None, use_virtual_table=False, input_dim=10
    )
    assert table.input_dim == 10 and table.total_num_buckets is None and not table.use_virtual_table


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"total_num_buckets": 4}, "total_num_buckets=4"),
        ({"use_virtual_table": True}, "use_virtual_table=True"),
        ({"input_dim": 2**40}, f"input_dim={2**40}"),
        ({"virtual_table_eviction_policy": "x", "use_virtual_table": True}, "virtual_table_eviction_policy='x'"),
        ({"enable_embedding_update": True}, "enable_embedding_update=True"),
        ({"stash_weights": True}, "stash_weights=True"),
    ],
)
def test_what_asks_for_rows_that_come_later_is_refused(kind: Any, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=r"table 't': got .*map ids to 0 \.\.\. 9 before the lookup") as refused:
        kind(num_embeddings=10, embedding_dim=4, name="t", **settings)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"num_embeddings": 8.0}, "got num_embeddings=8.0"),
        ({"embedding_dim": "4"}, "embedding_dim='4'; both must be whole numbers"),
        ({"weight_init_min": 1.0, "weight_init_max": 0.0}, r"from 1.0 \(weight_init_min\) to 0.0"),
        ({"weight_init_max": -2.0}, r"to -2.0 \(weight_init_max\)"),
    ],
)
def test_sizes_and_initial_values_are_checked(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        EmbeddingBagConfig(**{"num_embeddings": 8, "embedding_dim": 4, "name": "t"} | settings)
