"""Takes a part out of a traced program: the nodes between some tensors and others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.utils._pytree import tree_flatten
from torch.utils._sympy.value_ranges import ValueRanges

from recinfer.archive.manifest import DenseInput

__all__ = ["Program", "exported", "subgraph"]


@dataclass(frozen=True)
class Program:
    """A part of a traced forward: takes tensors in the order of ``inputs``, returns a dict of tensors.

    Attributes:
        sizes: symbol -> the sizes that it stands for, as they are after the trace: each run over its operators, as the
            exporter's of a convolution, may narrow those that torch knows.
    """

    module: fx.GraphModule
    inputs: tuple[DenseInput, ...]
    sizes: dict[Any, ValueRanges[Any]]

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """The nodes that the program returns, by name."""
        (result,) = (node.args[0] for node in self.module.graph.nodes if node.op == "output")
        assert isinstance(result, dict)
        return result  # type: ignore[return-value]

    @property
    def given(self) -> dict[fx.Node, DenseInput]:
        """The inputs by their nodes."""
        return dict(zip((n for n in self.module.graph.nodes if n.op == "placeholder"), self.inputs, strict=True))


def exported(part: Program) -> ExportedProgram:
    """``part`` as a program of torch.export, whose free axes may have any size; tensors of the model are its buffers.

    torch.export of it would trace all operators again, and take as long as the first trace.
    """
    graph, module = fx.Graph(), part.module
    copied: dict[fx.Node, fx.Node] = {}
    buffers: dict[str, Tensor] = {}
    taken = []
    for node in module.graph.nodes:
        tensor = functools.reduce(getattr, node.target.split("."), module) if node.op == "get_attr" else None
        if isinstance(tensor, Tensor):
            buffers[node.target] = tensor.detach()
            copied[node] = graph.placeholder(f"buffer_{len(copied)}")
            copied[node].meta["val"] = node.meta["val"]
            taken.append(InputSpec(InputKind.BUFFER, TensorArgument(copied[node].name), node.target, True))
    results: Any = graph.graph_copy(module.graph, copied)
    graph.output(tuple(results.values()))
    for node in graph.nodes:
        if node.target is torch.ops.aten.detach_.default:  # a tensor of numbers; programs change no tensor in place
            node.target = torch.ops.aten.detach.default
    taken += [InputSpec(InputKind.USER_INPUT, TensorArgument(copied[node].name), None) for node in part.given]
    given = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in results.values()]
    specs = tree_flatten((part.inputs, {}))[1], tree_flatten(results)[1]
    calls = [ModuleCallEntry("", ModuleCallSignature([], [], *specs))]
    return ExportedProgram(module, graph, ExportGraphSignature(taken, given), buffers, part.sizes, calls)


def _sizes(graph: fx.Graph) -> dict[Any, ValueRanges[Any]]:
    """Symbol -> the sizes that it stands for. A trace takes 2 for the least, on which no result depends."""
    found: dict[Any, ValueRanges[Any]] = {}
    for value in tree_flatten([node.meta.get("val") for node in graph.nodes])[0]:
        for size in (*value.shape, *value.stride()) if isinstance(value, Tensor) else (value,):
            if isinstance(size, torch.SymInt):
                known = size.node.shape_env.var_to_range
                found |= {symbol: ValueRanges(0, known[symbol].upper) for symbol in size.node.expr.free_symbols}
    return found


def subgraph(
    whole: fx.GraphModule,
    given: Mapping[fx.Node, DenseInput],
    outputs: Mapping[str, fx.Node],
    batch: AbstractSet[str],
    keep: Container[str] = (),
) -> Program:
    """The part of ``whole`` that computes ``outputs`` out of the tensors ``given``, which are its inputs.

    A size is read off an input that has it, best off one that the part reads anyway.

    Args:
        given: nodes of ``whole``; the part takes those that it reads.
        batch: symbols of the number of samples.
        keep: kinds of inputs that the part takes in any case.
    """

    def size_of(node: fx.Node) -> str:
        value = node.meta.get("val")
        return _key(value, batch) if isinstance(value, torch.SymInt) else ""

    sizes = {_key(size, batch) for node in given for size in _free_axes(node).values()}
    read = _needed(outputs.values(), lambda node: node in given or size_of(node) in sizes)
    wanted = [node for node in given if node in read or given[node].kind in keep]
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    sources: dict[str, tuple[fx.Node, int]] = {}
    for node in [*wanted, *(node for node in given if node not in wanted)]:
        for axis, size in _free_axes(node).items():
            sources.setdefault(_key(size, batch), (node, axis))
    wanted += {sources[size][0] for node in read if (size := size_of(node)) in sources}.difference(wanted)
    inputs = [node for node in given if node in wanted]
    for index, node in enumerate(inputs):
        copied[node] = graph.placeholder(f"input_{index}")
        copied[node].meta["val"] = node.meta["val"]
    for node in whole.graph.nodes:
        if node not in read or node in copied:
            continue
        if size_of(node) in sources:
            source, axis = sources[size_of(node)]
            copied[node] = graph.call_function(torch.ops.aten.sym_size.int, (copied[source], axis))
            copied[node].meta["val"] = source.meta["val"].shape[axis]
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output({name: copied[node] for name, node in outputs.items()})
    return Program(fx.GraphModule(whole, graph), tuple(given[node] for node in inputs), _sizes(graph))


def _needed(nodes: Iterable[fx.Node], is_known: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """``nodes`` and all nodes before them, up to the known ones."""
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += () if is_known(node) else node.all_input_nodes
    return found


def _free_axes(node: fx.Node) -> dict[int, Any]:
    """The free axes of the tensor that a node of a trace stands for, with their sizes."""
    return {axis: size for axis, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)}


def _key(size: Any, batch: AbstractSet[str]) -> str:
    return "batch" if str(size) in batch else str(size)
