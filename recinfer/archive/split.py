"""Splits a traced forward at its lookups, into the program before them (ids) and the program behind them (dense)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from recinfer.archive.jagged_aten import decompositions
from recinfer.archive.leaves import Leaf
from recinfer.archive.manifest import MAX_TABLE_BYTES, DenseInput
from recinfer.capture import Captured, Slot
from recinfer.errors import ConfigError

__all__ = ["ComputedFeature", "Facts", "ModuleLookup", "Split", "split"]

_POOLED = torch.ops.recinfer.pooled.default
_ROWS = torch.ops.recinfer.rows.default
_TABLE = torch.ops.recinfer.table.default
_ASSERTIONS = {
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
    torch._check,
}


@dataclass(frozen=True)
class Facts:
    """Facts about the inputs that forward relies on.

    Attributes:
        per_sample: jagged input -> the number of values of every sample.
        as_long_as: jagged input -> the input that has as many values, sample by sample.
        counts: jagged input -> the input whose values it counts: sample by sample its numbers sum to that input's number
            of values.
    """

    per_sample: dict[str, int]
    as_long_as: dict[str, str]
    counts: dict[str, str]


@dataclass(frozen=True)
class ComputedFeature:
    """A feature of a lookup whose ids the ids program computes."""

    name: str
    weighted: bool


@dataclass(frozen=True)
class ModuleLookup:
    """The lookups of one embedding module.

    Attributes:
        leaf: the module.
        features: per table the features that it looks up, which have the names of a request or of the ids program.
    """

    leaf: Leaf
    features: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, leaf: Leaf) -> ModuleLookup:
        """The lookups of a module under the features of its tables."""
        return cls(leaf, tuple(tuple(config.feature_names) for config in leaf.configs))

    @property
    def columns(self) -> list[tuple[int, str]]:
        """(table, feature) of each output, in the archive's order."""
        return [(i, name) for i, names in enumerate(self.features) for name in names]


@dataclass(frozen=True)
class Split:
    """The parts of a traced forward.

    Attributes:
        dense: takes tensors in the order of ``inputs``; returns a dict of float32 outputs.
        inputs: the dense program's inputs.
        ids: takes tensors in the order of ``ids_inputs``; returns values, lengths and weights of each computed feature,
            by name; None where forward passes its ids on.
        ids_inputs: the ids program's inputs.
        computed: the features that the ids program computes.
        lookups: the lookups of each module, in module order.
        facts: facts about the inputs.
    """

    dense: fx.GraphModule
    inputs: tuple[DenseInput, ...]
    ids: fx.GraphModule | None
    ids_inputs: tuple[DenseInput, ...]
    computed: tuple[ComputedFeature, ...]
    lookups: tuple[ModuleLookup, ...]
    facts: Facts


Bag = tuple[fx.Node, fx.Node, fx.Node | None]
"""The values, lengths and weights that a lookup reads of one feature."""


@dataclass(frozen=True)
class _Call:
    """One lookup in the graph: a pooled one of all outputs of a module, or the rows of one output."""

    node: fx.Node
    module: int
    outputs: tuple[int, ...]
    bags: tuple[Bag, ...]


