"""Checks the inputs of predict that are named: tensors, jagged numbers, and the facts that forward relies on.

Shape suffixes: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.manifest import Manifest
from recinfer.columns import dense_name
from recinfer.errors import InputError
from recinfer.inference.bags import Bags
from recinfer.inference.results import input_specs
from recinfer.inference.specs import InputSpec
from recinfer.input_arrays import as_input
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["GivenInput", "NamedInputs"]

GivenInput = Tensor | JaggedTensor
"""A checked input: a tensor, or numbers of any count a sample."""


class NamedInputs:
    """Checks and converts the inputs of requests beside features and ``dense``.

    Attributes:
        specs: all inputs of forward.
        infos: the named inputs of requests.
        names: their names.
        batched: names of those that have a part for each sample.
        dense_name: the name of the matrix that ``dense`` carries, or "".
        mergeable: whether requests may be concatenated: every tensor has the batch as its only free axis.
    """

    def __init__(self, manifest: Manifest) -> None:
        signature = manifest.signature
        self.specs = input_specs(manifest)
        self.names = frozenset(info.name for info in manifest.named_inputs)
        self.infos = tuple(spec for spec in self.specs if spec.name in self.names)
        self.batched = frozenset(i.name for i in self.infos if i.kind == "jagged" or i.shape[:1] == ("batch",))
        self._by_name = {info.name: info for info in self.infos}
        self._per_sample = {} if signature is None else signature.per_sample
        self._as_long_as = {} if signature is None else signature.as_long_as
        self._counts = {} if signature is None else signature.counts
        self._at_most = {} if signature is None else signature.at_most
        self.dense_name = ""
        self.dense_names: frozenset[str] = frozenset()
        if signature is not None and manifest.dense is not None and manifest.dense.num_dense:
            self.dense_name = next(info.name for info in signature.inputs if info.kind == "tensor")
            ids = [info.name for info in signature.inputs if info.kind == "ids"]
            self.dense_names = frozenset((self.dense_name, dense_name(ids)))
        self.mergeable = all(
            info.shape[:1] == ("batch",) and all(isinstance(size, int) for size in info.shape[1:])
            for info in self.infos
            if info.kind == "tensor"
        )

    def check(
        self,
        given: Mapping[str, Any] | None,
        batch: int,
        elsewhere: AbstractSet[str] | None = None,
        *,
        only: bool = False,
    ) -> dict[str, GivenInput]:
        """The inputs as tensors of their dtypes.

        Args:
            given: name -> input, see :func:`recinfer.input_arrays.as_input`. A tensor ``[B, n, ...]`` given for a jagged input
                has ``n`` values per sample.
            batch: number of samples.
            elsewhere: inputs that the request brings in its context, so that they are not missing.
            only: check the given inputs alone: those of a context.

        Raises:
            InputError: an unknown or missing input, another shape or dtype, NaN or infinity; names the input and the sample.
        """
        given = given or {}
        unknown = [name for name in given if name not in self._by_name]
        if unknown:
            have = ", ".join(map(repr, self._by_name)) or "none beside features and dense"
            raise InputError(f"inputs: got {unknown[0]!r}; this model takes {have}")
        found: dict[str, GivenInput] = {}
        for info in self.infos:
            if info.name not in given and (only or (elsewhere and info.name in elsewhere)):
                continue
            if info.name not in given:
                raise InputError(f"inputs: {info.name!r} is missing; expected {info.expected(batch)}")
            parts = _parts(info, given[info.name], batch)
            found[info.name] = (
                self._jagged(info, batch, *parts) if info.kind == "jagged" else self._tensor(info, batch, *parts)
            )
        self._check_free_axes(found)
        return found

    def _check_free_axes(self, found: Mapping[str, GivenInput]) -> None:
        """Axes of one name have one size, which is at most the largest one."""
        first: dict[str, tuple[str, int]] = {}
        for info in self.infos:
            value = found.get(info.name)
            for axis, size in zip(info.shape, value.shape if isinstance(value, Tensor) else ()):
                if not isinstance(axis, str) or axis == "batch":
                    continue
                name, other = first.setdefault(axis, (info.name, size))
                if other != size:
                    raise InputError(
                        f"input {info.name!r}: got {size} where {name!r} has {other}; expected the same size"
                    )
                if size > self._at_most.get(axis, size):
                    raise InputError(
                        f"input {info.name!r}: got an axis of {size}; this model takes at most {self._at_most[axis]}"
                    )

    def check_facts(self, bags: Sequence[Bags], inputs: Mapping[str, GivenInput]) -> None:
        """Check the numbers of values that forward relies on.

        Args:
            bags: the features of the samples, and those of their context.

        Raises:
            InputError: names the input and the sample.
        """
        if not self._per_sample and not self._as_long_as and not self._counts:
            return
        lengths_B: dict[str, NDArray[Any]] = {}
        for part in bags:
            lengths_B.update(zip(part.keys, part.lengths_FB))
        for name, value in inputs.items():
            if isinstance(value, JaggedTensor):
                lengths_B[name] = value.lengths().numpy()
        none = np.zeros(1, np.int64)
        for name, count in self._per_sample.items():
            if odd := _difference(lengths_B.get(name, none), count):
                self._refuse(name, odd, f"has {odd[1]} values; this model takes exactly {count} of every sample")
        for name, other in self._as_long_as.items():
            if odd := _difference(lengths_B.get(name, none), lengths_B.get(other, none)):
                self._refuse(name, odd, f"has {odd[1]} values and {other!r} {odd[2]}; this model takes as many of both")
        for name, other in self._counts.items():
            sums, least = next((_sums(part, name) for part in bags if name in part.keys), (none, 0))
            if least < 0:
                raise InputError(
                    f"feature {name!r}: got {least}; expected counts of the values of {other!r}, 0 or more"
                )
            if odd := _difference(sums, lengths_B.get(other, none)):
                self._refuse(
                    name, odd, f"counts {odd[1]} values and {other!r} has {odd[2]}; this model takes as many of both"
                )

    def _refuse(self, name: str, odd: tuple[int, int, int], reason: str) -> NoReturn:
        kind = "input" if name in self._by_name else "feature"
        raise InputError(f"{kind} {name!r}: sample {odd[0]} {reason}")

    def from_ids(self, name: str, values: NDArray[Any]) -> GivenInput:
        """The input ``name`` of one sample, from whole numbers that a request has among its ids."""
        info, tensor = self._by_name[name], torch.from_numpy(np.ascontiguousarray(values))
        if info.kind == "jagged":
            return JaggedTensor.from_parts_unchecked(tensor, None, torch.tensor([len(tensor)]))
        return tensor if len(info.shape) == 1 else tensor[None]

    def converted_bytes(self, given: Mapping[str, GivenInput] | None, *, always: bool = False) -> int:
        """The bytes that :meth:`check` allocates for inputs of another dtype than the model's; ``always``: of any dtype."""
        if not given:
            return 0
        total = 0
        for name, value in given.items():
            info = self._by_name.get(name)
            values = value.values() if isinstance(value, JaggedTensor) else value
            if info is not None and (always or values.dtype != getattr(torch, info.dtype)):
                total += values.numel() * getattr(torch, info.dtype).itemsize
        return total

    def _tensor(
        self, info: InputSpec, batch: int, values: Tensor, lengths: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        if lengths is not None:
            raise InputError(
                f"input {info.name!r}: got lists that differ in length, or values with lengths; expected {info.expected(batch)}"
            )
        tensor = _converted(info, values, batch)
        shape = [batch if size == "batch" else size for size in info.shape]
        if tensor.dim() != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(shape, tensor.shape)):
            raise InputError(f"input {info.name!r}: got shape {list(tensor.shape)}; expected {info.expected(batch)}")
        _check_finite(info, tensor, None)
        return tensor

    def _jagged(
        self, info: InputSpec, batch: int, values: Tensor, lengths: Tensor | None, weights: Tensor | None
    ) -> JaggedTensor:
        tensor = _converted(info, values, batch)
        if lengths is None:
            tensor, lengths = _rectangular(info, tensor, batch)
        lengths = lengths.long()
        if lengths.shape != (batch,) or bool((lengths < 0).any()) or int(lengths.sum()) != tensor.shape[0]:
            negative = (lengths < 0).nonzero()
            got = f"the length {int(lengths[negative[0]])} of sample {int(negative[0])}" if len(negative) else ""
            got = got or f"{len(lengths)} lengths that sum to {int(lengths.sum())}, and {tensor.shape[0]} values"
            raise InputError(
                f"input {info.name!r}: got {got}; expected {batch} lengths that sum to the number of values"
            )
        if list(tensor.shape[1:]) != list(info.shape[1:]):
            raise InputError(
                f"input {info.name!r}: got values of shape {list(tensor.shape[1:])}; expected {info.expected(batch)}"
            )
        _check_finite(info, tensor, lengths)
        if weights is not None and not info.weighted:
            raise InputError(f"input {info.name!r}: got weights; expected none, as this input takes none")
        if weights is not None:
            if weights.shape != tensor.shape[:1]:
                raise InputError(
                    f"input {info.name!r}: got {len(weights)} weights; expected {tensor.shape[0]}, one a value"
                )
            weights = weights.float()
            _check_finite(info, weights, lengths, "the weight ")
        if info.weighted and weights is None:
            weights = torch.ones(tensor.shape[0])
        return JaggedTensor.from_parts_unchecked(tensor, weights, lengths)


