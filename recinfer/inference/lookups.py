"""The interface between a predictor and its tables, and its implementation for tables in this process.

A predictor is a generator that yields the lookup it needs (:class:`Ask`) and continues with the result. The same steps
therefore run on local rows (:func:`run_now`) and on rows of other hosts, without blocking (:func:`run_steps`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from recinfer.archive.manifest import Manifest, ModuleInfo
from recinfer.archive.mapping import MappedShards
from recinfer.archive.positions import PositionWeights, read_position_weights
from recinfer.archive.reader import Archive
from recinfer.distributed.quant.sharded import ShardedQuantEmbeddingBagCollection, ShardedQuantEmbeddingCollection
from recinfer.inference.bags import Bags, merge_bags
from recinfer.inference.byte_tables import ByteTables, DirectTables
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.lookup import PooledLookup
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "NO_TRACE",
    "Ask",
    "Found",
    "FoundCallback",
    "LocalLookups",
    "Lookups",
    "LookupsOf",
    "Part",
    "Steps",
    "output_names",
    "run_now",
    "run_steps",
    "sharded_module",
]

T = TypeVar("T")
NO_TRACE: Mapping[str, str] = MappingProxyType({})
"""Trace of a request that is not traced."""


@dataclass(slots=True)
class Found:
    """The result of lookups.

    Attributes:
        parts: per module ``[B, D]`` when pooled, else JaggedTensors by output; None for a module without a lookup.
        missing: ranks that did not answer, so that their rows are the default rows.
    """

    parts: list[Any]
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Part:
    """One embedding module.

    Attributes:
        names, dims: names and columns of its outputs.
        positions: weights of ids by position in the bag.
        order: the module's features, in the order of the cheapest lookup.
    """

    info: ModuleInfo
    names: list[str]
    dims: list[int]
    positions: PositionWeights | None
    order: tuple[str, ...]

    @functools.cached_property
    def columns_of(self) -> Callable[[frozenset[str]], list[tuple[int, int]]]:
        """Function from features to the columns (first, end) of their vectors in the pooled output, neighbours joined."""
        return functools.lru_cache(maxsize=64)(functools.partial(_columns, self.info.features, self.dims))

    @property
    def needs_weights(self) -> bool:
        """Whether each id needs a weight from the request."""
        return self.info.is_weighted and self.positions is None


FoundCallback = Callable[["Found | None", "Exception | None"], None]
"""Callback that receives the result or the error, once, on any thread."""


class Lookups(Protocol):
    """Interface to the tables of an archive, local or remote. ``parts`` are in the manifest's order."""

    @property
    def parts(self) -> Sequence[Part]: ...
    @property
    def mapped(self) -> MappedShards | None:
        """The rows mapped into this process; None without local rows."""
        ...

    @property
    def byte_tables(self) -> ByteTables | None:
        """The tables for lookups from a request's bytes; None if the model or the machine does not support them."""
        ...

    @property
    def waits(self) -> bool:
        """Whether :meth:`find` waits for others; a caller that may not block calls :meth:`begin`."""
        ...

    def can_answer(self) -> bool:
        """Whether a lookup can succeed now; the call never waits."""
        ...

    def find(self, requests: Sequence[Bags], present: Set[str] | None) -> Found:
        """Look up the vectors of all requests' samples, in order.

        Args:
            requests: with any features; missing features are empty bags.
            present: features that are wanted; modules without any of them are left out. None: all.
        """
        ...

    def begin(
        self,
        requests: Sequence[Bags],
        present: Set[str] | None,
        deadline: float,
        done: FoundCallback,
        trace: Mapping[str, str] = ...,
    ) -> None:
        """The non-blocking form of :meth:`find`.

        Args:
            deadline: ``time.monotonic()`` after which the result is not needed.
            done: receives the result or the error, possibly before this returns.
            trace: headers of the requests' trace, for other hosts.
        """
        ...


LookupsOf = Callable[..., Lookups]
"""Creates the lookups of (archive, applied deltas)."""


@dataclass(slots=True)
class Ask:
    """The next lookup that a predictor's steps need."""

    lookups: Lookups
    requests: Sequence[Bags]
    present: Set[str] | None = None


