"""Runs one or several requests with one lookup and one run of the dense part; each gets its own result or error.

A request may have a context (a user, a query) that applies to all its candidates: the context's features are looked up
for the first candidate and their vectors are copied to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.manifest import DenseInput
from recinfer.columns import as_matrix
from recinfer.errors import InputError, UnavailableError
from recinfer.inference.bags import Bags, Features, bags_of
from recinfer.inference.intake import TakenFeatures
from recinfer.inference.lookups import Steps
from recinfer.inference.model import LoadedModel
from recinfer.inference.named_inputs import GivenInput
from recinfer.inference.results import LookupResult, Outputs, on_host, tensors_of
from recinfer.input_arrays import as_input, batch_of_inputs
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["PredictInputs", "lookup_many", "lookup_one", "predict_many", "predict_one"]


@dataclass(frozen=True)
class PredictInputs:
    """The inputs of Predictor.predict: ``dense [B, num_dense]`` or None, features of B samples or None, context of one or
    None, and other inputs by name."""

    dense: Tensor | None
    features: Features | None
    context: Features | None = None
    inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _CheckedRequest:
    """A checked predict request.

    Attributes:
        features: the bags that lookups read.
        shared: names of the context's features among them; only the first sample has bags of these.
        inputs: other inputs by name.
        given: the request's own bags, where the ids program computed ``features``.
    """

    at: int
    dense: Tensor | None
    features: Bags
    shared: frozenset[str]
    inputs: Mapping[str, GivenInput]
    given: Bags

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.features.batch


def lookup_one(model: LoadedModel, features: Features) -> Steps[LookupResult]:
    """See ``Predictor.lookup``."""
    taken = _taken_for_lookup(model, features)
    found = yield from model.find([taken.features], taken.present)
    return model.select(found.parts, taken.present, found.missing)


def _taken_for_lookup(model: LoadedModel, features: Features) -> TakenFeatures:
    """The features of a lookup; raises InputError for a feature whose ids the ids program computes."""
    bags = bags_of(features)
    taken = model.intake.take(bags, need_all=False)
    if not model.computes_ids:
        return taken
    own = [spec.name.split("@")[0] for spec in model.features if not spec.computed]
    for name in bags.keys:
        if name not in own:
            have = ", ".join(map(repr, dict.fromkeys(own))) or "none"
            raise InputError(
                f"feature {name!r}: this model computes ids from it, so a lookup cannot have it; call predict, or look up "
                f"features that are passed on as they are: {have}"
            )
    return TakenFeatures(model.intake.steps.apply(taken.features), taken.present)


def lookup_many(model: LoadedModel, requests: Sequence[Features]) -> Steps[list[LookupResult | Exception]]:
    """``Predictor.lookup`` of several requests, with one lookup per module."""
    if len(requests) == 1 or not model.mergeable:
        alone = []
        for request in requests:
            alone.append((yield from _result_or_error(lookup_one(model, request))))
        return alone
    answers: list[Any] = [None] * len(requests)
    taken = []
    for at, request in enumerate(requests):
        try:
            taken.append((at, _taken_for_lookup(model, request)))
        except Exception as error:
            answers[at] = error
    if not taken:
        return answers
    batches = [mine.features.batch for _, mine in taken]
    try:
        found = yield from model.find([mine.features for _, mine in taken])
    except UnavailableError as error:  # not the fault of one request
        for at, _ in taken:
            answers[at] = error
        return answers
    except Exception:  # a request has a bad id; separate runs find which
        for at, _ in taken:
            answers[at] = yield from _result_or_error(lookup_one(model, requests[at]))
        return answers
    for (at, mine), parts in zip(taken, _split_by_request(on_host(found.parts), batches)):
        answers[at] = model.select(parts, mine.present, found.missing)
    return answers


def predict_many(model: LoadedModel, requests: Sequence[PredictInputs]) -> Steps[list[Outputs | Exception]]:
    """``Predictor.predict`` of several requests, with one lookup per module and one run of the dense part."""
    if len(requests) == 1 or not model.mergeable:
        alone = []
        for request in requests:
            alone.append((yield from _result_or_error(predict_one(model, request))))
        return alone
    answers: list[Any] = [None] * len(requests)
    taken = []
    for at, request in enumerate(requests):
        try:
            taken.append(_checked(model, at, request))
        except Exception as error:
            answers[at] = error
    if not taken:
        return answers
    outputs = None
    try:
        outputs = yield from _run(model, taken)
    except UnavailableError as error:  # not the fault of one request
        for mine in taken:
            answers[mine.at] = error
        return answers
    except Exception:  # a request is invalid; separate runs find which
        pass
    if outputs is None:
        for mine in taken:
            answers[mine.at] = yield from _result_or_error(predict_one(model, requests[mine.at]))
        return answers
    for mine, mine_outputs in zip(taken, outputs):
        answers[mine.at] = mine_outputs
    return answers


def predict_one(model: LoadedModel, request: PredictInputs) -> Steps[Outputs]:
    """See ``Predictor.predict``."""
    outputs = yield from _run(model, [_checked(model, 0, request)])
    assert outputs is not None
    return outputs[0]


def _result_or_error(steps: Steps[Any]) -> Steps[Any]:
    try:
        return (yield from steps)
    except Exception as error:
        return error


def _checked(model: LoadedModel, at: int, request: PredictInputs) -> _CheckedRequest:
    intake, named = model.intake, model.inputs
    model.check_has_dense()
    candidates = bags_of(_no_features(request) if request.features is None else request.features)
    dense, inputs = _dense_by_name(model, request)
    shared: frozenset[str] = frozenset()
    if request.context is None:
        features = intake.take(candidates, need_all=True).features
        checked = named.check(inputs, features.batch)
        named.check_facts([features], checked)
    else:
        context = bags_of(request.context)
        if context.batch != 1:
            raise InputError(f"context: got {context.batch} samples, expected 1; its features apply to every candidate")
        shared = frozenset(context.keys)
        twice = shared.intersection(candidates.keys)
        if twice:
            raise InputError(f"context: feature {min(twice)!r} is also in features; give it in only one of the two")
        features = intake.take(candidates, need_all=True, elsewhere=shared).features
        own = intake.take(context, need_all=False, fill=False).features
        checked = named.check(inputs, features.batch)
        named.check_facts([features, own], checked)
        if model.computes_ids:
            features, shared = features.with_context(own, repeat=True), frozenset()
        else:
            features = features.with_context(own)
    dense = model.check_dense(dense, features.batch)
    given = features
    if model.computes_ids:
        alone = _CheckedRequest(at, dense, features, shared, checked, given)
        features = model.compute_ids(features, lambda about: _input(about, [alone]))
    return _CheckedRequest(at, dense, features, shared, checked, given)


def _no_features(request: PredictInputs) -> Bags:
    """No features, of as many samples as the request's inputs have."""
    batch = batch_of_inputs({name: as_input(name, given) for name, given in (request.inputs or {}).items()})
    return Bags((), batch, np.zeros(1, np.int64), np.zeros(0, np.int64))


