"""Rewrites a gather of columns in an ONNX model into a gather of rows of the transposed matrix, which onnxruntime runs
faster."""

from __future__ import annotations

from typing import Any

__all__ = ["gather_rows"]

_MANY = 16  # least number of columns for which two more nodes pay off


def gather_rows(model: Any) -> int:
    """Rewrite, in place, each Gather of many constant columns of a float32 matrix; returns how many.

    A DLRM's interactions are such a gather; ``python -m benchmarks.dense`` measures the gain.

    Args:
        model: an ``onnx.ModelProto`` with the shapes of its values.
    """
    from onnx import TensorProto, helper

    matrices = {
        value.name
        for value in (*model.graph.value_info, *model.graph.input)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT and len(value.type.tensor_type.shape.dim) == 2
    }
    columns = {tensor.name: tensor.dims[0] for tensor in model.graph.initializer if len(tensor.dims) == 1}
    nodes, changed = [], 0
    for node in model.graph.node:
        axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
        is_one = node.op_type == "Gather" and axis in (1, -1) and node.input[0] in matrices
        if not is_one or columns.get(node.input[1], 0) < _MANY:
            nodes.append(node)
            continue
        (out,) = node.output
        turned, rows = f"{out}_turned", f"{out}_rows"
        nodes += [
            helper.make_node("Transpose", [node.input[0]], [turned], name=f"{node.name}_turn", perm=[1, 0]),
            helper.make_node("Gather", [turned, node.input[1]], [rows], name=node.name, axis=0),
            helper.make_node("Transpose", [rows], [out], name=f"{node.name}_turn_back", perm=[1, 0]),
        ]
        changed += 1
    if changed:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    return changed
