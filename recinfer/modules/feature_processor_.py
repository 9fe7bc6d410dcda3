"""Feature processors for a JaggedTensor or a KeyedJaggedTensor, such as weights by position in the bag."""

from __future__ import annotations

import abc
import copy

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.modules.positions import new_position_weights, position_weights
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from recinfer.sparse.opaque import Opaque

__all__ = [
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
]


class FeatureProcessor(Opaque, nn.Module):
    """Changes the weights of one feature."""

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The features with new weights for the same ids."""


class FeatureProcessorsCollection(Opaque, nn.Module):
    """Changes the weights of several features at once."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features with new weights for the same ids."""


class PositionWeightedModule(FeatureProcessor):
    """Gives each id the weight of its position in the bag: a parameter ``position_weight[max_feature_length]``,
    initially 1.

    Args:
        max_feature_length: the longest bag.
        device: device of the parameter.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        if max_feature_length < 1:
            raise ConfigError(
                f"PositionWeightedModule: got max_feature_length={max_feature_length}; it must be at least 1"
            )
        self.position_weight = nn.Parameter(torch.empty(max_feature_length, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reset all weights to 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The ids with the weights of their positions; weights of the input are ignored.

        Raises:
            InputError: a bag longer than ``max_feature_length``.
        """
        values, offsets = features.values(), features.offsets()
        weights = position_weights("(unnamed)", self.position_weight, offsets, values.shape[0])
        return JaggedTensor.from_parts_unchecked(values, weights, features.lengths(), offsets)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Position weights of several features: parameters ``position_weights.<feature>[length]``, at first 1.

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

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids with the weights of their positions; weights of the input are ignored, other features get weight 1.

        Raises:
            InputError: a bag longer than its feature allows.
        """
        return with_weights(
            features,
            [
                position_weights(key, self.position_weights[key], part.offsets(), part.values().shape[0])
                if key in self.position_weights
                else part.values().new_ones(part.values().shape[0], dtype=torch.float32)
                for key, part in ((key, features[key]) for key in features.keys())  # noqa: SIM118 - not a dict
            ],
        )

    def copy(self, device: torch.device) -> nn.Module:
        """A copy on ``device``."""
        return copy.deepcopy(self).to(device)


def with_weights(features: KeyedJaggedTensor, weights: list[Tensor]) -> KeyedJaggedTensor:
    """``features`` with the weights of its keys, in order, instead of its own."""
    flat = torch.cat(weights) if weights else features.values().new_empty(0, dtype=torch.float32)
    inverse = features.inverse_indices_or_none()
    variable = features.variable_stride_per_key()
    result = KeyedJaggedTensor.from_parts_unchecked(
        features.keys(),
        features.values(),
        features.lengths(),
        offsets=features.offsets(),
        weights=flat,
        stride=features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        inverse_indices=inverse,
    )
    result._length_per_key = features.length_per_key()
    return result
