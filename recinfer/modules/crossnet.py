"""Cross networks of DCN and DCN-v2: layers that multiply the first input into the current one.

Shapes: ``B`` batch, ``N`` features, ``r`` low rank, ``E`` experts. Wang et al., "Deep & Cross Network" (2017) and
"DCN V2" (2020).
"""

# Annotations stay classes in this module (no __future__ import): torch.fx would write their text into its code, where
# TorchScript does not know the names.

from collections.abc import Callable

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError

__all__ = ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"]


def _kernels(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.init.xavier_normal_(torch.empty(*shape)) for _ in range(count))


def _biases(count: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(*shape)) for _ in range(count))


class CrossNet(nn.Module):
    """``x_next = x0 * (W x + b) + x`` with a full ``W[N, N]``.

    Args:
        in_features: ``N``.
        num_layers: number of layers.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _kernels(num_layers, in_features, in_features)
        self.bias = _biases(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x = input
        for kernel, bias in zip(self.kernels, self.bias):
            x = input * (x @ kernel.t() + bias.squeeze(1)) + x
        return x


class LowRankCrossNet(nn.Module):
    """``x_next = x0 * (W (V x) + b) + x`` with ``W[N, r]`` and ``V[r, N]``.

    Args:
        in_features: ``N``.
        num_layers: number of layers.
        low_rank: ``r``, at least 1.

    Raises:
        ConfigError: ``low_rank`` below 1.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        if low_rank < 1:
            raise ConfigError(f"LowRankCrossNet: got low_rank={low_rank}; it must be at least 1")
        self._num_layers = num_layers
        self._low_rank = low_rank
        self.W_kernels = _kernels(num_layers, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, low_rank, in_features)
        self.bias = _biases(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x = input
        for w, v, bias in zip(self.W_kernels, self.V_kernels, self.bias):
            x = input * ((x @ v.t()) @ w.t() + bias) + x
        return x


class VectorCrossNet(nn.Module):
    """``x_next = x0 * <w, x> + b + x`` with one vector ``w[N]`` per layer (as in the first DCN).

    Args:
        in_features: ``N``.
        num_layers: number of layers.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers
        self.kernels = _kernels(num_layers, in_features, 1)
        self.bias = _biases(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x = input
        for kernel, bias in zip(self.kernels, self.bias):
            x = input * (x @ kernel) + bias.squeeze(1) + x
        return x


class LowRankMixtureCrossNet(nn.Module):
    """Low-rank cross layers of several experts, mixed by a softmax gate: ``x_next = sum_e gate_e(x) E_e(x) + x``.

    ``E_e(x) = x0 * (U_e g(C_e g(V_e x)) + b)``.

    Args:
        in_features: ``N``.
        num_layers: number of layers.
        num_experts: ``E``, at least 1; a single expert has no gate.
        low_rank: ``r``, at least 1.
        activation: ``g``.

    Raises:
        ConfigError: ``num_experts`` or ``low_rank`` below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        if num_experts < 1 or low_rank < 1:
            raise ConfigError(
                f"LowRankMixtureCrossNet: got num_experts={num_experts}, low_rank={low_rank}; both must be at least 1"
            )
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._low_rank = low_rank
        self._activation = activation
        self.U_kernels = _kernels(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _kernels(num_layers, num_experts, low_rank, in_features)
        self.bias = _biases(num_layers, in_features, 1)
        if num_experts > 1:
            self.gates = nn.ModuleList(nn.Linear(in_features, 1, bias=False) for _ in range(num_experts))
        self.C_kernels = _kernels(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: Tensor) -> Tensor:
        """``[B, N]`` to ``[B, N]``."""
        x = input
        for u, v, c, bias in zip(self.U_kernels, self.V_kernels, self.C_kernels, self.bias):
            low = self._activation(torch.einsum("bn,ern->ber", x, v))
            low = self._activation(torch.einsum("ber,esr->bes", low, c))
            experts = input.unsqueeze(1) * (torch.einsum("ber,enr->ben", low, u) + bias.squeeze(1))
            if hasattr(self, "gates"):  # TorchScript omits the branch if there are none
                gates = torch.cat([gate(x) for gate in self.gates], dim=1).softmax(dim=1)
                experts = experts * gates.unsqueeze(2)
            x = experts.sum(1) + x
        return x
