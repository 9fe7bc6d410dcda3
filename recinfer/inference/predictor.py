"""From an archive to answers: ``load(path)`` gives a Predictor with ``lookup`` and ``predict``; it knows no network.

A request goes: intake (checks, absent features) -> one fused lookup per embedding module over the mapped shards ->
the dense program. Everything is built when the archive is loaded; a call only runs, and any number run at once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.check import Answer, Request, compare_answers, read_requests
from recinfer.archive.dense import DenseEngine, open_dense
from recinfer.archive.manifest import Manifest
from recinfer.archive.mapping import MappedShards
from recinfer.archive.reader import Archive, open_archive
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import ArchiveError, InputError, RecinferError, UnavailableError
from recinfer.inference.bags import Bags, Features, bags_of
from recinfer.inference.direct import DirectTables
from recinfer.inference.intake import FeatureIntake
from recinfer.inference.lookups import Ask, Found, LocalLookups, Lookups, LookupsOf, Steps, output_names, run_now
from recinfer.inference.results import FeatureSpec, LookupResult, feature_specs, selected, tensors_of
from recinfer.inference.stages import Stages
from recinfer.inference.states import States, at_one_state
from recinfer.inference.together import Outputs, PredictInputs, lookup_many, predict_many, predict_with_context
from recinfer.quant.outputs import keep_outputs

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["FeatureSpec", "LookupResult", "Predictor", "load"]

# Golden answers are kept to 1e-5 relative; samples that see each other differ by far more.
_MERGE_RELATIVE, _MERGE_ABSOLUTE = 1e-3, 1e-4


class Predictor(States):
    """Answers requests from one archive. Every method may be called from any number of threads at once.

    Attributes:
        features: what lookup gives, in the model's order.
        num_dense: columns of the dense input of predict; 0 without one.
        contract: how raw rows become inputs, or None.
        loaded_at: when it was loaded, seconds since the epoch.
        stages: how long lookups and dense runs took.
        mergeable: whether requests may share one run; false where the golden requests together get other answers than
            each alone (a model whose samples see each other).
        runs_on_arrays: whether :meth:`run_engine_arrays` may be called.
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
        self.features = tuple(feature_specs(manifest, output_names(manifest)))
        self.num_dense = 0 if manifest.dense is None else manifest.dense.num_dense
        self.output_names: list[str] = []
        if manifest.dense is not None:
            self.output_names = [output.name for output in manifest.dense.outputs]
        super().__init__(archive)

    def _assemble(self, archive: Archive, edit: Callable[[MappedShards], None] | None = None) -> None:
        manifest = archive.manifest
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
        self.runs_on_arrays = self._engine is not None and self.device.type == "cpu"

    @property
    def direct(self) -> DirectTables | None:
        """The tables for :mod:`recinfer.inference.direct`, where the model and the machine allow it."""
        return self.state.lookups.direct

    @property
    def away(self) -> Any:
        """The tables of other hosts for small requests, where the model allows it; see recinfer.serving.engine.remote_byte_path."""
        return self.state.lookups.away

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
        engine = self.state._engine
        return None if engine is None else engine.name

    @property
    def engine_reason(self) -> str | None:
        """Why torch runs the dense part and not onnxruntime, which is faster on the CPU; None where it does not."""
        dense = self.manifest.dense
        if dense is None or self.engine != "torch":
            return None
        if self.device.type != "cpu":
            return f"the device is {self.device}"
        if self._dense_options["engine"] == "torch":
            return "it was loaded with dense_engine='torch'"
        return dense.onnx_refused or "the archive's manifest says so"

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

    @at_one_state
    def lookup_steps(self, features: Features) -> Steps[LookupResult]:
        """:meth:`lookup` for who waits in another way (see recinfer.inference.lookups)."""
        taken = self.intake.take(bags_of(features), need_all=False)
        found = yield from self.find([taken.features], taken.present)
        return self.select(found.parts, taken.present, found.missing)

    def lookup_many(self, requests: Sequence[Features]) -> list[LookupResult | Exception]:
        """:meth:`lookup` of each request, run together; an error stands in the place of its request's answer."""
        return run_now(self.lookup_many_steps(requests))

    @at_one_state
    def lookup_many_steps(self, requests: Sequence[Features]) -> Steps[list[LookupResult | Exception]]:
        """:meth:`lookup_many` for who waits in another way."""
        return lookup_many(self, requests)

    def predict_many(self, requests: Sequence[PredictInputs]) -> list[Outputs | Exception]:
        """:meth:`predict` of each request, run together; an error stands in the place of its request's answer."""
        return run_now(self.predict_many_steps(requests))

    @at_one_state
    def predict_many_steps(self, requests: Sequence[PredictInputs]) -> Steps[list[Outputs | Exception]]:
        """:meth:`predict_many` for who waits in another way."""
        return predict_many(self, requests)

    def find(self, requests: Sequence[Bags], present: Set[str] | None = None) -> Steps[Found]:
        """The vectors of checked requests, timed."""
        start = time.perf_counter()
        found = yield Ask(self.lookups, requests, present)
        self.stages.add("lookup", time.perf_counter() - start)
        return found

    @at_one_state
    def select(self, found: Sequence[Any], present: Set[str] | None, missing: tuple[int, ...] = ()) -> LookupResult:
        """The embeddings of the features ``present`` (None: all), from what each module found (None: not asked)."""
        return selected(self.parts, found, present, missing)

    def predict(self, dense: Tensor | None, features: Features, context: Features | None = None) -> Outputs:
        """The model's outputs.

        Args:
            dense: float32 [B, num_dense], finite; None when the model has no dense input.
            features: all features of the model, in any order. One that is left out is refused, unless the archive was
                exported to fill it in (``recinfer export --missing``).
            context: features of one sample that go with every one of the B (a user's, beside its candidates'); none of
                them in ``features``. They are looked up once.

        Returns:
            output name -> float32 [B, ...] (``"output"`` when forward returns one tensor).

        Raises:
            InputError: as lookup, and: a feature left out; wrong shape or dtype, NaN or infinity in dense.
        """
        return run_now(self.predict_steps(dense, features, context))

    @at_one_state
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

    @at_one_state
    def replay(self, request: Request) -> Answer:
        """Answer a golden request: every embedding and output, module by module."""
        taken = self.intake.take(bags_of(request.features), need_all=True).features
        found = run_now(self.find([taken]))
        if found.missing:
            raise UnavailableError(f"ranks {', '.join(map(str, found.missing))} do not answer")
        outputs = [] if self._engine is None else self._run_dense(request.dense, found.parts)
        return Answer([t.cpu() for given in found.parts for t in tensors_of(given)], outputs)

    @at_one_state
    def check_request(self, index: int) -> None:
        """Replay golden request ``index``; raises ArchiveError (C1, C2) when it fails or its answer is not the stored one."""
        request, answer = read_requests(self.archive)[index]
        try:
            given = self.replay(request)
        except RecinferError as error:
            raise ArchiveError(f"golden request {index} fails: {error}", rule="C2") from None
        except Exception as error:  # what runs is the archive's own program: each engine raises its own types
            reason = " ".join(str(error).split())[:500]
            raise ArchiveError(f"golden request {index} fails: {type(error).__name__}: {reason}", rule="C2") from error
        compare_answers(index, given, answer)

    def _check_answers(self) -> None:
        for index in range(self.manifest.check.num_requests):
            self.check_request(index)
        self.check_merging()

    @at_one_state
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

    @at_one_state
    def run_engine(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The dense program on its inputs, in the manifest's order."""
        assert self._engine is not None
        start = time.perf_counter()
        outputs = [output.cpu() for output in self._engine([tensor.to(self.device) for tensor in tensors])]
        self.stages.add("dense", time.perf_counter() - start)
        return outputs

    def run_engine_arrays(self, arrays: Sequence[NDArray[Any]], *, counted: bool = True) -> list[NDArray[Any]]:
        """:meth:`run_engine` of this very state, on the CPU, without tensors; its time ``counted`` among the stages."""
        assert self._engine is not None
        start = time.perf_counter()
        outputs = self._engine.arrays(arrays)
        if counted:
            self.stages.add("dense", time.perf_counter() - start)
        return outputs

    @at_one_state
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

    @at_one_state
    def check_has_dense(self) -> None:
        """Raises InputError when the archive has no dense part."""
        if self._engine is None:
            raise InputError("this archive holds embeddings only, no dense part; call lookup")

    def _run_dense(self, dense: Tensor | None, found: Sequence[Any]) -> list[Tensor]:
        tensors = [dense] if dense is not None and self.num_dense else []
        for given in found:
            tensors += tensors_of(given, dense_input=True)
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


def _contract(manifest: Manifest) -> FeatureContract | None:
    if manifest.contract is None:
        return None
    from recinfer.data.contract import FeatureContract

    return FeatureContract.from_dict(manifest.contract)
