"""Traces a model's forward into one torch.export program in which each embedding lookup is one operator.

This file needs torch alone. Copy it into the environment that trained the model, if that environment cannot hold
recinfer too::

    from capture import capture

    capture(model, (batch,)).save("model.rqp")     # then: recinfer export --program model.rqp --checkpoint ...

An example batch decides what forward takes: tensors of any dtype and rank, KeyedJaggedTensor, JaggedTensor and
KeyedTensor of TorchRec or recinfer, and dicts, tuples, dataclasses and other objects of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import io
import json
import logging
import os
import random
import re
import sys
import threading
import traceback
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

__all__ = [
    "CaptureError",
    "Captured",
    "EmbeddingModule",
    "Slot",
    "capture",
    "collision_settings",
    "collision_stubs",
    "described",
    "embedding_modules",
    "model_copy",
    "plain_tables",
    "read_arguments",
    "read_capture",
    "torch_defaults",
    "trace",
    "unwrapped",
    "with_tables",
]

CAPTURE_VERSION = 1
_SIZES = (5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_DEPTH = 16


class CaptureError(ValueError):
    """The model or the example batch cannot be traced; the message names the input or the line of forward."""


class _CountNeeded(CaptureError):
    """Forward takes another way by the number of values of a jagged input, at one of ``indices`` among the tensors."""

    def __init__(self, message: str, indices: Sequence[int]) -> None:
        super().__init__(message)
        self.indices = tuple(indices)


Part = Literal["tensor", "values", "lengths", "weights"]


@dataclass(frozen=True)
class Slot:
    """One tensor that forward takes.

    Attributes:
        name: the input's name in requests: the key, attribute or argument, or its path where that is not unique.
        path: the input's place in forward's arguments, as ``batch.sparse_features['base']``.
        part: ``tensor``, or ``values``, ``lengths`` and ``weights`` of a jagged input.
        dtype: as ``float32``.
        shape: a number per fixed axis, text per free one: ``batch``, or an expression of other sizes.
    """

    name: str
    path: str
    part: Part
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Table:
    """One table of an embedding collection; ``pooling`` is ``sum``, ``mean`` or ``none``, ``data_type`` as ``FP32``."""

    name: str
    rows: int
    dim: int
    pooling: str
    data_type: str
    features: tuple[str, ...]


@dataclass(frozen=True)
class EmbeddingModule:
    """One embedding collection of a model.

    Attributes:
        path: the module's path, of the outer module of a feature-processed one.
        pooled: whether the lookup gives one vector per sample.
        weighted: whether ids carry weights.
        features, outputs, dims: the feature, the name and the columns of each output, in order.
        tables: the collection's tables; empty where the caller knows them.
        processed: whether a feature-processed module is around the collection.
        positions: (feature, parameter of its processor, positions) of position weights.
        collisions: table -> the settings of its managed collisions; empty where ids are rows.
        plain: table -> the path of the torch.nn.Embedding or EmbeddingBag that it is, where the "module" is a model without
            collections; empty for collections.
    """

    path: str
    pooled: bool
    weighted: bool
    features: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[int, ...]
    tables: tuple[Table, ...] = ()
    processed: bool = False
    positions: tuple[tuple[str, str, int], ...] = ()
    collisions: dict[str, dict[str, Any]] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)

    @property
    def is_weighted(self) -> bool:
        """Whether the collection's ids carry weights, the request's or those of positions."""
        return self.weighted or self.processed


@dataclass
class Captured:
    """A traced forward.

    Attributes:
        program: takes the tensors of :attr:`slots`, returns float32 tensors in the order of :attr:`outputs`.
        slots: the tensors that forward takes.
        modules: the embedding modules; operators of the program name them by their index.
        outputs: names of the outputs.
        structure: forward's result with each tensor replaced by ``{"output": name}``.
        examples: the tensors of the first example batch, in the order of ``slots``.
        arguments: names of forward's positional arguments.
        called: indices of the modules that forward calls.
        at_most: free axis of a tensor, as shapes of slots name it -> the largest size for which the trace holds.
    """

    program: ExportedProgram
    slots: tuple[Slot, ...]
    modules: tuple[EmbeddingModule, ...]
    outputs: tuple[str, ...]
    structure: Any
    arguments: tuple[str, ...]
    called: tuple[int, ...]
    examples: tuple[Tensor, ...] = field(default=(), repr=False)
    at_most: dict[str, int] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the program, its description and the example's tensors to one file, without tables."""
        examples = io.BytesIO()
        torch.save(list(self.examples), examples)
        about = {"capture": CAPTURE_VERSION, "torch": torch.__version__}
        about |= {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("program", "examples")}
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("capture.json", json.dumps(about, indent=1, default=asdict))
            archive.writestr("program.pt2", saved(self.program))
            archive.writestr("examples.pt", examples.getvalue())


def saved(program: ExportedProgram) -> bytes:
    """``program`` as a file of ``torch.export.save``, without example inputs, source locations and guards."""
    program._example_inputs = None
    program._guards_code = []
    # Torch's run over all operators of the loaded program raises for the sizes of a product, as 3*s0.
    program._range_constraints = {s: sizes for s, sizes in program.range_constraints.items() if str(s).isidentifier()}
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta = {key: node.meta[key] for key in ("val", "tensor_meta") if key in node.meta}
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def read_capture(path: str | os.PathLike[str], check: Callable[[bytes], object] = lambda _: None) -> Captured:
    """Read a file of :meth:`Captured.save`.

    Args:
        path: the file.
        check: raises an error for the bytes of a program that must not be loaded.

    Raises:
        CaptureError: another file, or one of a newer version.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            about = json.loads(archive.read("capture.json"))
            data = archive.read("program.pt2")
            examples = torch.load(io.BytesIO(archive.read("examples.pt")), weights_only=True)
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise CaptureError(f"{path} is not a captured program: {error}") from None
    if about.get("capture") != CAPTURE_VERSION:
        raise CaptureError(
            f"{path} is a captured program of version {about.get('capture')}, expected {CAPTURE_VERSION}; capture the "
            f"model again with this version of capture.py"
        )
    check(data)
    try:
        program = torch.export.load(io.BytesIO(data))
    except Exception as error:  # torch's parsers raise exceptions of many types
        raise CaptureError(
            f"{path}: torch {torch.__version__} cannot read the program, which torch {about.get('torch')} wrote: "
            f"{type(error).__name__}: {str(error)[:300]}"
        ) from None
    modules = [module | {"tables": tuple(_loaded(Table, t) for t in module["tables"])} for module in about["modules"]]
    return Captured(
        program,
        tuple(_loaded(Slot, slot) for slot in about["slots"]),
        tuple(_loaded(EmbeddingModule, module) for module in modules),
        tuple(about["outputs"]),
        about["structure"],
        tuple(about["arguments"]),
        tuple(about["called"]),
        tuple(examples),
        about["at_most"],
    )


def _loaded(kind: type, fields: Mapping[str, Any]) -> Any:
    """A dataclass out of JSON, whose lists were tuples."""

    def frozen(value: Any) -> Any:
        return tuple(map(frozen, value)) if isinstance(value, list) else value

    return kind(**{name: frozen(value) for name, value in fields.items()})


def capture(model: nn.Module, *batches: Any) -> Captured:
    """Trace ``model`` as it is in memory, in eval mode; the model is not changed.

    Args:
        model: its embedding modules are TorchRec's or recinfer's collections; of a model without any, its torch.nn.Embedding and
            EmbeddingBag.
        batches: one or two example batches, each a tuple of forward's arguments, or ``(args, kwargs)``. A second batch of
            another size tells which axes are free.

    Raises:
        CaptureError: the message names the input, or the line of forward.
    """
    model = unwrapped(model)
    found = embedding_modules(model)
    return trace(model, list(found), list(found.values()), batches)


def unwrapped(model: nn.Module) -> nn.Module:
    """``model`` without the outer wrappers of torch.compile, DataParallel and DistributedDataParallel.

    Their ``forward`` takes any arguments, so that a trace would find no names.
    """
    while True:
        if type(model).__name__ == "OptimizedModule":  # torch.compile(model); the class has no public name
            model = getattr(model, "_orig_mod")  # noqa: B009 - not a declared attribute
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        else:
            return model


@contextlib.contextmanager
def torch_defaults() -> Iterator[None]:
    """Run torch as a new process does: float32 on the CPU, without inference mode and autocast.

    An archive does not depend on what the caller's notebook has set.
    """
    dtype = torch.get_default_dtype()
    with torch.inference_mode(False), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def model_copy(model: nn.Module, stubs: Mapping[int, Any]) -> nn.Module:
    """A copy of ``model`` in eval mode, with other modules in place of some: the ``id`` of a module -> the other one."""
    with _CopyingResults():
        return copy.deepcopy(model, dict(stubs)).eval()


class _CopyingResults(TorchFunctionMode):
    """Copies the tensors that a training step or torch.nn.utils.prune left in a module; deepcopy refuses them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


# ------------------------------------------------------------------------------------------------- embedding modules


def embedding_modules(model: nn.Module) -> dict[nn.Module, EmbeddingModule]:
    """The embedding collections of ``model``, and feature-processed ones as a whole, in module order; without any, the model
    itself with its :func:`plain_tables`."""
    found: dict[nn.Module, EmbeddingModule] = {}
    collisions: dict[int, dict[str, dict[str, Any]]] = {}  # by the id of the collection behind them
    stack: list[tuple[str, nn.Module]] = [("", model)]
    seen: set[int] = set()
    while stack:
        path, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        inner = module
        names = {kind.__name__ for kind in type(module).__mro__}
        if "ManagedCollisionCollection" in names:
            continue
        managed = getattr(module, "_managed_collision_collection", None)
        if managed is not None:
            parts = managed._managed_collision_modules
            collisions[id(module._embedding_module)] = {name: collision_settings(part) for name, part in parts.items()}
        if "FeatureProcessedEmbeddingBagCollection" in names:
            inner = getattr(module, "_embedding_bag_collection")  # noqa: B009 - not a declared attribute
        for method, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
            read: Any = getattr(inner, method, None)
            configs = list(read()) if callable(read) else []
            if configs:  # a collection without tables, which forward cannot call, is none
                about = described(path, module, configs, pooled)
                found[module] = replace(about, collisions=collisions.get(id(module), {}))
                break
        else:
            children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
            stack += reversed(children)
    plain = None if found else plain_tables(model)
    return found if plain is None else {model: plain}


def plain_tables(model: nn.Module) -> EmbeddingModule | None:
    """The torch.nn.Embedding and EmbeddingBag of ``model`` as the tables of one module; None without any.

    A trace leaves the tables out that forward does not read by numbers of its inputs, as those of positions.
    """
    every: dict[str, Any] = {path: module for path, module in model.named_modules() if _is_plain_table(module)}
    last = [path.rpartition(".")[2] for path in every]
    plain, tables = {}, []
    for (path, module), short in zip(every.items(), last):
        unique = last.count(short) == 1 and not short.isdigit()
        name = (short if unique else path.replace(".", "_")) or "table"
        while name in plain:
            name += "_"
        plain[name] = path
        kind = {torch.float16: "FP16", torch.bfloat16: "BF16"}.get(module.weight.dtype, "FP32")
        tables.append(Table(name, int(module.num_embeddings), int(module.embedding_dim), "none", kind, (name,)))
    return with_tables(EmbeddingModule("", False, False, (), (), (), plain=plain), tables) if tables else None


