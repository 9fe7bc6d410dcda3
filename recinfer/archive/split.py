"""Splits a traced forward at its lookups, into the program before them (ids) and the program behind them (dense)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from recinfer.archive.jagged_aten import decompositions
from recinfer.archive.leaves import Leaf
from recinfer.archive.manifest import MAX_TABLE_BYTES, DenseInput
from recinfer.archive.operator_forms import replace_operators
from recinfer.archive.subgraph import Program, subgraph
from recinfer.capture import Captured, Slot, input_nodes
from recinfer.errors import ConfigError
from recinfer.modules.plain_tables import table_configs

__all__ = ["Facts", "ModuleLookup", "Split", "split"]

_POOLED = torch.ops.recinfer.pooled.default
_ROWS = torch.ops.recinfer.rows.default
_TABLE = torch.ops.recinfer.table.default


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
class ModuleLookup:
    """The lookups of one embedding module.

    Attributes:
        leaf: the module.
        features: per table the features that it looks up, which have the names of a request or of the ids program.
        position_weights: feature -> (state-dict key, positions), for position-weighted modules.
    """

    leaf: Leaf
    features: tuple[tuple[str, ...], ...]
    position_weights: dict[str, tuple[str, int]] | None

    @classmethod
    def of(cls, leaf: Leaf) -> ModuleLookup:
        """The lookups of a module under the features of its tables."""
        features = tuple(tuple(config.feature_names) for config in leaf.configs)
        return cls(leaf, features, leaf.position_weights)

    @property
    def columns(self) -> list[tuple[int, str]]:
        """(table, feature) of each output, in the archive's order."""
        return [(i, name) for i, names in enumerate(self.features) for name in names]


@dataclass(frozen=True)
class Split:
    """The parts of a traced forward.

    Attributes:
        dense: the program behind the lookups; returns forward's outputs as float32 tensors.
        ids: the program before them; returns values, lengths and weights of each computed feature; None where forward
            passes its ids on.
        computed: features that the ids program computes -> whether their ids carry weights.
        lookups: the lookups of each module, in module order.
        facts: facts about the inputs.
    """

    dense: Program
    ids: Program | None
    computed: dict[str, bool]
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
    graph_module = _decomposed(captured.program)
    graph = graph_module.graph
    for node in graph.nodes:
        if node.target in _SQUEEZES:
            _keep_free_axes(node)
    slots = dict(zip([n for n in graph.nodes if n.op == "placeholder"], captured.slots, strict=True))
    calls = list(_calls(graph))
    _check_stages(graph, calls, leaves)
    for index, leaf in enumerate(leaves):
        if index not in captured.called:
            raise ConfigError(f"forward never calls the embedding module {leaf.about.path!r}; remove it or use it")
    batch = _batch_symbols(slots)
    leaves = [_with_one_id_each(leaf, [c for c in calls if c.module == i], batch) for i, leaf in enumerate(leaves)]
    names = _FeatureNames(slots, calls, leaves)
    ids = _ids_program(graph_module, slots, names, batch)
    dense = _dense_program(graph_module, slots, calls, names, captured.outputs, batch)
    return Split(dense, ids, names.computed, names.lookups, facts_of(captured))


def _with_one_id_each(leaf: Leaf, calls: Sequence[_Call], batch: AbstractSet[str]) -> Leaf:
    """Tables of torch.nn.Embedding of which each sample reads one row per call: pooled ones, whose requests need no decoding."""
    about = leaf.about
    single = all(str(values.meta["val"].shape[0]) in batch for call in calls for values, _, _ in call.bags)
    if not about.plain or not calls or not single:
        return leaf
    about = replace(about, pooled=True, tables=tuple(replace(table, pooling="sum") for table in about.tables))
    return replace(leaf, about=about, configs=tuple(table_configs(about)))


_SQUEEZES = {torch.ops.aten.squeeze.default, torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.dims}


def _keep_free_axes(squeeze: fx.Node) -> None:
    """Let ``squeeze`` remove the axes that it removed in the trace, where no size was free: not the batch of one sample."""
    source: Any = squeeze.args[0]
    shape = source.meta["val"].shape
    given: Any = range(len(shape)) if len(squeeze.args) == 1 else squeeze.args[1]
    named = [given] if isinstance(given, int) else given
    axes = [axis for axis in named if shape and not isinstance(shape[axis], torch.SymInt) and shape[axis] == 1]
    if axes:
        squeeze.target, squeeze.args = torch.ops.aten.squeeze.dims, (source, axes)
    else:
        squeeze.target, squeeze.args = torch.ops.aten.clone.default, (source,)


