"""Embedding modules of a model are found by what they are called and hold, whichever package their class is from."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from recinfer.archive.leaves import find_leaves
from recinfer.modules import fp_embedding_modules as ours
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection

TABLES = [EmbeddingBagConfig(9, 4, "t", feature_names=["f", "g"])]


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """TorchRec's class, by its name and its parts: not a subclass of ours."""

    def __init__(self, ebc: EmbeddingBagCollection, processors: nn.Module) -> None:
        super().__init__()
        self._embedding_bag_collection = ebc
        self._feature_processors = processors


def collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection(TABLES, is_weighted=True, device=torch.device("meta"))


def test_torchrecs_feature_processors_are_position_weights() -> None:
    for processors in (
        PositionWeightedModuleCollection({"f": 5, "g": 7}),
        ours.FeatureProcessorDictWrapper(
            nn.ModuleDict({"f": PositionWeightedModule(5), "g": PositionWeightedModule(7)})
        ),
    ):
        theirs = nn.Sequential(FeatureProcessedEmbeddingBagCollection(collection(), processors))
        mine = nn.Sequential(ours.FeatureProcessedEmbeddingBagCollection(collection(), processors))
        (found,), (expected,) = find_leaves(theirs), find_leaves(mine)
        assert found.module is theirs[0]
        assert found.position_weights is not None
        assert {feature: size for feature, (_, size) in found.position_weights.items()} == {"f": 5, "g": 7}
        assert replace(found, module=theirs) == replace(expected, module=theirs)