def _is_plain_table(module: nn.Module) -> bool:
    """Whether forward of ``module`` is that of torch.nn.Embedding or EmbeddingBag, and gives rows as they are stored."""
    own = type(module).forward in (nn.Embedding.forward, nn.EmbeddingBag.forward)
    hooked = module._forward_hooks or module._forward_pre_hooks
    return own and not hooked and "weight" in module._parameters and getattr(module, "max_norm", None) is None


def with_tables(about: EmbeddingModule, tables: Sequence[Table]) -> EmbeddingModule:
    """A module of :func:`plain_tables` with ``tables``."""
    names, dims = tuple(table.name for table in tables), tuple(table.dim for table in tables)
    plain = {name: about.plain[name] for name in names}
    return replace(about, features=names, outputs=names, dims=dims, tables=tuple(tables), plain=plain)


def _is_weighted(module: nn.Module) -> bool:
    weighted: Any = getattr(module, "is_weighted", None)
    return callable(weighted) and bool(weighted())


def described(path: str, module: nn.Module, configs: Sequence[Any], pooled: bool) -> EmbeddingModule:
    """Describe the embedding module ``module`` at ``path``, whose collection has the tables ``configs``."""
    features = [(f, c) for c in configs for f in c.feature_names]
    count: dict[str, int] = {}
    for feature, _ in features:
        count[feature] = count.get(feature, 0) + 1
    outputs = [f"{f}@{c.name}" if count[f] > 1 else f for f, c in features]
    tables = tuple(
        Table(
            c.name,
            c.num_embeddings,
            c.embedding_dim,
            str(getattr(c.pooling, "name", c.pooling)).lower() if pooled else "none",
            str(getattr(c.data_type, "value", c.data_type)),
            tuple(c.feature_names),
        )
        for c in configs
    )
    processors = getattr(module, "_feature_processors", None)
    positions = []
    for name, parameter in processors.named_parameters() if processors is not None else ():
        by_position = name.startswith("position_weights.") or name.endswith(".position_weight")
        feature = name.removesuffix(".position_weight").removeprefix("_feature_processors.")
        feature = feature.removeprefix("position_weights.")
        if feature in count or not by_position:  # position weights of other names have no effect
            positions.append((feature, name, parameter.numel()))
    return EmbeddingModule(
        path,
        pooled,
        processors is None and _is_weighted(module),
        tuple(f for f, _ in features),
        tuple(outputs),
        tuple(c.embedding_dim for _, c in features),
        tables,
        processors is not None,
        tuple(positions),
    )


# ------------------------------------------------------------------------------------------------- managed collisions

_SORTED = {"zch_size": "_zch_size", "input_hash_size": "_input_hash_size"}
_HASHED = _SORTED | {
    "total_num_buckets": "_buckets",
    "max_probe": "_max_probe",
    "output_segments": "_output_segments",
    "opt_in_prob": "_opt_in_prob",
    "percent_reserved_slots": "_percent_reserved_slots",
    "disable_fallback": "_disable_fallback",
    "no_bag": "_no_bag",
}


def collision_settings(module: nn.Module) -> dict[str, Any]:
    """The class of a managed collision module and the arguments that lookups and the state depend on, as JSON values.

    Raises:
        CaptureError: a module whose lookups depend on more.
    """
    kinds = _mro(module)
    if "MCHManagedCollisionModule" in kinds:
        if getattr(module, "_input_hash_func", None) is not None:
            raise CaptureError(
                "a managed collision module hashes ids by input_hash_func, a Python function that no server runs; hash the ids "
                "before they reach the model, in training and in requests"
            )
        policy = type(getattr(module, "_eviction_policy", None)).__name__
        settings = {k: getattr(module, v) for k, v in _SORTED.items()}
        return {"class": "MCHManagedCollisionModule", **settings, "eviction_policy": policy}
    if "HashZchManagedCollisionModule" in kinds:
        mapper: Any = getattr(module, "input_mapper", module)  # TorchRec has the argument there
        divided = getattr(mapper, "_inference_dispatch_div_train_world_size", getattr(mapper, "_divided", False))
        return {
            "class": "HashZchManagedCollisionModule",
            **{k: getattr(module, v) for k, v in _HASHED.items()},
            "inference_dispatch_div_train_world_size": divided,
        }
    raise CaptureError(
        f"managed collisions of a {type(module).__name__}; expected MCHManagedCollisionModule or HashZchManagedCollisionModule"
    )


class Stub(nn.Module):
    """A module that replaces another one in a copy of its model, and has its attributes; the other is not copied."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_module"] = module

    def __deepcopy__(self, memo: Any) -> Stub:
        return self

    def __getattr__(self, name: str) -> Any:
        # Models read dims and names from their embedding modules, which needs no rows.
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(self.__dict__["_module"], name)


class _RawIds(Stub):
    """A collection with managed collisions whose tables take raw ids: a server maps them by the archive's vocabularies."""

    def __init__(self, module: nn.Module, lookup: nn.Module) -> None:
        super().__init__(module)
        self._embedding_module = lookup

    def forward(self, features: Any, *_: Any, **__: Any) -> Any:
        return self._embedding_module(features), None


def collision_stubs(model: nn.Module, lookups: Mapping[int, nn.Module]) -> dict[int, nn.Module]:
    """``id`` of each collection with managed collisions, sharded or not -> the module for its place in a copy of ``model``.

    Args:
        lookups: ``id`` of each embedding collection -> the module for its place.

    Raises:
        CaptureError: a module that also returns the rows of its ids.
    """
    stubs: dict[int, nn.Module] = {}
    for path, module in model.named_modules():
        if getattr(module, "_managed_collision_collection", None) is None:
            continue
        if getattr(module, "_return_remapped_features", False):
            raise CaptureError(
                f"module {path!r} is a {type(module).__name__} that returns the rows of its ids too, which no server returns; "
                f"build it with return_remapped_features=False"
            )
        stubs[id(module)] = _RawIds(module, lookups[id(module._embedding_module)])
    return stubs


# ------------------------------------------------------------------------------------------------- lookup operators


def _pooled(module: int, values: list[Tensor], lengths: list[Tensor], weights: list[Tensor], dim: int) -> Tensor:
    return lengths[0].new_empty((lengths[0].shape[0], dim), dtype=torch.float32)


def _rows(module: int, output: int, values: Tensor, lengths: Tensor, dim: int) -> Tensor:
    return values.new_empty((values.shape[0], dim), dtype=torch.float32)


def _table(module: int, table: int, rows: int, dim: int) -> Tensor:
    return torch.empty((rows, dim))


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "pooled(int module, Tensor[] values, Tensor[] lengths, Tensor[] weights, int dim) -> Tensor": _pooled,
    "rows(int module, int output, Tensor values, Tensor lengths, int dim) -> Tensor": _rows,
    "table(int module, int table, int rows, int dim) -> Tensor": _table,
}
_LIBRARY = torch.library.Library("recinfer", "FRAGMENT")
for _schema, _shape_of in _OPERATORS.items():
    _name = _schema.partition("(")[0]
    if not hasattr(torch.ops.recinfer, _name):  # a copy of this file may be imported beside recinfer
        _LIBRARY.define(_schema)
        torch.library.register_fake(f"recinfer::{_name}", _shape_of, lib=_LIBRARY)
for _lookup in (torch.ops.recinfer.pooled, torch.ops.recinfer.rows):
    # A lookup stays where forward leaves its vectors unused: requests hold the ids from which forward computes those of the table.
    torch.fx.node.has_side_effect(_lookup.default)


@dataclass(frozen=True)
class _TableRows:
    """A table whose rows forward reads as a whole."""

    module: int
    index: int
    table: Table

    @property
    def weight(self) -> Tensor:
        """All rows, [rows, dim]."""
        rows: Tensor = torch.ops.recinfer.table(self.module, self.index, self.table.rows, self.table.dim)
        return rows


class _Lookup(Stub):
    """An embedding module whose forward is one operator."""

    def __init__(self, index: int, about: EmbeddingModule, module: nn.Module, called: set[int]) -> None:
        super().__init__(module)
        self.__dict__.update(_index=index, _about=about, _called=called)
        tables = {table.name: _TableRows(index, i, table) for i, table in enumerate(about.tables)}
        self.__dict__["embedding_bags" if about.pooled else "embeddings"] = tables

    def forward(self, features: Any) -> Any:
        about = self._about
        self._called.add(self._index)
        title = f"the embedding module {about.path or type(self.__dict__['_module']).__name__!r}"
        if "KeyedJaggedTensor" not in _mro(features):
            raise CaptureError(f"{title} is called with a {type(features).__name__}, expected a KeyedJaggedTensor")
        parts = _parts_of(features)
        missing = [name for name in about.features if name not in parts]
        if missing:
            raise CaptureError(
                f"{title} reads feature {missing[0]!r}; the KeyedJaggedTensor that forward passes to it has "
                f"{', '.join(map(repr, list(parts)[:8])) or 'no feature'}"
            )
        base = _kjt_base(features)
        bags = [parts[name] for name in about.features]
        if about.pooled:
            weights = [w if w is not None else v.new_ones(v.shape[0], dtype=torch.float32) for v, _, w in bags]
            values = torch.ops.recinfer.pooled(
                self._index,
                [v for v, _, _ in bags],
                [n for _, n, _ in bags],
                weights if about.weighted else [],
                sum(about.dims),
            )
            return _sparse_type(base, "KeyedTensor")(list(about.outputs), list(about.dims), values)
        need_indices: Any = getattr(self.__dict__["_module"], "need_indices", None)
        with_ids = callable(need_indices) and bool(need_indices())
        found = {}
        for output, (name, (ids, lengths, _), dim) in enumerate(zip(about.outputs, bags, about.dims)):
            rows = torch.ops.recinfer.rows(self._index, output, ids, lengths, dim)
            found[name] = _jagged(_sparse_type(base, "JaggedTensor"), rows, lengths, ids if with_ids else None)
        return found


@dataclass
class _Run:
    """The findings of a trace. torch.export puts the lists of modules back after it, not other objects.

    Attributes:
        ids: paths of the tensors that are ids of tables.
        called: indices of the modules that forward has called.
        samples: the number of samples of the trace that runs.
    """

    ids: set[str]
    called: set[int] = field(default_factory=set)
    samples: Any = None


