"""Feature processors of TorchRec's older interface: dicts of JaggedTensors, and a grouped processor."""

from __future__ import annotations

import abc

import torch
from torch import nn

from recinfer.modules.feature_processor_ import PositionWeightedModuleCollection
from recinfer.modules.positions import new_position_weights, position_weights
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from recinfer.sparse.opaque import Opaque

__all__ = [
    "BaseFeatureProcessor",
    "BaseGroupedFeatureProcessor",
    "PositionWeightedModule",
    "PositionWeightedProcessor",
]


class BaseFeatureProcessor(Opaque, nn.Module):
    """Changes a dict of features."""

    @abc.abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The processed features, with the same keys."""


class BaseGroupedFeatureProcessor(Opaque, nn.Module):
    """Changes all features of a KeyedJaggedTensor."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The processed features, with the same keys."""


class PositionWeightedModule(BaseFeatureProcessor):
    """Position weights for the features of a dict: parameters ``position_weights.<feature>[length]``, at first 1.

    Args:
        max_feature_lengths: the longest bag of each feature.
        device: device of the parameters.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        # Pairs, not a mapping: ParameterDict would sort a mapping's names.
        self.position_weights = nn.ParameterDict(new_position_weights(max_feature_lengths, device).items())

    def reset_parameters(self) -> None:
        """Reset all weights to 1."""
        for weight in self.position_weights.values():
            nn.init.ones_(weight)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The ids with the weights of their positions; features without position weights are unchanged.

        Raises:
            InputError: a bag longer than its feature allows.
        """
        result = dict(features)
        for name, weight in self.position_weights.items():
            part = features.get(name)
            if part is not None:
                weights = position_weights(name, weight, part.offsets(), part.values().shape[0])
                result[name] = JaggedTensor.from_parts_unchecked(part.values(), weights, part.lengths(), part.offsets())
        return result


class PositionWeightedProcessor(BaseGroupedFeatureProcessor):
    """Position weights for a KeyedJaggedTensor: parameters ``position_weights.<feature>[length]``, at first 1.

    Args:
        max_feature_lengths: the longest bag of each feature.
        device: device of the parameters.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        self.position_weights = PositionWeightedModuleCollection(max_feature_lengths, device).position_weights

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Ids with the weights of their positions, see :class:`PositionWeightedModuleCollection`.

        Raises:
            InputError: a bag longer than its feature allows.
        """
        return PositionWeightedModuleCollection.forward(self, features)  # type: ignore[arg-type]
