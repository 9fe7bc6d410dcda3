"""Takes a part out of a traced program: the nodes between some tensors and others."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recinfer.archive.manifest import DenseInput

__all__ = ["Program", "free_axes", "subgraph"]


@dataclass(frozen=True)
class Program:
    """A part of a traced forward: takes tensors in the order of ``inputs``, returns a dict of tensors."""

    module: fx.GraphModule
    inputs: tuple[DenseInput, ...]

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

    sizes = {_key(size, batch) for node in given for size in free_axes(node).values()}
    read = _needed(outputs.values(), lambda node: node in given or size_of(node) in sizes)
    wanted = [node for node in given if node in read or given[node].kind in keep]
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    sources: dict[str, tuple[fx.Node, int]] = {}
    for node in [*wanted, *(node for node in given if node not in wanted)]:
        for axis, size in free_axes(node).items():
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
    return Program(fx.GraphModule(whole, graph), tuple(given[node] for node in inputs))


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


def free_axes(node: fx.Node) -> dict[int, Any]:
    """The free axes of the tensor that a node of a trace stands for, with their sizes."""
    return {axis: size for axis, size in enumerate(node.meta["val"].shape) if not isinstance(size, int)}


def _key(size: Any, batch: AbstractSet[str]) -> str:
    return "batch" if str(size) in batch else str(size)