class _PlainLookup(Stub):
    """A torch.nn.Embedding or EmbeddingBag whose rows one operator gives.

    Args:
        index: the index of the model among the embedding modules.
        output: the table's place in it.
        run: the trace.
    """

    def __init__(self, index: int, output: int, table: Table, module: nn.Module, run: _Run) -> None:
        super().__init__(module)
        self.__dict__.update(_index=index, _output=output, _table=table, _run=run, _dtype=module.weight.dtype)

    @property
    def weight(self) -> Tensor:
        """All rows, [rows, dim]."""
        self._run.called.add(self._index)
        rows = _TableRows(self._index, self._output, self._table).weight.to(self._dtype)
        return _with_note(rows, "lookup", self.rows)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows of ids [...], [..., dim]."""
        samples, dim = self._run.samples, self._table.dim
        self._run.called.add(self._index)
        path, bag = _note(ids, "path"), _note(ids, "bag")
        if path is not None:
            self._run.ids.add(path)
        values = ids.reshape(-1).long()
        if bag is not None:  # forward passes these ids on
            values, lengths = bag
        elif _always(ids.shape[:1] == (samples,)) or _always(values.shape[0] % samples == 0):
            lengths = values.new_ones(samples) * (values.shape[0] // samples)
        else:  # ids of no sample, as of positions
            lengths = (torch.arange(samples) == 0) * values.shape[0]
        _with_note(ids, "bag", (values, lengths))
        rows = torch.ops.recinfer.rows(self._index, self._output, values, lengths, dim)
        return rows.reshape(*ids.shape, dim).to(self._dtype)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        mode: str | None = getattr(self, "mode", None)
        if mode is None:
            return self.rows(ids)
        if ids.dim() != 2:
            raise CaptureError(
                f"forward gives the EmbeddingBag {self._table.name!r} offsets{_here()}; give it ids [samples, ids], padded with its "
                f"padding_idx, or use an EmbeddingBagCollection"
            )
        vectors, padding = self.rows(ids), self.padding_idx
        if per_sample_weights is not None:
            vectors = vectors * per_sample_weights.unsqueeze(2)
        if padding is None:
            pool: dict[str, Callable[[int], Tensor]] = {"sum": vectors.sum, "mean": vectors.mean, "max": vectors.amax}
            return pool[mode](1)
        kept = (ids != padding).unsqueeze(2)
        count = kept.sum(1)
        if mode == "max":
            return torch.where(count > 0, vectors.masked_fill(~kept, float("-inf")).amax(1), 0.0)
        total = (vectors * kept).sum(1)
        return total / count.clamp(min=1) if mode == "mean" else total


def _always(condition: Any) -> bool:
    """Whether a condition on sizes holds for all that the trace stands for."""
    return torch.fx.experimental.symbolic_shapes.statically_known_true(condition)


# ------------------------------------------------------------------------------------------------- jagged inputs

Bag = tuple[Tensor, Tensor, Tensor | None]
"""Values [N, ...], lengths [B] int64 and weights [N] of one feature."""


def _mro(value: Any) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}


def _kjt_base(value: Any) -> type:
    """The KeyedJaggedTensor class of the user's package."""
    return next(kind for kind in type(value).__mro__ if kind.__name__ == "KeyedJaggedTensor" and kind is not _TracedKjt)


def _sparse_type(base: type, name: str) -> Any:
    """Another sparse type of the package that the KeyedJaggedTensor ``base`` is of."""
    module = importlib.import_module(f"{base.__module__.partition('.')[0]}.sparse.jagged_tensor")
    return getattr(module, name)


def _jagged(kind: Any, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Any:
    """A JaggedTensor of the class ``kind``, made without checks that read numbers."""
    return getattr(kind, "from_parts_unchecked", kind)(values, weights, lengths)


class _TracedKjt:
    """The methods of a KeyedJaggedTensor over the separate tensors of each key, whose sizes the trace knows.

    A class of the user's package is mixed in, so that ``isinstance`` holds.
    """

    _bags: dict[str, Bag]
    _base: type

    def keys(self) -> list[str]:
        return list(self._bags)

    def _current(self) -> dict[str, Bag]:
        """The tensors of each key; forward may have changed the joined ones in place."""
        for index, joined in self.__dict__.get("_cache", {}).items():
            if len(self._bags) > 1 and _note(joined, "bags") is None:
                parts = joined.split([bag[index].shape[0] for bag in self._bags.values()])  # type: ignore[union-attr]
                for (key, bag), part in zip(list(self._bags.items()), parts):
                    self._bags[key] = (*bag[:index], part, *bag[index + 1 :])  # type: ignore[assignment]
                _with_note(joined, "bags", list(self._bags.values()))
        return self._bags

    def _joined(self, index: int) -> Tensor:
        cache = self.__dict__.setdefault("_cache", {})
        if index not in cache:
            parts = [bag[index] for bag in self._bags.values()]
            joined: Any = parts[0] if len(parts) == 1 else torch.cat(parts)  # type: ignore[arg-type]
            cache[index] = _with_note(joined, "bags", list(self._bags.values()))
        return cache[index]  # type: ignore[no-any-return]

    def values(self) -> Tensor:
        return self._joined(0)

    def lengths(self) -> Tensor:
        return self._joined(1)

    def weights_or_none(self) -> Tensor | None:
        return None if any(bag[2] is None for bag in self._bags.values()) else self._joined(2)

    def weights(self) -> Tensor:
        found = self.weights_or_none()
        if found is None:
            raise CaptureError(f"forward reads weights of {self.keys()}, which the example batch does not have")
        return found

    def offsets(self) -> Tensor:
        lengths = self.lengths()
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def stride(self) -> int:
        return next(iter(self._bags.values()))[1].shape[0]

    def stride_per_key(self) -> list[int]:
        return [bag[1].shape[0] for bag in self._bags.values()]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        return [[stride] for stride in self.stride_per_key()]

    def variable_stride_per_key(self) -> bool:
        return False

    def inverse_indices_or_none(self) -> None:
        return None

    def length_per_key(self) -> list[int]:
        return [bag[0].shape[0] for bag in self._bags.values()]

    def offset_per_key(self) -> list[int]:
        offsets = [0]
        for size in self.length_per_key():
            offsets.append(offsets[-1] + size)
        return offsets

    def index_per_key(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self._bags)}

    _key_indices = index_per_key

    def device(self) -> torch.device:
        return self.values().device

    def __getitem__(self, key: str) -> Any:
        if key not in self._bags:
            raise CaptureError(f"forward reads feature {key!r}; the example batch has {self.keys()}")
        return _jagged(_sparse_type(self._base, "JaggedTensor"), *self._current()[key])

    def to_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {key: self[key] for key in self._bags}

    def _some(self, keys: Sequence[str]) -> Any:
        bags = self._current()
        return _traced_kjt(self._base, {key: bags[key] for key in keys})

    def split(self, segments: Sequence[int]) -> list[Any]:
        keys, parts, start = self.keys(), [], 0
        for size in segments:
            parts.append(self._some(keys[start : start + size]))
            start += size
        return parts

    def permute(self, indices: Sequence[int], *_: Any, **__: Any) -> Any:
        keys = self.keys()
        return self._some([keys[i] for i in indices])

    def _same(self, *_: Any, **__: Any) -> Any:
        return self

    lengths_or_none, offsets_or_none = lengths, offsets
    length_per_key_or_none, offset_per_key_or_none = length_per_key, offset_per_key
    to = pin_memory = sync = unsync = flatten_lengths = record_stream = _same


def _traced_kjt(base: type, bags: Mapping[str, Bag]) -> Any:
    kind = _CLASSES.get(base)
    if kind is None:
        make: Any = type(base)
        kind = _CLASSES[base] = make("TracedFeatures", (_TracedKjt, base), {})
    self = kind.__new__(kind)
    self.__dict__["_bags"] = dict(bags)
    self.__dict__["_base"] = base
    return self


_CLASSES: dict[type, Any] = {}


def _parts_of(kjt: Any) -> dict[str, Bag]:
    """The tensors of each key of a KeyedJaggedTensor that forward made or passes on."""
    if isinstance(kjt, _TracedKjt):
        return kjt._current()
    keys, values, lengths, weights = list(kjt.keys()), kjt.values(), kjt.lengths(), kjt.weights_or_none()
    if not keys:
        return {}
    joined = _noted(lengths, "bags", keys)
    if joined is None:
        by_key = lengths.reshape(len(keys), -1)
        counts = [by_key[i].long() for i in range(len(keys))]
    else:
        counts = [bag[1] for bag in joined]
    sizes = _sizes_of(keys, values, lengths, counts)
    joined = _noted(values, "bags", keys)
    each = values.split(sizes) if joined is None else [bag[0] for bag in joined]
    heavy = [None] * len(keys) if weights is None else weights.split(sizes)
    return dict(zip(keys, zip(each, counts, heavy)))


def _sizes_of(keys: Sequence[str], values: Tensor, lengths: Tensor, counts: Sequence[Tensor]) -> list[Any]:
    """The number of values of each key."""
    joined = _noted(lengths, "bags", keys)
    if joined is not None and len(keys) > 1:
        return [bag[0].shape[0] for bag in joined]
    sizes = [values.shape[0]] if len(keys) == 1 else _noted(values, "sizes", keys)
    if sizes is None:
        sizes = torch.stack([count.sum() for count in counts]).tolist()
        for size in sizes:
            torch._check(size >= 0)
    fill = _note(lengths, "fill")
    if fill is not None:
        for size, count in zip(sizes, counts):
            torch._check(size == fill * count.shape[0])
    return sizes


def _noted(tensor: Tensor, note: str, keys: Sequence[str]) -> list[Any] | None:
    """A note of :class:`_Notes` or :meth:`_TracedKjt._joined` that has one entry a key; None without one."""
    found = _note(tensor, note)
    return None if found is None or len(found) != len(keys) else list(found)


def _with_note(tensor: Tensor, name: str, value: Any) -> Any:
    """``tensor`` with a note."""
    notes: dict[str, Any] = tensor.__dict__.setdefault("_recinfer_notes", {})
    notes[name] = value, tensor._version
    return tensor


def _note(tensor: Tensor, name: str) -> Any:
    """A note of ``tensor``; None without one, and, but for sizes, once the tensor has been changed in place."""
    value, version = getattr(tensor, "_recinfer_notes", {}).get(name, (None, None))
    return value if version == tensor._version or name == "sizes" else None


