"""Makes random requests of a served model from its description, with the numbers of values that its forward relies on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays
from recinfer.errors import InputError
from recinfer.inference.specs import InputSpec
from recinfer.input_arrays import InputArrays
from recinfer.serving.client.client import ModelDescription

__all__ = ["RandomPredict", "RandomRequests"]

_COMPUTED_FROM = 1 << 20  # ids that forward computes others from, and that no table has the name of, are below it
_FREE = 4  # size of free axes other than the batch


@dataclass(frozen=True)
class RandomPredict:
    """One request for a prediction; the fields are arguments of ``predict``.

    Attributes:
        dense: float32 ``[B, num_dense]``, or None.
        features: of B samples; None where requests have none.
        context: the user's features and inputs, of one sample; None without.
        inputs: other inputs by name.
    """

    dense: NDArray[np.float32] | None
    features: FeatureArrays | None
    context: dict[str, Any] | None
    inputs: dict[str, InputArrays]

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``predict``."""
        return {"dense": self.dense, "features": self.features, "context": self.context, "inputs": self.inputs}


class RandomRequests:
    """Makes requests of ``model`` with ids that are uniform over the rows of their tables.

    Where the export named the user's inputs (``recinfer export --user``), a request of several samples brings these as its
    context: one user with many candidates.

    Args:
        model: the description of a served model.
        seed: equal seeds give equal requests.

    Attributes:
        names: the features that requests have.
    """

    def __init__(self, model: ModelDescription, seed: int = 0) -> None:
        self._model = model
        self._random = np.random.default_rng(seed)
        # A feature that several tables read is listed once per table, as feature@table: its ids fit the smallest table.
        self._rows: dict[str, int] = {}
        for feature in model.features:
            name = feature.name.split("@")[0]
            self._rows[name] = min(feature.rows, self._rows.get(name, feature.rows))
        self._looked_up = frozenset(f.name.split("@")[0] for f in model.features if not f.computed)
        given = [spec.name for spec in model.inputs if spec.kind == "ids"]
        self.names = (
            tuple(dict.fromkeys([*(name for name in self._rows if name in given), *given]))
            if model.inputs
            else tuple(self._rows)
        )
        self._user = frozenset(spec.name for spec in model.inputs if spec.user)
        self._tensors = [spec for spec in model.inputs if spec.kind == "tensor"]
        self._jagged = [spec for spec in model.inputs if spec.kind == "jagged"]

    def lookup(self, lengths: Mapping[str, NDArray[np.int32]]) -> FeatureArrays:
        """The features of a lookup; ``lengths``: feature -> number of ids per sample, int32 ``[B]``.

        Raises:
            InputError: forward computes the ids of all features.
        """
        taken = {name: each for name, each in lengths.items() if name in self._looked_up}
        if not taken:
            raise InputError(f"{self._model.name} computes the ids of all its lookups; ask for predictions")
        return self._features(taken)

    def predict(self, batch: int, lengths: Mapping[str, NDArray[np.int32]]) -> RandomPredict:
        """A prediction for ``batch`` samples.

        Args:
            lengths: feature -> number of ids per sample, int32 ``[batch]``, where forward relies on no number.
        """
        user = self._user if batch > 1 else frozenset()
        counts = self._counts(batch, lengths, user)
        features = self._features({name: counts[name] for name in self.names if name not in user})
        own = self._features({name: counts[name] for name in self.names if name in user})
        inputs = {spec.name: self._values(spec, counts[spec.name]) for spec in self._jagged}
        dense = None
        for spec in self._tensors:
            tensor = self._numbers(spec.dtype, _sizes(spec.shape, 1 if spec.name in user else batch))
            if self._model.num_dense and spec.name not in user:
                dense = tensor
            else:
                inputs[spec.name] = InputArrays(tensor)
        if self._model.num_dense and not self._tensors:  # an archive from before inputs were recorded
            dense = self._random.standard_normal((batch, self._model.num_dense), np.float32)
        context: dict[str, Any] = {**_by_name(own), **{name: inputs.pop(name) for name in list(inputs) if name in user}}
        return RandomPredict(dense, features if features.keys else None, context or None, inputs)

    def _counts(
        self, batch: int, lengths: Mapping[str, NDArray[np.int32]], user: frozenset[str]
    ) -> dict[str, NDArray[np.int32]]:
        """The number of values per sample of each feature and jagged input."""
        specs = {spec.name: spec for spec in self._model.inputs}
        found: dict[str, NDArray[np.int32]] = {}
        for name in (*self.names, *(spec.name for spec in self._jagged)):
            each = specs[name].per_sample if name in specs else 0
            free = lengths.get(name, np.ones(batch, np.int32))
            found[name] = (np.full(batch, each, np.int32) if each else free)[: 1 if name in user else batch]
        for name in found:
            other = specs[name].as_long_as if name in specs else ""
            if other in found:
                found[name] = np.broadcast_to(found[other], found[name].shape)
        return found

    def _features(self, lengths: Mapping[str, NDArray[np.int32]]) -> FeatureArrays:
        names = tuple(lengths)
        counts = [int(each.sum()) for each in lengths.values()]
        ids = [self._random.integers(self._rows.get(n, _COMPUTED_FROM), size=c) for n, c in zip(names, counts)]
        values = np.concatenate([np.zeros(0, np.int64), *ids])
        weights = self._random.random(len(values), np.float32) if self._model.needs_weights else None
        batch = len(next(iter(lengths.values()))) if lengths else 0
        return FeatureArrays(names, batch, np.concatenate([np.zeros(0, np.int32), *lengths.values()]), values, weights)

    def _values(self, spec: InputSpec, lengths: NDArray[np.int32]) -> InputArrays:
        values = self._numbers(spec.dtype, (int(lengths.sum()), *_sizes(spec.shape[1:], 0)))
        return InputArrays(values, np.ascontiguousarray(lengths))

    def _numbers(self, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Normal numbers, or 0 and 1 where they are whole: such inputs mostly count or select."""
        if "float" in dtype:
            return self._random.standard_normal(shape, np.float32)
        return self._random.integers(2, size=shape).astype(dtype)


def _sizes(shape: tuple[int | str, ...], batch: int) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else batch if size == "batch" else _FREE for size in shape)


def _by_name(features: FeatureArrays) -> dict[str, Any]:
    """The features of one sample as a mapping, which may hold other inputs too."""
    found: dict[str, Any] = {}
    start = 0
    for name, count in zip(features.keys, features.lengths.tolist()):
        ids, weights = features.values[start : start + count], features.weights
        found[name] = [ids] if weights is None else ([ids], [weights[start : start + count]])
        start += count
    return found
