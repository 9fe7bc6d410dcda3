"""Splits the dense program once more: a user program, which reads the user's inputs alone, and a candidates program.

With one user and many candidates, the user program runs for one row, and its results are repeated where candidates meet
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from recinfer.archive.manifest import DenseInput
from recinfer.errors import ConfigError

__all__ = ["UserSplit", "split_user"]

_SIZE = torch.ops.aten.sym_size.int

Owner = Literal["user", "candidates", "both"]
"""The inputs that a node depends on: the user's alone, some of the candidates', or none but the batch size."""


@dataclass(frozen=True)
class UserSplit:
    """The dense program in two parts.

    Attributes:
        user, user_inputs: the program of the user's inputs, and its inputs; returns a dict of tensors, the batch first.
        candidates, candidate_inputs: the program of the other inputs and of the user program's tensors.
    """

    user: fx.GraphModule
    user_inputs: tuple[DenseInput, ...]
    candidates: fx.GraphModule
    candidate_inputs: tuple[DenseInput, ...]


def split_user(dense: fx.GraphModule, inputs: Sequence[DenseInput], owned: AbstractSet[str]) -> UserSplit:
    """Split the dense program ``dense`` of ``inputs``.

    Args:
        owned: names of the program inputs that are the user's.

    Raises:
        ConfigError: no tensor with one plain batch axis depends on the user's inputs alone.
    """
    nodes = list(dense.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    about = dict(zip(placeholders, inputs, strict=True))
    batch = {str(n.meta["val"].shape[0]) for n, i in about.items() if _has_batch(i)}
    owner = _owners(nodes, about, owned, batch)
    (result,) = (node for node in nodes if node.op == "output")
    outputs: dict[str, fx.Node] = result.args[0]
    frontier = _frontier(outputs.values(), owner, batch)
    if not frontier:
        names = ", ".join(sorted(i.feature or i.name for i in inputs if i.name in owned)) or "none"
        raise ConfigError(
            f"user: forward computes nothing of the user's inputs alone ({names}) that has one row per sample; leave user out, or "
            f"name the inputs of the user's part"
        )
    between = {node: f"user_{i}" for i, node in enumerate(frontier)}
    user, user_inputs = _part(dense, about, batch, {}, {name: node for node, name in between.items()})
    candidates, candidate_inputs = _part(dense, about, batch, between, outputs)
    return UserSplit(user, user_inputs, candidates, candidate_inputs)


def _has_batch(about: DenseInput) -> bool:
    return about.kind in ("dense", "pooled", "lengths", "jagged_lengths")


def _owners(
    nodes: Sequence[fx.Node], about: dict[fx.Node, DenseInput], owned: AbstractSet[str], batch: AbstractSet[str]
) -> dict[fx.Node, Owner]:
    owner: dict[fx.Node, Owner] = {}
    for node in nodes:
        if node in about:
            owner[node] = "user" if about[node].name in owned else "candidates"
            if about[node].kind == "table":
                owner[node] = "both"
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and str(value) in batch:
            owner[node] = "both"  # each part reads the batch size off its own inputs
            continue
        found = {owner[i] for i in node.all_input_nodes} - {"both"}
        owner[node] = "candidates" if "candidates" in found else "user" if found else "both"
    return owner


def _frontier(outputs: Any, owner: dict[fx.Node, Owner], batch: AbstractSet[str]) -> list[fx.Node]:
    """The nodes nearest to the outputs that depend on the user alone and have one plain batch axis, the first."""
    found: dict[fx.Node, None] = {}
    seen: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if owner[node] == "user" and node.op == "call_function" and _is_plain(node.meta.get("val"), batch):
            found[node] = None
        else:
            stack += node.all_input_nodes
    return list(found)


def _is_plain(value: Any, batch: AbstractSet[str]) -> bool:
    if not isinstance(value, torch.Tensor) or not value.dim() or str(value.shape[0]) not in batch:
        return False
    return all(isinstance(size, int) for size in value.shape[1:])


def _part(
    whole: fx.GraphModule,
    about: dict[fx.Node, DenseInput],
    batch: AbstractSet[str],
    given: dict[fx.Node, str],
    outputs: dict[str, fx.Node],
) -> tuple[fx.GraphModule, tuple[DenseInput, ...]]:
    """The part of a program that computes ``outputs``, with the nodes ``given`` as inputs under their names."""
    needed = _needed(outputs.values(), given, batch)
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    inputs: list[DenseInput] = []
    sizes: list[tuple[fx.Node, int]] = []

    def add(node: fx.Node, info: DenseInput) -> None:
        copied[node] = graph.placeholder(f"input_{len(inputs)}")
        inputs.append(info)
        value = node.meta["val"]
        if value.dim() and str(value.shape[0]) in batch:
            sizes.append((copied[node], 0))

    for node, info in about.items():
        if node in needed:
            add(node, info)
    for node, name in given.items():
        add(node, DenseInput(name, "user", None, None, _width(node.meta["val"])))
    for node in whole.graph.nodes:
        if node not in needed or node in copied:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and str(value) in batch:
            copied[node] = graph.call_function(_SIZE, sizes[0])
        else:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
    graph.output({name: copied[node] for name, node in outputs.items()})
    graph.eliminate_dead_code()
    return fx.GraphModule(whole, graph), tuple(inputs)


def _needed(outputs: Any, given: dict[fx.Node, str], batch: AbstractSet[str]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in needed or node in given:
            continue
        needed.add(node)
        value = node.meta.get("val")
        if not (isinstance(value, torch.SymInt) and str(value) in batch):
            stack += node.all_input_nodes
    return needed


def _width(value: torch.Tensor) -> int:
    width = 1
    for size in value.shape[1:]:
        width *= int(size)
    return width