def split(captured: Captured, leaves: Sequence[Leaf]) -> Split:
    """Split ``captured`` at its lookups.

    Args:
        captured: a trace of the model whose embedding modules are ``leaves``, in this order.

    Raises:
        ConfigError: ids that depend on another lookup, or a module that forward never calls.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its classes
        graph_module = captured.program.run_decompositions(decompositions()).module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target in _ASSERTIONS or node.op == "call_module":
            graph.erase_node(node)
    slots = dict(zip([n for n in graph.nodes if n.op == "placeholder"], captured.slots, strict=True))
    calls = list(_calls(graph))
    _check_stages(graph, calls, leaves)
    for index, leaf in enumerate(leaves):
        if index not in captured.called:
            raise ConfigError(f"forward never calls the embedding module {leaf.module_path!r}; remove it or use it")
    names = _FeatureNames(slots, calls, leaves)
    ids, ids_inputs = _ids_program(graph_module, slots, names)
    dense, inputs = _DensePart(graph_module, captured, slots, calls, names).build()
    return Split(dense, inputs, ids, ids_inputs, names.computed(), names.lookups, facts_of(captured))


def facts_of(captured: Captured) -> Facts:
    """The facts that the sizes of jagged inputs state, and the operators that take numbers of one as sizes of another."""
    slots = captured.slots
    per_sample: dict[str, int] = {}
    as_long_as: dict[str, str] = {}
    first: dict[int | str, str] = {}
    for slot in slots:
        if slot.part != "values":
            continue
        size = slot.shape[0]
        times = _times_batch(size)
        if times is not None:
            per_sample[slot.name] = times
        elif size in first:
            as_long_as[slot.name] = first[size]
        else:
            first[size] = slot.name
    return Facts(per_sample, as_long_as, _counts(captured, first))


def _counts(captured: Captured, by_size: dict[int | str, str]) -> dict[str, str]:
    """Jagged input -> the input whose values it counts; ``by_size`` names the input of each number of values."""
    graph, names = captured.program.graph, set(captured.program.graph_signature.user_inputs)
    slots = dict(
        zip([n for n in graph.nodes if n.op == "placeholder" and n.name in names], captured.slots, strict=True)
    )
    found: dict[str, str] = {}
    for node in graph.nodes:
        if node.target is not torch.ops.aten.segment_reduce.default:
            continue
        lengths = node.kwargs.get("lengths")
        while lengths is not None and lengths.op == "call_function" and lengths.target in _SAME_NUMBERS:
            lengths = lengths.args[0]
        slot = slots.get(lengths)
        counted = by_size.get(str(node.args[0].meta["val"].shape[0]))
        if slot is not None and slot.part == "values" and counted not in (None, slot.name):
            found.setdefault(slot.name, counted)
    return found


_SAME_NUMBERS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.detach.default,
}


def _times_batch(size: int | str) -> int | None:
    """The factor k of a size ``k*batch``; None for other sizes."""
    if size == "batch":
        return 1
    if isinstance(size, str):
        factor, _, rest = size.partition("*")
        if rest == "batch" and factor.isdigit():
            return int(factor)
    return None


# ------------------------------------------------------------------------------------------------- lookups


def _calls(graph: fx.Graph) -> Iterator[_Call]:
    for node in graph.nodes:
        if node.target is _POOLED:
            module, values, lengths, weights, _ = node.args
            heavy = weights or [None] * len(values)
            yield _Call(node, module, tuple(range(len(values))), tuple(zip(values, lengths, heavy)))
        elif node.target is _ROWS:
            module, output, values, lengths, _ = node.args
            yield _Call(node, module, (output,), ((values, lengths, None),))


def _check_stages(graph: fx.Graph, calls: Sequence[_Call], leaves: Sequence[Leaf]) -> None:
    by_node = {call.node: call for call in calls}
    source: dict[fx.Node, int] = {}  # the module whose vectors reach a node
    for node in graph.nodes:
        before = [source[n] for n in node.all_input_nodes if n in source]
        if node.target is _TABLE:
            source[node] = node.args[0]
        elif node in by_node:
            if before:
                one, two = leaves[before[0]].module_path, leaves[by_node[node].module].module_path
                raise ConfigError(
                    f"the ids of {two!r} are computed from the vectors of {one!r}; an archive looks up once, so split the "
                    f"model in two and export each"
                )
            source[node] = by_node[node].module
        elif before:
            source[node] = before[0]


class _FeatureNames:
    """Names the features that lookups read: a request's, where ids are passed on, or one of the ids program."""

    def __init__(self, slots: dict[fx.Node, Slot], calls: Sequence[_Call], leaves: Sequence[Leaf]) -> None:
        self._slots = slots
        self.bags: dict[str, Bag] = {}  # computed feature -> its nodes
        self.of: dict[tuple[fx.Node, int], str] = {}  # (call, place in its outputs) -> feature
        self._weighted: dict[str, bool] = {}
        passed = {self._passed_on(bag) for call in calls for bag in call.bags}
        by_nodes: dict[tuple[fx.Node, fx.Node], str] = {}
        for call in calls:
            leaf = leaves[call.module]
            for place, (output, bag) in enumerate(zip(call.outputs, call.bags)):
                name = self._passed_on(bag)
                if name is None:
                    name = by_nodes.get(bag[:2])
                if name is None:
                    name = leaf.features[output]
                    if name in passed or name in self.bags:
                        name = f"{leaf.module_path}.{name}"
                    while name in passed or name in self.bags:
                        name += "'"
                    by_nodes[bag[:2]] = name
                    self.bags[name] = bag
                    self._weighted[name] = leaf.is_weighted
                self.of[call.node, place] = name
        self.lookups = tuple(self._lookup(i, leaf, calls) for i, leaf in enumerate(leaves))

    def _passed_on(self, bag: Bag) -> str | None:
        """The request's feature whose ids a lookup reads as they are; None for computed ids."""
        values, lengths, weights = bag
        v, n = self._slots.get(values), self._slots.get(lengths)
        if v is None or n is None or (v.part, n.part) != ("values", "lengths") or v.path != n.path:
            return None
        if weights is not None and weights.target is not torch.ops.aten.new_ones.default:
            w = self._slots.get(weights)
            if w is None or w.part != "weights" or w.path != v.path:
                return None
        return v.name

    def _lookup(self, index: int, leaf: Leaf, calls: Sequence[_Call]) -> ModuleLookup:
        table_of = [i for i, config in enumerate(leaf.configs) for _ in config.feature_names]
        features: list[list[str]] = [[] for _ in leaf.configs]
        for call in calls:
            if call.module != index:
                continue
            for place, output in enumerate(call.outputs):
                name, mine = self.of[call.node, place], features[table_of[output]]
                if name not in mine:
                    mine.append(name)
        given = {slot.name for slot in self._slots.values() if slot.part == "values"}
        for config, mine in zip(leaf.configs, features):
            if not mine and not given.issuperset(config.feature_names):
                raise ConfigError(
                    f"forward reads no vector of table {config.name!r} in {leaf.module_path!r}; remove the table"
                )
            if not mine:  # forward leaves its vectors unused
                mine += config.feature_names
        return ModuleLookup(leaf, tuple(tuple(mine) for mine in features))

    def computed(self) -> tuple[ComputedFeature, ...]:
        return tuple(ComputedFeature(name, self._weighted[name]) for name in self.bags)