Steps = Generator[Ask, Found, T]


def run_now(steps: Steps[T]) -> T:
    """Run steps to completion in this thread."""
    try:
        ask = next(steps)
        while True:
            try:
                found = ask.lookups.find(ask.requests, ask.present)
            except Exception as error:
                ask = steps.throw(error)
            else:
                ask = steps.send(found)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]


def run_steps(
    steps: Steps[T],
    deadline: float,
    done: Callable[[T | Exception], None],
    resume: Callable[[Callable[[], None]], None],
    trace: Mapping[str, str] = NO_TRACE,
) -> None:
    """Run steps with remote lookups to completion without blocking a thread during the lookups.

    Args:
        deadline: ``time.monotonic()`` after which the result is not needed.
        done: is given the result, or what the steps raised.
        resume: runs the next step once a lookup is there, on a thread that may compute.
        trace: headers of the trace of the request, for other hosts.
    """

    def step(advance: Callable[[], Ask]) -> None:
        try:
            ask = advance()
        except StopIteration as stop:
            done(stop.value)
        except Exception as error:
            done(error)
        else:
            ask.lookups.begin(ask.requests, ask.present, deadline, found, trace)

    def found(result: Found | None, error: Exception | None) -> None:
        if error is not None:
            resume(functools.partial(step, functools.partial(steps.throw, error)))
        else:
            assert result is not None
            resume(functools.partial(step, functools.partial(steps.send, result)))

    step(functools.partial(next, steps))


@dataclass(frozen=True, eq=False)
class _LocalPart(Part):
    """A module with local rows. ``run`` takes a KeyedJaggedTensor of ``order``."""

    run: Callable[[KeyedJaggedTensor], Any]
    rows: NDArray[np.uint64]
    table_batch: Callable[..., Tensor] | None
    """The operator alone, if its output is the module's output: ids ``[N]`` below ``rows``, offsets, weights to ``[B,
    D]``."""

    def __call__(self, bags: Bags) -> Tensor | list[JaggedTensor]:
        """``[B, D]`` of a pooled module, else vectors by output; features missing in ``bags`` are empty bags."""
        arranged = bags.arranged(self.order)
        if self.table_batch is not None and arranged.fits(self.rows):
            # The op is called directly, because each Python call before it costs as much as its 26 lookups.
            weights = torch.from_numpy(arranged.weights) if self.needs_weights else None
            return self.table_batch(torch.from_numpy(arranged.values), torch.from_numpy(arranged.offsets), weights)
        features = KeyedJaggedTensor.from_parts_unchecked(
            list(self.order),
            torch.from_numpy(arranged.values),
            None,
            offsets=torch.from_numpy(arranged.offsets),
            weights=None if arranged.weights is None else torch.from_numpy(arranged.weights),
            stride=arranged.batch,
        )
        if self.positions is not None:
            features = self.positions.apply(features)
        found = self.run(features)
        return found.values() if self.info.kind == "pooled" else list(found.values())


class LocalLookups:
    """The tables of an archive mapped into this process.

    Args:
        archive: opened for all ranks.
        mapped: the archive's rows.
        device: ``"cpu"``, or ``"cuda"``: rank r's rows go to GPU r.
    """

    waits = False

    def __init__(
        self,
        archive: Archive,
        mapped: MappedShards,
        *,
        device: str = "cpu",
    ) -> None:
        manifest = archive.manifest
        self.mapped: MappedShards | None = mapped
        weights, names = read_position_weights(archive), output_names(manifest)
        self.parts: list[_LocalPart] = [
            _part(
                info,
                manifest.configs(info.path),
                sharded_module(archive, info, mapped, device=device),
                names[info.path],
                weights.get(info.path),
            )
            for info in manifest.modules
        ]
        self.byte_tables = _byte_tables(manifest, self.parts[0]) if len(self.parts) == 1 else None

    def can_answer(self) -> bool:
        """See :class:`Lookups`."""
        return True

    def find(self, requests: Sequence[Bags], present: Set[str] | None) -> Found:
        """See :class:`Lookups`."""
        if len(requests) > 1:
            return Found([part(merge_bags(requests, part.order, weighted=part.needs_weights)) for part in self.parts])
        bags = requests[0]
        if present is None:
            return Found([part(bags) for part in self.parts])
        return Found([None if present.isdisjoint(part.info.features) else part(bags) for part in self.parts])

    def begin(
        self,
        requests: Sequence[Bags],
        present: Set[str] | None,
        deadline: float,
        done: FoundCallback,
        trace: Mapping[str, str] = NO_TRACE,
    ) -> None:
        """See :class:`Lookups`; calls ``done`` before it returns."""
        try:
            found = self.find(requests, present)
        except Exception as error:
            done(None, error)
        else:
            done(found, None)


