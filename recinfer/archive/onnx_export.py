"""Converts a program to ONNX by torch's exporter, without the work that the exporter would repeat in each export.

Only this file uses private names of the exporter; ``tests/archive/test_onnx_export.py`` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

__all__ = ["OPSET", "to_onnx"]

OPSET = 18


def to_onnx(program: ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """``program`` as an ``onnx.ModelProto``; the program cannot be used afterwards.

    Args:
        inputs, outputs: their names, in order.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        Exception: the exporter's errors, of many types.
    """
    from torch.onnx._internal.exporter import _core

    registry = _registry()
    _name_casts(program.graph)

    def decomposed(table: Any) -> ExportedProgram:
        # The exporter's run over all operators takes a third of an export; most programs have an ONNX form of each.
        if all(_has_form(node, registry.functions) for node in program.graph.nodes):
            return program
        return ExportedProgram.run_decompositions(program, table)

    program.run_decompositions = decomposed  # type: ignore[method-assign,assignment]
    exported = _core.export(
        program,
        registry=registry,
        input_names=list(inputs),
        output_names=list(outputs),
        opset_version=OPSET,
        verbose=False,
    )
    return exported.model_proto


@functools.cache
def _registry() -> Any:
    """The ONNX forms of torch's operators, of which the exporter parses the source: another third of an export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return ONNXRegistry.from_torchlib(opset_version=OPSET)


def _name_casts(graph: fx.Graph) -> None:
    """Write conversions of a dtype as the operator that has an ONNX form.

    Half of all models convert a tensor, and a conversion alone would have the exporter run over all operators.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.to.dtype:
            dtype = node.args[1] if len(node.args) > 1 else node.kwargs["dtype"]
            node.target, node.args, node.kwargs = torch.ops.aten._to_copy.default, node.args[:1], {"dtype": dtype}


def _has_form(node: fx.Node, forms: Any) -> bool:
    if node.op != "call_function":
        return True
    operator: Any = node.target
    if not hasattr(operator, "_schema"):
        return operator in forms
    return operator.name() in forms and not operator._schema.is_mutable
