"""Rewrites the bfloat16 operators of an ONNX model to compute in float32 and round each result, since onnxruntime has few
bfloat16 operators on CPUs."""

from __future__ import annotations

from typing import Any

__all__ = ["compute_in_float32"]


def compute_in_float32(model: Any) -> int:
    """Rewrite, in place, each operator that reads or writes bfloat16; returns how many.

    Torch's bfloat16 layers sum up in float32 and round once too, so that the results are the same but for the order of
    sums.

    Args:
        model: an ``onnx.ModelProto`` with the types of its values.
    """
    from onnx import TensorProto, helper

    graph = model.graph
    half = {
        value.name
        for value in (*graph.value_info, *graph.input, *graph.output)
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
        del graph.node[:]
        graph.node.extend(nodes)
        kept = [value for value in graph.value_info if value.name not in half]
        del graph.value_info[:]
        graph.value_info.extend(kept)
    return changed