def _decomposed(program: ExportedProgram) -> fx.GraphModule:
    """The graph of ``program`` without operators that have a form in others, wrappers (autocast) and changes in place."""
    forms = decompositions()
    graph_module = program.module(check_guards=False)
    if not replace_operators(graph_module.graph, lambda node: forms.get(node.target), forms, composite=True):  # type: ignore[arg-type]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its classes
            graph_module = program.run_decompositions(forms).module(check_guards=False)
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


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
    slots = dict(zip(input_nodes(captured.program), captured.slots, strict=True))
    found: dict[str, str] = {}
    for node in captured.program.graph.nodes:
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
    source: dict[fx.Node, str] = {}  # the embedding module whose vectors reach a node
    for node in graph.nodes:
        before = [source[n] for n in node.all_input_nodes if n in source]
        call = by_node.get(node)
        if node.target is _TABLE:
            source[node] = _title(leaves[node.args[0]], node.args[1])
        elif call is not None:
            title = _title(leaves[call.module], call.outputs[0])
            if before:
                raise ConfigError(
                    f"the ids of {title!r} are computed from the vectors of {before[0]!r}; an archive looks up once, so split the "
                    f"model in two and export each"
                )
            source[node] = title
        elif before:
            source[node] = before[0]


def _title(leaf: Leaf, output: int) -> str:
    """The path of the module that forward calls for an output."""
    about = leaf.about
    return about.plain[about.outputs[output]] if about.plain else about.path


class _FeatureNames:
    """Names the features that lookups read: a request's, where ids are passed on, or one of the ids program."""

    def __init__(self, slots: dict[fx.Node, Slot], calls: Sequence[_Call], leaves: Sequence[Leaf]) -> None:
        self._slots = slots
        self.bags: dict[str, Bag] = {}  # computed feature -> its nodes
        self.of: dict[tuple[fx.Node, int], str] = {}  # (call, place in its outputs) -> feature
        self.computed: dict[str, bool] = {}  # computed feature -> whether its ids carry weights
        self._processed: dict[
            tuple[int, str], str
        ] = {}  # (position-weighted module, feature) -> the module's name of it
        passed = {self._passed_on(bag) for call in calls for bag in call.bags}
        by_nodes: dict[Any, str] = {}
        for call in calls:
            leaf = leaves[call.module]
            for place, (output, bag) in enumerate(zip(call.outputs, call.bags)):
                own = leaf.about.features[output]
                processed = (call.module, own) if leaf.about.processed else None
                name = self._passed_on(bag)
                if name is not None and self._processed.get((call.module, name), own) != own:
                    name = None  # the same ids under another name, whose positions weigh something else
                if name is None:
                    name = by_nodes.get((bag, processed))
                if name is None:
                    name = own
                    if leaf.about.path and (name in passed or name in self.bags):
                        name = f"{leaf.about.path}.{name}"
                    while name in passed or name in self.bags:
                        name += "'"
                    by_nodes[bag, processed] = name
                    self.bags[name] = bag
                    self.computed[name] = leaf.about.weighted
                if processed is not None:
                    self._processed[call.module, name] = own
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

    def _read(self, call: _Call, leaf: Leaf) -> list[tuple[int, str]]:
        """(table, feature) of each output of a call."""
        tables = [i for i, config in enumerate(leaf.configs) for _ in config.feature_names]
        return [(tables[output], self.of[call.node, place]) for place, output in enumerate(call.outputs)]

    def wanted(self, call: _Call, leaf: Leaf) -> list[int]:
        """The place of each output of a call among the columns of its module's lookup."""
        columns = self.lookups[call.module].columns
        return [columns.index(read) for read in self._read(call, leaf)]

    def _lookup(self, index: int, leaf: Leaf, calls: Sequence[_Call]) -> ModuleLookup:
        read: list[dict[str, None]] = [{} for _ in leaf.configs]
        for call in calls:
            for table, name in self._read(call, leaf) if call.module == index else ():
                read[table][name] = None
        features = [list(names) for names in read]
        given = {slot.name for slot in self._slots.values() if slot.part == "values"}
        for config, mine in zip(leaf.configs, features):
            if not mine and not given.issuperset(config.feature_names):
                where = f" in {leaf.about.path!r}" if leaf.about.path else ""
                raise ConfigError(f"forward reads no vector of table {config.name!r}{where}; remove the table")
            if not mine:  # forward leaves its vectors unused
                mine += config.feature_names
        weights = leaf.position_weights
        if weights is not None:
            named = {name: self._processed.get((index, name), name) for mine in features for name in mine}
            weights = {name: weights[own] for name, own in named.items() if own in weights}
        return ModuleLookup(leaf, tuple(tuple(mine) for mine in features), weights)


# ------------------------------------------------------------------------------------------------- the two programs


def _ids_program(
    whole: fx.GraphModule, slots: dict[fx.Node, Slot], names: _FeatureNames, batch: AbstractSet[str]
) -> Program | None:
    """The program that computes the ids of lookups."""
    outputs: dict[str, fx.Node] = {}
    for name, (values, lengths, weights) in names.bags.items():
        outputs[f"computed/{name}/values"], outputs[f"computed/{name}/lengths"] = values, lengths
        if weights is not None:
            outputs[f"computed/{name}/weights"] = weights
    given = {node: _slot_input(slot) for node, slot in slots.items()}
    return subgraph(whole, given, outputs, batch) if outputs else None


