"""The models and versions that a server has, the choice of one for a request, and the answers and run costs of each."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from recinfer.errors import ConfigError, InputError, NotFoundError
from recinfer.excerpts import quoted
from recinfer.inference.stages import BATCH_BOUNDS, Histogram, HistogramState, Stages
from recinfer.serving.engine.state import Spread

if TYPE_CHECKING:
    from recinfer.inference.archived import ArchivedModel
    from recinfer.inference.predictor import Predictor

__all__ = ["AnswerCounts", "ModelRegistry", "RequestStats", "RunCost", "ServedModel"]

_DECAY = 0.8  # by which each run multiplies the weight of earlier ones


class RunCost:
    """Smoothed CPU seconds per sample of one version of a model, weighted by samples.

    A sample costs less in a large run than alone: a rate that was learned from single samples is too high for the first
    merged run, and right after it. Any thread may call; of two simultaneous calls, one figure may be lost.
    """

    __slots__ = ("_samples", "_seconds")

    def __init__(self) -> None:
        self._seconds = self._samples = 0.0

    def expected(self, samples: int) -> float:
        """Expected CPU seconds of a run of ``samples`` samples; 0 before the first run."""
        return self._seconds / self._samples * samples if self._samples else 0.0

    def learn(self, samples: int, seconds: float) -> None:
        """Record a run of ``samples`` samples that took ``seconds`` CPU seconds."""
        self._seconds = _DECAY * self._seconds + seconds
        self._samples = _DECAY * self._samples + samples


class AnswerCounts:
    """Answers by call and gRPC code name, and their seconds by call: of one served version, or of no version. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: Counter[tuple[str, str]] = Counter()
        self._latency: dict[str, Histogram] = {}

    def add(self, call: str, code: str, seconds: float | None) -> None:
        """Count one answer; None: an answer without a duration."""
        with self._lock:
            self._codes[call, code] += 1
            if seconds is None:
                return
            latency = self._latency.get(call)
            if latency is None:
                latency = self._latency[call] = Histogram()
        latency.add(seconds)

    def codes(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code)."""
        with self._lock:
            return dict(self._codes)

    def latency(self) -> dict[str, HistogramState]:
        """Histograms of seconds by call."""
        with self._lock:
            latency = dict(self._latency)
        return {call: histogram.state() for call, histogram in latency.items()}


@dataclass(frozen=True)
class ServedModel:
    """One version of one model, ready to answer.

    Attributes:
        name: the model's name in requests, which may differ from the name in its archive.
        version: the version's name in requests: the version in its archive's manifest, or its folder in the model store.
        predictor: runs the version.
        pooled_width: sum of the widths of its pooled features.
        sequence_width: sum of the widths of its unpooled features.
        since: ``time.monotonic()`` when the version was loaded.
        run_cost: estimates the duration of its dense runs.
        answers: counts the answers to its requests.
    """

    name: str
    version: str
    predictor: Predictor
    pooled_width: int
    sequence_width: int
    since: float = field(default_factory=time.monotonic, compare=False)
    run_cost: RunCost = field(default_factory=RunCost, compare=False)
    answers: AnswerCounts = field(default_factory=AnswerCounts, compare=False)

    @classmethod
    def of(cls, name: str, predictor: Predictor | ArchivedModel, version: str = "") -> ServedModel:
        """Wrap ``predictor`` under ``name`` and ``version`` (empty: the version of its archive)."""
        engine = predictor.predictor if hasattr(predictor, "predictor") else predictor
        widths = [(feature.dim, feature.pooled) for feature in engine.features]
        return cls(
            name=name,
            version=version or engine.manifest.version,
            predictor=engine,
            pooled_width=sum(dim for dim, pooled in widths if pooled),
            sequence_width=sum(dim for dim, pooled in widths if not pooled),
        )

    def widths_of(self, keys: Iterable[str]) -> tuple[int, int]:
        """``pooled_width`` and ``sequence_width`` of the features ``keys`` alone."""
        wanted = set(keys)
        pooled = sequence = 0
        for feature in self.predictor.features:
            # A feature that several tables read has one output per table, named feature@table.
            if feature.name in wanted or feature.name.split("@")[0] in wanted:
                pooled += feature.dim * feature.pooled
                sequence += feature.dim * (not feature.pooled)
        return pooled, sequence


@dataclass(frozen=True)
class _Versions:
    """The versions of one model; ``weights`` sum to more than 0, and ``before`` holds the weights that they replaced.

    ``labels``: label -> version. ``faults``: version -> the reason why it may answer wrongly.
    """

    by_name: Mapping[str, ServedModel]
    weights: Mapping[str, int]
    before: Mapping[str, int] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)

    def choose(self) -> ServedModel:
        """A random version, with a probability proportional to its weight."""
        if len(self.weights) == 1:
            return self.by_name[next(iter(self.weights))]
        return self.by_name[random.choices(list(self.weights), list(self.weights.values()))[0]]


class ModelRegistry:
    """The served models by name and version; the first added model is the default.

    Readers take no lock: every change builds a new state and replaces the old one at once. Thread-safe.

    Args:
        models: name -> predictor, or the models to serve.

    Raises:
        ConfigError: no model, or a name that is empty.
        InputError: a version of a model twice.
    """

    def __init__(self, models: Mapping[str, Predictor | ArchivedModel] | Iterable[ServedModel]) -> None:
        if isinstance(models, Mapping):
            models = [ServedModel.of(name, predictor) for name, predictor in models.items()]
        models = list(models)
        names = [model.name for model in models]
        if not names or not all(names):
            raise ConfigError(f"models: got {names}, expected at least one model, each with a name")
        self._lock = threading.Lock()
        self._models: dict[str, _Versions] = {}
        pairs = [(model.name, model.version) for model in models]
        for name, version in pairs:
            if pairs.count((name, version)) > 1:
                raise InputError(f"models: version {version!r} of model {name!r} was given twice; give each once")
        for model in models:
            self.add(model)

    def names(self) -> list[str]:
        """The names of all models, the default first."""
        return list(self._models)

    def versions(self, name: str) -> dict[str, ServedModel]:
        """The versions of a model in the order of their loading; raises NotFoundError."""
        return dict(self._of(name).by_name)

    def weights(self, name: str) -> dict[str, int]:
        """The versions that requests without a version go to, each with its weight; raises NotFoundError."""
        return dict(self._of(name).weights)

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a model, each with its version; raises NotFoundError."""
        return dict(self._of(name).labels)

    def resolve_label(self, model: str, label: str) -> str:
        """The version that ``label`` names of ``model`` (empty: the default model).

        Raises:
            NotFoundError: no such model or label; the message lists the known names.
        """
        return self._labelled(model, self._of(model), label)

    def get(self, name: str = "", version: str = "", label: str = "") -> ServedModel:
        """The model ``name`` (empty: the default model) at ``version`` (empty: a random version by weight).

        Args:
            label: names a version, instead of ``version``.

        Raises:
            NotFoundError: no such model, version or label; the message lists the known names.
            InputError: both a version and a label.
        """
        versions = self._of(name)
        if label:
            if version:
                raise InputError(f"version: got {quoted(version)} and the label {quoted(label)}, expected one of them")
            return versions.by_name[self._labelled(name, versions, label)]
        if not version:
            return versions.choose()
        self._check_version(name, versions, version)
        return versions.by_name[version]

    def add(self, model: ServedModel) -> None:
        """Serve ``model``: the first version of a model as its default, a further version for requests that name it.

        Raises:
            InputError: the version is loaded already.
        """
        with self._lock:
            here = self._models.get(model.name)
            if here is not None and model.version in here.by_name:
                raise InputError(
                    f"version: {model.version!r} of model {model.name!r} is loaded already; unload it first"
                )
            if here is None:
                new = _Versions({model.version: model}, {model.version: 1})
            else:
                new = replace(here, by_name={**here.by_name, model.version: model})
            self._replace(model.name, new)

    def remove(self, name: str, version: str) -> None:
        """Remove a version and its labels; running requests finish with the version.

        Raises:
            NotFoundError: no such model or version.
            InputError: the version has a weight and others are left, or is the last version of the last model.
        """
        with self._lock:
            versions = self._of(name)
            self._check_version(name, versions, version)
            name = name or next(iter(self._models))
            left = {v: model for v, model in versions.by_name.items() if v != version}
            if not left and len(self._models) == 1:
                raise InputError(f"version: {version!r} of {name!r} is the last one served; load another first")
            if left and version in versions.weights:
                raise InputError(
                    f"version: {version!r} of model {name!r} has weight {versions.weights[version]}; "
                    f"set another default first: {', '.join(map(repr, left))}"
                )
            models = {key: value for key, value in self._models.items() if key != name or left}
            if left:
                before = versions.before if versions.before and version not in versions.before else None
                labels = {label: of for label, of in versions.labels.items() if of != version}
                faults = {of: why for of, why in versions.faults.items() if of != version}
                models[name] = _Versions(left, versions.weights, before, labels, faults)
            self._models = models

    def set_weights(self, name: str, weights: Mapping[str, int]) -> None:
        """Spread requests without a version over versions by weight.

        Equal weights again change nothing, also not the weights to which ``rollback`` returns.

        Raises:
            NotFoundError: a model or version that is not loaded.
            InputError: no weight above 0.
        """
        with self._lock:
            versions = self._of(name)
            for version in weights:
                self._check_version(name, versions, version)
            positive = {version: weight for version, weight in weights.items() if weight > 0}
            if not positive:
                raise InputError(f"weights: got {dict(weights)}, expected at least one above 0")
            # A caller without an answer repeats its call; the version to roll back to stays the same.
            before = versions.before if positive == versions.weights else versions.weights
            new = replace(versions, weights=positive, before=before)
            self._replace(name, new)

    def set_labels(self, name: str, labels: Mapping[str, str]) -> None:
        """Give a model these labels, each the name of a version, and no others.

        Raises:
            NotFoundError: a model or version that is not loaded.
            InputError: an empty label.
        """
        with self._lock:
            versions = self._of(name)
            for label, version in labels.items():
                if not label:
                    raise InputError(f"labels: got an empty one for version {quoted(version)}, expected a name")
                self._check_version(name, versions, version)
            new = replace(versions, labels=dict(labels))
            self._replace(name, new)

    def set_fault(self, name: str, version: str, why: str) -> None:
        """Note the reason ``why`` a version may answer wrongly; an empty reason clears the fault. Raises NotFoundError."""
        with self._lock:
            versions = self._of(name)
            self._check_version(name, versions, version)
            faults = {of: said for of, said in {**versions.faults, version: why}.items() if said}
            self._replace(name, replace(versions, faults=faults))

    def faults(self, name: str) -> dict[str, str]:
        """The versions of a model that may answer wrongly, each with the reason; raises NotFoundError."""
        return dict(self._of(name).faults)

    def faulty(self) -> set[str]:
        """The models that have a version with a fault."""
        return {name for name, versions in self._models.items() if versions.faults}

    def rollback(self, name: str) -> None:
        """Bring back the weights that the last ``set_weights`` replaced; raises NotFoundError, InputError."""
        with self._lock:
            versions = self._of(name)
            if versions.before is None:
                raise InputError(f"model: {name!r} has nothing to go back to")
            new = replace(versions, weights=versions.before, before=versions.weights)
            self._replace(name, new)

    def spreads(self) -> dict[str, Spread]:
        """The spread of each model, by its name."""
        return {
            name: Spread(
                dict(versions.weights),
                None if versions.before is None else dict(versions.before),
                dict(versions.labels),
            )
            for name, versions in self._models.items()
        }

    def restore(self, spreads: Mapping[str, Spread]) -> None:
        """Apply the ``spreads`` of another process, which may have versions that this process lacks.

        A model keeps its weights where this process lacks all its versions with a weight in ``spreads``.
        """
        with self._lock:
            models = dict(self._models)
            for name, spread in spreads.items():
                here = models[name].by_name if name in models else {}
                left = {version: weight for version, weight in spread.weights.items() if version in here}
                if left:
                    back = spread.before if spread.before is not None and spread.before.keys() <= here.keys() else None
                    named = {label: version for label, version in spread.labels.items() if version in here}
                    models[name] = replace(models[name], weights=left, before=back, labels=named)
            self._models = models

    def _replace(self, name: str, new: _Versions) -> None:
        self._models = {**self._models, name or next(iter(self._models)): new}

    def _of(self, name: str) -> _Versions:
        models = self._models
        versions = models.get(name) if name else next(iter(models.values()))
        if versions is None:
            raise NotFoundError(f"model: got {quoted(name)}, expected one of {', '.join(map(repr, models))}")
        return versions

    def _labelled(self, name: str, versions: _Versions, label: str) -> str:
        if label not in versions.labels:
            known = ", ".join(map(repr, versions.labels))
            of = name or next(iter(self._models))
            expected = f"expected one of {known}" if known else "which has no labels"
            raise NotFoundError(f"label: got {quoted(label)} of model {of!r}, {expected}")
        return versions.labels[label]

    def _check_version(self, name: str, versions: _Versions, version: str) -> None:
        if version not in versions.by_name:
            known = ", ".join(map(repr, versions.by_name))
            of = name or next(iter(self._models))
            raise NotFoundError(f"version: got {quoted(version)} of model {of!r}, expected one of {known}")


class RequestStats:
    """Requests answered since the start. Thread-safe.

    Attributes:
        stages: seconds of decode, queue and encode; each predictor counts its own lookup and dense.
        batch: samples of a request.
        unnamed: answers to requests that name nothing served.
    """

    def __init__(self) -> None:
        self.stages = Stages("decode", "queue", "encode")
        self.batch = Histogram(BATCH_BOUNDS)
        self.unnamed = AnswerCounts()
        self._all = AnswerCounts()

    def add(self, call: str, code: str, seconds: float | None, version: AnswerCounts | None = None) -> None:
        """Count one answer to ``call`` with ``code`` after ``seconds`` in the server.

        Args:
            seconds: None: the call was refused when it arrived.
            version: the counts of the version that the request got; None: the request names nothing served.
        """
        self._all.add(call, code, seconds)
        (self.unnamed if version is None else version).add(call, code, seconds)

    def requests(self) -> dict[tuple[str, str], int]:
        """Answers by (call, code), of unloaded versions too."""
        return self._all.codes()

    def latency(self) -> dict[str, HistogramState]:
        """Histograms of the seconds from the request's arrival in Python to its answer, by call, of unloaded versions too."""
        return self._all.latency()
