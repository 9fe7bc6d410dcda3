"""Computes the positions of ids in their bags and their position weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError, InputError
from recinfer.sparse.checks import is_plain
from recinfer.sparse.offsets import offsets_to_rows

__all__ = ["check_positions", "new_position_weights", "offsets_to_positions", "position_weights"]


def new_position_weights(
    max_feature_lengths: dict[str, int], device: torch.device | None = None
) -> dict[str, nn.Parameter]:
    """A weight of 1 for each position of each feature: feature -> ``[length]``.

    Raises:
        ConfigError: a length below 1.
    """
    for name, length in max_feature_lengths.items():
        if length < 1:
            raise ConfigError(f"feature {name!r}: got max_feature_length={length}; it must be at least 1")
    return {name: nn.Parameter(torch.ones(length, device=device)) for name, length in max_feature_lengths.items()}


def offsets_to_positions(offsets: Tensor, num_values: int) -> Tensor:
    """``offsets[n + 1]`` to ``int64[num_values]``: 0, 1, 2, ... in each bag."""
    offsets = offsets.long()
    starts = offsets.index_select(0, offsets_to_rows(offsets, num_values))
    return torch.arange(num_values, device=offsets.device) - starts


def check_positions(name: str, positions: Tensor, max_length: int) -> None:
    """Raise InputError for bags longer than their position weights; on other devices than the CPU, the device checks
    this.

    Raises:
        InputError: a bag is longer than ``max_length``.
    """
    if positions.numel() and positions.device.type == "cpu" and is_plain(positions):
        longest = int(positions.max()) + 1
        if longest > max_length:
            raise InputError(
                f"feature {name!r} has a bag of {longest} ids but only {max_length} position weights; shorten the "
                f"bag or raise max_feature_length"
            )


def position_weights(name: str, weight: Tensor, offsets: Tensor, num_values: int) -> Tensor:
    """The weight of each value by its position in its bag: ``weight[L]`` to ``[num_values]``.

    Raises:
        InputError: a bag is longer than ``L``.
    """
    positions = offsets_to_positions(offsets, num_values)
    check_positions(name, positions, weight.shape[0])
    return weight.index_select(0, positions)