# ------------------------------------------------------------------------------------------------- the two programs


def _ids_program(
    whole: fx.GraphModule, slots: dict[fx.Node, Slot], names: _FeatureNames
) -> tuple[fx.GraphModule | None, tuple[DenseInput, ...]]:
    """The program that computes the ids of lookups, and its inputs."""
    if not names.bags:
        return None, ()
    outputs: dict[str, fx.Node] = {}
    for name, (values, lengths, weights) in names.bags.items():
        outputs[f"computed/{name}/values"], outputs[f"computed/{name}/lengths"] = values, lengths
        if weights is not None:
            outputs[f"computed/{name}/weights"] = weights
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    needed = _ancestors(outputs.values())
    inputs = []
    for node in whole.graph.nodes:
        if node in needed:
            copied[node] = graph.node_copy(node, lambda n: copied[n])
            if node in slots:
                inputs.append(_slot_input(slots[node]))
    graph.output({name: copied[node] for name, node in outputs.items()})
    return fx.GraphModule(whole, graph), tuple(inputs)


def _ancestors(nodes: Any) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _slot_input(slot: Slot) -> DenseInput:
    """The program input that carries a tensor of the request."""
    width = 1
    for size in slot.shape[1:]:
        width *= size if isinstance(size, int) else 1
    name = slot.name if slot.part == "tensor" else f"{slot.name}/{slot.part}"
    kind: Any = "tensor" if slot.part == "tensor" else f"jagged_{slot.part}"
    return DenseInput(name, kind, None, slot.name, width)


