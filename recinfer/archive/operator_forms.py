"""Replaces single operators of a traced graph by their forms in other operators.

``ExportedProgram.run_decompositions`` gives the same; it runs all operators again, which takes longer than the trace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["replace_operators"]

Form = Callable[..., Any]
"""A function of an operator's arguments; gives NotImplemented for a call that it does not cover."""


def replace_operators(
    graph: fx.Graph, form_of: Callable[[fx.Node], Form | None], table: dict[Any, Form], *, composite: bool
) -> bool:
    """Replace, in place, the operators of ``graph`` that have a form.

    Args:
        graph: of a trace, whose nodes have the values of the trace.
        form_of: gives a node's form; None where the operator stays.
        table: operator -> its form, for the operators in forms.
        composite: whether operators that torch defines by others, such as matmul, stay in forms.

    Returns:
        False, without a change of the graph, if only a run over all operators can replace them: an operator has a graph
        inside (autocast), changes a tensor in place, or its form would give a size another symbol.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    forms = {node: form for node in nodes if (form := form_of(node)) is not None}
    if any(map(_has_effects, nodes)) or not all(map(_is_alone, forms)):
        return False
    for node, form in forms.items():
        body, given = _traced(form, node, table, composite)
        (result,) = (n.args[0] for n in body.nodes if n.op == "output")
        if result is not None:
            with graph.inserting_before(node):
                _put(graph.graph_copy(body, given), node)
    return True


def _has_effects(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        # A tensor that forward makes of numbers is detached in place, which changes no number.
        return target._schema.is_mutable and target is not torch.ops.aten.detach_.default
    return isinstance(target, torch._ops.HigherOrderOperator)


def _is_alone(node: fx.Node) -> bool:
    """Whether a form can take the place of a node: of an operator that gives tensors of known sizes."""
    return isinstance(node.target, torch._ops.OpOverload) and "unbacked_bindings" not in node.meta


def _traced(
    form: Form, node: fx.Node, table: dict[Any, Form], composite: bool
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph of a form for the arguments of ``node``, which returns None if the form does not cover them, and the nodes that
    its inputs stand for."""
    flat, spec = tree_flatten((node.args, node.kwargs))
    given = {place: value for place, value in enumerate(flat) if isinstance(value, fx.Node)}

    def call(*values: Any) -> Any:
        found = dict(zip(given, values))
        args, kwargs = tree_unflatten([found.get(place, value) for place, value in enumerate(flat)], spec)
        result = form(*args, **kwargs)
        return None if result is NotImplemented else result

    values = [source.meta["val"] for source in given.values()]
    tensors = tree_flatten((values, node.meta["val"]))[0]
    mode = next(value.fake_mode for value in tensors if isinstance(value, torch._subclasses.FakeTensor))
    with mode, torch.no_grad():
        traced = make_fx(call, decomposition_table=table, pre_dispatch=composite)(*values)
        if any(
            map(_has_effects, traced.graph.nodes)
        ):  # torch's forms of cosine_similarity and rms_norm change tensors in place
            traced = make_fx(functionalize(traced), pre_dispatch=composite)(*values)
        body = traced.graph
    return body, dict(zip((n for n in body.nodes if n.op == "placeholder"), given.values(), strict=True))


def _put(result: Any, node: fx.Node) -> None:
    """Put ``result``, a node or a list of nodes, in place of ``node``."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        assert user.target is operator.getitem
        _put(result[user.args[1]], user)  # type: ignore[index]
    node.graph.erase_node(node)
