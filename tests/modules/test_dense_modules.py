"""MLPs, cross networks and regrouping: shapes, state-dict keys, and the formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.modules.activation import SwishLayerNorm
from recinfer.modules.crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.mlp import MLP, Perceptron
from recinfer.modules.regroup import KTRegroupAsDict
from recinfer.sparse import KeyedTensor


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("relu", torch.relu),
        ("sigmoid", torch.sigmoid),
        (torch.tanh, torch.tanh),
        (nn.Tanh, torch.tanh),
        (nn.Tanh(), torch.tanh),
        (lambda: nn.ELU(), nn.functional.elu),
    ],
)
@pytest.mark.parametrize("on_last", [True, False])
def test_mlp_is_its_layers(activation, function, on_last: bool) -> None:
    mlp = MLP(5, [4, 3], activation=activation, activation_on_last=on_last)
    x = torch.randn(6, 5)
    hidden = function(x @ mlp._mlp[0]._linear.weight.t() + mlp._mlp[0]._linear.bias)  # type: ignore[union-attr]
    last = hidden @ mlp._mlp[1]._linear.weight.t() + mlp._mlp[1]._linear.bias  # type: ignore[union-attr]
    assert torch.allclose(mlp(x), function(last) if on_last else last, atol=1e-6)
    assert [k for k in mlp.state_dict() if "_linear" in k] == [
        f"_mlp.{n}._linear.{p}" for n in (0, 1) for p in ("weight", "bias")
    ]


def test_swish_layer_norm_has_its_own_parameters() -> None:
    mlp = MLP(5, [4], activation="swish_layernorm", bias=False)
    assert list(mlp.state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._activation_fn.norm.0.weight",
        "_mlp.0._activation_fn.norm.0.bias",
    ]
    x = torch.randn(3, 4)
    assert torch.allclose(SwishLayerNorm(4)(x), x * torch.sigmoid(nn.functional.layer_norm(x, (4,))))


def test_unknown_activation_and_meta() -> None:
    with pytest.raises(ConfigError, match="unknown activation 'tanh'"):
        MLP(5, [4], activation="tanh")
    assert Perceptron(5, 4, device=torch.device("meta"))._linear.weight.is_meta
    assert MLP(3, [2], dtype=torch.float64)(torch.rand(1, 3).double()).dtype == torch.float64


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    return module


def test_cross_layers_are_their_formulas() -> None:
    x = torch.randn(6, 5)
    full = randomised(CrossNet(5, 1))
    expected = x * (x @ full.kernels[0].t() + full.bias[0].t()) + x  # type: ignore[index, operator]
    assert torch.allclose(full(x), expected, atol=1e-5)
    vector = randomised(VectorCrossNet(5, 1))
    expected = x * (x @ vector.kernels[0]) + vector.bias[0].t() + x  # type: ignore[index, operator]
    assert torch.allclose(vector(x), expected, atol=1e-5)
    low = randomised(LowRankCrossNet(5, 1, low_rank=2))
    expected = x * (x @ low.V_kernels[0].t() @ low.W_kernels[0].t() + low.bias[0]) + x  # type: ignore[index, operator]
    assert torch.allclose(low(x), expected, atol=1e-5)


@pytest.mark.parametrize("num_experts", [1, 3])
def test_mixture_of_cross_experts(num_experts: int) -> None:
    x = torch.randn(6, 5)
    mix = LowRankMixtureCrossNet(5, 1, num_experts, low_rank=2)
    randomised(mix)
    u, v, c, bias = (p[0] for p in (mix.U_kernels, mix.V_kernels, mix.C_kernels, mix.bias))
    gates = torch.ones(6, 1)
    if num_experts > 1:
        gates = torch.cat([gate(x) for gate in mix.gates], 1).softmax(1)
    expected = x
    for e in range(num_experts):
        inner = torch.relu(torch.relu(x @ v[e].t()) @ c[e].t()) @ u[e].t()
        expected = expected + gates[:, e : e + 1] * x * (inner + bias.t())
    assert torch.allclose(mix(x), expected, atol=1e-4)


def test_cross_layers_refuse_ranks_below_one() -> None:
    with pytest.raises(ConfigError, match="low_rank=0"):
        LowRankCrossNet(5, 1, 0)
    with pytest.raises(ConfigError, match="num_experts=0"):
        LowRankMixtureCrossNet(5, 1, 0)


def test_regroup_module_names_and_casts() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.rand(3, 3))
    out = KTRegroupAsDict([["b"], ["b", "a"]], ["x", "y"], emb_dtype=DataType.FP16)([kt])
    assert {k: (tuple(v.shape), v.dtype) for k, v in out.items()} == {
        "x": ((3, 2), torch.float16),
        "y": ((3, 3), torch.float16),
    }
    assert torch.equal(KTRegroupAsDict([["a"]], ["x"])([kt])["x"], kt["a"])
    with pytest.raises(ConfigError, match="1 groups and 2 keys"):
        KTRegroupAsDict([["a"]], ["x", "y"])