def _dense_by_name(model: LoadedModel, request: PredictInputs) -> tuple[Tensor | None, Mapping[str, Any] | None]:
    """``dense`` and the other inputs of a request, which may name the dense matrix among its inputs."""
    name, inputs = model.inputs.dense_name, request.inputs
    if not inputs or not name or name not in inputs:
        return request.dense, inputs
    if request.dense is not None:
        raise InputError(f"got dense and inputs[{name!r}], which are the same input; give one of the two")
    given = inputs[name]
    dense = given if isinstance(given, Tensor) else torch.from_numpy(as_matrix(given))
    return dense, {other: value for other, value in inputs.items() if other != name}


def _input(about: DenseInput, taken: Sequence[_CheckedRequest]) -> Tensor:
    """A program's input that is no vector of a lookup, of all requests."""
    if about.kind == "dense":
        dense = [mine.dense for mine in taken if mine.dense is not None]
        return dense[0] if len(dense) == 1 else torch.cat(dense)
    assert about.feature is not None
    parts = [_part_of(about, about.feature, mine) for mine in taken]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _part_of(about: DenseInput, name: str, mine: _CheckedRequest) -> Tensor:
    given = mine.inputs.get(name)
    if isinstance(given, Tensor):
        return given
    if given is None:
        bags = mine.given.arranged((name,))
        times = mine.batch if name in mine.shared else 1
        lengths = torch.from_numpy(bags.lengths_FB[0].astype(np.int64))
        if times > 1:
            lengths = lengths[:1].repeat(times)
        if about.kind == "jagged_lengths":
            return lengths
        values: Any = bags.values.astype(np.int64, copy=False)
        if about.kind == "jagged_weights":
            values = np.ones(len(values), np.float32) if bags.weights is None else bags.weights
        return torch.from_numpy(np.tile(values, times) if times > 1 else values)
    if about.kind == "jagged_lengths":
        return given.lengths()
    return given.weights() if about.kind == "jagged_weights" else given.values()


