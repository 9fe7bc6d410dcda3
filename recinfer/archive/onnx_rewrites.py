"""Rewrites an ONNX model for onnxruntime: gathers of columns that it runs slowly, and bfloat16 operators that it lacks."""

from __future__ import annotations

from typing import Any

__all__ = ["compute_in_float32", "gather_rows"]

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
        _put(model.graph.node, nodes)
    return changed


def compute_in_float32(model: Any) -> int:
    """Rewrite, in place, each operator that reads or writes bfloat16; returns how many.

    Torch's bfloat16 layers sum up in float32 and round once too, so that the results are the same but for the order of
    sums. Inputs in bfloat16 become inputs in float32, which hold the same values: numpy lacks the type.

    Args:
        model: an ``onnx.ModelProto`` with the types of its values.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    for value in graph.input:
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    half = {
        value.name
        for value in (*graph.value_info, *graph.output)
        if value.type.tensor_type.elem_type == TensorProto.BFLOAT16
    }
    half |= {tensor.name for tensor in graph.initializer if tensor.data_type == TensorProto.BFLOAT16}
    nodes: list[Any] = []
    wide: dict[str, str] = {}  # bfloat16 value -> the same in float32
    changed = 0

    def widened(name: str) -> str:
        if name not in half:
            return name
        if name not in wide:
            wide[name] = f"{name}_float32"
            nodes.append(helper.make_node("Cast", [name], [wide[name]], to=TensorProto.FLOAT))
        return wide[name]

    for node in graph.node:
        if node.op_type in ("Cast", "CastLike", "Constant") or not half.intersection([*node.input, *node.output]):
            nodes.append(node)
            continue
        inputs = [widened(name) for name in node.input]
        exact = [f"{name}_exact" if name in half else name for name in node.output]
        outputs = [name for name in node.output if name in half]
        del node.input[:], node.output[:]
        node.input.extend(inputs)
        node.output.extend(exact)
        nodes.append(node)
        nodes += [helper.make_node("Cast", [f"{name}_exact"], [name], to=TensorProto.BFLOAT16) for name in outputs]
        changed += 1
    if changed:
        _put(graph.node, nodes)
        _put(graph.value_info, [value for value in graph.value_info if value.name not in half])
    return changed


def _put(items: Any, new: list[Any]) -> None:
    """Replace the elements of a protobuf list; the new ones may be among the old."""
    copies = [type(item).FromString(item.SerializeToString()) for item in new]
    del items[:]
    items.extend(copies)
