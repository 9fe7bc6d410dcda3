"""Checks the inputs of predict that are named: tensors, jagged numbers, and the facts that forward relies on.

Shape suffixes: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.manifest import InputInfo, Manifest
from recinfer.errors import InputError
from recinfer.inference.bags import Bags
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["GivenInput", "NamedInputs"]

GivenInput = Tensor | JaggedTensor
"""A checked input: a tensor, or numbers of any count a sample."""


class NamedInputs:
    """Checks and converts the inputs of requests beside features and ``dense``.

    Attributes:
        infos: the named inputs of the model.
        names: their names.
        dense_name: the name of the matrix that ``dense`` carries, or "".
        mergeable: whether requests may be concatenated: every tensor has the batch as its only free axis.
    """

    def __init__(self, manifest: Manifest) -> None:
        signature = manifest.signature
        self.infos = manifest.named_inputs
        self.names = frozenset(info.name for info in self.infos)
        self._by_name = {info.name: info for info in self.infos}
        self._per_sample = {} if signature is None else signature.per_sample
        self._as_long_as = {} if signature is None else signature.as_long_as
        self._at_most = {} if signature is None else signature.at_most
        self.dense_name = ""
        if signature is not None and manifest.dense is not None and manifest.dense.num_dense:
            self.dense_name = next(info.name for info in signature.inputs if info.kind == "tensor")
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
            given: name -> tensor, array or list of numbers; of a jagged input a JaggedTensor, ``(values, lengths)``, or a list of
                numbers per sample.
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
                raise InputError(f"inputs: {info.name!r} is missing; expected {expected(info, batch)}")
            value = given[info.name]
            found[info.name] = (
                self._jagged(info, value, batch) if info.kind == "jagged" else self._tensor(info, value, batch)
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
        if not self._per_sample and not self._as_long_as:
            return
        lengths_B: dict[str, NDArray[Any]] = {}
        for part in bags:
            lengths_B.update(zip(part.keys, part.lengths_FB))
        for name, value in inputs.items():
            if isinstance(value, JaggedTensor):
                lengths_B[name] = value.lengths().numpy()
        none = np.zeros(1, np.int64)
        for name, count in self._per_sample.items():
            mine = lengths_B.get(name, none)
            if (mine != count).any():
                sample = int(np.argmax(mine != count))
                raise InputError(
                    f"feature {name!r}: sample {sample} has {int(mine[sample])} values; this model takes exactly {count} of "
                    f"every sample"
                )
        for name, other in self._as_long_as.items():
            mine, theirs = np.broadcast_arrays(lengths_B.get(name, none), lengths_B.get(other, none))
            if (mine != theirs).any():
                sample = int(np.argmax(mine != theirs))
                raise InputError(
                    f"feature {name!r}: sample {sample} has {int(mine[sample])} values and {other!r} {int(theirs[sample])}; "
                    f"this model takes as many of both"
                )

    def _tensor(self, info: InputInfo, value: Any, batch: int) -> Tensor:
        tensor = _as_tensor(info, value, batch)
        shape = [batch if size == "batch" else size for size in info.shape]
        if tensor.dim() != len(shape) or any(isinstance(s, int) and s != n for s, n in zip(shape, tensor.shape)):
            raise InputError(f"input {info.name!r}: got shape {list(tensor.shape)}; expected {expected(info, batch)}")
        _check_finite(info, tensor)
        return tensor

    def _jagged(self, info: InputInfo, value: Any, batch: int) -> JaggedTensor:
        values: Any
        lengths: Any
        weights = None
        if isinstance(value, JaggedTensor):
            values, lengths, weights = value.values(), value.lengths(), value.weights_or_none()
        elif isinstance(value, tuple) and len(value) == 2:
            values, lengths = value
        else:
            rows = [np.asarray(row) for row in value]
            lengths = np.array([len(row) for row in rows], np.int64)
            values = np.concatenate(rows) if rows else np.zeros(0)
        counts = torch.as_tensor(lengths).long()
        tensor = _as_tensor(info, values, batch)
        if counts.shape != (batch,) or bool((counts < 0).any()) or int(counts.sum()) != tensor.shape[0]:
            raise InputError(
                f"input {info.name!r}: got {tensor.shape[0]} values and lengths {list(counts.shape)} with the sum "
                f"{int(counts.sum())}; expected {batch} lengths that sum to the number of values"
            )
        if list(tensor.shape[1:]) != list(info.shape[1:]):
            raise InputError(f"input {info.name!r}: got values {list(tensor.shape)}; expected {expected(info, batch)}")
        _check_finite(info, tensor)
        if info.weighted and weights is None:
            weights = torch.ones(tensor.shape[0])
        return JaggedTensor.from_parts_unchecked(tensor, weights, counts)


def expected(info: InputInfo, batch: int | None = None) -> str:
    """The dtype and shape of an input, as text."""
    sizes = [
        "any" if isinstance(s, str) and s != "batch" else str(batch or s if s == "batch" else s) for s in info.shape
    ]
    if info.kind == "tensor":
        return f"{info.dtype} [{', '.join(sizes)}]"
    rest = f" of {info.dtype} [{', '.join(sizes[1:])}]" if sizes[1:] else f" of {info.dtype}"
    return f"a list{rest} per sample"


def _as_tensor(info: InputInfo, value: Any, batch: int) -> Tensor:
    dtype = getattr(torch, info.dtype)
    try:
        tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    except (TypeError, ValueError):
        raise InputError(
            f"input {info.name!r}: got {type(value).__name__}, not numbers; expected {expected(info, batch)}"
        ) from None
    if tensor.dtype == dtype:
        return tensor.contiguous()
    loses = tensor.is_floating_point() and tensor.numel() and not dtype.is_floating_point
    if loses or tensor.is_complex() or (dtype == torch.bool and bool(((tensor != 0) & (tensor != 1)).any())):
        raise InputError(f"input {info.name!r}: got {tensor.dtype}; expected {expected(info, batch)}")
    converted = tensor.to(dtype)
    if not dtype.is_floating_point and bool((converted.to(tensor.dtype) != tensor).any()):
        raise InputError(f"input {info.name!r}: got numbers beyond {info.dtype}; expected {expected(info, batch)}")
    return converted.contiguous()


def _check_finite(info: InputInfo, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        place = (~torch.isfinite(tensor)).nonzero()[0].tolist()
        what = "sample" if info.kind == "tensor" else "value"
        raise InputError(
            f"input {info.name!r}: {what} {place[0] if place else 0} has {float(tensor[tuple(place)])}; expected finite numbers"
        )
