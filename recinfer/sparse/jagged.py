"""JaggedTensor: rows of different length, as concatenated values plus lengths (or offsets)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.sparse.checks import check_jagged, require
from recinfer.sparse.offsets import lengths_to_offsets, offsets_to_lengths
from recinfer.sparse.printing import format_jagged, summary
from recinfer.sparse.proxyable import Proxyable

__all__ = ["JaggedParts", "JaggedTensor", "jt_is_equal"]


class JaggedParts(metaclass=Proxyable):
    """The getters of a JaggedTensor, of ``B`` rows, and of a KeyedJaggedTensor, of ``F * B``."""

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None

    def values(self) -> Tensor:
        """``[N, ...]``."""
        return self._values

    def weights(self) -> Tensor:
        """``[N]``; InputError without weights."""
        if self._weights is None:
            raise InputError(
                f"this {type(self).__name__} has no weights; build it with weights=, or call weights_or_none()"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """``[N]`` or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """``[B]``, or ``[F * B]`` with keys; computed from the offsets once if needed."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = offsets_to_lengths(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths, or None when only offsets are known."""
        return self._lengths

    def offsets(self) -> Tensor:
        """``[B + 1]``, or ``[F * B + 1]`` with keys; computed from the lengths once if needed."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = lengths_to_offsets(self._lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets, or None when only lengths are known."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device


class JaggedTensor(JaggedParts):
    """Rows of different length.

    Args:
        values: ``[N, ...]``, row behind row.
        weights: ``[N]`` or None, one a value.
        lengths: integers ``[B]``, the length of each row.
        offsets: integers ``[B + 1]``, where each row starts; at least one of lengths and offsets.

    Raises:
        InputError: sizes that do not fit together, or negative lengths.

    >>> JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 0, 1])).to_padded_dense()
    tensor([[7, 8],
            [0, 0],
            [9, 0]])
    """

    _fields = ["_values", "_weights", "_lengths", "_offsets"]  # noqa: RUF012 - the name and the type are TorchRec's

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_jagged("JaggedTensor", values, weights, lengths, offsets)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @staticmethod
    def from_parts_unchecked(
        values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None = None
    ) -> JaggedTensor:
        """Build without checks, from parts that are known to be consistent."""
        self = JaggedTensor.__new__(JaggedTensor)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        return self

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No rows and no values, of the given dtypes."""
        return JaggedTensor.from_parts_unchecked(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            torch.empty(0, dtype=lengths_dtype, device=device),
            torch.zeros(1, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
        """No rows and no values, of the dtypes and the device of ``jt``.

        Args:
            device: if given, the result has ``jt``'s sizes on this device, in uninitialised memory for :meth:`copy_`.
        """
        if device is not None:
            return jt._map(lambda tensor: torch.empty_like(tensor, device=device))
        lengths = jt._lengths if jt._lengths is not None else jt.offsets()
        return JaggedTensor.from_parts_unchecked(
            jt._values.new_empty((0, *jt._values.shape[1:])),
            None if jt._weights is None else jt._weights.new_empty((0, *jt._weights.shape[1:])),
            lengths.new_empty(0),
        )

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """From padded rows ``values[B, M, ...]`` of which the first ``lengths[B]`` entries count.

        Raises:
            InputError: the numbers of rows differ, or a length is above ``M``.
        """
        require(
            values.dim() >= 2 and values.shape[0] == lengths.shape[0],
            f"JaggedTensor.from_dense_lengths: got values {tuple(values.shape)} and {lengths.numel()} lengths; "
            "expected values [B, M, ...] and B lengths",
        )
        mask = torch.arange(values.shape[1], device=values.device).expand(values.shape[:2]) < lengths.unsqueeze(-1)
        # A length above M has too few values; the constructor compares the two numbers.
        return JaggedTensor(values[mask], weights=None if weights is None else weights[mask], lengths=lengths)

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """From one tensor per row (rows of ``values[i].shape[0]`` entries), and weights of the same shapes.

        Raises:
            InputError: no rows, or weights whose rows differ in length from the values'.
        """
        require(len(values) > 0, "JaggedTensor.from_dense: got no rows; use JaggedTensor.empty for an empty one")
        if weights is not None:
            for row, (value, weight) in enumerate(zip(values, weights, strict=False)):
                require(
                    len(value) == len(weight),
                    f"JaggedTensor.from_dense: row {row} has {len(value)} values and {len(weight)} weights",
                )
            require(
                len(values) == len(weights),
                f"JaggedTensor.from_dense: got {len(values)} rows of values and {len(weights)} rows of weights",
            )
        device = values[0].device
        lengths = torch.tensor([len(v) for v in values], dtype=torch.int32, device=device)
        return JaggedTensor.from_parts_unchecked(
            torch.cat(values), None if weights is None else torch.cat(weights), lengths, lengths_to_offsets(lengths)
        )

    def to_dense(self) -> list[Tensor]:
        """The rows as views of the values, one tensor per row."""
        return list(self._values.split(self.lengths().tolist())) if self.lengths().numel() else []

    def to_dense_weights(self) -> list[Tensor] | None:
        """The rows of weights, one tensor per row; None without weights."""
        if self._weights is None:
            return None
        return list(self._weights.split(self.lengths().tolist())) if self.lengths().numel() else []

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """``[B, M, ...]``: rows cut to, or filled with ``padding_value`` up to, ``M``.

        Args:
            desired_length: ``M``; the longest row if None (waits for the device).
            padding_value: the value that fills short rows.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """The weights, padded as :meth:`to_padded_dense`; None without weights."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, flat: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths, starts = self.lengths().long().unsqueeze(1), self.offsets()[:-1].long().unsqueeze(1)
        width: Any = desired_length
        if width is None:
            width = lengths.max().item() if lengths.numel() else 0  # torch.export follows item(), not int()
        # Every place of the result reads a value or the row of padding behind the values, with operators that ONNX has
        # too.
        column = torch.arange(width, device=flat.device)
        source = torch.where(column < lengths, starts + column, flat.shape[0])
        padded = torch.cat([flat, flat.new_full((1, *flat.shape[1:]), padding_value)])
        return padded.index_select(0, source.flatten()).reshape(*source.shape, *flat.shape[1:])

    def _map(self, function: Callable[[Tensor], Tensor]) -> JaggedTensor:
        weights, lengths, offsets = (
            None if part is None else function(part) for part in (self._weights, self._lengths, self._offsets)
        )
        return JaggedTensor.from_parts_unchecked(function(self._values), weights, lengths, offsets)

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        """A JaggedTensor whose parts are on ``device``."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> JaggedTensor:
        """A copy in page-locked memory (needs an accelerator)."""
        return self._map(lambda t: t.pin_memory())

    def copy_(self, jt: JaggedTensor, non_blocking: bool = False) -> JaggedTensor:
        """Copy the numbers of ``jt``, of the same sizes, into the memory of ``self``; returns ``self``."""
        for name in self._fields:
            mine, theirs = getattr(self, name), getattr(jt, name)
            if mine is not None and theirs is not None:
                require(
                    mine.shape == theirs.shape,
                    f"JaggedTensor.copy_: {name[1:]} has shape {tuple(mine.shape)} here, {tuple(theirs.shape)} in "
                    f"the source",
                )
                mine.copy_(theirs, non_blocking=non_blocking)
            elif mine is not None:
                setattr(self, name, None)
            else:
                setattr(self, name, theirs)
        return self

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the allocator that ``stream`` uses the parts."""
        for part in (self._values, self._weights, self._lengths, self._offsets):
            if part is not None and part.device.type != "cpu":
                part.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of the parts that exist now."""
        parts = (self._values, self._weights, self._lengths, self._offsets)
        return sum(p.numel() * p.element_size() for p in parts if p is not None)

    def __str__(self) -> str:
        return format_jagged(self._values, self._weights, self.lengths())

    def __repr__(self) -> str:
        return summary(
            "JaggedTensor", values=self._values, weights=self._weights, lengths=self._lengths, offsets=self._offsets
        )


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Whether the two have equal values, weights and lengths; values are compared to float closeness, as in
    TorchRec."""
    if not (isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor)):
        return False
    return (
        same_tensor(jt_1._values, jt_2._values)
        and same_tensor(jt_1._weights, jt_2._weights)
        and same_tensor(jt_1.lengths(), jt_2.lengths())
    )


def same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether the two tensors are both None, or have equal shapes and close values."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and a.device == b.device and torch.allclose(a, b.to(a.dtype))
