"""Columns gathered as rows: same numbers, and only where that saves time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recinfer.archive.onnx_rewrites import gather_rows
from recinfer.models.dlrm import InteractionArch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")


def model_of(columns: list[int], shape: list[Any], dtype: int = 1, axis: int = 1) -> Any:
    """One Gather along ``axis`` of a value that an Identity gives."""
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("Identity", ["x"], ["same"]),
            helper.make_node("Gather", ["same", "places"], ["y"], name="pick", axis=axis),
        ],
        "g",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info("y", dtype, [None] * len(shape))],
        [onnx.numpy_helper.from_array(np.array(columns, np.int64), "places")],
        value_info=[helper.make_tensor_value_info("same", dtype, shape)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def run(model: Any, x: np.ndarray[Any, Any]) -> Any:
    onnx.checker.check_model(model)
    (found,) = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return found


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("batch", [0, 1, 7])
def test_many_columns_are_gathered_as_rows(axis: int, batch: int) -> None:
    places = [29, 0, 3, -1, *range(5, 25)]
    model, before = (model_of(places, ["b", 30], axis=axis) for _ in range(2))
    assert gather_rows(model) == 1
    assert [node.op_type for node in model.graph.node] == ["Identity", "Transpose", "Gather", "Transpose"]
    x = np.random.default_rng(0).normal(size=(batch, 30)).astype(np.float32)
    assert np.array_equal(run(model, x), run(before, x))
    assert np.array_equal(run(model, x), x[:, places])


@pytest.mark.parametrize(
    "model",
    [
        model_of([1, 2, 3], ["b", 30]),
        model_of(list(range(20)), ["b", 30, 2]),
        model_of(list(range(20)), ["b", 30], dtype=7),
        model_of(list(range(20)), [30, 2], axis=0),
    ],
    ids=["few", "not a matrix", "integers", "rows"],
)
def test_others_stay_as_they_are(model: Any) -> None:
    before = model.SerializeToString()
    assert gather_rows(model) == 0
    assert model.SerializeToString() == before


def test_the_interactions_of_a_dlrm_are_such_columns() -> None:
    arch = InteractionArch(8).eval()
    example = torch.randn(5, 4), torch.randn(5, 8, 4)
    batch = torch.export.Dim("batch")
    program = torch.onnx.export(
        arch, example, dynamo=True, opset_version=18, dynamic_shapes=({0: batch}, {0: batch}), verbose=False
    )
    assert program is not None
    model = program.model_proto
    assert gather_rows(model) == 1
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for size in (1, 5, 300):
        dense, sparse = torch.randn(size, 4), torch.randn(size, 8, 4)
        (found,) = session.run(None, {i.name: t.numpy() for i, t in zip(session.get_inputs(), (dense, sparse))})
        torch.testing.assert_close(torch.from_numpy(found), arch(dense, sparse), rtol=1e-5, atol=1e-5)
