"""Converts a program to ONNX by torch's exporter, without the work that the exporter would repeat in each export.

Only this file uses private names of the exporter and of onnxscript; ``tests/archive/test_onnx_export.py`` lists them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from recinfer.archive.operator_forms import replace_operators

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
    forms = registry.functions

    def decomposed(table: Any) -> ExportedProgram:
        # The exporter's run over all operators takes a third of an export; few operators have no ONNX form.
        def form_of(node: fx.Node) -> Any:
            return None if _has_form(node, forms) else table.get(node.target, node.target)

        hook = program.graph_signature.get_replace_hook()  # an output may be replaced
        with program.graph_module._set_replace_hook(hook):
            replace_operators(program.graph, form_of, table, composite=False)
        return program

    program.run_decompositions = decomposed  # type: ignore[method-assign,assignment]
    with _exact_rules():
        exported = _core.export(
            program,
            registry=registry,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            verbose=False,
        )
    return exported.model_proto


@contextmanager
def _exact_rules() -> Iterator[None]:
    """Without onnxscript's rules for ``x + 0`` and ``x * 1``, which take 1e-8 for 0 and 1.00001 for 1.

    ``clicks / (views + 1e-8)`` would be NaN without views. onnxruntime leaves out what adds exactly 0.
    """
    from onnxscript import rewriter
    from onnxscript.rewriter.rules.common import _no_op

    before, inexact = rewriter._DEFAULT_REWRITE_RULES, {id(rule) for rule in _no_op.rules}
    rewriter._DEFAULT_REWRITE_RULES = tuple(rule for rule in before if id(rule) not in inexact)
    try:
        yield
    finally:
        rewriter._DEFAULT_REWRITE_RULES = before


@functools.cache
def _registry() -> Any:
    """The ONNX forms of torch's operators, of which the exporter parses the source: another third of an export."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    registry = ONNXRegistry.from_torchlib(opset_version=OPSET)
    for target, name in _FORMS.items():
        registry.register_op(target, registry.functions[name][0].onnx_function)
    registry.register_op(torch.ops.aten.masked_select.default, _masked_select)
    return registry


def _masked_select(self: Any, mask: Any) -> Any:
    """The ONNX form of ``masked_select``, of which the exporter has none."""
    from onnxscript import opset18 as op

    values = op.Expand(self, op.Shape(mask))
    wanted = op.Expand(mask, op.Shape(values))
    return op.Compress(values, op.Reshape(wanted, op.Constant(value_ints=[-1])))


_FORMS = {
    torch.ops.aten.to.dtype: "aten::_to_copy",
    torch.ops.aten.item.default: "aten::_local_scalar_dense",
    torch.ops.aten.sort.stable: "aten::sort",  # TopK takes the lower place of two equal values first
}
"""Operators that have the ONNX form of another one."""


def _has_form(node: fx.Node, forms: Any) -> bool:
    operator: Any = node.target
    if node.op != "call_function" or not node.users:  # the exporter leaves out assertions
        return True
    if not hasattr(operator, "_schema"):
        return operator in forms
    if operator is torch.ops.aten.reshape.default and len({node.args[0], *node.all_input_nodes}) > 2:
        return False  # where two sizes are not fixed, the form takes 0 for the size before
    return operator.name() in forms
