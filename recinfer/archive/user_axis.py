"""Splits the dense program once more: a user program, which reads the user's inputs alone, and a candidates program.

With one user and many candidates, the user program runs for one row, and its results are repeated where candidates meet
them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Literal

import torch
from torch import fx

from recinfer.archive.manifest import DenseInput
from recinfer.archive.subgraph import Program, subgraph
from recinfer.errors import ConfigError

__all__ = ["split_user"]

_OF_SAMPLES = ("dense", "pooled", "lengths", "jagged_lengths")
"""Kinds of inputs whose first axis is the number of samples."""

Owner = Literal["user", "candidates", "both"]
"""The inputs that a node depends on: the user's alone, some of the candidates', or none but the batch size."""


def split_user(
    dense: Program, owned: AbstractSet[str], columns: Mapping[str, Sequence[bool]]
) -> tuple[Program, Program]:
    """Split the dense program in two.

    Args:
        owned: names of the program inputs that are the user's.
        columns: pooled input with columns of both owners -> whether each column is the user's.

    Returns:
        the program of the user's inputs, which returns tensors with the batch first, and the program of the other inputs
        and of these tensors.

    Raises:
        ConfigError: no tensor with one plain batch axis depends on the user's inputs alone.
    """
    about, outputs = dense.given, dense.outputs
    batch = {str(n.meta["val"].shape[0]) for n, i in about.items() if i.kind in _OF_SAMPLES}
    cut = _user_columns(dense.module.graph.nodes, about, columns)
    owner = _owners(dense.module.graph.nodes, about, owned, batch, cut)
    # Columns of the user alone need no program: the candidates program cuts them out of its own input.
    frontier = [node for node in _frontier(outputs.values(), owner, batch) if node not in cut]
    if not frontier:
        names = ", ".join(sorted(i.feature or i.name for i in dense.inputs if i.name in owned)) or "none"
        raise ConfigError(
            f"user: forward computes nothing of the user's inputs alone ({names}) that has one row per sample; leave user out, or "
            f"name the inputs of the user's part"
        )
    between = {
        node: DenseInput(f"user_{i}", "user", None, None, math.prod(map(int, node.meta["val"].shape[1:])))
        for i, node in enumerate(frontier)
    }
    mine = {node: i for node, i in about.items() if owner[node] != "candidates" or i.name in columns}
    user = subgraph(dense.module, mine, {i.name: node for node, i in between.items()}, batch)
    return user, subgraph(dense.module, {**between, **about}, outputs, batch)


def _user_columns(
    nodes: Iterable[fx.Node], about: Mapping[fx.Node, DenseInput], columns: Mapping[str, Sequence[bool]]
) -> set[fx.Node]:
    """The nodes that cut columns of the user alone out of a pooled input."""
    found = set()
    for node in nodes:
        whole, first, last = _cut(node)
        mine = columns.get(about[whole].name, ()) if whole is not None and whole in about else ()
        if mine[first:last] and all(mine[first:last]):
            found.add(node)
    return found


def _cut(node: fx.Node) -> tuple[fx.Node | None, int, int]:
    """The tensor that a slice of columns or a part of a split is of, its first column, and the column behind its last."""
    args: Any = node.args
    if node.target is torch.ops.aten.slice.Tensor and len(args) == 4 and args[1] in (1, -1):
        whole, _, first, last = args
    elif node.target is operator.getitem and args[0].target is torch.ops.aten.split_with_sizes.default:
        whole, sizes, *axis = args[0].args
        if axis not in ([1], [-1]):
            return None, 0, 0
        first = sum(sizes[: args[1]])
        last = first + sizes[args[1]]
    else:
        return None, 0, 0
    return (whole, first, last) if isinstance(first, int) and isinstance(last, int) else (None, 0, 0)


def _owners(
    nodes: Iterable[fx.Node],
    about: Mapping[fx.Node, DenseInput],
    owned: AbstractSet[str],
    batch: AbstractSet[str],
    of_user: AbstractSet[fx.Node],
) -> dict[fx.Node, Owner]:
    owner: dict[fx.Node, Owner] = {}
    for node in nodes:
        if node in about:
            owner[node] = "user" if about[node].name in owned else "candidates"
            if about[node].kind == "table":
                owner[node] = "both"
            continue
        if node in of_user:
            owner[node] = "user"
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
