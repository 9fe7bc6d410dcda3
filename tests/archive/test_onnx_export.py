"""The conversion to ONNX, and the private names of torch's exporter that it uses."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.onnx._internal.exporter import _core
from torch.onnx._internal.exporter._registration import ONNXRegistry

from recinfer.archive.dense import OnnxEngine, _free_sizes
from recinfer.archive.onnx_export import to_onnx


class Plain(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.relu()}


class Casts(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": x.long().to(torch.float32) + x.to(x.dtype)}


class Spread(nn.Module):
    """Has an operator without an ONNX form, which torch writes as others."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": torch.special.entr(x.sigmoid())}


def exported(module: nn.Module) -> ExportedProgram:
    program = torch.export.export(module, (torch.randn(3, 2),), dynamic_shapes=({0: Dim.AUTO},))
    _free_sizes(program)
    return program


def test_the_exporter_has_the_private_names() -> None:
    given = {"model", "registry", "input_names", "output_names", "opset_version", "verbose"}
    assert given <= inspect.signature(_core.export).parameters.keys()
    assert "opset_version" in inspect.signature(ONNXRegistry.from_torchlib).parameters


@pytest.mark.parametrize(
    ("module", "runs"), [(Plain(), 0), (Casts(), 0), (Spread(), 1)], ids=["plain", "casts", "spread"]
)
def test_operators_are_replaced_only_where_one_has_no_onnx_form(
    module: nn.Module, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    replace = ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda self, table: calls.append(1) or replace(self, table)
    )
    model = to_onnx(exported(module), ["x"], ["y"])
    assert len(calls) == runs
    assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["x", "y"]
    x = torch.tensor([[0.5, -1.5], [2.25, -3.75]])
    (found,) = OnnxEngine(model.SerializeToString(), ["x"], ["y"], 1)([x])
    torch.testing.assert_close(found, module(x)["y"])


def test_a_second_export_makes_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    to_onnx(exported(Plain()), ["x"], ["y"])
    monkeypatch.setattr(ONNXRegistry, "from_torchlib", None)
    assert to_onnx(exported(Plain()), ["x"], ["y"]).graph.node[0].op_type == "Relu"
