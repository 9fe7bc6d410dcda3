"""The inputs of a model in the V1 protocol: its features, its dense columns by the names in its archive, and named inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from recinfer.columns import dense_name
from recinfer.errors import InputError
from recinfer.excerpts import some
from recinfer.lru import LruCache
from recinfer.serving.wire.json_codec import text_of

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor
    from recinfer.inference.specs import InputSpec

__all__ = ["Layout", "ModelInputs", "inputs_of"]

_MAX_LAYOUTS = 64
_SHOWN = 20

Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """The inputs of a request, in the request's order.

    Attributes:
        features: names of its features.
        dense: names of its dense columns; the name of the list alone for numbers in one list; empty in a lookup.
        cells: sample -> the cells of its features.
        numbers: sample -> its dense numbers.
        named: names of its other inputs; empty in a lookup.
        others: sample -> the cells of its other inputs.
    """

    features: tuple[str, ...]
    dense: tuple[str, ...]
    cells: Callable[[Row], tuple[Any, ...]]
    numbers: Callable[[Row], Any]
    named: tuple[str, ...]
    others: Callable[[Row], tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The inputs of one version of a model.

    Attributes:
        features: the names of its features, in the archive's order.
        num_dense: number of dense numbers of a sample.
        columns: names of the dense numbers in the feature contract; empty without a contract.
        dense: the name of the input that holds all dense numbers of a sample as one list.
        named: the other inputs.
        dense_in_forward: another name of ``dense``: that in forward; empty: none.
        strings: the features whose ids may be strings.
    """

    features: tuple[str, ...]
    num_dense: int
    columns: tuple[str, ...]
    dense: str
    named: tuple[InputSpec, ...] = ()
    dense_in_forward: str = ""
    strings: frozenset[str] = frozenset()
    _layouts: LruCache[tuple[str, ...], Layout] = field(default_factory=lambda: LruCache(_MAX_LAYOUTS), repr=False)

    def layout(
        self, names: tuple[str, ...], field: str, *, with_dense: bool, in_context: frozenset[str] = frozenset()
    ) -> Layout:
        """The layout of a request with these inputs; ``field`` is their place in the body, ``in_context`` the inputs that its
        context has.

        Raises:
            InputError: an input that the model lacks, or some dense columns without the others.
        """
        key = (*names, "predict" if with_dense else "lookup", *sorted(in_context))
        found = self._layouts[key]
        if found is None:
            found = self._layouts[key] = self._new_layout(names, field, with_dense, in_context)
        return found

    def kind_in_context(self, name: str) -> str:
        """The kind of an input of the context: ``feature``, ``named`` or ``dense``.

        Raises:
            InputError: no input of the model, or a dense column alone.
        """
        if name in self.features:
            return "feature"
        if any(info.name == name for info in self.named):
            return "named"
        if self.num_dense and name in (self.dense, self.dense_in_forward):
            return "dense"
        known = (*self.features, *([self.dense] if self.num_dense else ()), *(info.name for info in self.named))
        raise InputError(
            f"context: got {text_of(name)}, which is no input of this model; it takes {some(known, _SHOWN)}"
        )

    @property
    def by_sample(self) -> frozenset[str]:
        """The named inputs with an entry per sample."""
        return frozenset(info.name for info in self.named if info.kind == "jagged" or info.shape[:1] == ("batch",))

    def only(self) -> str | None:
        """The name of the model's only input, which samples need not name; None for a model with several inputs."""
        return self.features[0] if len(self.features) == 1 and not self.num_dense and not self.named else None

    def _new_layout(self, names: tuple[str, ...], field: str, with_dense: bool, in_context: frozenset[str]) -> Layout:
        own, others = set(self.features), {info.name for info in self.named}
        features = tuple(name for name in names if name in own)
        named = tuple(name for name in names if name in others) if with_dense else ()
        dense: tuple[str, ...] = tuple(name for name in names if name not in own and name not in others)
        at = self.dense
        if dense == (self.dense_in_forward,):
            dense, at = (self.dense,), self.dense_in_forward
        known = (*self.features, *self.columns, *([self.dense] if self.num_dense else ()), *sorted(others))
        if unknown := [name for name in dense if name not in known]:
            raise InputError(
                f"{field}: got {text_of(unknown[0])}, which is no input of this model; it takes {some(known, _SHOWN)}"
            )
        if not features and not ((named or dense) and (in_context or not self.features)):
            raise InputError(f"{field}: got no feature, expected some of {', '.join(self.features[:_SHOWN])}")
        if not with_dense:
            dense = ()
        elif self.num_dense and not dense and self.dense in in_context:
            pass
        elif self.num_dense and not dense:
            beside = f", or the columns {', '.join(self.columns[:_SHOWN])}" if self.columns else ""
            raise InputError(
                f"{field}: got no {self.dense!r}, expected a list of {self.num_dense} numbers a sample{beside}"
            )
        elif len(dense) > 1 and self.dense in dense:
            other = next(name for name in dense if name != self.dense)
            raise InputError(f"{field}: got {self.dense!r} and {other!r}, expected one of them")
        elif dense and dense != (self.dense,):
            if missing := [name for name in self.columns if name not in dense]:
                raise InputError(
                    f"{field}: got no {missing[0]!r}, expected all of the dense columns {', '.join(self.columns[:_SHOWN])}"
                )
            dense = self.columns
        cells = _getter(features)
        numbers = itemgetter(at) if dense == (self.dense,) else _getter(dense)
        return Layout(features, dense, cells, numbers, named, _getter(named))


_known: WeakKeyDictionary[Predictor, ModelInputs] = WeakKeyDictionary()


def inputs_of(predictor: Predictor) -> ModelInputs:
    """The inputs of ``predictor``."""
    found = _known.get(predictor)
    if found is None:
        found = _known[predictor] = _inputs(predictor)
    return found


def _inputs(predictor: Predictor) -> ModelInputs:
    contract = predictor.contract
    columns = () if contract is None else tuple(feature.name for feature in contract.dense)
    features = predictor.intake.names
    dense = dense_name(features)
    if len(columns) != predictor.num_dense or not {dense, *features}.isdisjoint(columns):
        columns = ()  # not the model's columns, or names that features or the list have
    own = predictor.inputs.dense_name
    if own in (dense, *columns, *features):
        own = ""
    strings = predictor.manifest.string_features
    return ModelInputs(features, predictor.num_dense, columns, dense, predictor.inputs.infos, own, strings)


def _getter(names: tuple[str, ...]) -> Callable[[Row], tuple[Any, ...]]:
    if not names:
        return lambda row: ()
    if len(names) == 1:
        return lambda row, name=names[0]: (row[name],)  # type: ignore[misc]
    return itemgetter(*names)
