"""Loads an archive as a Predictor, which runs ``lookup`` and ``predict`` in this process.

A request passes these steps: intake (checks, missing features) -> one fused lookup per embedding module over the mapped
shards -> the dense program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from recinfer.archive.check import Answer, Request, compare_answers, input_tensor, read_requests
from recinfer.archive.reader import open_archive
from recinfer.columns import as_matrix
from recinfer.errors import ArchiveError, RecinferError, UnavailableError
from recinfer.inference.bags import Features, bags_of, merge_bags
from recinfer.inference.lookups import LookupsOf, Steps, run_now
from recinfer.inference.model import LoadedModel, at_one_state
from recinfer.inference.named_inputs import GivenInput
from recinfer.inference.results import FeatureSpec, LookupResult, Outputs, tensors_of
from recinfer.inference.together import PredictInputs, lookup_many, lookup_one, predict_many, predict_one
from recinfer.quant.outputs import keep_outputs
from recinfer.quant.transfers import to_host
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["FeatureSpec", "LookupResult", "Predictor", "load"]

# Golden answers are kept to 1e-5 relative; samples that see each other differ by far more.
_MERGE_RELATIVE, _MERGE_ABSOLUTE = 1e-3, 1e-4


class Predictor(LoadedModel):
    """Runs lookups and predictions of one archive. All methods are thread-safe."""

    def lookup(self, features: Features) -> LookupResult:
        """Look up the embeddings of the given features.

        Args:
            features: some or all of the model's features, in any order; ids int32 or int64. A KeyedJaggedTensor, or what
                the clients take, ``{"user": [3, 4], "tags": ([[1], [2, 5]], [[0.5], [1, 2]])}``: see
                :func:`recinfer.columns.as_features`. An id without a weight weighs 1.

        Raises:
            InputError: an unknown feature, an id out of range, weights where there may be none; names the feature and the place.
        """
        return run_now(self.lookup_steps(features))

    @at_one_state
    def lookup_steps(self, features: Features) -> Steps[LookupResult]:
        """:meth:`lookup` as a generator for callers that do not block (see recinfer.inference.lookups)."""
        return lookup_one(self, features)

    def lookup_many(self, requests: Sequence[Features]) -> list[LookupResult | Exception]:
        """Run :meth:`lookup` for several requests together; a failed request has its error as the result."""
        return run_now(self.lookup_many_steps(requests))

    @at_one_state
    def lookup_many_steps(self, requests: Sequence[Features]) -> Steps[list[LookupResult | Exception]]:
        """:meth:`lookup_many` as a generator for callers that do not block."""
        return lookup_many(self, requests)

    def predict_many(self, requests: Sequence[PredictInputs]) -> list[Outputs | Exception]:
        """Run :meth:`predict` for several requests together; a failed request has its error as the result."""
        return run_now(self.predict_many_steps(requests))

    @at_one_state
    def predict_many_steps(self, requests: Sequence[PredictInputs]) -> Steps[list[Outputs | Exception]]:
        """:meth:`predict_many` as a generator for callers that do not block."""
        return predict_many(self, requests)

    def predict(
        self,
        dense: Any = None,
        features: Features | None = None,
        context: Features | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Outputs:
        """Compute the model's outputs.

        Args:
            dense: float32 [B, num_dense], finite, or rows of numbers; None when the model has no dense input.
            features: all features of the model, in any order. A missing feature is an error, unless the archive was
                exported with a policy for it (``recinfer export --missing``). None for a model whose requests have no
                features.
            context: features of one sample that apply to all B samples (a user's features with B candidates); none of
                them in ``features``. They are looked up once.
            inputs: the model's other inputs by name (``recinfer inspect`` lists them), see
                :func:`recinfer.input_arrays.as_input`.

        Returns:
            output name -> float32 [B, ...] (``"output"`` when forward returns one tensor).

        Raises:
            InputError: as lookup; also a missing feature, or a wrong shape, dtype, NaN or infinity in dense.
        """
        if dense is not None and not isinstance(dense, Tensor):
            dense = torch.from_numpy(as_matrix(dense))
        return run_now(self.predict_steps(PredictInputs(dense, features, context, inputs)))

    @at_one_state
    def predict_steps(self, request: PredictInputs) -> Steps[Outputs]:
        """:meth:`predict` as a generator for callers that do not block."""
        return predict_one(self, request)

    @at_one_state
    def replay(self, request: Request) -> Answer:
        """Run a golden request; returns every embedding, module by module, and the outputs.

        Raises:
            ConfigError: the dense part cannot run on it.
        """
        features = replace(bags_of(request.features), strings=request.strings)
        taken = self.intake.take(features, need_all=True).features
        self.inputs.check_facts([taken], request.inputs)
        if self._ids is not None:
            taken = self.compute_ids(taken, lambda about: input_tensor(about, request))
        found = run_now(self.find([taken]))
        if found.missing:
            raise UnavailableError(f"ranks {', '.join(map(str, found.missing))} do not respond")
        outputs: list[Tensor] = []
        if self._engine is not None:
            vectors = (t for f in found.parts for t in tensors_of(f, dense_input=True))
            tensors = self.arranged(vectors, lambda about: input_tensor(about, request))
            outputs = self.run_checked(tensors, taken.batch)
        return Answer(to_host([t for given in found.parts for t in tensors_of(given)]), outputs)

    @at_one_state
    def check_request(self, index: int) -> None:
        """Replay golden request ``index``; raises ArchiveError (C1, C2) if it fails or its answer is not the stored one."""
        request, answer = read_requests(self.archive)[index]
        try:
            given = self.replay(request)
        except RecinferError as error:
            raise ArchiveError(f"golden request {index} fails: {error}", rule="C2") from error
        except Exception as error:  # a lookup on a GPU raises exceptions of many types
            reason = " ".join(str(error).split())[:500]
            raise ArchiveError(f"golden request {index} fails: {type(error).__name__}: {reason}", rule="C2") from error
        compare_answers(index, given, answer)

    def _check_answers(self) -> None:
        for index in range(self.manifest.check.num_requests):
            self.check_request(index)
        self.check_merging()
        self.check_user()

    @at_one_state
    def check_user(self) -> None:
        """Run the golden requests of one sample with the user's inputs as their context and the sample as two candidates.

        Raises:
            ArchiveError: the user and candidates programs answer otherwise than the dense program (C2).
        """
        if self.user is None:
            return
        for index, (request, _) in enumerate(read_requests(self.archive)):
            if request.features.stride() != 1:
                continue
            expected = self.replay(request).outputs
            found = self._two_candidates(request)
            for name, tensor in zip(self.output_names, expected):
                if not torch.allclose(found[name], tensor, rtol=_MERGE_RELATIVE, atol=_MERGE_ABSOLUTE):
                    raise ArchiveError(
                        f"golden request {index}: with a context, output {name!r} differs by "
                        f"{float((found[name] - tensor).abs().max()):.3g}; the user and candidates programs are not those of "
                        f"the dense program",
                        rule="C2",
                    )

    def _two_candidates(self, request: Request) -> Outputs:
        """The outputs of a request of one sample, which is given as two equal candidates of one user."""
        assert self.user is not None
        names, dense_name = self.user.names, self.inputs.dense_name
        bags = bags_of(request.features)
        own = tuple(key for key in bags.keys if key in names)
        rest = bags.arranged(tuple(key for key in bags.keys if key not in names))
        twice = merge_bags([rest, rest], rest.keys, weighted=rest.weights is not None)
        given = dict(request.inputs) if request.dense is None else {dense_name: request.dense}
        once = {name: value for name, value in given.items() if name in names}
        inputs = {
            name: _doubled(value) if name in self.inputs.batched | {dense_name} else value
            for name, value in given.items()
        }
        inputs = {name: value for name, value in inputs.items() if name not in names}
        context = bags.arranged(own) if own else None
        return run_now(predict_one(self, PredictInputs(None, twice, context, inputs, once)))

    @at_one_state
    def check_merging(self) -> None:
        """Run the golden requests merged; if an answer differs from its unmerged one, requests are never merged."""
        stored = read_requests(self.archive)
        together = [PredictInputs(request.dense, request.features, None, request.inputs) for request, _ in stored]
        if self._engine is None or len(together) < 2 or not self.mergeable:
            return
        for (_, answer), given in zip(stored, self.predict_many(together)):
            if isinstance(given, Exception):
                self.mergeable = False
                return
            for tensor, expected in zip(given.values(), answer.outputs):
                if not torch.allclose(tensor, expected, rtol=_MERGE_RELATIVE, atol=_MERGE_ABSOLUTE):
                    self.mergeable = False


def _doubled(value: GivenInput) -> GivenInput:
    """An input of one sample for two samples."""
    if isinstance(value, Tensor):
        return torch.cat([value, value])
    weights = value.weights_or_none()
    return JaggedTensor(
        torch.cat([value.values()] * 2),
        None if weights is None else torch.cat([weights] * 2),
        torch.cat([value.lengths()] * 2),
    )


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    preload: bool = False,
    lock: bool = False,
    check_hashes: bool = False,
    dense_threads: int = 1,
    dense_engine: Literal["onnx", "torch"] | None = None,
    reuse_outputs: bool = False,
    lookups: LookupsOf | None = None,
) -> Predictor:
    """Open an archive for serving.

    Args:
        path: the archive's folder.
        device: ``"cpu"``, or ``"cuda"``: rank r's tables go to GPU r.
        preload: read all table pages now instead of at their first use.
        lock: also lock the tables in memory (mlock; needs a sufficient limit, ulimit -l).
        check_hashes: hash the shards too (reads every byte); everything else is always hashed.
        dense_threads: threads that one call of the dense program uses; servers run many calls at once, so 1.
        dense_engine: ``"onnx"`` or ``"torch"`` instead of the manifest's choice.
        reuse_outputs: keep the memory of freed outputs for the next ones, in the whole process: outputs above 32 MiB
            come in about half the time (:func:`recinfer.quant.outputs.keep_outputs`).
        lookups: creates lookups that replace local tables; no shard is opened then.

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
        lookups=lookups,
    )
    predictor.check_request(0)  # proves that this machine gives the stored answer, and warms every part up
    predictor.check_merging()
    predictor.check_user()
    return predictor
