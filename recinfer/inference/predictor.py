"""From an archive to answers: ``load(path)`` gives a Predictor with ``lookup`` and ``predict``; it knows no network.

A request goes: intake (checks, absent features) -> one fused lookup per embedding module over the mapped shards ->
the dense program. Everything is built when the archive is loaded; a call only runs, and any number run at once.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.check import Answer, Request, compare_answers, read_requests
from recinfer.archive.delta import Delta, patch_rows, read_delta, with_delta
from recinfer.archive.dense import DenseEngine, open_dense
from recinfer.archive.manifest import Manifest
from recinfer.archive.mapping import MappedShards
from recinfer.archive.paths import read_inside
from recinfer.archive.reader import Archive, open_archive
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import ArchiveError, InputError, NotFoundError, RecinferError, UnavailableError
from recinfer.inference.bags import Bags, Features, bags_of
from recinfer.inference.direct import DirectTables
from recinfer.inference.intake import FeatureIntake
from recinfer.inference.lookups import Ask, Found, LocalLookups, Lookups, LookupsOf, Part, Steps, output_names, run_now
from recinfer.inference.stages import Stages
from recinfer.inference.together import Outputs, PredictInputs, lookup_many, predict_many, predict_with_context
from recinfer.quant.outputs import keep_outputs
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["FeatureSpec", "LookupResult", "Predictor", "load"]

# Golden answers are kept to 1e-5 relative; samples that see each other differ by far more.
_MERGE_RELATIVE, _MERGE_ABSOLUTE = 1e-3, 1e-4


_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class FeatureSpec:
    """One output of lookup: its name, and the table behind it."""

    name: str
    table: str
    rows: int
    dim: int
    pooled: bool


@dataclass(frozen=True)
class LookupResult:
    """Embeddings of the features that a request brought, in the model's order.

    Attributes:
        pooled: float32 [B, sum of dims], or None when no pooled feature was asked for.
        sequences: name -> values float32 [ids, dim] with their lengths.
        missing: ranks whose hosts did not answer, so that vectors of their rows are zero.
    """

    pooled: KeyedTensor | None
    sequences: dict[str, JaggedTensor]
    missing: tuple[int, ...] = ()

    def keys(self) -> list[str]:
        """All names: pooled ones first."""
        return [*(self.pooled.keys() if self.pooled is not None else ()), *self.sequences]

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        """The vectors of one name: [B, dim] when pooled; raises NotFoundError."""
        if name in self.sequences:
            return self.sequences[name]
        if self.pooled is not None and name in self.pooled.keys():  # noqa: SIM118 - not a dict
            return self.pooled[name]
        raise NotFoundError(f"no embedding {name!r} in this result; it has {', '.join(self.keys())}")


def _at_one_state(method: _Method) -> _Method:
    """Run a method on the state of the moment it is called: a delta applied meanwhile does not reach it."""

    @functools.wraps(method)
    def run(self: Predictor, *args: Any, **kwargs: Any) -> Any:
        return method(self._state or self, *args, **kwargs)

    return cast(_Method, run)


class Predictor:
    """Answers requests from one archive. Every method may be called from any number of threads at once.

    ``_state`` is a copy of the predictor with the rows and the dense program of the deltas applied; what does not change
    (counters, the checks of features) is shared. Each call runs on the one state that it finds, to its end: the base is
    such a copy too, since a call that ran on the predictor itself would meet a delta half-way.

    Attributes:
        features: what lookup gives, in the model's order.
        num_dense: columns of the dense input of predict; 0 without one.
        contract: how raw rows become inputs, or None.
        loaded_at: when it was loaded, seconds since the epoch.
        stages: how long lookups and dense runs took.
        mergeable: whether requests may share one run; false where the golden requests together get other answers than
            each alone (a model whose samples see each other).
        parts, intake, output_names: the embedding modules, the checks of features, the dense program's outputs; for
            recinfer.inference.together.
    """

    def __init__(
        self,
        archive: Archive,
        *,
        device: str = "cpu",
        preload: bool = False,
        lock: bool = False,
        dense_threads: int = 1,
        dense_engine: Literal["onnx", "torch"] | None = None,
        lookup_threads: int = 1,
        join_columns: bool = False,
        lookups: LookupsOf | None = None,
    ) -> None:
        manifest = archive.manifest
        self.loaded_at = time.time()
        self.stages = Stages("lookup", "dense")
        self.device = torch.device(device)
        self.contract: FeatureContract | None = _contract(manifest)
        self._mapping: dict[str, Any] = {"preload": preload, "lock": lock}
        self._lookup_options: dict[str, Any] = {"threads": lookup_threads, "join_columns": join_columns}
        self._lookups_of = lookups
        self._dense_options: dict[str, Any] = {"device": device, "num_threads": dense_threads, "engine": dense_engine}
        self.intake = FeatureIntake(manifest)
        self.mergeable = True
        self.features = tuple(_specs(manifest, output_names(manifest)))
        self.num_dense = 0 if manifest.dense is None else manifest.dense.num_dense
        self.output_names: list[str] = []
        if manifest.dense is not None:
            self.output_names = [output.name for output in manifest.dense.outputs]
        self._state: Predictor | None = None
        self._previous: Predictor | None = None
        self._deltas: tuple[Delta, ...] = ()
        self._delta_lock = threading.Lock()
        self._assemble(archive)
        self._base: Predictor = copy.copy(self)
        self._state = self._base

    def _assemble(self, archive: Archive, edit: Callable[[MappedShards], None] | None = None) -> None:
        """Map the tables and open the dense program of ``archive``."""
        manifest = archive.manifest
        self._archive = archive
        self.lookups: Lookups
        if self._lookups_of is None:
            mapped = archive.map_shards(**self._mapping, edit=edit)
            self.lookups = LocalLookups(archive, mapped, device=str(self.device), **self._lookup_options)
        else:
            self.lookups = self._lookups_of(archive, self._deltas)
        self.parts = self.lookups.parts
        self._mapped = self.lookups.mapped
        self._engine: DenseEngine | None = None
        if manifest.dense is not None:
            self._engine = open_dense(archive, manifest.dense, **self._dense_options)

    def apply_delta(self, path: str | os.PathLike[str]) -> None:
        """Bring the model to the state of a later checkpoint, while requests run.

        A request (and a batch of requests that run together) sees all of the delta or nothing of it. The changed rows'
        pages become this process's own; all others stay shared. Answers are then those of a full export.

        Args:
            path: a delta (``*.rqd``) for this archive, the next one in its chain.

        Raises:
            ArchiveError: the delta breaks a rule of DELTA.md, or its golden answers do not come out. Nothing changed.
            UnavailableError: there is no memory for the changed rows. Nothing changed.
        """
        self.apply(read_delta(path))

    def apply(self, delta: Delta) -> None:
        """:meth:`apply_delta` of a delta that is open already."""
        with self._delta_lock:
            now = self._state or self
            state = self.tried(delta)
            now._previous = None  # one undo is at hand, older ones are built again: memory stays bounded
            state._previous = now
            self._state = state

    def undo_delta(self) -> None:
        """Go back to the state before the last delta, as atomically as it came.

        Raises:
            InputError: no delta is applied.
        """
        with self._delta_lock:
            now = self._state or self
            if not now._deltas:
                raise InputError("no delta is applied to this archive, so there is none to undo")
            if len(now._deltas) == 1:
                self._state = self._base
            elif now._previous is not None:
                self._state = now._previous
            else:
                state = self._base
                for delta in now._deltas[:-2]:  # their manifests only; the rows come with the last one
                    state = state._with_manifest(delta)
                self._state = state.tried(now._deltas[-2], at=state)

    def tried(self, delta: Delta, *, at: Predictor | None = None) -> Predictor:
        """The state after ``delta``, its golden answers checked; this predictor stays as it is.

        Raises:
            ArchiveError: as :meth:`apply_delta`.
        """
        now = at or self._state or self
        _check_unchanged(self.archive)
        archive = with_delta(now._archive, delta, now._deltas)
        deltas = (*now._deltas, delta)

        def edit(mapped: MappedShards) -> None:
            for each in deltas:
                patch_rows(mapped, archive.manifest, each)

        state = copy.copy(now)
        state._state = state._previous = None
        state._deltas = deltas
        state._assemble(archive, edit)
        if delta.sha256:  # else it is still being written, and its answers are not known
            for index in range(archive.manifest.check.num_requests):
                state.check_request(index)
            state.check_merging()
        return state

    def _with_manifest(self, delta: Delta) -> Predictor:
        state = copy.copy(self)
        state._state = None
        state._archive = with_delta(self._archive, delta, self._deltas)
        state._deltas = (*self._deltas, delta)
        return state

    @property
    def state(self) -> Predictor:
        """The predictor of this moment: deltas that are applied later do not reach it."""
        return self._state or self

    @property
    def direct(self) -> DirectTables | None:
        """The tables for :mod:`recinfer.inference.direct`, where the model and the machine allow it."""
        return self.state.lookups.direct

    @property
    def away(self) -> Any:
        """The tables of other hosts for small requests, where the model allows it; see recinfer.serving.away."""
        return self.state.lookups.away

    @property
    def archive(self) -> Archive:
        """The opened archive, as it reads after the deltas applied."""
        return (self._state or self)._archive

    @property
    def num_deltas(self) -> int:
        """How many deltas are applied: the sequence number of the last one, 0 without one."""
        return len((self._state or self)._deltas)

    @property
    def manifest(self) -> Manifest:
        """What the archive holds."""
        return self.archive.manifest

    @property
    def plan(self) -> Plan:
        """Where each rectangle of each table is."""
        return self.archive.plan

    @property
    def engine(self) -> str | None:
        """What runs the dense part: ``"onnx"``, ``"torch"``, or None without a dense part."""
        engine = (self._state or self)._engine
        return None if engine is None else engine.name

    @property
    def mapped_bytes(self) -> int:
        """Bytes of table rows that are mapped into this process's memory."""
        return 0 if self._mapped is None else self._mapped.buffer.numel()

    @property
    def replaced_ids(self) -> int:
        """How many ids out of range became the default row, of features whose policy says so."""
        return self.intake.replaced_ids

    def lookup(self, features: Features) -> LookupResult:
        """Embeddings of the features given.

        Args:
            features: some or all of the model's features, in any order; ids int32 or int64.

        Raises:
            InputError: an unknown feature, an id out of range, missing weights; names the feature and the place.
        """
        return run_now(self.lookup_steps(features))

    @_at_one_state
    def lookup_steps(self, features: Features) -> Steps[LookupResult]:
        """:meth:`lookup` for who waits in another way (see recinfer.inference.lookups)."""
        taken = self.intake.take(bags_of(features), need_all=False)
        found = yield from self.find([taken.features], taken.present)
        return self.select(found.parts, taken.present, found.missing)

    def lookup_many(self, requests: Sequence[Features]) -> list[LookupResult | Exception]:
        """:meth:`lookup` of each request, run together; an error stands in the place of its request's answer."""
        return run_now(self.lookup_many_steps(requests))

    @_at_one_state
    def lookup_many_steps(self, requests: Sequence[Features]) -> Steps[list[LookupResult | Exception]]:
        """:meth:`lookup_many` for who waits in another way."""
        return lookup_many(self, requests)

    def predict_many(self, requests: Sequence[PredictInputs]) -> list[Outputs | Exception]:
        """:meth:`predict` of each request, run together; an error stands in the place of its request's answer."""
        return run_now(self.predict_many_steps(requests))

    @_at_one_state
    def predict_many_steps(self, requests: Sequence[PredictInputs]) -> Steps[list[Outputs | Exception]]:
        """:meth:`predict_many` for who waits in another way."""
        return predict_many(self, requests)

    def find(self, requests: Sequence[Bags], present: Set[str] | None = None) -> Steps[Found]:
        """The vectors of checked requests, timed."""
        start = time.perf_counter()
        found = yield Ask(self.lookups, requests, present)
        self.stages.add("lookup", time.perf_counter() - start)
        return found

    @_at_one_state
    def select(self, found: Sequence[Any], present: Set[str] | None, missing: tuple[int, ...] = ()) -> LookupResult:
        """The embeddings of the features ``present`` (None: all), from what each module found (None: not asked)."""
        pooled: list[KeyedTensor] = []
        sequences: dict[str, JaggedTensor] = {}
        for part, given in zip(self.parts, found):
            wanted = None if present is None else [f in present for f in part.info.features]
            if given is None or (wanted is not None and not any(wanted)):
                continue
            if part.info.kind == "pooled":
                pooled.append(_select(part, given, wanted))
            else:
                chosen = zip(part.names, given, wanted or [True] * len(part.names))
                sequences.update({name: _on_cpu(sequence) for name, sequence, keep in chosen if keep})
        return LookupResult(_join(pooled), sequences, missing)

    def predict(self, dense: Tensor | None, features: Features, context: Features | None = None) -> Outputs:
        """The model's outputs.

        Args:
            dense: float32 [B, num_dense], finite; None when the model has no dense input.
            features: all features of the model, in any order. An absent one is an empty bag, or its default id, or
                refused, as the manifest says.
            context: features of one sample that go with every one of the B (a user's, beside its candidates'); none of
                them in ``features``. They are looked up once.

        Returns:
            output name -> float32 [B, ...] (``"output"`` when forward returns one tensor).

        Raises:
            InputError: as lookup, and: wrong shape or dtype, NaN or infinity in dense.
        """
        return run_now(self.predict_steps(dense, features, context))

    @_at_one_state
    def predict_steps(
        self, dense: Tensor | None, features: Features, context: Features | None = None
    ) -> Steps[Outputs]:
        """:meth:`predict` for who waits in another way."""
        self.check_has_dense()
        if context is not None:
            return (yield from predict_with_context(self, PredictInputs(dense, features, context)))
        taken = self.intake.take(bags_of(features), need_all=True).features
        dense = self.check_dense(dense, taken.batch)
        found = yield from self.find([taken])
        return Outputs(zip(self.output_names, self._run_dense(dense, found.parts)), missing=found.missing)

    @_at_one_state
    def replay(self, request: Request) -> Answer:
        """Answer a golden request: every embedding and output, module by module."""
        taken = self.intake.take(bags_of(request.features), need_all=True).features
        found = run_now(self.find([taken]))
        if found.missing:
            raise UnavailableError(f"ranks {', '.join(map(str, found.missing))} do not answer")
        outputs = [] if self._engine is None else self._run_dense(request.dense, found.parts)
        return Answer([t.cpu() for given in found.parts for t in _tensors(given)], outputs)

    @_at_one_state
    def check_request(self, index: int) -> None:
        """Replay golden request ``index``; raises ArchiveError (C1, C2) when the answer differs from the stored one."""
        request, answer = read_requests(self.archive)[index]
        try:
            given = self.replay(request)
        except RecinferError as error:
            raise ArchiveError(f"golden request {index} fails: {error}", rule="C2") from None
        compare_answers(index, given, answer)

    @_at_one_state
    def run_dense_on(
        self, dense: Tensor | None, embeddings: Sequence[Tensor], lengths: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """The dense program on given embeddings, as :meth:`replay` returns them; a sequence's with its lengths."""
        if self._engine is None:
            return []
        tensors = [dense] if dense is not None else []
        for vectors, length in zip(embeddings, lengths):
            tensors += [vectors] if length is None else [vectors, length]
        return [output.cpu() for output in self._engine([t.to(self.device) for t in tensors])]

    @_at_one_state
    def run_engine(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The dense program on its inputs, in the manifest's order."""
        assert self._engine is not None
        start = time.perf_counter()
        outputs = [output.cpu() for output in self._engine([tensor.to(self.device) for tensor in tensors])]
        self.stages.add("dense", time.perf_counter() - start)
        return outputs

    def run_engine_arrays(self, arrays: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """:meth:`run_engine` of this very state, on the CPU, without tensors."""
        assert self._engine is not None
        start = time.perf_counter()
        outputs = self._engine.arrays(arrays)
        self.stages.add("dense", time.perf_counter() - start)
        return outputs

    @_at_one_state
    def check_merging(self) -> None:
        """Run the golden requests together; where an answer differs from the one alone, requests are never merged."""
        stored = read_requests(self.archive)
        together = [PredictInputs(request.dense, request.features) for request, _ in stored]
        if self._engine is None or len(together) < 2:
            return
        for (_, answer), given in zip(stored, self.predict_many(together)):
            if isinstance(given, Exception):
                self.mergeable = False
                return
            for tensor, expected in zip(given.values(), answer.outputs):
                if not torch.allclose(tensor, expected, rtol=_MERGE_RELATIVE, atol=_MERGE_ABSOLUTE):
                    self.mergeable = False

    @_at_one_state
    def check_has_dense(self) -> None:
        """Raises InputError when the archive has no dense part."""
        if self._engine is None:
            raise InputError("this archive holds embeddings only, no dense part; call lookup")

    def _run_dense(self, dense: Tensor | None, found: Sequence[Any]) -> list[Tensor]:
        tensors = [dense] if dense is not None and self.num_dense else []
        for given in found:
            tensors += _tensors(given, dense_input=True)
        return self.run_engine(tensors)

    def check_dense(self, dense: Tensor | None, batch: int) -> Tensor | None:
        """``dense`` when it is finite float32 ``[batch, num_dense]``; raises InputError."""
        if dense is None:
            if self.num_dense:
                raise InputError(f"dense is missing; expected float32 [{batch}, {self.num_dense}]")
            return None
        if (
            not isinstance(dense, Tensor)
            or dense.dtype != torch.float32
            or tuple(dense.shape) != (batch, self.num_dense)
        ):
            came = f"{dense.dtype} {list(dense.shape)}" if isinstance(dense, Tensor) else type(dense).__name__
            raise InputError(f"dense: got {came}; expected float32 [{batch}, {self.num_dense}] (batch, num_dense)")
        # One sum sees every NaN and infinity; a finite batch whose sum overflows is looked at twice.
        if not math.isfinite(dense.sum().item()) and not bool(torch.isfinite(dense).all()):
            sample, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
            raise InputError(
                f"dense: sample {sample}, column {column} is {float(dense[sample, column])}; expected finite numbers"
            )
        return dense.contiguous()


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    preload: bool = False,
    lock: bool = False,
    check_hashes: bool = False,
    dense_threads: int = 1,
    dense_engine: Literal["onnx", "torch"] | None = None,
    lookup_threads: int = 1,
    join_columns: bool = False,
    reuse_outputs: bool = False,
    lookups: LookupsOf | None = None,
) -> Predictor:
    """Open an archive for serving.

    Args:
        path: the archive's folder.
        device: ``"cpu"``, or ``"cuda"``: rank r's tables go to GPU r.
        preload: read all table pages now instead of at their first use.
        lock: also keep them in memory whatever else the machine does (mlock; needs a limit, ulimit -l, that allows it).
        check_hashes: hash the shards too (reads every byte); everything else is always hashed.
        dense_threads: threads that one call of the dense program uses; servers run many calls at once, so 1.
        dense_engine: ``"onnx"`` or ``"torch"`` instead of the manifest's choice.
        lookup_threads: on CPU, threads that one large pooled lookup may use; each size of lookup is timed both ways and
            split only where that was clearly faster.
        join_columns: on CPU, put tables that are cut by columns together again, in memory of this process: one row to
            read instead of one a piece, for a copy of these tables that other processes do not share.
        reuse_outputs: keep the memory of freed outputs for the next ones, in the whole process: outputs above 32 MiB
            come in about half the time (:func:`recinfer.quant.outputs.keep_outputs`).
        lookups: who looks up instead of this process: no shard is opened then.

    Raises:
        ArchiveError: the archive breaks a rule of FORMAT.md, or answers its first golden request wrongly.
        UnavailableError: something that serving needs is not installed, or the limit on locked memory is too low.

    Example::

        predictor = recinfer.load("model.rqa")
        logits = predictor.predict(dense, features)["output"]
    """
    if reuse_outputs:
        keep_outputs()
    archive = open_archive(path, check_hashes=check_hashes, ranks=None if lookups is None else ())
    predictor = Predictor(
        archive,
        device=device,
        preload=preload,
        lock=lock,
        dense_threads=dense_threads,
        dense_engine=dense_engine,
        lookup_threads=lookup_threads,
        join_columns=join_columns,
        lookups=lookups,
    )
    predictor.check_request(0)  # proves that this machine gives the stored answer, and warms every part up
    predictor.check_merging()
    return predictor


def _check_unchanged(archive: Archive) -> None:
    """Rows are mapped from the folder again, so it must still hold what was loaded."""
    try:
        text = read_inside(archive.root, "manifest.json")
    except ArchiveError:
        text = b""
    if archive.manifest_sha256 and hashlib.sha256(text).hexdigest() != archive.manifest_sha256:
        raise ArchiveError(f"{str(archive.root)!r} was replaced since it was loaded; load it again", rule="X5")


def _contract(manifest: Manifest) -> FeatureContract | None:
    if manifest.contract is None:
        return None
    from recinfer.data.contract import FeatureContract

    return FeatureContract.from_dict(manifest.contract)


def _specs(manifest: Manifest, names: dict[str, list[str]]) -> list[FeatureSpec]:
    specs = []
    for module in manifest.modules:
        tables = [table for table in manifest.module_tables(module.path) for _ in table.features]
        for name, table in zip(names[module.path], tables):
            specs.append(FeatureSpec(name, table.name, table.rows, table.dim, module.kind == "pooled"))
    return specs


def _tensors(found: Tensor | list[JaggedTensor], *, dense_input: bool = False) -> list[Tensor]:
    """The vectors of one module; as the dense program takes them also the lengths of each sequence."""
    if isinstance(found, Tensor):
        return [found]
    if not dense_input:
        return [sequence.values() for sequence in found]
    return [tensor for sequence in found for tensor in (sequence.values(), sequence.lengths().long())]


def _select(part: Part, values: Tensor, wanted: Sequence[bool] | None) -> KeyedTensor:
    if wanted is None or all(wanted):
        return KeyedTensor.from_parts_unchecked(part.names, part.dims, values.cpu())
    chosen = [i for i, keep in enumerate(wanted) if keep]
    columns = values.split(part.dims, dim=1)
    return KeyedTensor(
        [part.names[i] for i in chosen],
        [part.dims[i] for i in chosen],
        torch.cat([columns[i] for i in chosen], dim=1).cpu(),
    )


def _join(pooled: Sequence[KeyedTensor]) -> KeyedTensor | None:
    if len(pooled) <= 1:
        return pooled[0] if pooled else None
    return KeyedTensor(
        [key for part in pooled for key in part.keys()],  # noqa: SIM118 - not a dict
        [dim for part in pooled for dim in part.length_per_key()],
        torch.cat([part.values() for part in pooled], dim=1),
    )


def _on_cpu(sequence: JaggedTensor) -> JaggedTensor:
    if sequence.values().device.type == "cpu":
        return sequence
    return JaggedTensor.from_parts_unchecked(sequence.values().cpu(), None, sequence.lengths().cpu())
