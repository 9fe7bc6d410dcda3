"""Activation functions with trainable parameters."""

# Annotations stay classes in this module (no __future__ import): torch.fx would write their text into its code, where
# TorchScript does not know the names.

import torch
from torch import Tensor, nn

__all__ = ["SwishLayerNorm"]


class SwishLayerNorm(nn.Module):
    """``x * sigmoid(layer_norm(x))``.

    Args:
        input_dims: the trailing dimensions that are normalised over.
        device: device of the parameters.
    """

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *input_dims]`` to the same shape."""
        return input * self.norm(input)
