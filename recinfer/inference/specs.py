"""Specifications of a model's inputs and outputs, without a torch import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["FeatureSpec", "InputSpec", "Outputs", "values_per_sample"]


@dataclass(frozen=True)
class FeatureSpec:
    """One output of lookup: its name, its table, and whether its feature is optional in a prediction.

    ``missing``: a prediction without the feature fails (``"reject"``), or uses no ids (``"empty"``) or this id in every
    sample. A lookup may leave out any feature. ``weighted``: whether requests may bring weights for its ids. ``computed``: the
    model computes the ids from its inputs, so a lookup cannot have the feature.
    """

    name: str
    table: str
    rows: int
    dim: int
    pooled: bool
    missing: str | int = "reject"
    weighted: bool = False
    computed: bool = False


@dataclass(frozen=True)
class InputSpec:
    """One input of a model's forward, as requests name it.

    Attributes:
        name: the name in requests.
        path: the place in forward's arguments, as ``batch.sparse_features['base']``.
        kind: ``"ids"``: a feature; ``"tensor"``; ``"jagged"``: a list of values per sample.
        dtype: of the tensor or the values, as ``float32``.
        shape: of the tensor or the values: a number per fixed axis, ``"batch"``, or text for another free axis. Of ids and
            jagged inputs the first axis holds the values of all samples.
        weighted: whether each value may have a weight.
        per_sample: the number of values of every sample; 0: any number.
        as_long_as: the input that has as many values in each sample; empty: none.
        counts: the input whose values this one counts: its numbers of a sample sum to that input's number of values;
            empty: none.
        user: whether the export named it as the user's: forward's part of these alone runs once for a context.
    """

    name: str
    path: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    weighted: bool = False
    per_sample: int = 0
    as_long_as: str = ""
    counts: str = ""
    user: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether a request has one tensor for all its samples."""
        return self.kind == "tensor" and self.shape[:1] != ("batch",)

    @property
    def facts(self) -> str:
        """Properties of the input that forward relies on, next to dtype and shape, as text; empty: none."""
        told = ["one tensor for all samples"] if self.is_shared else []
        if self.per_sample:
            told.append(f"exactly {self.per_sample} per sample")
        if self.as_long_as:
            told.append(f"as many as {self.as_long_as}")
        if self.counts:
            told.append(f"counts of the values of {self.counts}")
        return ", ".join(told)

    def expected(self, batch: int | None = None) -> str:
        """The dtype and shape as text, of ``batch`` samples: ``float32 [5, 2]``, or ``a list of int64 per sample``."""
        sizes = [_size_text(size, batch) for size in self.shape]
        if self.kind == "tensor":
            return f"{self.dtype} [{', '.join(sizes)}]"
        rest = f" [{', '.join(sizes[1:])}]" if sizes[1:] else ""
        return f"a list of {self.dtype}{rest} per sample"

    def described(self, *, strings: bool = False) -> str:
        """The input as one line of text: what a request holds, the facts, and forward's name if it is another.

        Args:
            strings: whether the ids may be strings.
        """
        values = "strings or rows" if strings else "ids"
        text = f"a list of {values} per sample" if self.kind == "ids" else self.expected()
        text = f"{text}, {self.facts}" if self.facts else text
        return f"{text} (forward's {self.path})" if self.path != self.name else text


def values_per_sample(specs: Mapping[str, InputSpec], name: str) -> int:
    """The number of values of the input ``name`` in each sample that forward relies on; 1 where any number is right."""
    name = next((counts.name for counts in specs.values() if counts.counts == name), name)
    spec = specs.get(name)
    if spec is None:
        return 1
    return spec.per_sample or specs.get(spec.as_long_as, spec).per_sample or 1


def _size_text(size: int | str, batch: int | None) -> str:
    if size == "batch":
        return "batch" if batch is None else str(batch)
    return "any" if isinstance(size, str) else str(size)


class Outputs(dict[str, Any]):
    """The model's outputs by name, float32 ``[B, ...]``: tensors, or numpy arrays from a client.

    Attributes:
        missing: ranks whose hosts did not respond; the vectors of their rows were zero.
    """

    missing: tuple[int, ...]

    def __init__(self, *args: Any, missing: tuple[int, ...] = ()) -> None:
        super().__init__(*args)
        self.missing = missing
