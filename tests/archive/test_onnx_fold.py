"""Folding of gathered products into a narrow layer: same answers, and only for that pattern."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recinfer.archive.onnx_rewrites import fold_gathers
from recinfer.models.dlrm import InteractionArch, OverArch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

FEATURES, DIM = 8, 4


class Dense(nn.Module):
    """Interactions and top MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.interactions = InteractionArch(FEATURES)
        self.over = OverArch(DIM + FEATURES * (FEATURES + 1) // 2, [width, 1])

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        return self.over(self.interactions(dense, sparse))


def exported(model: nn.Module) -> Any:
    batch = torch.export.Dim("batch")
    example = torch.randn(5, DIM), torch.randn(5, FEATURES, DIM)
    program = torch.onnx.export(
        model, example, dynamo=True, opset_version=18, dynamic_shapes=({0: batch}, {0: batch}), verbose=False
    )
    assert program is not None
    return program.model_proto


@pytest.fixture(scope="module")
def narrow() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Dense(6).eval()
    return model, exported(model)


def node(model: Any, kind: str) -> Any:
    return next(each for each in model.graph.node if each.op_type == kind)


def test_interactions_before_a_narrow_layer_are_not_gathered(narrow: tuple[nn.Module, Any]) -> None:
    module, model = narrow[0], copy.deepcopy(narrow[1])
    assert fold_gathers(model) == 1
    onnx.checker.check_model(model, full_check=True)
    kinds = [each.op_type for each in model.graph.node]
    assert "Gather" not in kinds
    assert kinds.count("Concat") == 1  # the vectors'; that of the interactions is gone
    assert fold_gathers(model) == 0
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (1, 5, 300):
        dense, sparse = torch.randn(size, DIM), torch.randn(size, FEATURES, DIM)
        (found,) = session.run(None, {i.name: t.numpy() for i, t in zip(session.get_inputs(), (dense, sparse))})
        torch.testing.assert_close(torch.from_numpy(found), module(dense, sparse).detach(), rtol=1e-5, atol=1e-5)


def test_columns_that_come_twice_or_from_behind_are_added(narrow: tuple[nn.Module, Any]) -> None:
    before = copy.deepcopy(narrow[1])
    chosen = next(t for t in before.graph.initializer if t.name == node(before, "Gather").input[1])
    places = onnx.numpy_helper.to_array(chosen).copy()
    places[3], places[5] = places[4], -1
    chosen.CopyFrom(onnx.numpy_helper.from_array(places, chosen.name))
    after = copy.deepcopy(before)
    assert fold_gathers(after) == 1
    random = np.random.default_rng(0)
    values = random.normal(size=(9, DIM)).astype(np.float32), random.normal(size=(9, FEATURES, DIM)).astype(np.float32)
    found = []
    for model in (before, after):
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append(session.run(None, dict(zip([i.name for i in session.get_inputs()], values)))[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-5)


def test_other_gathers_are_unchanged(narrow: tuple[nn.Module, Any]) -> None:
    def also_given(model: Any) -> None:
        model.graph.output.append(copy.deepcopy(model.graph.output[0]))
        model.graph.output[-1].name = node(model, "Gather").output[0]

    def of_no_products(model: Any) -> None:
        node(model, "MatMul").op_type = "Add"

    def no_shapes(model: Any) -> None:
        del model.graph.value_info[:]

    def scaled(model: Any) -> None:
        for each in model.graph.node:
            if each.op_type == "Gemm":
                next(a for a in each.attribute if a.name == "alpha").f = 2.0

    for change in (also_given, of_no_products, no_shapes, scaled):
        model = copy.deepcopy(narrow[1])
        change(model)
        before = model.SerializeToString()
        assert fold_gathers(model) == 0, change.__name__
        assert model.SerializeToString() == before


def test_before_a_wide_layer_columns_are_gathered() -> None:
    assert fold_gathers(exported(Dense(1024).eval())) == 0
