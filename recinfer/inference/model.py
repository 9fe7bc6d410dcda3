"""A loaded archive: its tables, feature checks and dense part in one state, as loaded and after each delta.

Everything is prepared when the archive is loaded; calls are thread-safe, and each runs on one state.
"""

from __future__ import annotations

import abc
import copy
import functools
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.check import Request, input_tensor
from recinfer.archive.delta import Delta, patch_rows, read_delta, with_delta
from recinfer.archive.dense import NEEDS_IDS, DenseEngine, open_dense, open_program
from recinfer.archive.manifest import DenseInput, Manifest
from recinfer.archive.mapping import MappedShards
from recinfer.archive.paths import read_inside
from recinfer.archive.reader import Archive
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import ArchiveError, ConfigError, InputError
from recinfer.inference.bags import Bags
from recinfer.inference.byte_tables import ByteTables
from recinfer.inference.id_steps import IdSteps
from recinfer.inference.intake import FeatureIntake
from recinfer.inference.lookups import Ask, Found, LocalLookups, Lookups, LookupsOf, Steps, output_names
from recinfer.inference.named_inputs import NamedInputs
from recinfer.inference.programs import IdsProgram, TensorOf, UserPrograms, read_whole_tables
from recinfer.inference.results import LookupResult, feature_specs, on_host, selected
from recinfer.inference.stages import Stages
from recinfer.quant.transfers import to_device, to_host

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["LoadedModel", "States", "at_one_state"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def at_one_state(method: _Method) -> _Method:
    """Run a method on the current state: deltas applied during the call do not affect it."""

    @functools.wraps(method)
    def run(self: States, *args: Any, **kwargs: Any) -> Any:
        return method(self._state or self, *args, **kwargs)

    return cast(_Method, run)


class States(abc.ABC):
    """Holds the current state of a predictor and replaces it when a delta is applied or undone.

    ``_state`` is a copy of the predictor with the rows and the dense program after the applied deltas; unchanged parts
    (counters, feature checks) are shared. Each call runs on one state to its end. The base is such a copy too, since a
    call on the predictor itself could see a partly applied delta.
    """

    _state: Self | None
    _previous: Self | None
    _base: Self

    def __init__(self: Self, archive: Archive) -> None:
        """Subclasses call this last: it copies their attributes as the base state."""
        self._state = None
        self._previous = None
        self._deltas: tuple[Delta, ...] = ()
        self._delta_lock = threading.Lock()
        self._archive = archive
        self._assemble(archive)
        self._base = copy.copy(self)
        self._state = self._base

    @abc.abstractmethod
    def _assemble(self, archive: Archive, edit: Callable[[MappedShards], None] | None = None) -> None:
        """Map the tables and open the dense program of ``archive``, with rows changed by ``edit``."""

    @abc.abstractmethod
    def _check_answers(self) -> None:
        """Raises ArchiveError if a golden request's answer differs from the stored one."""

    def apply_delta(self, path: str | os.PathLike[str]) -> None:
        """Apply a delta: update the model to a later checkpoint while requests run.

        A request, or a batch of merged requests, sees the whole delta or none of it. Pages of changed rows become
        private to this process; all others stay shared. Results then equal those of a full export.

        Args:
            path: a delta (``*.rqd``) for this archive, the next one in its chain.

        Raises:
            ArchiveError: the delta breaks a rule of DELTA.md, or its golden answers are not reproduced. The state is
                unchanged.
            UnavailableError: there is no memory for the changed rows. The state is unchanged.
        """
        self.apply(read_delta(path))

    def apply(self: Self, delta: Delta, *, check: bool = True) -> None:
        """Apply an opened delta like :meth:`apply_delta`; ``check`` also replays its golden requests."""
        with self._delta_lock:
            now = self._state or self
            state = self.with_delta_applied(delta, check=check)
            now._previous = None  # one state is kept for undo; older ones are built again, so memory stays bounded
            state._previous = now
            self._state = state

    def undo_delta(self: Self) -> None:
        """Return to the state before the last delta, atomically.

        Raises:
            InputError: no delta is applied.
        """
        with self._delta_lock:
            now = self._state or self
            if not now._deltas:
                raise InputError("no delta is applied, so there is none to undo")
            if len(now._deltas) == 1:
                self._state = self._base
            elif now._previous is not None:
                self._state = now._previous
            else:
                state = self._base
                for delta in now._deltas[:-2]:  # manifests only; with_delta_applied below maps the rows
                    state = state._with_manifest(delta)
                self._state = state.with_delta_applied(now._deltas[-2], at=state)

    def with_delta_applied(self, delta: Delta, *, at: Self | None = None, check: bool = True) -> Self:
        """A predictor with ``delta`` applied, its golden answers checked if ``check``; this predictor is unchanged.

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
        state._archive = archive
        state._assemble(archive, edit)
        if check and delta.sha256:  # a delta without a hash is still being written and has no answers yet
            state._check_answers()
        return state

    def _with_manifest(self, delta: Delta) -> Self:
        state = copy.copy(self)
        state._state = None
        state._archive = with_delta(self._archive, delta, self._deltas)
        state._deltas = (*self._deltas, delta)
        return state

    @property
    def state(self) -> Self:
        """A predictor with the current state; deltas applied later do not affect it."""
        return self._state or self

    @property
    def archive(self) -> Archive:
        """The opened archive with all deltas applied."""
        return (self._state or self)._archive

    @property
    def content(self) -> list[str]:
        """SHA-256 (hex) of the archive's manifest, which lists the hashes of all other files, and of each applied
        delta.

        Two predictors with the same content give the same results, independent of their names.
        """
        now = self._state or self
        return [now._archive.manifest_sha256, *(delta.sha256 for delta in now._deltas)]

    @property
    def num_deltas(self) -> int:
        """Number of applied deltas, which is the sequence number of the last one; 0 without deltas."""
        return len((self._state or self)._deltas)


class LoadedModel(States):
    """The tables and the dense part of one archive; :mod:`recinfer.inference.together` runs requests on them.

    Attributes:
        features: the outputs of lookup, in the model's order.
        num_dense: columns of the dense input of predict; 0 without one.
        contract: the feature contract, by which raw rows become inputs, or None.
        loaded_at: when it was loaded, seconds since the epoch.
        stages: durations of lookups and dense runs.
        mergeable: whether requests may share one run; false where the golden requests together get other answers than
            each alone (a model whose samples see each other).
        runs_on_arrays: whether :meth:`run_engine_arrays` may be called.
        inputs: the checks of inputs beside features.
        whole_tables: program input -> all rows of a table, dequantized; of tables that forward reads as a whole.
        parts, intake, output_names: the embedding modules, the checks of features, the dense program's outputs.
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
        lookups: LookupsOf | None = None,
    ) -> None:
        manifest = archive.manifest
        self.loaded_at = time.time()
        self.stages = Stages("lookup", "dense")
        self.device = torch.device(device)
        self.contract: FeatureContract | None = None
        self._mapping: dict[str, Any] = {"preload": preload, "lock": lock}
        self._lookups_of = lookups
        self._dense_options: dict[str, Any] = {"device": device, "num_threads": dense_threads, "engine": dense_engine}
        self.intake = FeatureIntake(manifest)
        self.inputs = NamedInputs(manifest)
        self.mergeable = self.inputs.mergeable
        self.features = tuple(feature_specs(manifest, output_names(manifest)))
        self.num_dense = manifest.num_dense
        outputs = () if manifest.dense is None else manifest.dense.outputs
        self.output_names = [output.name for output in outputs]
        self._no_outputs = [(0, *output.shape) for output in outputs]  # the shapes of the outputs of no samples
        super().__init__(archive)

    def _assemble(self, archive: Archive, edit: Callable[[MappedShards], None] | None = None) -> None:
        manifest = archive.manifest
        self.intake = self.intake.at(archive, self._deltas)
        if self.contract is None:
            self.contract = self.intake.contract(manifest)
        self.lookups: Lookups
        if self._lookups_of is None:
            mapped = archive.map_shards(**self._mapping, edit=edit)
            self.lookups = LocalLookups(archive, mapped, device=str(self.device))
        else:
            self.lookups = self._lookups_of(archive, self._deltas)
        self.parts = self.lookups.parts
        self._mapped = self.lookups.mapped
        self._engine: DenseEngine | None = None
        if manifest.dense is not None:
            self._engine = open_dense(archive, manifest.dense, **self._dense_options)
        self.whole_tables = read_whole_tables(archive, self._deltas)
        signature = manifest.signature
        is_plain = signature is None or (signature.is_plain and not self._reads_more())
        self.runs_on_arrays = (
            self._engine is not None and self.device.type == "cpu" and is_plain and not self.inputs.infos
        )
        self._ids: IdsProgram | None = None
        if signature is not None and signature.ids is not None:
            ids = signature.ids
            threads = self._dense_options["num_threads"]
            self._ids = IdsProgram(manifest, open_program(archive, "dense/ids", ids, ids.outputs, num_threads=threads))
        self.user: UserPrograms | None = None
        if signature is not None and signature.user is not None:
            self.user = UserPrograms(archive, signature.user, self.output_names, self._dense_options)
            self.runs_on_arrays = False

    @property
    def byte_tables(self) -> ByteTables | None:
        """The tables for lookups from a request's bytes; None if the model or the machine does not support them."""
        state = self.state
        return None if state._ids is not None else state.lookups.byte_tables

    def _reads_more(self) -> bool:
        dense = self._archive.manifest.dense
        return dense is not None and any(i.kind.startswith("jagged") or i.kind == "table" for i in dense.inputs)

    @property
    def manifest(self) -> Manifest:
        """The archive's manifest."""
        return self.archive.manifest

    @property
    def plan(self) -> Plan:
        """The archive's plan: the rank of each rectangle of each table."""
        return self.archive.plan

    @property
    def engine(self) -> str | None:
        """The engine of the dense part: ``"onnx"``, ``"torch"``, or None without a dense part."""
        engine = self.state._engine
        return None if engine is None else engine.name

    @property
    def engine_reason(self) -> str | None:
        """The reason why torch runs the dense part instead of onnxruntime; None if onnxruntime runs it."""
        dense = self.manifest.dense
        if dense is None or self.engine != "torch":
            return None
        if self.device.type != "cpu":
            return f"the device is {self.device}"
        if self._dense_options["engine"] == "torch":
            return "it was loaded with dense_engine='torch'"
        return dense.onnx_refused or "the archive's manifest selects torch"

    @property
    def mapped_bytes(self) -> int:
        """Bytes of table rows mapped into this process."""
        return 0 if self._mapped is None else self._mapped.buffer.numel()

    @property
    def replaced_ids(self) -> int:
        """Number of out-of-range ids replaced by the default row, by the features' policies."""
        return self.intake.replaced.total()

    def find(self, requests: Sequence[Bags], present: Set[str] | None = None) -> Steps[Found]:
        """Look up the vectors of checked requests and record the time."""
        start = time.perf_counter()
        found = yield Ask(self.lookups, requests, present)
        self.stages.add("lookup", time.perf_counter() - start)
        return found

    @at_one_state
    def select(self, found: Sequence[Any], present: Set[str] | None, missing: tuple[int, ...] = ()) -> LookupResult:
        """The embeddings of the features ``present`` (None: all), from each module's result (None: not looked up)."""
        return selected(self.parts, on_host(found), present, missing)

    @property
    def programs_read_ids(self) -> bool:
        """Whether the dense or the ids program reads the ids of requests."""
        return self.state._ids is not None or self.state._reads_more()

    @property
    def computes_ids(self) -> bool:
        """Whether an ids program computes ids of lookups."""
        return self.state._ids is not None

    @at_one_state
    def compute_ids(self, given: Bags, tensor_of: Callable[[DenseInput], Tensor]) -> Bags:
        """The bags that lookups read, by the ids program and the id steps; see IdsProgram.run."""
        assert self._ids is not None
        return self.intake.steps.apply(self._ids.run(given, tensor_of))

    @at_one_state
    def looked_up(self, request: Request, steps: IdSteps | None = None) -> Request:
        """``request`` with the features that lookups read, after ``steps`` (None: this state's)."""
        given = request if self._ids is None else self._ids.looked_up(request)
        return (steps or self.intake.steps).looked_up(given)

    @at_one_state
    def run_dense_on(
        self, request: Request, embeddings: Sequence[Tensor], lengths: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Run the dense part on embeddings as :meth:`replay` returns them; sequences come with their lengths.

        Args:
            request: brings the other inputs.

        Raises:
            ConfigError: the dense part cannot run on them.
        """
        if self._engine is None:
            return []
        vectors = (t for pair in zip(embeddings, lengths) for t in pair if t is not None)
        tensors = self.arranged(vectors, lambda about: input_tensor(about, request))
        return self.run_checked(tensors, request.features.stride())

    def arranged(self, vectors: Iterable[Tensor], tensor_of: Callable[[DenseInput], Tensor]) -> list[Tensor]:
        """The dense program's inputs, in its order: ``vectors`` of lookups, module by module, and others by ``tensor_of``."""
        dense = self._archive.manifest.dense
        assert dense is not None
        of_lookups = iter(vectors)
        return [
            next(of_lookups)
            if about.kind in ("pooled", "values", "lengths")
            else self.whole_tables[about.name]
            if about.kind == "table"
            else tensor_of(about)
            for about in dense.inputs
        ]

    def run_checked(self, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Run :meth:`run_engine` for a check; an engine's own exception becomes a ConfigError with the batch's sizes."""
        try:
            return self.run_engine(tensors, batch)
        except Exception as error:  # each engine raises its own types for errors of the archive's program
            assert self.manifest.dense is not None
            inputs = zip(self.manifest.dense.inputs, tensors)
            ids = {
                i.feature: len(tensor) for i, tensor in inputs if i.kind == "values"
            }  # other features are pooled vectors here
            told = "".join(f", {count} ids of {name}" for name, count in ids.items())
            todo = NEEDS_IDS if 0 in ids.values() else ""
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"the dense part cannot run on a batch of {batch} samples{told}: {type(error).__name__}: {reason}{todo}"
            ) from error

    def to_device(self, tensor: Tensor) -> Tensor:
        """``tensor`` where the dense part runs; the caller does not wait for a copy to a GPU."""
        return to_device(tensor, self.device)

    @at_one_state
    def run_engine(self, tensors: Sequence[Tensor], batch: int) -> list[Tensor]:
        """Run the dense part on its inputs of ``batch`` samples, in the manifest's order.

        Only its outputs come back to the host, together.

        Without samples nothing is run: torch and onnxruntime differ in what they make of an empty batch, and
        onnxruntime's recurrent layers end the process.
        """
        assert self._engine is not None
        if not batch:
            return [torch.empty(shape) for shape in self._no_outputs]
        start = time.perf_counter()
        outputs = to_host(self._engine([self.to_device(tensor) for tensor in tensors]))
        self.stages.add("dense", time.perf_counter() - start)
        return outputs

    def run_user(self, user_of: TensorOf, tensor_of: TensorOf, batches: Sequence[int]) -> list[Tensor]:
        """Run the dense part in two: see :meth:`recinfer.inference.programs.UserPrograms.run`."""
        assert self.user is not None
        start = time.perf_counter()
        outputs = self.user.run(
            lambda about: self.to_device(user_of(about)), lambda about: self.to_device(tensor_of(about)), batches
        )
        outputs = to_host(outputs)
        self.stages.add("dense", time.perf_counter() - start)
        return outputs

    def run_engine_arrays(self, arrays: Sequence[NDArray[Any]], *, counted: bool = True) -> list[NDArray[Any]]:
        """Run the dense part of this state on numpy arrays on the CPU; ``counted`` adds its time to the stages."""
        assert self._engine is not None
        if not len(arrays[-1]):
            return [np.empty(shape, np.float32) for shape in self._no_outputs]
        start = time.perf_counter()
        outputs = self._engine.arrays(arrays)
        if counted:
            self.stages.add("dense", time.perf_counter() - start)
        return outputs

    @at_one_state
    def check_has_dense(self) -> None:
        """Raises InputError when the archive has no dense part."""
        if self._engine is None:
            raise InputError("this archive has no dense part, so it cannot predict; call lookup instead")

    def check_dense(self, dense: Tensor | None, batch: int) -> Tensor | None:
        """Returns ``dense`` if it is finite float32 ``[batch, num_dense]``; raises InputError otherwise."""
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
            if not self.num_dense:
                raise InputError(f"dense: got {came}; this model takes no matrix of dense numbers: leave dense out")
            raise InputError(f"dense: got {came}; expected float32 [{batch}, {self.num_dense}] (batch, num_dense)")
        # A NaN or an infinity makes the sum non-finite. A finite batch whose sum overflows is checked one by one.
        if not math.isfinite(dense.sum().item()) and not bool(torch.isfinite(dense).all()):
            sample, column = (~torch.isfinite(dense)).nonzero()[0].tolist()
            raise InputError(
                f"dense: sample {sample}, column {column} is {float(dense[sample, column])}; expected finite numbers"
            )
        return dense.detach().contiguous()


def _check_unchanged(archive: Archive) -> None:
    """Raises ArchiveError if the folder changed since loading, because rows are mapped from it again."""
    try:
        text = read_inside(archive.root, "manifest.json")
    except ArchiveError:
        text = b""
    if archive.manifest_sha256 and hashlib.sha256(text).hexdigest() != archive.manifest_sha256:
        raise ArchiveError(f"{str(archive.root)!r} was replaced since it was loaded; load it again", rule="X5")