def _split_by_request(found: Sequence[Any], batches: Sequence[int]) -> list[list[Any]]:
    """Split results by request: ``[B, D]`` of each pooled module, JaggedTensors by feature of the others."""
    columns: list[Sequence[Any]] = []
    for given in found:
        if isinstance(given, Tensor):
            columns.append(given.split(batches))
            continue
        by_request: list[list[JaggedTensor]] = [[] for _ in batches]
        for sequence in given:
            lengths = sequence.lengths().split(batches)
            values = sequence.values().split([int(n.sum()) for n in lengths])
            for mine, v, n in zip(by_request, values, lengths):
                mine.append(JaggedTensor.from_parts_unchecked(v, None, n))
        columns.append(by_request)
    return [list(row) for row in zip(*columns)]


def _run(model: LoadedModel, taken: Sequence[_CheckedRequest]) -> Steps[list[Outputs] | None]:
    """The outputs of each request; None if an output does not have one row per sample and cannot be split."""
    batches = [mine.features.batch for mine in taken]
    total = sum(batches)
    dense = None
    if model.num_dense:
        given = [mine.dense for mine in taken if mine.dense is not None]
        # The copy to a GPU starts before the lookup, so that it runs while the ids are prepared.
        dense = model.to_device(given[0] if len(given) == 1 else torch.cat(given))
    found = yield from model.find([mine.features for mine in taken])
    contexts = any(mine.shared for mine in taken)
    vectors_of: list[Tensor] = []
    for part, vectors in zip(model.parts, found.parts):
        if contexts and not isinstance(vectors, Tensor):
            vectors_of += _repeat_sequences(part, vectors, taken, batches)
            continue
        if contexts:
            _broadcast(part, vectors, taken)
        vectors_of += tensors_of(vectors, dense_input=True)
    tensors = model.arranged(
        vectors_of, lambda about: dense if dense is not None and about.kind == "dense" else _input(about, taken)
    )
    outputs = model.run_engine(tensors, total)
    if len(taken) == 1:
        return [Outputs(zip(model.output_names, outputs), missing=found.missing)]
    if any(output.dim() == 0 or output.shape[0] != total for output in outputs):
        return None
    split = [output.split(batches) for output in outputs]
    return [Outputs(zip(model.output_names, row), missing=found.missing) for row in zip(*split)]


def _broadcast(part: Any, found: Tensor, taken: Sequence[_CheckedRequest]) -> None:
    """Write the context's columns of each request's first row ``[S, D]`` into its other rows."""
    rows: Any = found.numpy() if found.device.type == "cpu" else found
    start = 0
    for mine in taken:
        stop = start + mine.features.batch
        if stop == start:
            continue
        for first, last in part.columns_of(mine.shared):
            rows[start + 1 : stop, first:last] = rows[start, first:last]
        start = stop


def _repeat_sequences(
    part: Any, found: Sequence[JaggedTensor], taken: Sequence[_CheckedRequest], batches: Sequence[int]
) -> list[Tensor]:
    """Per output values and lengths of the candidates; a context's list is repeated for every candidate."""
    tensors = []
    for name, sequence in zip(part.info.features, found):
        lengths = list(sequence.lengths().split(batches))
        values = list(sequence.values().split([int(n.sum()) for n in lengths]))
        for at, (mine, batch) in enumerate(zip(taken, batches)):
            if name in mine.shared:
                values[at], lengths[at] = values[at].repeat(batch, 1), lengths[at][:1].repeat(batch)
        tensors += [torch.cat(values), torch.cat(lengths).long()]
    return tensors
