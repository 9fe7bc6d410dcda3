"""Runs one or several requests with one lookup and one run of the dense part; each gets its own result or error.

A request may have a context (a user, a query) that applies to all its candidates: the context's features are looked up
for the first candidate and their vectors are copied to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.manifest import DenseInput
from recinfer.columns import as_matrix, of_context
from recinfer.errors import InputError, UnavailableError
from recinfer.inference.bags import Bags, Features, bags_of
from recinfer.inference.intake import TakenFeatures
from recinfer.inference.lookups import Steps
from recinfer.inference.model import LoadedModel
from recinfer.inference.named_inputs import GivenInput
from recinfer.inference.programs import TensorOf
from recinfer.inference.results import LookupResult, Outputs, on_host, tensors_of
from recinfer.input_arrays import as_input, batch_of_inputs
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["PredictInputs", "lookup_many", "lookup_one", "predict_many", "predict_one"]


@dataclass(frozen=True)
class PredictInputs:
    """The inputs of Predictor.predict.

    Attributes:
        dense: ``[B, num_dense]`` or None.
        features: ids of B samples; None for a model whose requests have no features.
        context: ids of one sample that apply to all, or None; a mapping may hold other inputs of one sample too.
        inputs: other inputs of B samples, by name.
        context_inputs: other inputs of one sample that apply to all, by name.
    """

    dense: Tensor | None
    features: Features | None
    context: Features | None = None
    inputs: Mapping[str, Any] | None = None
    context_inputs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class _CheckedRequest:
    """A checked predict request.

    Attributes:
        features: the bags that lookups read.
        shared: names of the context's features among them; only the first sample has bags of these.
        of_context: names of all inputs that the context brings.
        repeated: those among them that have one sample, which stands for all samples of the request.
        inputs: other inputs by name; those of the context have one sample.
        given: the request's own bags, where the ids program computed ``features``.
    """

    dense: Tensor | None
    features: Bags
    shared: frozenset[str]
    of_context: frozenset[str]
    repeated: frozenset[str]
    inputs: Mapping[str, GivenInput]
    given: Bags

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.features.batch


def lookup_one(model: LoadedModel, features: Features) -> Steps[LookupResult]:
    """See ``Predictor.lookup``."""
    return (yield from _find(model, [_taken_for_lookup(model, features)]))[0]


def lookup_many(model: LoadedModel, requests: Sequence[Features]) -> Steps[list[LookupResult | Exception]]:
    """``Predictor.lookup`` of several requests, with one lookup per module."""
    return _together(model, requests, _taken_for_lookup, _find)


def predict_one(model: LoadedModel, request: PredictInputs) -> Steps[Outputs]:
    """See ``Predictor.predict``."""
    outputs = yield from _run(model, [_checked(model, request)])
    assert outputs is not None
    return outputs[0]


def predict_many(model: LoadedModel, requests: Sequence[PredictInputs]) -> Steps[list[Outputs | Exception]]:
    """``Predictor.predict`` of several requests, with one lookup per module and one run of the dense part."""
    return _together(model, requests, _checked, _run)


def _together(
    model: LoadedModel,
    requests: Sequence[Any],
    check: Callable[[LoadedModel, Any], Any],
    run: Callable[[LoadedModel, list[Any]], Steps[list[Any] | None]],
) -> Steps[list[Any]]:
    """The answer or error of each request: of one run of all, or of a run of each where one is invalid."""
    answers: dict[int, Any] = {}
    taken: dict[int, Any] = {}
    for at, request in enumerate(requests):
        try:
            taken[at] = check(model, request)
        except Exception as error:
            answers[at] = error
    if len(taken) > 1 and model.mergeable:
        try:
            found = yield from run(model, list(taken.values()))
            answers.update(zip(taken, found or ()))
        except UnavailableError as error:  # not the fault of one request
            answers.update(dict.fromkeys(taken, error))
        except Exception:  # a request is invalid; separate runs find which
            pass
    for at, mine in taken.items():
        if at not in answers:
            try:
                found = yield from run(model, [mine])
                assert found is not None
                answers[at] = found[0]
            except Exception as error:
                answers[at] = error
    try:
        return [answers[at] for at in range(len(requests))]
    finally:
        answers.clear()  # an error's traceback holds this frame: together a cycle, which would keep the model


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


def _find(model: LoadedModel, taken: Sequence[TakenFeatures]) -> Steps[list[LookupResult]]:
    """The rows of each request."""
    if len(taken) == 1:
        found = yield from model.find([taken[0].features], taken[0].present)
        return [model.select(found.parts, taken[0].present, found.missing)]
    found = yield from model.find([mine.features for mine in taken])
    parts = _split_by_request(on_host(found.parts), [mine.features.batch for mine in taken])
    return [model.select(own, mine.present, found.missing) for mine, own in zip(taken, parts)]


def _checked(model: LoadedModel, request: PredictInputs) -> _CheckedRequest:
    intake, named = model.intake, model.inputs
    model.check_has_dense()
    candidates = bags_of(_no_features(request) if request.features is None else request.features)
    bags, once = _context(model, request)
    dense, inputs = _dense_by_name(named.dense_names, request.dense, request.inputs)
    dense_once, once = _dense_by_name(named.dense_names, None, once)
    of_context = frozenset(once or ())
    shared: frozenset[str] = frozenset()
    own = None
    if bags is not None:
        if bags.batch != 1:
            raise InputError(
                f"context: got {bags.batch} samples, expected 1 ([[3, 7]] is one of two ids); its features apply to every "
                f"candidate"
            )
        shared = frozenset(bags.keys)
        twice = shared.intersection(candidates.keys)
        if twice:
            raise InputError(f"context: feature {min(twice)!r} is also in features; give it in only one of the two")
        own = intake.take(bags, need_all=False, fill=False).features
    features = intake.take(candidates, need_all=True, elsewhere=shared).features
    twice = of_context.intersection(inputs or ())
    if twice:
        raise InputError(f"context: input {min(twice)!r} is also in inputs; give it in only one of the two")
    checked = named.check(inputs, features.batch, of_context) | named.check(once, 1, only=True)
    named.check_facts([features] if own is None else [features, own], checked)
    if own is not None:
        features = features.with_context(own, repeat=model.computes_ids)
    repeated = (of_context & named.batched) | shared
    of_context |= shared
    if dense_once is not None:
        if dense is not None:
            raise InputError("context: the dense input is also in the request; give it in only one of the two")
        once_checked = model.check_dense(dense_once, 1)
        assert once_checked is not None
        dense, of_context = once_checked.expand(features.batch, -1).contiguous(), of_context | {named.dense_name}
    else:
        dense = model.check_dense(dense, features.batch)
    given = features
    if model.computes_ids:
        shared = frozenset()
        alone = _CheckedRequest(dense, features, shared, of_context, repeated, checked, given)
        features = model.compute_ids(features, lambda about: _input(about, [alone]))
    return _CheckedRequest(dense, features, shared, of_context, repeated, checked, given)


def _no_features(request: PredictInputs) -> Bags:
    """No features, of as many samples as the request's inputs have."""
    batch = batch_of_inputs({name: as_input(name, given) for name, given in (request.inputs or {}).items()})
    return Bags((), batch, np.zeros(1, np.int64), np.zeros(0, np.int64))


