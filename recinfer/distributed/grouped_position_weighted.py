"""Feature processor of a grouped lookup: position weights for the features that a rank received."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.distributed.types.embedding_modules import BaseGroupedFeatureProcessor
from recinfer.modules.feature_processor_ import with_weights
from recinfer.modules.positions import check_positions, new_position_weights, offsets_to_positions
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["GroupedPositionWeightedModule"]


class GroupedPositionWeightedModule(BaseGroupedFeatureProcessor):
    """Gives each id the weight of its position in the bag: ``position_weights.<feature>[length]``, initially 1.

    Args:
        max_feature_lengths: the longest bag of each feature.
        device: device of the parameters.

    Raises:
        ConfigError: a length below 1.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | None = None) -> None:
        super().__init__()
        self.max_feature_lengths = max_feature_lengths
        # The weights are kept out of the module tree, because a feature's name may hold dots and a ParameterDict's key
        # may not.
        self._position_weights = new_position_weights(max_feature_lengths, device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids of ``features`` with the weights of their positions.

        Weights of ``features``, if any, are the positions: buckets of a table that is cut by rows no longer show them
            (see
        ``bucketize_pos`` of bucketize_kjt_before_all2all). Features without position weights get weight 1.

        Raises:
            InputError: a bag longer than its feature allows.
        """
        given = features.weights_or_none()
        positions = offsets_to_positions(features.offsets(), features.values().shape[0]) if given is None else given
        weights = []
        for key, places in zip(features.keys(), positions.long().split(features.length_per_key())):
            weight = self._position_weights.get(key)
            if weight is None:
                weights.append(torch.ones(places.numel(), device=places.device))
            else:
                check_positions(key, places, weight.shape[0])
                weights.append(weight.index_select(0, places))
        return with_weights(features, weights)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for parameter in self._position_weights.values():
            parameter.data = fn(parameter.data)
        return super()._apply(fn, recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """``<prefix>.position_weights.<feature>`` of every feature."""
        for name, parameter in self._position_weights.items():
            yield f"{prefix}.position_weights.{name}" if prefix else f"position_weights.{name}", parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """No buffers."""
        yield from ()

    def state_dict(  # type: ignore[override]
        self, destination: dict[str, Any] | None = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """``<prefix>position_weights.<feature>`` of every feature."""
        result: dict[str, Any] = OrderedDict() if destination is None else destination
        for name, parameter in self._position_weights.items():
            result[f"{prefix}position_weights.{name}"] = parameter if keep_vars else parameter.detach()
        return result

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        known = {f"{prefix}position_weights.{name}": p for name, p in self._position_weights.items()}
        for key, parameter in known.items():
            if key not in state_dict:
                missing_keys.append(key)
            elif state_dict[key].shape != parameter.shape:
                error_msgs.append(f"{key}: got shape {tuple(state_dict[key].shape)}; expected {tuple(parameter.shape)}")
            else:
                parameter.copy_(state_dict[key])
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]
