"""Position weights: by loop, by both interfaces, in front of tables, and bags that are too long."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recinfer.errors import ConfigError, InputError
from recinfer.modules import feature_processor
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

LENGTHS = {"a": 3, "b": 4}


def batch() -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 0, 4])
    return KeyedJaggedTensor(["b", "z", "a"], torch.arange(10) % 7, torch.full((10,), 9.0), lengths=lengths).permute(
        [1, 0, 2]
    )


def short_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["b", "z", "a"], torch.arange(9) % 7, lengths=torch.tensor([2, 0, 1, 3, 0, 3]))


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for scale, parameter in enumerate(module.parameters(), start=1):
            parameter.copy_(torch.arange(1, parameter.numel() + 1) * float(scale))


def test_a_weight_is_that_of_the_place_in_the_bag() -> None:
    module = PositionWeightedModule(4)
    assert module.position_weight.tolist() == [1.0] * 4
    fill(module)
    jagged = JaggedTensor(torch.arange(6), torch.full((6,), 9.0), lengths=torch.tensor([2, 0, 1, 3]))
    out = module(jagged)
    assert out.weights().tolist() == [1, 2, 1, 1, 2, 3]
    assert torch.equal(out.values(), jagged.values())
    out.weights().sum().backward()
    assert module.position_weight.grad.tolist() == [3, 2, 1, 0]  # type: ignore[union-attr]


def test_collection_weighs_its_features_and_leaves_the_rest_at_one() -> None:
    module = PositionWeightedModuleCollection(LENGTHS)
    assert list(module.state_dict()) == ["position_weights.a", "position_weights.b"]
    fill(module)
    kjt = short_batch()
    out = module(kjt)
    assert out["a"].weights().tolist() == [1, 2, 3]
    assert out["b"].weights().tolist() == [2, 4]
    assert out["z"].weights().tolist() == [1, 1, 1, 1]
    assert out.keys() == kjt.keys()
    old = feature_processor.PositionWeightedProcessor(LENGTHS)
    assert list(old.state_dict()) == list(module.state_dict())
    fill(old)
    assert torch.equal(old(kjt).weights(), out.weights())


def test_dict_interface_passes_other_features() -> None:
    module = feature_processor.PositionWeightedModule(LENGTHS)
    fill(module)
    kjt = short_batch()
    out = module(kjt.to_dict())
    assert out["a"].weights().tolist() == [1, 2, 3]
    assert out["z"].weights_or_none() is None


def test_a_bag_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(InputError, match="feature 'a' has a bag of 4 ids but only 3"):
        PositionWeightedModuleCollection(LENGTHS)(batch())
    with pytest.raises(InputError, match="a bag of 2 ids but only 1"):
        PositionWeightedModule(1)(JaggedTensor(torch.arange(2), lengths=torch.tensor([2])))
    with pytest.raises(ConfigError, match="max_feature_length=0"):
        PositionWeightedModuleCollection({"a": 0})


def tables(weighted: bool = True) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(num_embeddings=7, embedding_dim=4, name="t", feature_names=["a", "b"])
    return EmbeddingBagCollection([config], is_weighted=weighted)


def test_processors_in_front_of_tables() -> None:
    ebc = tables()
    collection = PositionWeightedModuleCollection(LENGTHS)
    fill(collection)
    together = FeatureProcessedEmbeddingBagCollection(ebc, collection)
    by_feature = FeatureProcessedEmbeddingBagCollection(
        ebc, {name: PositionWeightedModule(length) for name, length in LENGTHS.items()}
    )
    fill(by_feature._feature_processors)
    kjt = short_batch()
    expected = ebc(collection(kjt)).values()
    assert torch.equal(together(kjt).values(), expected)
    assert torch.equal(by_feature(kjt).values(), expected)
    assert list(together.state_dict()) == [
        "_embedding_bag_collection.embedding_bags.t.weight",
        "_feature_processors.position_weights.a",
        "_feature_processors.position_weights.b",
    ]
    assert list(by_feature.state_dict())[1:] == [
        "_feature_processors.a.position_weight",
        "_feature_processors.b.position_weight",
    ]
    processors, bags = by_feature.split()
    assert torch.equal(bags(processors(kjt)).values(), expected)
    together(kjt).values().sum().backward()
    assert all(p.grad is not None for p in together.parameters())


class Drops(FeatureProcessor):
    """Gives fewer weights than there are ids."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values()[:0]
        return JaggedTensor(ids, ids.float(), lengths=features.lengths() * 0)


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(tables(weighted=False), PositionWeightedModuleCollection(LENGTHS))
    with pytest.raises(ConfigError, match=r"processors for \['a'\]; expected one for each .* \['a', 'b'\]"):
        FeatureProcessedEmbeddingBagCollection(tables(), {"a": PositionWeightedModule(3)})
    dropping = FeatureProcessedEmbeddingBagCollection(tables(), {"a": Drops(), "b": PositionWeightedModule(4)})
    with pytest.raises(InputError, match="feature 'a' returned 0 weights for 3 ids"):
        dropping(short_batch())