def _context(model: LoadedModel, request: PredictInputs) -> tuple[Bags | None, Mapping[str, Any] | None]:
    """The context's features and its other inputs, which a mapping may hold together."""
    context, once = request.context, dict(request.context_inputs or {})
    if isinstance(context, Mapping):
        names = model.inputs.names | model.inputs.dense_names
        once |= {name: value for name, value in context.items() if name in names}
        context = {name: value for name, value in context.items() if name not in names} or None
    if context is None:
        return None, once
    with of_context():
        bags = bags_of(context)
    if bags.batch == 1 and (own := model.inputs.names.intersection(bags.keys)):
        once |= {name: model.inputs.from_ids(name, bags.arranged((name,)).values) for name in own}
        rest = tuple(key for key in bags.keys if key not in own)
        return bags.arranged(rest) if rest else None, once
    return bags, once


def _dense_by_name(
    names: AbstractSet[str], dense: Tensor | None, inputs: Mapping[str, Any] | None
) -> tuple[Tensor | None, Mapping[str, Any] | None]:
    """``dense`` and the other inputs of a request, which may have the dense matrix among them by one of its ``names``."""
    given = sorted(names & (inputs or {}).keys())
    if inputs is None or not given:
        return dense, inputs
    name = given[0]
    if len(given) > 1:
        raise InputError(f"inputs: got {given[0]!r} and {given[1]!r}, which are the same input; give one of the two")
    if dense is not None:
        raise InputError(f"got dense and inputs[{name!r}], which are the same input; give one of the two")
    value = inputs[name]
    exact = isinstance(value, Tensor) and value.dtype == torch.float32
    return value if exact else torch.from_numpy(as_matrix(value)), {
        other: value for other, value in inputs.items() if other != name
    }