def _slot_input(slot: Slot) -> DenseInput:
    """The program input that carries a tensor of the request."""
    width = 1
    for size in slot.shape[1:]:
        width *= size if isinstance(size, int) else 1
    if slot.part == "tensor":
        return DenseInput(slot.name, "tensor", None, slot.name, width)
    kind: Any = f"jagged_{slot.part}"
    return DenseInput(f"{slot.name}/{slot.part}", kind, None, slot.name, width)


def _dense_program(
    whole: fx.GraphModule,
    slots: dict[fx.Node, Slot],
    calls: Sequence[_Call],
    names: _FeatureNames,
    outputs: Sequence[str],
    batch: AbstractSet[str],
) -> Program:
    """The program behind the lookups, whose vectors are its inputs."""
    graph = whole.graph
    first = next(iter(graph.nodes))
    given = {node: _slot_input(slot) for node, slot in slots.items() if slot.part == "tensor"}

    def placeholder(value: Any) -> fx.Node:
        with graph.inserting_before(first):
            node = graph.placeholder("vectors")
        node.meta["val"] = value
        return node

    def slot_of(name: str, part: str) -> fx.Node:
        return next(node for node, slot in slots.items() if (slot.name, slot.part) == (name, part))

    for index, lookup in enumerate(names.lookups):
        leaf, columns = lookup.leaf, lookup.columns
        mine = [call for call in calls if call.module == index]
        dims = [leaf.configs[table].embedding_dim for table, _ in columns]
        if leaf.about.pooled:
            lengths = mine[0].bags[0][1] if mine else slot_of(columns[0][1], "lengths")
            vectors = placeholder(_rows_of(lengths, sum(dims)))
            given[vectors] = DenseInput(f"pooled_{index}", "pooled", leaf.path, None, sum(dims))
            for call in mine:
                call.node.replace_all_uses_with(_columns(graph, call, vectors, dims, names.wanted(call, leaf)))
            continue
        for column, (name, dim, (_, feature)) in enumerate(zip(leaf.output_names(lookup.features), dims, columns)):
            reads = [call for call in mine if names.wanted(call, leaf) == [column]]
            values, lengths = (
                reads[0].bags[0][:2] if reads else (slot_of(feature, "values"), slot_of(feature, "lengths"))
            )
            vectors = placeholder(_rows_of(values, dim))
            for call in reads:
                call.node.replace_all_uses_with(vectors)
            stem = f"sequence_{index}_{column}"
            given[vectors] = DenseInput(f"{stem}_values", "values", leaf.path, name, dim)
            lengths = lengths if lengths not in given else placeholder(lengths.meta["val"])
            given[lengths] = DenseInput(f"{stem}_lengths", "lengths", leaf.path, name, 1)
    for node, slot in slots.items():
        given.setdefault(node, _slot_input(slot))
    tables: dict[DenseInput, fx.Node] = {}
    for node in graph.nodes:
        if node.target is _TABLE:
            about = _table_input(node, names.lookups)
            node.replace_all_uses_with(tables.setdefault(about, node))
            given[tables[about]] = about
    results: Any = next(node.args[0] for node in graph.nodes if node.op == "output")
    found = dict(zip(outputs, results, strict=True))
    return subgraph(whole, given, found, batch, keep=("pooled", "values", "lengths"))


def _columns(graph: fx.Graph, call: _Call, vectors: fx.Node, dims: Sequence[int], wanted: Sequence[int]) -> fx.Node:
    """The columns ``wanted`` of a module's pooled ``vectors``, which one of its calls gives."""
    if list(wanted) == list(range(len(dims))):
        return vectors
    edges = [sum(dims[:column]) for column in range(len(dims) + 1)]
    with graph.inserting_before(call.node):
        pieces = [
            graph.call_function(torch.ops.aten.slice.Tensor, (vectors, 1, edges[c], edges[c + 1])) for c in wanted
        ]
        found = pieces[0] if len(pieces) == 1 else graph.call_function(torch.ops.aten.cat.default, (pieces, 1))
    for piece, column in zip(pieces, wanted):
        piece.meta["val"] = _rows_of(vectors, dims[column])
    found.meta["val"] = call.node.meta["val"]
    return found


def _table_input(node: fx.Node, lookups: Sequence[ModuleLookup]) -> DenseInput:
    """The program input for a table whose rows forward reads as a whole."""
    arguments: Any = node.args
    module, index, rows, dim = arguments
    leaf = lookups[module].leaf
    table, size = leaf.configs[index].name, rows * dim * 4
    if size > MAX_TABLE_BYTES:
        raise ConfigError(
            f"forward reads all {rows:,} rows of table {table!r} ({size / 2**20:,.0f} MiB as float32), more than "
            f"{MAX_TABLE_BYTES >> 20} MiB; look up the candidates' rows instead"
        )
    return DenseInput(f"table_{module}_{index}", "table", leaf.path, table, dim)


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