def _difference(mine_B: NDArray[Any], theirs_B: NDArray[Any] | int) -> tuple[int, int, int] | None:
    """The first sample in which two numbers differ, and the numbers."""
    mine_B, theirs_B = np.broadcast_arrays(mine_B, theirs_B)
    if not (differs := mine_B != theirs_B).any():
        return None
    sample = int(np.argmax(differs))
    return sample, int(mine_B[sample]), int(theirs_B[sample])


def _sums(bags: Bags, name: str) -> tuple[NDArray[Any], int]:
    """The sum of the values of the feature ``name`` in each sample, int64 [B], and the least of its values, or 0."""
    at = bags.keys.index(name)
    offsets = bags.offsets[at * bags.batch : (at + 1) * bags.batch + 1].astype(np.int64)
    values = bags.values[offsets[0] : offsets[-1]]
    total = np.concatenate((np.zeros(1, np.int64), values.cumsum(dtype=np.int64)))
    ends = total[offsets - offsets[0]]
    return ends[1:] - ends[:-1], int(values.min(initial=0))


def _parts(info: InputSpec, value: Any, batch: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, lengths and weights of an input in any form."""
    if isinstance(value, Tensor):
        return value.detach().cpu(), None, None
    if isinstance(value, JaggedTensor):
        return value.values().detach().cpu(), value.lengths().cpu(), value.weights_or_none()
    arrays = as_input(info.name, value)
    values = torch.from_numpy(np.ascontiguousarray(arrays.values))
    return values, _or_none(arrays.lengths), _or_none(arrays.weights)


def _or_none(array: NDArray[Any] | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(np.ascontiguousarray(array))


def _rectangular(info: InputSpec, tensor: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    """Values and lengths of a jagged input with the same number of values in each sample."""
    rank = len(info.shape)
    if tensor.dim() > 1 and tensor.shape[:2] == (batch, 0):  # lists without any value do not tell its shape
        rest = [size if isinstance(size, int) else 0 for size in info.shape[1:]]
        return tensor.new_zeros([0, *rest]), torch.full((batch,), 0)
    if tensor.dim() not in (rank, rank + 1) or tensor.shape[0] != batch:
        raise InputError(f"input {info.name!r}: got shape {list(tensor.shape)}; expected {info.expected(batch)}")
    each = 1
    if tensor.dim() == rank + 1:
        each, tensor = tensor.shape[1], tensor.flatten(0, 1)
    return tensor, torch.full((batch,), each)


def _converted(info: InputSpec, tensor: Tensor, batch: int) -> Tensor:
    """``tensor`` in the input's dtype; raises InputError where a value would change, except between floats."""
    dtype = getattr(torch, info.dtype)
    if tensor.dtype == dtype:
        return tensor.contiguous()
    loses = tensor.is_floating_point() and tensor.numel() and not dtype.is_floating_point
    if loses or tensor.is_complex() or (dtype == torch.bool and bool(((tensor != 0) & (tensor != 1)).any())):
        raise InputError(
            f"input {info.name!r}: got {str(tensor.dtype).removeprefix('torch.')}; expected {info.expected(batch)}"
        )
    converted = tensor.to(dtype)
    if not dtype.is_floating_point and bool((converted.to(tensor.dtype) != tensor).any()):
        raise InputError(f"input {info.name!r}: got numbers beyond {info.dtype}; expected {info.expected(batch)}")
    return converted.contiguous()


def _check_finite(info: InputSpec, tensor: Tensor, lengths: Tensor | None, what: str = "") -> None:
    """Raise InputError for NaN and infinity; ``lengths`` of a jagged input tell the sample of a value."""
    if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return
    place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
    value = float(tensor[tuple(place)])
    sample = place[0] if place else 0
    if lengths is not None:
        sample = int(torch.searchsorted(lengths.cumsum(0), place[0], right=True))
    raise InputError(f"input {info.name!r}: sample {sample} has {what}{value}; expected finite numbers")