def _input(about: DenseInput, taken: Sequence[_CheckedRequest]) -> Tensor:
    """A program's input that is no vector of a lookup, of all requests."""
    if about.kind == "dense":
        return _joined([mine.dense for mine in taken if mine.dense is not None])
    assert about.feature is not None
    return _joined([_part_of(about, about.feature, mine) for mine in taken])


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _part_of(about: DenseInput, name: str, mine: _CheckedRequest, *, once: bool = False) -> Tensor:
    """A request's own part of a program's input; ``once``: the one sample of its context, else one row per sample."""
    times = mine.batch if name in mine.repeated and not once else 1
    given = mine.inputs.get(name)
    if isinstance(given, Tensor):
        return given.repeat(times, *[1] * (given.dim() - 1)) if times > 1 else given
    if given is None:
        bags = mine.given.arranged((name,))
        if name not in mine.shared:
            times = 1  # the ids program's features are repeated already
        lengths = torch.from_numpy(bags.lengths_FB[0].astype(np.int64))
        if name in mine.shared:
            lengths = lengths[:1].repeat(times)
        values: Any = torch.from_numpy(bags.values.astype(np.int64, copy=False))
        weights = None if bags.weights is None else torch.from_numpy(bags.weights)
    else:
        values, lengths, weights = given.values(), given.lengths().repeat(times), given.weights_or_none()
    if about.kind == "jagged_lengths":
        return lengths
    if about.kind == "jagged_weights":
        values = torch.ones(len(values)) if weights is None else weights
    return values.repeat(times, *[1] * (values.dim() - 1)) if times > 1 else values


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
        dense = model.to_device(_joined(given))
    found = yield from model.find([mine.features for mine in taken])
    contexts = any(mine.shared for mine in taken)
    user = model.user
    # With one candidate a request, two runs cost more than one.
    # The user's programs run where every request has samples and gives all of the user's inputs as its context.
    if user is not None and total > len(taken) and all(m.batch and user.names <= m.of_context for m in taken):
        outputs = model.run_user(*_by_owner(model, taken, found.parts, batches), batches)
        return _split_outputs(model, outputs, taken, batches, found.missing)
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
    return _split_outputs(model, outputs, taken, batches, found.missing)


def _split_outputs(
    model: LoadedModel,
    outputs: Sequence[Tensor],
    taken: Sequence[_CheckedRequest],
    batches: Sequence[int],
    missing: tuple[int, ...],
) -> list[Outputs] | None:
    if len(taken) == 1:
        return [Outputs(zip(model.output_names, outputs), missing=missing)]
    if any(output.dim() == 0 or output.shape[0] != sum(batches) for output in outputs):
        return None
    split = [output.split(batches) for output in outputs]
    return [Outputs(zip(model.output_names, row), missing=missing) for row in zip(*split)]


def _by_owner(
    model: LoadedModel, taken: Sequence[_CheckedRequest], found: Sequence[Any], batches: Sequence[int]
) -> tuple[TensorOf, TensorOf]:
    """Functions from a program's input to its tensor: of the user, one row per request; and of the samples."""
    first = torch.tensor([0, *batches[:-1]]).cumsum(0)  # the sample that has the context's ids
    pooled: dict[str, Tensor] = {}
    sequences: dict[str, tuple[str, JaggedTensor]] = {}
    for i, (part, given) in enumerate(zip(model.parts, found)):
        if isinstance(given, Tensor):
            _broadcast(part, given, taken)
            pooled[f"pooled_{i}"] = given
        else:
            named = zip(part.info.features, given)
            sequences.update({f"sequence_{i}_{j}": pair for j, pair in enumerate(named)})

    def user_of(about: DenseInput) -> Tensor:
        if about.kind == "table":
            return model.whole_tables[about.name]
        if about.kind == "pooled":
            return pooled[about.name][first]
        if about.kind in ("values", "lengths"):  # no sample but the first ones has ids of the user
            _, sequence = sequences[about.name.rpartition("_")[0]]
            return sequence.values() if about.kind == "values" else sequence.lengths().long()[first]
        if about.kind == "dense":
            return _joined([mine.dense[:1] for mine in taken if mine.dense is not None])
        assert about.feature is not None
        return _joined([_part_of(about, about.feature, mine, once=True) for mine in taken])

    def tensor_of(about: DenseInput) -> Tensor:
        if about.kind == "table":
            return model.whole_tables[about.name]
        if about.kind == "pooled":
            return pooled[about.name]
        if about.kind in ("values", "lengths"):
            name, sequence = sequences[about.name.rpartition("_")[0]]
            values, lengths = _repeated(name, sequence, taken, batches)
            return values if about.kind == "values" else lengths
        return _input(about, taken)

    return user_of, tensor_of


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
    pairs = (_repeated(name, sequence, taken, batches) for name, sequence in zip(part.info.features, found))
    return [tensor for pair in pairs for tensor in pair]


def _repeated(
    name: str, sequence: JaggedTensor, taken: Sequence[_CheckedRequest], batches: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Values and lengths of one output; a context's list is repeated for every candidate."""
    if not any(name in mine.shared for mine in taken):
        return sequence.values(), sequence.lengths().long()
    lengths = list(sequence.lengths().split(batches))
    values = list(sequence.values().split([int(n.sum()) for n in lengths]))
    for at, (mine, batch) in enumerate(zip(taken, batches)):
        if name in mine.shared:
            values[at], lengths[at] = values[at].repeat(batch, 1), lengths[at][:1].repeat(batch)
    return torch.cat(values), torch.cat(lengths).long()