class _Notes(TorchFunctionMode):
    """Notes on tensors, while tracing, the sizes of the tensors that ``torch.cat`` joined, and the number that fills one.

    A trace has no numbers; with these notes a KeyedJaggedTensor that forward makes can be taken apart by its keys.
    """

    def __init__(self) -> None:
        super().__init__()
        self.length_at = ""  # the place of the first len(tensor), which is a plain number

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == _DATA:
            function = Tensor.detach
        if function is Tensor.__len__:
            self.length_at = self.length_at or _here()
        if getattr(function, "__name__", "") == "_pack_padded_sequence":
            raise CaptureError(
                f"forward packs a padded sequence{_here()}, whose sizes depend on numbers; run the layer on the padded "
                f"sequence and take the state of each sample's last place (gather)"
            )
        lookup, ids = _row_read(function, args, kwargs)
        if lookup is not None:
            return lookup(ids)
        result = function(*args, **kwargs)
        if not isinstance(result, Tensor):
            return result
        if function in (torch.cat, torch.concat, torch.hstack):
            parts = args[0] if args else kwargs.get("tensors", ())
            if all(part.dim() == 1 for part in parts):
                _with_note(result, "sizes", [part.shape[0] for part in parts])
            fills = {_note(part, "fill") for part in parts}
            if len(fills) == 1:
                _with_note(result, "fill", fills.pop())
            return result
        if function in _FILLS:
            _with_note(result, "fill", 1)
        elif function is torch.full:
            fill = args[1] if len(args) > 1 else kwargs.get("fill_value")
            _with_note(result, "fill", fill if isinstance(fill, int) else None)
        elif args and isinstance(args[0], Tensor):
            self._keep(function, args[0], result)
        return result

    @staticmethod
    def _keep(function: Any, given: Tensor, result: Tensor) -> None:
        """Notes that hold for the result of a function of ``given`` too."""
        name = getattr(function, "__name__", "")
        sizes = _note(given, "sizes")
        same = result.dim() == given.dim() == 1 and str(result.shape[0]) == str(given.shape[0])
        if sizes is not None and same and name not in _REORDERS:
            _with_note(result, "sizes", sizes)
        fill = _note(given, "fill")
        if fill is not None and name in _SAME_NUMBERS:
            _with_note(result, "fill", fill)
        wide = result.dtype == given.dtype or (result.dtype in (torch.int64, torch.int32) and name != "view")
        if name in _SAME_IDS and wide:
            for note in ("path", "bag"):
                if _note(given, note) is not None:
                    _with_note(result, note, _note(given, note))