class _DensePart:
    """Builds the program behind the lookups."""

    def __init__(
        self,
        whole: fx.GraphModule,
        captured: Captured,
        slots: dict[fx.Node, Slot],
        calls: Sequence[_Call],
        names: _FeatureNames,
    ) -> None:
        self._whole = whole
        self._captured = captured
        self._slots = slots
        self._calls = {call.node: call for call in calls}
        self._names = names
        self._graph = fx.Graph()
        self._copied: dict[fx.Node, fx.Node] = {}
        self._inputs: list[DenseInput] = []
        self._sizes: dict[str, tuple[fx.Node, int]] = {}
        self._batch = _batch_symbols(slots)
        self._lengths: dict[str, fx.Node] = {}  # feature -> the input with its lengths
        self._vectors: dict[tuple[int, int], fx.Node] = {}  # (module, column) -> the input with its vectors

    def build(self) -> tuple[fx.GraphModule, tuple[DenseInput, ...]]:
        self._add_tensors()
        for index, lookup in enumerate(self._names.lookups):
            self._add_lookup(index, lookup)
        self._add_jagged()
        self._add_tables()
        last = next(node for node in self._whole.graph.nodes if node.op == "output")
        for node in self._whole.graph.nodes:
            if node.op != "placeholder" and node is not last:
                self._copy(node)
        outputs = last.args[0]
        self._graph.output({n: self._copied[o] for n, o in zip(self._captured.outputs, outputs, strict=True)})
        self._graph.eliminate_dead_code()
        kept = []
        for node, about in zip([n for n in self._graph.nodes if n.op == "placeholder"], list(self._inputs)):
            if not node.users and about.kind not in ("pooled", "values", "lengths"):
                self._graph.erase_node(node)
            else:
                kept.append(about)
        return fx.GraphModule(self._whole, self._graph), tuple(kept)

    def _input(self, about: DenseInput, value: Any) -> fx.Node:
        """Add an input, whose sizes stand for equal sizes of other tensors."""
        node = self._graph.placeholder(f"input_{len(self._inputs)}")
        node.meta["val"] = value
        self._inputs.append(about)
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                self._sizes.setdefault(self._size_key(size), (node, axis))
        return node

    def _size_key(self, size: Any) -> str:
        text = str(size)
        return "batch" if text in self._batch else text

    def _add_tensors(self) -> None:
        for node, slot in self._slots.items():
            if slot.part == "tensor":
                self._copied[node] = self._input(_slot_input(slot), node.meta["val"])

    def _add_lookup(self, index: int, lookup: ModuleLookup) -> None:
        path, leaf = lookup.leaf.path, lookup.leaf
        calls = [call for call in self._calls.values() if call.module == index]
        if leaf.pooled:
            width = sum(leaf.configs[table].embedding_dim for table, _ in lookup.columns)
            lengths = calls[0].bags[0][1] if calls else self._slot(lookup.columns[0][1], "lengths")
            about = DenseInput(f"pooled_{index}", "pooled", path, None, width)
            self._vectors[index, 0] = self._input(about, _rows_of(lengths, width))
            return
        outputs = leaf.output_names(lookup.features)
        for column, (table, feature) in enumerate(lookup.columns):
            mine = [c for c in calls if self._names.of[c.node, 0] == feature and self._table(leaf, c) == table]
            bag = mine[0].bags[0] if mine else (self._slot(feature, "values"), self._slot(feature, "lengths"))
            dim = leaf.configs[table].embedding_dim
            stem = f"sequence_{index}_{column}"
            about = DenseInput(f"{stem}_values", "values", path, outputs[column], dim)
            self._vectors[index, column] = self._input(about, _rows_of(bag[0], dim))
            about = DenseInput(f"{stem}_lengths", "lengths", path, outputs[column], 1)
            self._lengths.setdefault(feature, self._input(about, bag[1].meta["val"]))

    def _slot(self, name: str, part: str) -> fx.Node:
        return next(node for node, slot in self._slots.items() if (slot.name, slot.part) == (name, part))

    @staticmethod
    def _table(leaf: Leaf, call: _Call) -> int:
        table_of = [i for i, config in enumerate(leaf.configs) for _ in config.feature_names]
        return table_of[call.outputs[0]]

    def _add_jagged(self) -> None:
        """Inputs for jagged tensors that forward reads beside its lookups; unused ones are removed in the end."""
        for node, slot in self._slots.items():
            if slot.part == "tensor":
                continue
            if slot.part == "lengths" and slot.name in self._lengths and slot.name not in self._names.bags:
                self._copied[node] = self._lengths[slot.name]
            else:
                self._copied[node] = self._input(_slot_input(slot), node.meta["val"])

    def _add_tables(self) -> None:
        """Inputs for tables whose rows forward reads as a whole."""
        for node in self._whole.graph.nodes:
            if node.target is not _TABLE:
                continue
            module, index, rows, dim = node.args
            leaf = self._names.lookups[module].leaf
            table = leaf.configs[index].name
            if rows * dim * 4 > MAX_TABLE_BYTES:
                raise ConfigError(
                    f"forward reads all {rows:,} rows of table {table!r} ({rows * dim * 4 / 2**20:,.0f} MiB as float32), more than "
                    f"{MAX_TABLE_BYTES >> 20} MiB; look up the candidates' rows instead"
                )
            about = DenseInput(f"table_{module}_{index}", "table", leaf.path, table, dim)
            known = [n for n, i in zip(self._graph.nodes, self._inputs) if i == about]
            self._copied[node] = known[0] if known else self._input(about, node.meta["val"])

    def _copy(self, node: fx.Node) -> None:
        if node in self._copied:
            return
        if node in self._calls:
            self._copied[node] = self._vectors_of(self._calls[node])
            return
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and (source := self._sizes.get(self._size_key(value))) is not None:
            size = self._graph.call_function(torch.ops.aten.sym_size.int, source)
            size.meta["val"] = source[0].meta["val"].shape[source[1]]
            self._copied[node] = size
            return
        self._copied[node] = self._graph.node_copy(node, lambda n: self._copied[n])

    def _vectors_of(self, call: _Call) -> fx.Node:
        """The vectors of one lookup, out of the input with those of its module."""
        lookup = self._names.lookups[call.module]
        leaf, columns = lookup.leaf, lookup.columns
        table_of = [i for i, config in enumerate(leaf.configs) for _ in config.feature_names]
        wanted = [columns.index((table_of[o], self._names.of[call.node, p])) for p, o in enumerate(call.outputs)]
        if not leaf.pooled:
            return self._vectors[call.module, wanted[0]]
        whole = self._vectors[call.module, 0]
        if wanted == list(range(len(columns))):
            return whole
        edges = [0]
        for table, _ in columns:
            edges.append(edges[-1] + leaf.configs[table].embedding_dim)
        pieces = [
            self._graph.call_function(torch.ops.aten.slice.Tensor, (whole, 1, edges[c], edges[c + 1])) for c in wanted
        ]
        return pieces[0] if len(pieces) == 1 else self._graph.call_function(torch.ops.aten.cat.default, (pieces, 1))


def _rows_of(node: fx.Node, dim: int) -> Any:
    """A float32 tensor [N, dim] in the trace, of the tensor [N] that ``node`` stands for."""
    value = node.meta["val"]
    return value.new_empty((value.shape[0], dim), dtype=torch.float32)


def _batch_symbols(slots: dict[fx.Node, Slot]) -> set[str]:
    """The symbols of sizes that are the number of samples."""
    found = set()
    for node, slot in slots.items():
        size = node.meta["val"].shape[0] if node.meta["val"].dim() else 0
        if not isinstance(size, int) and (slot.part == "lengths" or slot.shape[0] == "batch"):
            found.add(str(size))
    return found
