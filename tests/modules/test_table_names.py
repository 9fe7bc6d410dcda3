"""A table name that torch's ModuleDict cannot hold is an error that names it, not a KeyError from torch."""

from __future__ import annotations

import pytest

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection


@pytest.mark.parametrize("name", ["items", "keys", "values", "training", "forward"])
def test_reserved_names(name: str) -> None:
    bag = EmbeddingBagConfig(num_embeddings=3, embedding_dim=4, name=name, feature_names=["f"])
    row = EmbeddingConfig(num_embeddings=3, embedding_dim=4, name=name, feature_names=["f"])
    with pytest.raises(ConfigError, match=f"table name '{name}'"):
        EmbeddingBagCollection(tables=[bag])
    with pytest.raises(ConfigError, match=f"table name '{name}'"):
        EmbeddingCollection(tables=[row])
    with pytest.raises(ConfigError, match=f"table name '{name}'"):
        QuantEmbeddingBagCollection([bag], False)
