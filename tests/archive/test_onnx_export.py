"""The conversion to ONNX, and the private names of torch's exporter that it uses."""

from __future__ import annotations

import inspect

import pytest
import torch
from onnxscript import rewriter
from onnxscript.rewriter.rules.common import _no_op
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.onnx._internal.exporter import _core
from torch.onnx._internal.exporter._registration import ONNXRegistry

from recinfer.archive.dense import OnnxEngine
from recinfer.archive.manifest import DenseInput
from recinfer.archive.onnx_export import _FORMS, OPSET, to_onnx
from recinfer.archive.subgraph import exported as program_of
from recinfer.archive.subgraph import subgraph


class Plain(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.relu()}


class Casts(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.long().to(torch.float32) + x.to(x.dtype)}


class Spread(nn.Module):
    """Has operators without an ONNX form, which torch writes as others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        places = torch.bucketize(x[:, 0].contiguous(), torch.tensor([-1.0, 1.0]))
        added = torch.zeros(3, 2).index_add(0, places, x).index_select(0, places)
        one = nn.functional.one_hot(places, 3)[:, :2]
        return {
            "y": torch.special.entr(x.sigmoid()) + self.norm(x) + added + one + torch.var_mean(x, 1)[1].unsqueeze(1)
        }


class LastOnes(nn.Module):
    """Returns what operators without an ONNX form give, in one case an input as it stands."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x.exp().unsqueeze(1).unsqueeze(1)
        return {"y": y.squeeze((1, 2)), "z": torch.special.entr(x.sigmoid()), "copy": torch.ops.aten.alias(x)}


class Empty(nn.Module):
    """Gives a tensor two sizes that are not fixed, of which one may be 0."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x[:, 1].long().max().item()
        torch._check(size >= 0)
        padded = torch.arange(size) * x[:, :1].long()
        return {"y": x.sum(1) + padded.flatten().reshape(x.shape[0], size, 1).sum((1, 2))}


class SmallNumbers(nn.Module):
    """Adds numbers that keep a quotient finite, and multiplies by numbers near 1."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rate = x / (x.abs() + 1e-8) + x / (1e-12 + x.abs()) + (x.abs() - -1e-9).log()
        return {"rate": rate, "near_one": x * 1.000007 / 0.999993}


def exported(module: nn.Module) -> ExportedProgram:
    traced = torch.export.export(module, (torch.randn(3, 2),), dynamic_shapes=({0: Dim.AUTO},)).module(
        check_guards=False
    )
    (x,) = (node for node in traced.graph.nodes if node.op == "placeholder")
    (results,) = (node.args[0] for node in traced.graph.nodes if node.op == "output")
    outputs = dict(zip(module(torch.zeros(3, 2)), results, strict=True))
    return program_of(subgraph(traced, {x: DenseInput("x", "dense", None, None, 2)}, outputs, set()))


def test_the_exporter_has_the_private_names() -> None:
    given = {"model", "registry", "input_names", "output_names", "opset_version", "verbose"}
    assert given <= inspect.signature(_core.export).parameters.keys()
    assert "opset_version" in inspect.signature(ONNXRegistry.from_torchlib).parameters
    assert list(inspect.signature(ONNXRegistry.register_op).parameters)[:3] == ["self", "target", "function"]
    forms = ONNXRegistry.from_torchlib(opset_version=OPSET).functions
    assert all(callable(forms[name][0].onnx_function) for name in _FORMS.values())
    program = exported(Plain())
    rules = [id(rule) for rule in rewriter._DEFAULT_REWRITE_RULES]
    assert _no_op.rules.rules and all(id(rule) in rules for rule in _no_op.rules)
    assert "f" in inspect.signature(program.graph_module._set_replace_hook).parameters
    assert callable(program.graph_signature.get_replace_hook())


@pytest.mark.parametrize("module", [Plain(), Casts(), Spread().eval(), Empty()], ids=lambda value: type(value).__name__)
def test_operators_without_an_onnx_form_are_replaced_alone(module: nn.Module) -> None:
    model = to_onnx(exported(module), ["x"], ["y"])
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["x", "y"]
    engine = OnnxEngine(model.SerializeToString(), ["x"], ["y"], 1)
    for last in (-3.75, 3.0, 0.0):
        x = torch.tensor([[0.5, -1.5 if last else 0.0], [2.25, last]])
        if not isinstance(module, Empty) or last >= 0:
            torch.testing.assert_close(engine([x])[0], module(x)["y"])


def test_small_constants_stay() -> None:
    """onnxscript's rules take 1e-8 for 0 and 1.00001 for 1; torch exports a constant as such an operand."""
    outputs = ["rate", "near_one"]
    engine = OnnxEngine(to_onnx(exported(SmallNumbers()), ["x"], outputs).SerializeToString(), ["x"], outputs, 1)
    x = torch.tensor([[0.0, -1.5], [2.25, 0.0]])
    for found, expected in zip(engine([x]), SmallNumbers()(x).values(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_an_output_may_be_replaced() -> None:
    outputs = ["y", "z", "copy"]
    model = to_onnx(exported(LastOnes()), ["x"], outputs)
    engine = OnnxEngine(model.SerializeToString(), ["x"], outputs, 1)
    x = torch.tensor([[0.5, -1.5], [2.25, -3.75]])
    for found, expected in zip(engine([x]), LastOnes()(x).values(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_second_export_makes_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    to_onnx(exported(Plain()), ["x"], ["y"])
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", None)
    assert to_onnx(exported(Plain()), ["x"], ["y"]).graph.node[0].op_type == "Relu"