def _byte_tables(manifest: Manifest, part: _LocalPart) -> DirectTables | None:
    lookup = getattr(part.run, "__self__", None)
    if not isinstance(lookup, PooledLookup) or part.info.is_weighted:
        return None
    batch = lookup.batch
    if not isinstance(batch, nn.Module) or batch.weights.device.type != "cpu":
        return None
    means = {table.name for table in manifest.configs(part.info.path) if getattr(table, "pooling") is PoolingType.MEAN}  # noqa: B009
    used = [read.rect.table in means for read in batch.reads]
    return DirectTables(lookup, used, part.info.features, part.names, part.dims)


def output_names(manifest: Manifest) -> dict[str, list[str]]:
    """Module path -> a name per output; a name in two modules gets the suffix ``@<module path>``."""
    count: dict[str, int] = {}
    for module in manifest.modules:
        for name in module.outputs:
            count[name] = count.get(name, 0) + 1
    return {
        module.path: [f"{name}@{module.path}" if count[name] > 1 else name for name in module.outputs]
        for module in manifest.modules
    }


def _columns(features: Sequence[str], dims: Sequence[int], wanted: frozenset[str]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for name, dim, end in zip(features, dims, accumulate(dims)):
        if name in wanted and runs and runs[-1][1] == end - dim:
            runs[-1] = (runs[-1][0], end)
        elif name in wanted:
            runs.append((end - dim, end))
    return runs


def sharded_module(
    archive: Archive, info: ModuleInfo, mapped: MappedShards, *, device: str = "cpu"
) -> ShardedQuantEmbeddingBagCollection | ShardedQuantEmbeddingCollection:
    """One module of an archive, with its rows placed by the plan's compute kernels.

    Args:
        archive: opened for all ranks.
        info: the module.
        mapped: the archive's rows.
        device: ``"cpu"``, where all rows stay mapped, or ``"cuda"``: rank r's rows go to GPU r, but those of
            ``quant_uvm`` and ``quant_uvm_caching`` tables stay in host memory.
    """
    tables, shards = archive.manifest.configs(info.path), mapped.module_shards[info.path]
    common: dict[str, Any] = {
        "world_size": archive.manifest.world_size,
        "device": device,
        "kernels": {t.table: t.compute_kernel for t in archive.plan.tables if t.module == info.path},
    }
    if info.kind == "pooled":
        return ShardedQuantEmbeddingBagCollection.from_packed(
            tables, shards, mapped.buffer, is_weighted=info.is_weighted, **common
        )
    return ShardedQuantEmbeddingCollection.from_packed(tables, shards, mapped.buffer, **common)


def _part(
    info: ModuleInfo,
    tables: Sequence[Any],
    module: ShardedQuantEmbeddingBagCollection | ShardedQuantEmbeddingCollection,
    names: list[str],
    positions: PositionWeights | None,
) -> _LocalPart:
    dims = [table.embedding_dim for table in tables for _ in table.feature_names]
    fused = module.fused_lookup
    # Position weights are made by name, so names may not repeat there. Past nn.Module's call machinery, which costs as
    # much as the op's dispatch.
    direct = fused if isinstance(fused, PooledLookup) and positions is None else None
    order = tuple(dict.fromkeys(info.features)) if direct is None else tuple(direct.arranger.features)
    return _LocalPart(
        info,
        names,
        dims,
        positions,
        order,
        direct.forward if direct else module,
        np.array([] if direct is None else direct.arranger.rows, np.uint64),
        direct.batch.forward if direct is not None and direct.op_is_all else None,
    )
