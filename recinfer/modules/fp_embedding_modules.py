"""A weighted EmbeddingBagCollection whose weights come from feature processors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import FeatureProcessor, FeatureProcessorsCollection, with_weights
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from recinfer.sparse.opaque import Opaque

__all__ = [
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessorDictWrapper",
    "apply_feature_processors_to_kjt",
]


def apply_feature_processors_to_kjt(
    features: KeyedJaggedTensor, feature_processors: Mapping[str, nn.Module]
) -> KeyedJaggedTensor:
    """``features`` with the weights from the processor of each key; keys without a processor get weight 1.

    Raises:
        InputError: a processor that returns no weights, or not one weight per id.
    """
    weights = []
    for key in features.keys():  # noqa: SIM118 - not a dict
        part = features[key]
        count = part.values().shape[0]
        if key not in feature_processors:
            weights.append(part.values().new_ones(count, dtype=torch.float32))
            continue
        given = feature_processors[key](part).weights()
        if given.shape[0] != count:
            raise InputError(
                f"the processor of feature {key!r} returned {given.shape[0]} weights for {count} ids; expected one "
                f"weight per id, since a processor may not change ids"
            )
        weights.append(given)
    return with_weights(features, weights)


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """A collection of feature processors, one per feature.

    Args:
        feature_processors: feature to processor.
    """

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """See :func:`apply_feature_processors_to_kjt`."""
        return apply_feature_processors_to_kjt(features, self._feature_processors)  # type: ignore[arg-type]


class FeatureProcessedEmbeddingBagCollection(Opaque, nn.Module):
    """Feature processors in front of a weighted EmbeddingBagCollection.

    Args:
        embedding_bag_collection: the tables; ``is_weighted`` is True.
        feature_processors: a collection, or one processor for each feature of the tables.

    Raises:
        ConfigError: tables without weights, or processors for other features than the tables'.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: dict[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ConfigError(
                "FeatureProcessedEmbeddingBagCollection: the tables do not take weights; build the "
                "EmbeddingBagCollection with is_weighted=True"
            )
        features = {f for config in embedding_bag_collection.embedding_bag_configs() for f in config.feature_names}
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors: nn.ModuleDict | FeatureProcessorsCollection
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            if set(feature_processors) != features:
                raise ConfigError(
                    f"FeatureProcessedEmbeddingBagCollection: got processors for {sorted(feature_processors)}; "
                    f"expected one for each feature of the tables: {sorted(features)}"
                )
            self._feature_processors = nn.ModuleDict(feature_processors)
        self._feature_names = features

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """The processors and the tables as two modules."""
        processors = self._feature_processors
        if isinstance(processors, nn.ModuleDict):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled vectors, see :meth:`EmbeddingBagCollection.forward`.

        Raises:
            InputError: a bag that its processor rejects.
        """
        if isinstance(self._feature_processors, nn.ModuleDict):
            processed = apply_feature_processors_to_kjt(features, self._feature_processors)  # type: ignore[arg-type]
        else:
            processed = self._feature_processors(features)
        return self._embedding_bag_collection(processed)

    def is_weighted(self) -> bool:
        """Always True: the feature processors give every id a weight."""
        return self._embedding_bag_collection.is_weighted()

    def embedding_bag_collection(self) -> EmbeddingBagCollection:
        """The tables."""
        return self._embedding_bag_collection
