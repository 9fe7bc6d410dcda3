"""Fully connected layers: a perceptron, and a stack of them."""

# Annotations stay classes in this module (no __future__ import): torch.fx would write their text into its code, where
# TorchScript does not know the names.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.modules.activation import SwishLayerNorm

__all__ = ["MLP", "Perceptron"]

Activation = str | Callable[[], nn.Module] | nn.Module | Callable[[Tensor], Tensor]


class Perceptron(nn.Module):
    """``activation(linear(x))``. Parameters are ``_linear.weight`` and ``_linear.bias``.

    Args:
        in_size: columns of the input.
        out_size: columns of the output.
        bias: whether the linear layer has one.
        activation: a module or a function of a tensor.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size]`` to ``[B, out_size]``."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """A stack of perceptrons. Parameters are ``_mlp.<layer>._linear.weight`` and ``.bias``.

    Args:
        in_size: columns of the input.
        layer_sizes: columns after each layer.
        bias: whether layers have one.
        activation: ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"``, a module (shared by the layers), a function that
            creates a module (called once per layer), or a function of a tensor.
        device: device of the parameters.
        dtype: dtype of the parameters.
        activation_on_last: whether the last layer ends with the activation too.

    Raises:
        ConfigError: an unknown activation name.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        sizes = [in_size, *layer_sizes]
        layers = []
        for at, size in enumerate(layer_sizes):
            last = at == len(layer_sizes) - 1
            chosen = nn.Identity() if last and not activation_on_last else _activation(activation, size, device)
            layers.append(Perceptron(sizes[at], size, bias=bias, activation=chosen, device=device, dtype=dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, in_size]`` to ``[B, layer_sizes[-1]]``."""
        return self._mlp(input)


def _activation(
    activation: Activation, size: int, device: torch.device | None
) -> nn.Module | Callable[[Tensor], Tensor]:
    if isinstance(activation, str):
        if activation == "swish_layernorm":
            return SwishLayerNorm(size, device=device)
        if activation in ("relu", "sigmoid"):
            return getattr(torch, activation)
        raise ConfigError(f"unknown activation {activation!r}; expected relu, sigmoid, swish_layernorm or a callable")
    if isinstance(activation, nn.Module):
        return activation
    if isinstance(activation, type) and issubclass(activation, nn.Module):
        return activation()
    return _made_by(activation)


def _made_by(function: Callable[..., object]) -> nn.Module | Callable[[Tensor], Tensor]:
    # A function may create a module or be the activation itself; a call without arguments tells which.
    try:
        made = function()
    except TypeError:
        return function  # type: ignore[return-value]
    return made if isinstance(made, nn.Module) else function  # type: ignore[return-value]
