"""Rewrites an ONNX model for onnxruntime: gathers of columns that it runs slowly, and bfloat16 operators that it lacks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["compute_in_float32", "fold_gathers", "gather_rows"]

# Multiplications per sample that a fold may add. Gathering a column costs over a nanosecond, as long as 80
# multiplications.
_MOST_MORE = 1 << 15
_MOST_INPUTS = 4


def fold_gathers(model: Any) -> int:
    """Rewrite, in place, each Gather of columns of products that one narrow layer reads; returns how many.

    ``Gemm(Concat(a, Gather(products)))`` becomes ``Gemm(products, C=Gemm(a))``, whose weights are 0 where no column was
    gathered: no copy of the columns, no Concat. A DLRM's interactions before a layer of 64 are such products; before wider
    layers the gather is cheaper. Sums are of the same numbers in another order. Only columns of a MatMul are replaced
    this way; they are finite for finite inputs.

    Args:
        model: an ``onnx.ModelProto`` with the shapes of its values.
    """
    graph, folded = _Graph(model), 0
    for node in list(model.graph.node):
        folded += node.op_type == "Gemm" and graph.fold(node)
    if folded:
        graph.finish()
    return folded


class _Graph:
    def __init__(self, model: Any) -> None:
        self.graph = model.graph
        self.made_by = {out: node for node in self.graph.node for out in node.output}
        self.readers = Counter(name for node in self.graph.node for name in node.input)
        self.readers.update(item.name for item in self.graph.output)
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.widths = {
            value.name: value.type.tensor_type.shape.dim[1].dim_value
            for value in (*self.graph.value_info, *self.graph.input)
            if len(value.type.tensor_type.shape.dim) == 2 and value.type.tensor_type.elem_type == 1
        }
        self.instead: dict[str, list[Any]] = {}
        self.gone: set[str] = set()

    def fold(self, gemm: Any) -> bool:
        """Fold the gather that ``gemm`` reads; returns whether there was one."""
        from onnx import helper, numpy_helper

        given = {a.name: helper.get_attribute_value(a) for a in gemm.attribute}
        joined = self.made_by.get(gemm.input[0])
        if given.get("transA", 0) or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return False
        if joined is None or joined.op_type != "Concat" or not self._has_one_reader(joined, (1, -1)):
            return False
        if gemm.input[1] not in self.constants or not 2 <= len(joined.input) <= _MOST_INPUTS:
            return False
        weights = numpy_helper.to_array(self.constants[gemm.input[1]])
        weights = weights.T if given.get("transB", 0) else weights  # [in, out]
        sources = [self._source(name) for name in joined.input]
        widths = [self.widths.get(name, 0) if places is None else len(places) for name, places in sources]
        if all(places is None for _, places in sources) or 0 in widths or sum(widths) != len(weights):
            return False
        more = sum((self.widths[name] - len(places)) for name, places in sources if places is not None)
        if not 0 <= more * weights.shape[1] <= _MOST_MORE:
            return False
        nodes, at, sum_so_far = [], 0, list(gemm.input[2:3])
        for number, ((name, places), width) in enumerate(zip(sources, widths, strict=True)):
            mine = weights[at : at + width]
            at += width
            if places is not None:
                mine = _scattered(mine, places, self.widths[name])
            weight, out = f"{gemm.output[0]}_weight_{number}", f"{gemm.output[0]}_sum_{number}"
            self.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(mine.T), weight))
            out = gemm.output[0] if number == len(sources) - 1 else out
            nodes.append(helper.make_node("Gemm", [name, weight, *sum_so_far], [out], name=f"{out}_gemm", transB=1))
            sum_so_far = [out]
        self.instead[gemm.output[0]] = nodes
        self.gone.add(joined.output[0])
        self.gone.update(name for name, (_, places) in zip(joined.input, sources) if places is not None)
        return True

    def _source(self, name: str) -> tuple[str, NDArray[np.int64] | None]:
        """The value that a layer may read instead of ``name``, and the columns that ``name`` takes of it (None: all)."""
        from onnx import numpy_helper

        gather = self.made_by.get(name)
        if gather is None or gather.op_type != "Gather" or not self._has_one_reader(gather, (1, -1)):
            return name, None
        matrix, chosen = gather.input
        flat = self.made_by.get(matrix)
        made = None if flat is None or flat.op_type != "Reshape" else self.made_by.get(flat.input[0])
        if made is None or made.op_type != "MatMul" or chosen not in self.constants or not self.widths.get(matrix):
            return name, None
        places = numpy_helper.to_array(self.constants[chosen])
        return (matrix, places % self.widths[matrix]) if places.ndim == 1 and places.size else (name, None)

    def _has_one_reader(self, node: Any, axes: tuple[int, ...]) -> bool:
        """Whether one node alone reads the output of ``node``, whose axis is one of ``axes``."""
        return self.readers[node.output[0]] == 1 and next((a.i for a in node.attribute if a.name == "axis"), 0) in axes

    def finish(self) -> None:
        """Insert the new nodes and remove nodes whose outputs are unused."""
        nodes = [
            new
            for node in self.graph.node
            if node.output[0] not in self.gone
            for new in self.instead.get(node.output[0], [node])
        ]
        _put(self.graph.node, nodes)
        read = {name for node in nodes for name in node.input} | {item.name for item in self.graph.output}
        _put(self.graph.initializer, [tensor for tensor in self.graph.initializer if tensor.name in read])
        _put(self.graph.value_info, [value for value in self.graph.value_info if value.name not in self.gone])


def _put(items: Any, new: list[Any]) -> None:
    """Replace the elements of a protobuf list; the new ones may be among the old."""
    copies = [type(item).FromString(item.SerializeToString()) for item in new]
    del items[:]
    items.extend(copies)


def _scattered(weights: NDArray[np.float32], places: NDArray[np.int64], width: int) -> NDArray[np.float32]:
    """``[width, out]``: the rows of ``weights`` scattered to their columns; duplicates are added, other rows are 0."""
    found = np.zeros((width, weights.shape[1]), np.float32)
    np.add.at(found, places, weights)
    return found


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
        _put(graph.node, nodes)
        _put(graph.value_info, [value for value in graph.value_info if value.name not in half])
    return changed