def _row_read(function: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The lookup and the ids of a function that reads rows out of the weight of a :class:`_PlainLookup`; None for others."""
    if function is nn.functional.embedding and kwargs.get("max_norm") is None:
        return _note(args[1], "lookup"), args[0]
    if function is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype in (torch.int64, torch.int32):
        return _note(args[0], "lookup"), args[1]
    return None, None


_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
"""The function of ``tensor.data``, which a trace takes for a constant."""
_FILLS = (torch.ones, torch.ones_like, Tensor.new_ones)
_REORDERS = {"flip", "roll", "sort", "argsort", "index_select", "gather", "take", "__getitem__"}
_RESHAPES = {
    "view",
    "reshape",
    "flatten",
    "squeeze",
    "unsqueeze",
    "expand",
    "repeat",
    "repeat_interleave",
    "__getitem__",
}
_SAME_IDS = {"to", "long", "cpu", "clone", "contiguous", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze"}
_SAME_NUMBERS = {"to", "int", "long", "type", "cpu", "clone", "contiguous", "detach", *_RESHAPES}


def _concat(base: type, original: Callable[..., Any]) -> Callable[..., Any]:
    """``KeyedJaggedTensor.concat`` that keeps the sizes of each key."""

    def concat(kjt_list: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(kjt, _TracedKjt) or isinstance(kjt.lengths().shape[0], torch.SymInt) for kjt in kjt_list):
            return original(kjt_list, *args, **kwargs)
        return _traced_kjt(base, {key: bag for kjt in kjt_list for key, bag in _parts_of(kjt).items()})

    return concat


def _from_jt_dict(base: type, jt_dict: Mapping[str, Any]) -> Any:
    """``KeyedJaggedTensor.from_jt_dict`` that keeps the sizes of each key."""
    parts = {key: (jt.values(), jt.lengths(), jt.weights_or_none()) for key, jt in jt_dict.items()}
    return _traced_kjt(
        base, {key: (v, n if n.dtype == torch.int64 else n.long(), w) for key, (v, n, w) in parts.items()}
    )


def _from_offsets(base: Any, keys: list[str], values: Tensor, offsets: Tensor, weights: Any = None, **more: Any) -> Any:
    """``KeyedJaggedTensor.from_offsets_sync`` that does not wait for numbers."""
    return base(keys=keys, values=values, weights=weights, offsets=offsets, **more)


def _regroup(keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """``KeyedTensor.regroup`` as slices and concatenations."""
    columns: dict[str, Tensor] = {}
    for keyed in keyed_tensors:
        parts = keyed.values().split(list(keyed.length_per_key()), dim=keyed.key_dim())
        columns.update(zip(keyed.keys(), parts))
    dim, nothing = keyed_tensors[0].key_dim(), keyed_tensors[0].values()
    return [torch.cat([columns[key] for key in group], dim) if group else nothing.narrow(dim, 0, 0) for group in groups]


def _regroup_as_dict(
    keyed_tensors: Sequence[Any], groups: Sequence[Sequence[str]], keys: Sequence[str]
) -> dict[str, Tensor]:
    return dict(zip(keys, _regroup(keyed_tensors, groups)))


_CDIST_ROWS = 25


def _cdist(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``cdist`` by a mode that does not depend on the number of samples.

    Torch takes the product of matrices where either side has more than 25 rows. Here the side of a fixed size decides.
    """

    def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
        if compute_mode in (None, "use_mm_for_euclid_dist_if_necessary"):
            fixed = [x.shape[-2] for x in (x1, x2) if isinstance(x.shape[-2], int)]
            many = any(rows > _CDIST_ROWS for rows in fixed)
            compute_mode = "use_mm_for_euclid_dist" if many else "donot_use_mm_for_euclid_dist"
        return original(x1, x2, p=p, compute_mode=compute_mode)

    return cdist


def _take_along_dim(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``take_along_dim`` that does not fix the number of samples, where only ``dim`` may differ."""

    def take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
        if dim is None or input.dim() != indices.dim():
            return original(input, indices, dim)
        sizes = [[str(size) for size in tensor.shape] for tensor in (input, indices)]
        for each in sizes:
            each[dim] = ""
        return input.gather(dim, indices) if sizes[0] == sizes[1] else original(input, indices, dim)

    return take_along_dim


def _batch_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``batch_norm`` that does not ask whether a tensor is empty, where its size is a number read from a tensor."""

    def batch_norm(
        input: Tensor,  # torch's own name of the argument
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        read = torch.fx.experimental.symbolic_shapes.free_unbacked_symbols(list(input.shape))
        if training or running_mean is None or running_var is None or not read:
            return original(input, running_mean, running_var, weight, bias, training, momentum, eps)
        factor = torch.rsqrt(running_var + eps)
        factor = factor if weight is None else factor * weight
        shift = -running_mean * factor if bias is None else bias - running_mean * factor
        column = [-1] + [1] * (input.dim() - 2)
        return input * factor.reshape(column) + shift.reshape(column)

    return batch_norm


# ------------------------------------------------------------------------------------------------- example batches


@dataclass
class _Example:
    """One tensor of an example batch.

    Attributes:
        sample: the tensor for the trace, of other samples.
        free: its free axes.
        batched: whether its first axis is the batch.
    """

    name: str
    path: str
    part: Part
    tensor: Tensor
    sample: Tensor = field(init=False)
    free: tuple[int, ...] = (0,)
    batched: bool = False


Builder = Callable[[Sequence[Tensor]], Any]
"""Builds a value of the example batch again, with other tensors."""


class _Reader:
    """Takes the tensors out of an example batch, and builds the batch again around others; see :func:`read_arguments` for
    ``takes``."""

    def __init__(
        self, takes: Callable[[Any, str], bool] = lambda value, path: False, ids: AbstractSet[str] = frozenset()
    ) -> None:
        self.found: list[_Example] = []
        self._takes = takes
        self._ids = ids  # paths of matrices of ids

    def read(self, value: Any, path: str, name: str, depth: int = 0) -> Builder:
        """Collect the tensors of ``value``."""
        if depth > _DEPTH:
            raise CaptureError(f"the example batch is nested deeper than {_DEPTH} levels at {path}")
        if isinstance(value, Tensor):
            return self._matrix(value, path, name) if path in self._ids else self._tensor(value, path, name, "tensor")
        kinds = _mro(value)
        if "KeyedJaggedTensor" in kinds:
            return (lambda _: value) if self._takes(value, path) else self._keyed_jagged(value, path, name)
        if "JaggedTensor" in kinds:
            bag = self._bag(value.values(), value.lengths(), value.weights_or_none(), path, name)
            return lambda tensors: _jagged(type(value), *bag(tensors))
        if "KeyedTensor" in kinds:
            return self._keyed(value, path, name)
        if isinstance(value, nn.Module) or not _holds_tensors(value):
            return lambda _: value
        rebuilt: Callable[[dict[Any, Any]], Any]
        if isinstance(value, Mapping):
            parts = [(k, f"{path}[{k!r}]", v) for k, v in value.items()]
            rebuilt = functools.partial(_same_mapping, value)
        elif isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            parts = [(i, f"{path}[{i}]", v) for i, v in enumerate(value)]
            rebuilt = lambda items: type(value)(items.values())  # noqa: E731
        elif isinstance(value, tuple):
            parts = [(f, f"{path}.{f}", v) for f, v in zip(value._fields, value)]  # type: ignore[attr-defined]
            rebuilt = lambda items: type(value)(*items.values())  # noqa: E731
        else:
            parts = [(k, f"{path}.{k}", v) for k, v in vars(value).items()]
            rebuilt = functools.partial(_copied, value)
        builds = {key: self.read(v, at, _below(name, key), depth + 1) for key, at, v in parts}
        return lambda tensors: rebuilt({key: build(tensors) for key, build in builds.items()})

    def _tensor(self, value: Tensor, path: str, name: str, part: Part) -> Builder:
        if value.is_complex():
            raise CaptureError(f"{path} has complex numbers; give torch.view_as_real of them")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise CaptureError(f"the example batch has NaN or infinity in {path}; give a batch of real numbers")
        index = len(self.found)
        self.found.append(_Example(name, path, part, value.detach().cpu()))
        return lambda tensors: tensors[index]

    def _bag(
        self, values: Tensor, lengths: Tensor, weights: Tensor | None, path: str, name: str
    ) -> Callable[[Sequence[Tensor]], Bag]:
        if not values.is_floating_point():
            values = values.long()
        v = self._tensor(values, path, name, "values")
        n = self._tensor(lengths.long(), path, name, "lengths")
        w = None if weights is None else self._tensor(weights, path, name, "weights")
        return lambda tensors: (v(tensors), n(tensors), None if w is None else w(tensors))

    def _matrix(self, value: Tensor, path: str, name: str) -> Builder:
        """A matrix of ids, of which each sample has as many, as a jagged input."""
        bag = self._bag(value.reshape(-1).long(), torch.full((len(value),), value[0].numel()), None, path, name)

        def build(tensors: Sequence[Tensor]) -> Tensor:
            ids, lengths, _ = bag(tensors)
            matrix = ids.reshape(lengths.shape[0], *value.shape[1:]).to(value.dtype)
            return _with_note(matrix, "bag", (ids, lengths))  # type: ignore[no-any-return]

        return build

    def _keyed_jagged(self, value: Any, path: str, name: str) -> Builder:
        base = _kjt_base(value)
        if value.variable_stride_per_key():
            raise CaptureError(f"{path} has batch sizes that differ between its keys; give one batch size")
        bags = {}
        for key, jagged in value.to_dict().items():
            bags[key] = self._bag(
                jagged.values(), jagged.lengths(), jagged.weights_or_none(), f"{path}[{key!r}]", _below(name, key)
            )
        return lambda tensors: _traced_kjt(base, {key: bag(tensors) for key, bag in bags.items()})

    def _keyed(self, value: Any, path: str, name: str) -> Builder:
        keys, dims = list(value.keys()), list(value.length_per_key())
        columns = [
            self._tensor(part, f"{path}[{key!r}]", _below(name, key), "tensor")
            for key, part in zip(keys, value.values().split(dims, dim=1))
        ]
        kind = type(value)
        return lambda tensors: kind(keys, dims, torch.cat([column(tensors) for column in columns], 1))


def _below(name: str, key: object) -> str:
    """The name of a part of ``name``, until :func:`_shorten`: keys may have dots."""
    return f"{name}\0{key}" if name else str(key)


def _holds_tensors(value: Any) -> bool:
    if value is None or isinstance(value, str | bytes | int | float | complex | torch.dtype | torch.device | type):
        return False
    return isinstance(value, Mapping | list | tuple) or (hasattr(value, "__dict__") and not callable(value))


def _same_mapping(original: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(original) is dict:
        return items
    other = copy.copy(original)
    for key, item in items.items():
        other[key] = item  # type: ignore[index]
    return other


def _copied(original: Any, attributes: Mapping[str, Any]) -> Any:
    other = copy.copy(original)
    for key, item in attributes.items():
        object.__setattr__(other, key, item)
    return other


def _arguments(model: nn.Module, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``batch`` as the arguments of forward: a tuple of them, ``(args, kwargs)``, or the only one."""
    signature = inspect.signature(model.forward)
    ways: list[tuple[tuple[Any, ...], dict[str, Any]]] = [(batch if isinstance(batch, tuple) else (batch,), {})]
    if (
        isinstance(batch, tuple)
        and len(batch) == 2
        and isinstance(batch[0], tuple | list)
        and isinstance(batch[1], dict)
    ):
        ways.append((tuple(batch[0]), batch[1]))
    for args, kwargs in reversed(ways):
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            reason = error
        else:
            return args, kwargs
    raise CaptureError(
        f"the example batch does not fit forward{signature}: {reason}; give a tuple of its arguments, or (args, kwargs)"
    )


def read_arguments(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    takes: Callable[[Any, str], bool] = lambda value, path: False,
) -> Iterator[tuple[Slot, Tensor]]:
    """The tensors in arguments of a forward whose positional arguments are ``names``; their slots have no free axes, and paths
    as names. A KeyedJaggedTensor that ``takes`` takes, given it and its path, is left out.

    Raises:
        CaptureError: too many arguments, or an argument given twice.
    """
    if len(args) > len(names):
        raise CaptureError(f"got {len(args)} positional arguments; forward takes {len(names)}: {', '.join(names)}")
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice:
        raise CaptureError(f"got {twice[0]!r} by position and by name")
    reader = _Reader(takes)
    for name, value in (*zip(names, args), *kwargs.items()):
        reader.read(value, name, name)
    for found in reader.found:
        yield (
            Slot(found.path, found.path, found.part, str(found.tensor.dtype), tuple(found.tensor.shape)),
            found.tensor,
        )


def _read_batch(
    model: nn.Module, batch: Any, ids: AbstractSet[str] = frozenset()
) -> tuple[_Reader, Callable[[Sequence[Tensor]], tuple[Any, Any]]]:
    args, kwargs = _arguments(model, batch)
    names = _positional(model)
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    reader = _Reader(ids=ids)
    positional = [reader.read(value, name, name) for name, value in zip(names, args)]
    keyword = {name: reader.read(value, name, name) for name, value in kwargs.items()}
    _shorten(reader.found)

    def build(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        return [make(tensors) for make in positional], {name: make(tensors) for name, make in keyword.items()}

    return reader, build


def _positional(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _shorten(found: Sequence[_Example]) -> None:
    """Replace each name by its last key, where no other input has that one, or by all of them."""
    by_short: dict[str, set[str]] = {}
    for example in found:
        by_short.setdefault(example.name.rpartition("\0")[2], set()).add(example.path)
    for example in found:
        short = example.name.rpartition("\0")[2]
        unique = len(by_short[short]) == 1 and not short.isdigit()
        example.name = short if unique else example.name.replace("\0", ".")


def _sample(batches: Sequence[Sequence[_Example]]) -> None:
    """Give each tensor of the first batch its sample: of as many samples as no fixed axis has."""
    first = batches[0]
    for other in batches[1:]:
        _check_same(first, other)
    sizes = _batch_sizes(batches)
    fixed = {size for example in first if example.part == "tensor" for size in example.tensor.shape[1:]}
    count = next(size for size in _SIZES if size not in fixed)
    picked = torch.arange(count) % sizes[0]
    lengths = {example.path: example.tensor for example in first if example.part == "lengths"}
    for index, example in enumerate(first):
        if example.part != "tensor":
            example.batched = example.part == "lengths"
            example.sample = _sampled_bag(example, lengths[example.path], picked)
            continue
        given = [batch[index].tensor for batch in batches]
        example.free = _free_axes(given, sizes)
        if len(set(sizes)) == 1 and 0 not in example.free:
            _check_fixed(example, sizes[0], first)
        example.batched = 0 in example.free and all(len(t) == size for t, size in zip(given, sizes))
        if 0 in example.free and not example.batched:
            _check_rows(example.path, given, batches)
        example.sample = (example.tensor.index_select(0, picked) if example.batched else example.tensor).clone()


def _sampled_bag(example: _Example, lengths: Tensor, picked: Tensor) -> Tensor:
    """The part ``example`` of a jagged input for the samples ``picked``; at least two values, since torch takes the sizes
    0 and 1 for fixed ones."""
    taken = lengths[picked]
    if int(taken.sum()) < 2:
        taken = torch.zeros_like(taken)
        taken[0] = 2
        if example.part == "lengths":
            return taken
        return example.tensor.new_zeros((2, *example.tensor.shape[1:]))
    if example.part == "lengths":
        return taken.clone()
    starts = lengths.cumsum(0) - lengths
    within = torch.arange(int(taken.sum())) - torch.repeat_interleave(taken.cumsum(0) - taken, taken)
    return example.tensor[torch.repeat_interleave(starts[picked], taken) + within]


def _check_same(first: Sequence[_Example], other: Sequence[_Example]) -> None:
    mine = [(e.path, e.part, e.tensor.dtype, e.tensor.dim()) for e in first]
    theirs = [(e.path, e.part, e.tensor.dtype, e.tensor.dim()) for e in other]
    if mine != theirs:
        odd = next((a, b) for a, b in zip([*mine, None], [*theirs, None]) if a != b)
        one, two = ("nothing" if p is None else f"{p[0]} ({p[1]}, {p[2]}, {p[3]} axes)" for p in odd)
        raise CaptureError(
            f"the two example batches differ in more than sizes: {one} in the first, {two} in the second"
        )


def _batch_sizes(batches: Sequence[Sequence[_Example]]) -> list[int]:
    """The number of samples of each batch; of tensors alone, the rows that differ between two batches count."""
    first, last = (
        {e.path: len(e.tensor) for e in batch if e.part == "tensor" and e.tensor.dim()}
        for batch in (batches[0], batches[-1])
    )
    same = {path for path, rows in first.items() if last[path] == rows}
    return [_batch_size(batch, same if len(same) < len(first) else set(), len(batches) > 1) for batch in batches]


def _batch_size(batch: Sequence[_Example], fixed: AbstractSet[str], two: bool) -> int:
    sizes = {e.path: len(e.tensor) for e in batch if e.part == "lengths"}
    if not sizes:
        sizes = {e.path: len(e.tensor) for e in batch if e.tensor.dim() and e.path not in fixed}
    if not sizes:
        raise CaptureError("the example batch has no tensor with a batch axis")
    distinct = sorted(set(sizes.values()))
    if len(distinct) > 1 and any(e.part == "lengths" for e in batch):
        one, other = (next(p for p, n in sizes.items() if n == size) for size in (distinct[0], distinct[-1]))
        raise CaptureError(
            f"the example batch has {sizes[one]} samples in {one} and {sizes[other]} in {other}; give one batch size "
            f"(negatives that a sampler added are for training: leave them out, or export the towers; the features of one user "
            f"for many candidates go into requests as context)"
        )
    count = [list(sizes.values()).count(size) for size in distinct]
    size = distinct[count.index(max(count))]
    if count.count(max(count)) > 1:
        each = ", ".join(f"{n} rows in {path}" for path, n in sizes.items())
        todo = "give values and lengths of ids as a KeyedJaggedTensor" if two else _TWO_BATCHES
        raise CaptureError(f"the example batch has {each}, and no ids to tell which is the number of samples; {todo}")
    if size < 2:
        raise CaptureError(
            f"the example batch has {size} sample{'' if size == 1 else 's'}; give at least 2, so that the batch axis differs "
            f"from an axis of size 1"
        )
    return size


_TWO_BATCHES = "give two example batches of different sizes, a list [batch, batch]"


def _check_fixed(example: _Example, samples: int, batch: Sequence[_Example]) -> None:
    """Refuse a tensor whose first axis may depend on the batch in a way that one batch size does not show."""
    rows = len(example.tensor) if example.tensor.dim() else 1
    if rows == 1:
        return
    reason = f"{rows // samples} for each of {samples} samples" if rows % samples == 0 else ""
    todo = ""
    for path, count in _numbers_of_values(batch).items():
        if count == rows:
            reason, todo = f"as many as {path} has values", f", or {_AS_JAGGED.format(path)}"
    if reason:
        raise CaptureError(
            f"{example.path} has {rows} rows, {reason}, or always {rows}: one batch size cannot tell; {_TWO_BATCHES}{todo}"
        )


_AS_JAGGED = "give a number for each value as a JaggedTensor, or as the weights of {}"


def _check_rows(title: str, tensors: Sequence[Tensor], batches: Sequence[Sequence[_Example]]) -> None:
    """Refuse a tensor with a row for each value of a jagged input: requests bring such rows with lengths."""
    counts = [_numbers_of_values(batch) for batch in batches]
    for path in counts[0]:
        if all(len(tensor) == of[path] for tensor, of in zip(tensors, counts)):
            raise CaptureError(f"{title} has as many rows as {path} has values; {_AS_JAGGED.format(path)}")


def _numbers_of_values(batch: Sequence[_Example]) -> dict[str, int]:
    """Path of each jagged input, and of each KeyedJaggedTensor -> its number of values."""
    numbers: dict[str, int] = {}
    for example in batch:
        if example.part == "values":
            for path in dict.fromkeys((example.path, example.path.rpartition("[")[0] or example.path)):
                numbers[path] = numbers.get(path, 0) + len(example.tensor)
    return numbers


def _free_axes(tensors: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, ...]:
    """The axes of a tensor that differ between batches; of one batch, a first axis of the batch's size."""
    axes = {0} if tensors[0].dim() and tensors[0].shape[0] == sizes[0] else set()
    if len(tensors) > 1:
        if axes and sizes[0] != sizes[1] and tensors[1].shape[0] != sizes[1]:
            axes = set()  # a fixed axis that has the size of the first batch by chance
        axes |= {i for i, (a, b) in enumerate(zip(tensors[0].shape, tensors[1].shape)) if a != b}
    return tuple(sorted(axes))


# ------------------------------------------------------------------------------------------------- the trace


def _values_of_weights(examples: Sequence[_Example]) -> dict[int, int]:
    """Index of the weights of each jagged input -> that of its values, which are as many."""
    values = {example.path: index for index, example in enumerate(examples) if example.part == "values"}
    return {index: values[e.path] for index, e in enumerate(examples) if e.part == "weights"}


def _are_whole(tensor: Tensor) -> bool:
    """Whether the numbers may be ids: data loaders have columns of ids as floats too."""
    if tensor.is_floating_point():
        return bool((tensor == tensor.trunc()).all())
    return tensor.dtype in (torch.int64, torch.int32)


class _Whole(nn.Module):
    """A model as a function of tensors, with named float32 outputs."""

    def __init__(
        self,
        model: nn.Module,
        build: Callable[[Sequence[Tensor]], tuple[Any, Any]],
        examples: Sequence[_Example],
        counts: Mapping[int, int],
        alike: Mapping[int, int],
        begin: Callable[[Any], None],
        keep: Callable[[tuple[str, ...], Any], None],
    ) -> None:
        super().__init__()
        self.model = model
        self._batched = [index for index, example in enumerate(examples) if example.batched]
        self._numbers = {  # tensors that may be ids
            index: example.path
            for index, example in enumerate(examples)
            if example.batched and example.free == (0,) and _are_whole(example.tensor)
        }
        self._counts = dict(counts)
        self._alike = {**_values_of_weights(examples), **alike}
        self.__dict__["_build"] = build
        self.__dict__["_begin"] = begin  # functions, since torch.export runs a deep copy of the module
        self.__dict__["_keep"] = keep

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # All inputs have one number of samples, also where forward only slices one by the size of another (labels).
        for one, other in zip(self._batched, self._batched[1:]):
            if tensors[one].shape[0] != tensors[other].shape[0]:
                raise CaptureError("the inputs of the trace differ in their numbers of samples")
        for index, count in self._counts.items():
            if tensors[index].shape[0] != count * tensors[self._batched[0]].shape[0]:
                raise CaptureError(f"the inputs of the trace have not {count} values in each sample")
        for index, other in self._alike.items():
            if tensors[index].shape[0] != tensors[other].shape[0]:
                raise CaptureError("the inputs of the trace differ in their numbers of values")
        self.__dict__["_begin"](tensors[self._batched[0]].shape[0])
        for index, path in self._numbers.items():
            _with_note(tensors[index], "path", path)
        args, kwargs = self.__dict__["_build"](tensors)
        outputs: dict[str, Tensor] = {}
        structure = _structure(self.model(*args, **kwargs), "", outputs)
        self.__dict__["_keep"](tuple(outputs), structure)
        return tuple(_as_float32(output) for output in outputs.values())


_EXACT = 2**24
"""Integers beyond are no float32 each."""


def _as_float32(output: Tensor) -> Tensor:
    """``output`` as float32; an integer that float32 may round, as a raw id, is NaN, since another number would be wrong."""
    number = output.float()
    if output.dtype not in (torch.int64, torch.int32):
        return number
    return torch.where((output >= -_EXACT) & (output <= _EXACT), number, float("nan"))


# How an output of one row for each id becomes one of one row for each sample.
_PADDED = " (.to_padded_dense(most) of a JaggedTensor of vectors is [samples, most, dim])"


def _structure(value: Any, name: str, outputs: dict[str, Tensor]) -> Any:
    """Forward's result as plain data; adds its tensors to ``outputs``."""
    kinds = _mro(value)
    if value is None:
        return None
    if isinstance(value, Tensor):
        name = name or "output"
        if value.is_complex():
            raise CaptureError(f"forward returns complex numbers as {name!r}; return torch.view_as_real of them")
        outputs[name] = value
        return {"output": name}
    if "KeyedTensor" in kinds:
        value = value.to_dict()
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    elif hasattr(value, "__dataclass_fields__"):
        value = {k: getattr(value, k) for k in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {"dict": {str(k): _structure(v, f"{name}.{k}" if name else str(k), outputs) for k, v in value.items()}}
    if isinstance(value, tuple | list):
        items = [_structure(v, f"{name or 'output'}_{i}", outputs) for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    kind = "KeyedJaggedTensor" if "KeyedJaggedTensor" in kinds else type(value).__name__
    raise CaptureError(
        f"forward returns a {kind}{f' as {name!r}' if name else ''}; expected a tensor, or a dict, tuple or "
        f"KeyedTensor of them{_PADDED if 'JaggedTensor' in kinds else ''}"
    )


def trace(
    model: nn.Module,
    modules: Sequence[nn.Module],
    abouts: Sequence[EmbeddingModule],
    batches: Sequence[Any],
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> Captured:
    """Trace ``model``, whose embedding modules are ``modules``, described by ``abouts``.

    Args:
        model: not changed; its tables are neither copied nor read.
        batches: see :func:`capture`.
        prepare: fills the parameters of the copy without tables.

    Raises:
        CaptureError: see :func:`capture`.
    """
    if not 1 <= len(batches) <= 2:
        raise CaptureError(f"got {len(batches)} example batches, expected one or two")
    read = [_read_batch(model, batch) for batch in batches]
    _sample([reader.found for reader, _ in read])
    counts: dict[int, int] = {}
    alike: dict[int, int] = {}
    ids: set[str] = set()  # tensors that the trace finds to be ids of tables, so that it reads them as jagged inputs
    while True:
        try:
            known = len(ids)
            captured = _traced(model, modules, abouts, read[0], prepare, counts, alike, ids)
            kept = [_with_read_tables(about, captured.program) for about in abouts]
            if len(ids) > known or kept != list(abouts):
                abouts = kept
                read = [_read_batch(model, batch, ids) for batch in batches]
                _sample([reader.found for reader, _ in read])
                counts = _counts_of_matrices([reader.found for reader, _ in read], ids)
                alike = {}
                continue
            found = _by_lengths_of_others(captured, [reader.found for reader, _ in read], alike)
            if not found:
                return captured
            alike |= found
        except _CountNeeded as error:
            # A view of several values as one row needs the same number of values in each sample, and a tensor beside the ids of
            # several features as many values as each of them.
            given = [reader.found for reader, _ in read]
            for index in error.indices:
                count = 0 if index in counts else _count_of_each(given, index)
                if count:
                    counts[index] = count
                    break
            else:
                same = {} if alike else _of_same_lengths(given, error.indices)
                if not same:
                    raise CaptureError(str(error)) from error
                alike |= same


def _with_read_tables(about: EmbeddingModule, program: ExportedProgram) -> EmbeddingModule:
    """A module of :func:`plain_tables` with the tables of which forward reads rows by numbers of its inputs.

    Tables that it reads only by numbers that it computes from vectors, such as the nearest of some centres, are none.

    Raises:
        CaptureError: there is none.
    """
    if not about.plain:
        return about
    given = set(input_nodes(program))  # nodes that depend on the numbers of inputs, not on their sizes alone
    vectors: set[torch.fx.Node] = set()  # nodes that depend on vectors
    read: set[Any] = set()
    for node in program.graph.nodes:
        sources = set() if isinstance(node.meta.get("val"), torch.SymInt) else set(_numbers_of(node))
        if node.target is torch.ops.recinfer.rows.default and node.args[2] in given - vectors:
            read.add(node.args[1])
        if sources & given:
            given.add(node)
        if sources & vectors or node.target in (torch.ops.recinfer.rows.default, torch.ops.recinfer.table.default):
            vectors.add(node)
    if not read:
        raise CaptureError(
            "forward reads no row of a torch.nn.Embedding by ids of its inputs, and an archive needs a table"
        )
    return with_tables(about, [table for index, table in enumerate(about.tables) if index in read])


def _numbers_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The inputs of a node of which it reads numbers; functions such as ``zeros_like`` and ``expand_as`` read a size."""
    name = getattr(node.target, "_opname", "")
    if name.endswith("_like") or name.startswith("new_"):
        return []
    return node.all_input_nodes[:1] if name.endswith("_as") else node.all_input_nodes


def _by_lengths_of_others(
    captured: Captured, batches: Sequence[Sequence[_Example]], known: Mapping[int, int]
) -> dict[int, int]:
    """Jagged values whose own lengths forward does not read, so that those of another input cut them: index -> that input's.

    Timestamps of a history are one, beside its ids. The example batches tell which other input has the same lengths.
    """
    nodes = input_nodes(captured.program)
    read = _needed_by_outputs(captured.program)
    sizes = [
        "" if slot.part == "weights" else str(node.meta["val"].shape[:1]) for node, slot in zip(nodes, captured.slots)
    ]
    by_path = {(slot.path, slot.part): index for index, slot in enumerate(captured.slots)}
    cutting = [index for index, slot in enumerate(captured.slots) if slot.part == "lengths" and nodes[index] in read]
    found = {}
    for (path, part), index in by_path.items():
        if part != "values" or index in known or nodes[index] not in read or sizes.count(sizes[index]) > 1:
            continue
        own = by_path[path, "lengths"]
        if nodes[own] in read:
            continue
        for other in cutting:
            if all(torch.equal(batch[own].tensor, batch[other].tensor) for batch in batches):
                found[index] = by_path[captured.slots[other].path, "values"]
                break
    return found


def _of_same_lengths(batches: Sequence[Sequence[_Example]], indices: Sequence[int]) -> dict[int, int]:
    """Index of values, among ``indices``, that have the lengths of earlier values in every batch -> the index of these."""
    lengths = [{e.path: e.tensor for e in batch if e.part == "lengths"} for batch in batches]
    found: dict[int, int] = {}
    for place, index in enumerate(indices):
        for other in indices[:place]:
            paths = batches[0][index].path, batches[0][other].path
            if other not in found and all(torch.equal(*(of[path] for path in paths)) for of in lengths):
                found[index] = other
                break
    return found


def _needed_by_outputs(program: ExportedProgram) -> set[torch.fx.Node]:
    """The nodes that outputs depend on, but by a size: the longest of some lengths, or their number, cuts no values.

    Assertions and what they alone read are not among them, nor the lengths of ids that a collection of rows takes, which gives a
    row of each id.
    """
    needed: set[torch.fx.Node] = set()
    stack = [node for node in program.graph.nodes if node.op == "output"]
    while stack:
        node = stack.pop()
        if node not in needed and not isinstance(node.meta.get("val"), torch.SymInt):
            needed.add(node)
            inputs = node.all_input_nodes
            if node.target is torch.ops.recinfer.rows.default:
                inputs = [source for source in inputs if source is not node.args[3]]
            stack += inputs
    return needed


def _counts_of_matrices(batches: Sequence[Sequence[_Example]], paths: AbstractSet[str]) -> dict[int, int]:
    """Index of the values of each matrix of ids -> the number in each sample."""
    return {
        index: _count_of_each(batches, index)
        for index, example in enumerate(batches[0])
        if example.part == "values" and example.path in paths
    }


def _count_of_each(batches: Sequence[Sequence[_Example]], index: int) -> int:
    """The number of values of each sample of a jagged input; 0 if samples differ."""
    path = batches[0][index].path
    found = {int(n) for batch in batches for e in batch if (e.path, e.part) == (path, "lengths") for n in e.tensor}
    return found.pop() if len(found) == 1 else 0


def _traced(
    model: nn.Module,
    modules: Sequence[nn.Module],
    abouts: Sequence[EmbeddingModule],
    batch: tuple[_Reader, Builder],
    prepare: Callable[[nn.Module], object],
    counts: Mapping[int, int],
    alike: Mapping[int, int],
    ids: set[str],
) -> Captured:
    """Trace ``model`` with ``counts`` values of each sample, index of a jagged input's values -> their number, and as many
    values as another input has, ``alike``: index -> the other's.
    """
    examples, build = batch[0].found, batch[1]
    run = _Run(ids)
    stubs: dict[int, Any] = {}
    for i, (module, about) in enumerate(zip(modules, abouts)):
        for output, table in enumerate(about.tables if about.plain else ()):
            inner = module.get_submodule(about.plain[table.name])
            stubs[id(inner)] = _PlainLookup(i, output, table, inner, run)
        if not about.plain:
            stubs[id(module)] = _Lookup(i, about, module, run.called)
    stubs |= collision_stubs(model, stubs)
    body = model_copy(model, stubs)
    prepare(body)
    results: list[tuple[tuple[str, ...], Any]] = []
    begin = lambda samples: setattr(run, "samples", samples)  # noqa: E731
    whole = _Whole(body, build, examples, counts, alike, begin, lambda *result: results.append(result)).eval()
    axes = tuple({axis: Dim.AUTO for axis in example.free} for example in examples)
    notes = _Notes()
    with torch_defaults(), _patched(), torch.no_grad(), notes:
        try:
            program = _exported(whole, tuple(example.sample for example in examples), axes)
            if notes.length_at and _fixed(program, examples):
                with _traced_numbers(whole.model):
                    program = _exported(whole, tuple(example.sample for example in examples), axes)
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(explain(error)) from error
    outputs, structure = results[-1]
    if not outputs:
        raise CaptureError("forward returns no tensor; expected at least one output")
    slots = _slots(program, examples, notes.length_at)
    _check_guards(program, slots)
    _check_operators(program)
    _split_joined_lengths(program)
    # A loss that is no output may divide by the number of samples, which no archive may contain.
    program.graph_module.graph.eliminate_dead_code()
    _state_sizes(program)
    return Captured(
        program=program,
        slots=slots,
        modules=tuple(abouts),
        outputs=outputs,
        structure=structure,
        arguments=tuple(_positional(model)),
        called=tuple(sorted(run.called)),
        examples=tuple(example.tensor for example in examples),
        at_most=_limits(program, slots),
    )


def _split_joined_lengths(program: ExportedProgram) -> None:
    """Replace a row of ``cat(parts).view(len(parts), -1)`` by its part, where all parts have as many numbers.

    The lengths of a KeyedJaggedTensor that forward makes of several are joined and cut so; else each row, as the number of
    candidates, would seem to depend on the lengths of all features.
    """
    aten = torch.ops.aten
    for node in program.graph.find_nodes(op="call_function", target=aten.select.int):
        given: tuple[Any, ...] = node.args
        rows, axis, index = given
        if axis != 0 or rows.target not in (aten.view.default, aten.reshape.default):
            continue
        parts = _joined(rows.args[0])
        shapes = {str(part.meta["val"].shape) for part in parts}
        kinds = {part.meta["val"].dtype for part in parts}
        if (
            len(parts) == rows.meta["val"].shape[0]
            and len(shapes) == len(kinds) == 1
            and parts[0].meta["val"].dim() == 1
        ):
            node.replace_all_uses_with(parts[index])


def _joined(node: Any) -> list[torch.fx.Node]:
    """The tensors that ``node`` joins along its first axis, those of joined ones in their place."""
    if node.target is not torch.ops.aten.cat.default or (len(node.args) > 1 and node.args[1] != 0):
        return [node]
    return [part for each in node.args[0] for part in _joined(each)]


def _state_sizes(program: ExportedProgram) -> None:
    """Replace -1 in the shape of a view by its size: torch cannot tell it for an empty tensor."""
    graph = program.graph
    known: dict[str, tuple[torch.fx.Node, int]] = {}
    for node in input_nodes(program):
        for axis, size in enumerate(node.meta["val"].shape):
            known.setdefault(str(size), (node, axis))
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (
            torch.ops.aten.view.default,
            torch.ops.aten.reshape.default,
        ):
            continue
        given = list(node.args[1])
        if -1 not in given:
            continue
        size = node.meta["val"].shape[given.index(-1)]
        if not isinstance(size, int):
            if str(size) not in known:
                continue
            with graph.inserting_before(node):
                read = graph.call_function(torch.ops.aten.sym_size.int, known[str(size)])
            read.meta["val"], size = size, read
        node.args = (node.args[0], [size if each == -1 else each for each in given])


def _exported(whole: _Whole, tensors: tuple[Tensor, ...], axes: Any) -> ExportedProgram:
    def export() -> ExportedProgram:
        # prefer_deferred_runtime_asserts: no; an inequality of sizes has to show as a guard.
        return torch.export.export(whole, tensors, dynamic_shapes=(axes,), strict=False)

    try:
        return export()
    except torch.fx.experimental.symbolic_shapes.GuardOnDataDependentSymNode as error:
        lines = [frame.line or "" for frame in traceback.extract_tb(error.__traceback__)]
        if not any(re.search(r"\bint\(", line) for line in lines):
            raise
    with _traced_numbers(whole.model):
        return export()


@contextlib.contextmanager
def _traced_numbers(model: nn.Module) -> Iterator[None]:
    """Lets ``int(x)`` and ``len(x)`` in the packages of the model's classes return a traced size, which Python's cannot."""
    packages = {kind.__module__.partition(".")[0] for module in model.modules() for kind in type(module).__mro__}
    packages -= {"torch", "torchrec", "recinfer", "fbgemm_gpu", "builtins", __name__}
    numbers = {"int": _Int, "len": _len}
    places = [
        (vars(file), name)
        for module, file in list(sys.modules.items())
        if module.partition(".")[0] in packages and module != __name__
        for name in numbers.keys() - vars(file).keys()
    ]
    for names, name in places:
        names[name] = numbers[name]
    try:
        yield
    finally:
        for names, name in places:
            del names[name]


def _len(value: Any) -> Any:
    """``len`` for the model's own files while a trace runs."""
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)


class _IntType(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, int)

    def __call__(cls, *value: Any, **base: Any) -> Any:
        if value and isinstance(value[0], Tensor) and not value[0].is_floating_point():
            value = (value[0].item(), *value[1:])
        return value[0] if value and isinstance(value[0], torch.SymInt) else int(*value, **base)


class _Int(int, metaclass=_IntType):
    """``int`` for the model's own files while a trace runs; other threads that use it there get Python's own numbers."""


def _is_number(size: Any) -> bool:
    """Whether the size of an axis is a number; a symbol that a trace found equal to a number is one."""
    return str(size).isdigit()


def _fixed(program: ExportedProgram, examples: Sequence[_Example]) -> bool:
    """Whether forward fixes a free axis."""
    shapes = [node.meta["val"].shape for node in input_nodes(program)]
    return any(_is_number(shape[axis]) for example, shape in zip(examples, shapes) for axis in example.free)


def _slots(program: ExportedProgram, examples: Sequence[_Example], length_at: str) -> tuple[Slot, ...]:
    """Describe the inputs of ``program``; refuses a free axis that forward fixes, maybe by a len() ``length_at``."""
    nodes = input_nodes(program)
    # An axis that forward never compares with others has a symbol of its own.
    batch = {str(node.meta["val"].shape[0]) for node, example in zip(nodes, examples) if example.batched}
    slots = []
    for example, node in zip(examples, nodes, strict=True):
        shape: list[int | str] = []
        for axis, size in enumerate(node.meta["val"].shape):
            text = str(size)
            fixed = _is_number(size)
            if axis in example.free and fixed:
                what = {"values": "number of values", "lengths": "number of samples", "weights": "number of weights"}
                raise CaptureError(
                    f"forward works only where the {what.get(example.part, f'size of axis {axis}')} of {example.path} is "
                    f"{example.sample.shape[axis]}{length_at}; take sizes from the tensors, as x.shape[0], not from numbers, len(x) "
                    f"or int()"
                )
            shape.append(int(size) if fixed else re.sub(r"\w+", lambda m: "batch" if m[0] in batch else m[0], text))
        slots.append(
            Slot(
                example.name, example.path, example.part, str(example.tensor.dtype).removeprefix("torch."), tuple(shape)
            )
        )
    return tuple(slots)


def input_nodes(program: ExportedProgram) -> list[torch.fx.Node]:
    names = set(program.graph_signature.user_inputs)
    return [node for node in program.graph.nodes if node.op == "placeholder" and node.name in names]


_GUARD_ROUNDS = 12


def _check_guards(program: ExportedProgram, slots: Sequence[Slot]) -> None:
    """Refuse a trace that holds only for some sizes: a guard of it that other sizes break."""
    guards = _guards(program)
    symbols = sorted({name for guard in guards for name in guard.symbols})
    ranges = {str(symbol): sizes for symbol, sizes in program.range_constraints.items()}
    for guard in guards:
        if not all(guard.holds(sizes) for sizes in _trial_sizes(symbols, ranges, guard.is_users)):
            raise _needed(guard, program, slots)


def _needed(guard: _Guard, program: ExportedProgram, slots: Sequence[Slot]) -> CaptureError:
    """The error that says on which sizes ``guard`` depends."""
    of_values: list[int] = []
    titles: dict[str, str] = {}
    for index, (node, slot) in enumerate(zip(input_nodes(program), slots, strict=True)):
        for axis, size in enumerate(node.meta["val"].shape):
            if str(size) in guard.symbols:
                titles.setdefault(str(size), f"size {axis} of {_title(slot)}")
                of_values += [index] if slot.part == "values" else []
    sizes = re.sub(r"\w+", lambda m: titles.get(m[0], m[0]), guard.text)
    view = next((node for node in program.graph.nodes if _is_divided(node, guard)), None) if of_values else None
    if view is not None:
        title = _title(slots[of_values[0]])
        return _CountNeeded(
            f"forward splits {title}{_place_of(view)} by the number of samples; {_SAME_NUMBER}", of_values
        )
    return _branch(guard.place, sizes[:300], of_values)


def _is_divided(node: torch.fx.Node, guard: _Guard) -> bool:
    """Whether ``node`` is a view with a size that is the quotient of the sizes of which ``guard`` takes the remainder."""
    views = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
    shape = str(node.meta["val"].shape) if node.target in views else ""
    return "//" in shape and "Mod(" in guard.text and all(symbol in shape for symbol in guard.symbols)


def _branch(place: str, condition: str, of_values: Sequence[int], other: str = "") -> CaptureError:
    """The error for a trace that holds under ``condition`` alone, which is on the numbers of the values ``of_values``, if any."""
    text = (
        f"forward takes another way{place} unless {condition}; write it without a branch on a size (torch.where){other}"
    )
    return _CountNeeded(text, of_values) if of_values else CaptureError(text)


@dataclass(frozen=True)
class _Guard:
    """A condition on sizes under which a trace holds.

    Attributes:
        condition: a sympy expression of the symbols of sizes.
        is_users: whether a line of the user's code asked it, not one of torch's.
        place: that line, as text; empty if it is not known.
    """

    condition: Any
    is_users: bool
    place: str

    @property
    def symbols(self) -> set[str]:
        """Names of the sizes in it."""
        return {str(symbol) for symbol in self.condition.free_symbols}

    @property
    def text(self) -> str:
        """The condition as Python."""
        if hasattr(self.condition, "rel_op"):
            return f"{self.condition.lhs} {self.condition.rel_op} {self.condition.rhs}"
        return str(self.condition)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        return bool(self.condition.subs({symbol: sizes[str(symbol)] for symbol in self.condition.free_symbols}))


def _guards(program: ExportedProgram) -> list[_Guard]:
    """The conditions on sizes that the trace of ``program`` met."""
    sizes = [size for node in input_nodes(program) for size in node.meta["val"].shape]
    traced: Any = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    found = []
    for guard in traced.guards if traced is not None else ():
        frame: Any = getattr(getattr(guard, "sloc", None), "framework_loc", None)
        known = isinstance(frame, traceback.FrameSummary) and _is_users(frame.filename)
        found.append(_Guard(guard.expr.xreplace(traced.replacements), known, _place([frame]) if known else ""))
    return found


def _trial_sizes(symbols: Sequence[str], ranges: Mapping[str, Any], equal: bool) -> Iterator[dict[str, int]]:
    """Large sizes of the symbols, which differ, and with ``equal`` also equal ones.

    Torch compares sizes with 0 and 1, and with each other, to pick strides; its results hold for these too, which the trials
    of programs show. A line of forward that compares sizes for equality does not.
    """
    numbers = random.Random(0)
    for trial in range(_GUARD_ROUNDS):
        same = int(2 ** numbers.uniform(6, 16))
        sizes = {}
        for symbol in symbols:
            size = same if equal and trial >= _GUARD_ROUNDS // 2 else int(2 ** numbers.uniform(6, 16))
            upper = str(getattr(ranges.get(symbol), "upper", ""))
            sizes[symbol] = max(2, int(upper) - size % 3) if upper.isdigit() and size > int(upper) else size
        yield sizes


_NO_LIMIT = 2**31 - 1
"""No request has so many values. Torch's limits from here on are those of its integers: ``torch._check_is_size``, or the sum of
two sizes, one of which is read from a tensor."""


def _limits(program: ExportedProgram, slots: Sequence[Slot]) -> dict[str, int]:
    """The largest sizes of free axes, which forward has compared with numbers: a matrix of positions has a last row.

    Raises:
        CaptureError: the trace holds only for some numbers of samples or values, or from some size on.
    """
    nodes = input_nodes(program)
    # Torch also lists products such as 2*s0, whose limits follow from those of the symbol.
    ranges = {str(symbol): sizes for symbol, sizes in program.range_constraints.items() if str(symbol).isidentifier()}
    at_most: dict[str, int] = {}
    for index, (node, slot) in enumerate(zip(nodes, slots, strict=True)):
        for axis, size in enumerate(node.meta["val"].shape):
            sizes = ranges.get(str(size))
            limited = sizes is not None and str(sizes.upper).isdigit() and int(sizes.upper) < _NO_LIMIT
            if sizes is None or (sizes.lower <= 2 and not limited):
                continue
            if sizes.lower <= 2 and axis and slot.part == "tensor" and slot.shape[axis] != "batch":
                at_most[str(slot.shape[axis])] = int(sizes.upper)
                continue
            limits = f"at least {sizes.lower}" if sizes.lower > 2 else f"at most {sizes.upper}"
            what = "the number of samples" if slot.shape[axis] == "batch" else f"size {axis} of {_title(slot)}"
            place = next(
                (g.place for g in _guards(program) if g.place and size.node.expr in g.condition.free_symbols), ""
            )
            of_values = [index] if slot.part == "values" and not axis else []
            raise _branch(place, f"{what} is {limits}", of_values, ", or give the axis a fixed size")
    return at_most


def _check_operators(program: ExportedProgram) -> None:
    """Refuse random numbers, and operators that no archive may contain."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        place = _place_of(node)
        if node.users and _is_random(node):
            raise CaptureError(
                f"forward draws random numbers by {node.target}{place}; an archive gives the same answer each time: draw "
                f"only where self.training holds (nn.Dropout does), draw once and keep the numbers (register_buffer), or take "
                f"them as an input"
            )
        if node.target.namespace not in ("aten", "prims", "fbgemm", "recinfer"):
            raise CaptureError(
                f"forward calls the operator {node.target}{place}, which an archive may not contain; write it with torch's own "
                f"operators"
            )


def _is_random(node: torch.fx.Node) -> bool:
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = target._schema.arguments
    given = {argument.name: argument.default_value for argument in arguments}
    given |= dict(zip(given, node.args)) | node.kwargs
    # Layers of a model in eval mode call such operators too, with their randomness off.
    switches = [given[name] for name in ("train", "training", "dropout_p") if name in given]
    return any(switches) if switches else True


def _place_of(node: torch.fx.Node) -> str:
    """The line of forward that a node of a trace comes from, as text; empty if it is not known."""
    found = re.findall(r'File "([^"]+)", line (\d+), in (\w+)\n\s*(.*)', node.meta.get("stack_trace") or "")
    for file, line, name, text in reversed(found):
        if _is_users(file):
            return _place_text(file, line, name, text)
    return ""


def _title(slot: Slot) -> str:
    return slot.path if slot.part == "tensor" else f"the {slot.part} of {slot.path}"


_TRACE = threading.Lock()
"""Held while functions are replaced: of two traces, the second would put back those of the first."""


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Replaces functions that a trace cannot follow, of all packages that are loaded; one trace at a time does."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, inspect.getattr_static(owner, name))
            setattr(owner, name, value)

        undo.enter_context(_TRACE)
        for package in ("torchrec", "recinfer"):
            module = sys.modules.get(f"{package}.sparse.jagged_tensor")
            if module is not None:
                kjt = module.KeyedJaggedTensor
                put(kjt, "concat", staticmethod(_concat(kjt, kjt.concat)))
                put(kjt, "from_jt_dict", staticmethod(functools.partial(_from_jt_dict, kjt)))
                put(kjt, "from_offsets_sync", staticmethod(functools.partial(_from_offsets, kjt)))
                put(module.KeyedTensor, "regroup", staticmethod(_regroup))
                if hasattr(module.KeyedTensor, "regroup_as_dict"):
                    put(module.KeyedTensor, "regroup_as_dict", staticmethod(_regroup_as_dict))
        regroup = sys.modules.get("torchrec.modules.regroup")
        if regroup is not None:
            forward = lambda self, tensors: _regroup_as_dict(tensors, self._groups, self._keys)  # noqa: E731
            put(regroup.KTRegroupAsDict, "forward", forward)
        for owner in (torch, torch.functional):
            put(owner, "cdist", _cdist(owner.cdist))
        for holder in (torch, Tensor):
            put(holder, "take_along_dim", _take_along_dim(holder.take_along_dim))
        put(nn.functional, "batch_norm", _batch_norm(nn.functional.batch_norm))
        undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path gives NaN for an empty history
        detect = nn.modules.transformer._detect_is_causal_mask
        causal = lambda *args: False if args[1:2] != (True,) else detect(*args)  # noqa: E731
        put(nn.modules.transformer, "_detect_is_causal_mask", causal)
        sizes_log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
        undo.callback(sizes_log.setLevel, sizes_log.level)
        sizes_log.setLevel(logging.ERROR)  # warnings about lines of code that torch cannot find help no user
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        undo.enter_context(contextlib.redirect_stderr(io.StringIO()))  # torch prints graphs there
        yield


# ------------------------------------------------------------------------------------------------- errors


def explain(error: BaseException) -> str:
    """One sentence for an exception of a trace: the line of forward, the cause, and what to write instead."""
    frames = traceback.extract_tb(error.__traceback__)
    place = _place(frames)
    text = brief(error)
    kind = type(error).__name__
    if "DataDependent" in kind or "data-dependent" in text or "unbacked" in text.lower():
        cause = "forward takes a way or a size that depends on the numbers in a tensor; write torch.where, a fixed size, or "
        cause += "x.item() for int(x)"
    elif "is invalid for input of size" in text:
        cause = f"{text}; {_SAME_NUMBER}"
    elif "device" in text and re.search(r"\bmeta\b", text):
        cause = "parameters of the model are on the meta device; load its weights before the capture (tables need none)"
    elif ".numpy()" in text:
        cause = "forward leaves torch by .numpy(); write it with torch's own functions"
    else:
        cause = f"{kind}: {text}"
    return f"forward cannot be traced{place}: {cause}"


_SAME_NUMBER = (
    "a view of several values as one row needs as many values in each sample of the example batch; pad them where samples "
    "differ (to_padded_dense(N))"
)

_REST = re.compile(
    r"While executing|Original traceback|Potential framework|To fix the error|Use tlparse|For more information|graph\(\)"
    r"|class GraphModule|The following call raised|\(Size-like symbols"
)


def brief(error: BaseException, most: int = 300) -> str:
    """The first sentences of an exception's message, as one line without dumps of graphs."""
    return " ".join(_REST.split(str(error), maxsplit=1)[0].split())[:most]


def _place(frames: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside of torch and this file, as text."""
    for frame in reversed(frames):
        if _is_users(frame.filename):
            return _place_text(frame.filename, frame.lineno, frame.name, frame.line)
    return ""


def _here() -> str:
    """The line of forward that is running, as text."""
    return _place(traceback.extract_stack())


def _is_users(file: str) -> bool:
    torch_folder = str(Path(torch.__file__).parent)
    return file != str(Path(__file__)) and not file.startswith(torch_folder) and "/sparse/" not in file


def _place_text(file: str, line: object, name: str, text: str | None) -> str:
    return f" at {Path(file).name}:{line}, in {name}: `{(text or '').strip()}`"
