"""The state of a KeyedJaggedTensor and its getters: parts, memory, batch sizes and sizes per key.

Shapes: ``F`` keys, ``B`` batch size (the stride), ``N`` values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from recinfer.errors import InputError
from recinfer.sparse.checks import check_jagged, check_keys_per_stride, is_plain, require
from recinfer.sparse.jagged import JaggedParts, JaggedTensor
from recinfer.sparse.offsets import prefix_sums, segment_sums

__all__ = ["InverseIndices", "KeyedParts", "Strides"]

InverseIndices = tuple[list[str], Tensor]
Strides = list[list[int]]


class KeyedParts(JaggedParts):
    """The state of a KeyedJaggedTensor and its getters; sizes are computed once, on first use."""

    _fields = [  # noqa: RUF012 - the name and the type are TorchRec's
        "_values",
        "_weights",
        "_lengths",
        "_offsets",
        "_stride_per_key_per_rank",
        "_inverse_indices",
    ]
    _stride_per_key: list[int] | None
    _length_per_key: list[int] | None
    _lengths_offset_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None
    _jt_dict: dict[str, JaggedTensor] | None

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Strides | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        if type(lengths) is Tensor and lengths.dim() == 2 and lengths.shape[0] == len(keys):
            lengths = lengths.reshape(-1)
        if keys and isinstance(stride_per_key_per_rank, list) and not stride_per_key_per_rank:
            stride_per_key_per_rank = None  # the value of stride_per_key_per_rank() for a fixed batch
        if stride_per_key_per_rank is None and stride_per_key is not None and len(set(stride_per_key)) > 1:
            stride_per_key_per_rank = [[s] for s in stride_per_key]
        self._set(keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank, inverse_indices)
        self._stride_per_key = stride_per_key
        self._length_per_key = length_per_key
        self._lengths_offset_per_key = lengths_offset_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        self._jt_dict = jt_dict
        self._check()

    @classmethod
    def from_parts_unchecked(
        cls,
        keys: list[str],
        values: Tensor,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> Self:
        """Build without checks, for the hot path, from parts that are known to be consistent."""
        self = cls.__new__(cls)
        self._set(keys, values, weights, lengths, offsets, stride, stride_per_key_per_rank, inverse_indices)
        return self

    def _set(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int | None,
        stride_per_key_per_rank: Tensor | Strides | None,
        inverse_indices: InverseIndices | None,
    ) -> None:
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride = stride
        self._stride_per_key_per_rank = stride_per_key_per_rank
        self._inverse_indices = inverse_indices
        self._stride_per_key = None
        self._length_per_key = None
        self._lengths_offset_per_key = None
        self._offset_per_key = None
        self._index_per_key = None
        self._jt_dict = None

    def _check(self) -> None:
        what = "KeyedJaggedTensor"
        check_jagged(what, self._values, self._weights, self._lengths, self._offsets)
        if not is_plain(self._values, self._lengths, self._offsets):
            return
        if self._lengths is not None:
            num_lengths = self._lengths.numel()
        else:
            assert self._offsets is not None
            num_lengths = max(self._offsets.numel() - 1, 0)
        stride = None if self.variable_stride_per_key() else self._stride
        strides = self.stride_per_key() if self.variable_stride_per_key() else self._stride_per_key
        check_keys_per_stride(what, self._keys, num_lengths, stride, strides)
        if self._inverse_indices is not None:
            keys, indices = self._inverse_indices
            require(
                indices.dim() == 2 and indices.shape[0] == len(keys),
                f"{what}: inverse_indices of {len(keys)} keys have shape {tuple(indices.shape)}; expected "
                f"[{len(keys)}, full batch]",
            )

    def keys(self) -> list[str]:
        """The ``F`` feature names."""
        return self._keys

    def _key_indices(self) -> dict[str, int]:
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def index_per_key(self) -> dict[str, int]:
        """Index of each key in :meth:`keys` (the last one of a key that occurs twice)."""
        return self._key_indices()

    # ---- memory of the parts

    def _parts(self) -> list[Tensor]:
        strides = self._stride_per_key_per_rank
        parts = [self._values, self._weights, self._lengths, self._offsets]
        parts.append(strides if isinstance(strides, Tensor) else None)
        return [p for p in parts if p is not None]

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the allocator that ``stream`` uses the parts."""
        parts = self._parts()
        if self._inverse_indices is not None:
            parts.append(self._inverse_indices[1])
        for part in parts:
            if part.device.type != "cpu":
                part.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of the parts that exist now; strides of a variable batch count 4 bytes a number."""
        size = sum(p.numel() * p.element_size() for p in self._parts())
        if isinstance(self._stride_per_key_per_rank, list):
            size += 4 * sum(len(s) for s in self._stride_per_key_per_rank)
        return size

    def clear_storage(self) -> int:
        """Free the memory of the parts now, even if other objects hold them; returns the freed bytes."""
        freed = 0
        for part in self._parts():
            storage = part.untyped_storage()
            freed += storage.size()
            storage.resize_(0)
        return freed

    # ---- batch sizes

    def variable_stride_per_key(self) -> bool:
        """Whether keys have different batch sizes."""
        return self._stride_per_key_per_rank is not None

    def stride(self) -> int:
        """``B``. Variable batch: the full batch of the inverse indices, or else the largest of the keys'."""
        if self._stride is None:
            if self.variable_stride_per_key():
                if self._inverse_indices is not None and self._inverse_indices[1].numel():
                    self._stride = self._inverse_indices[1].shape[-1]
                else:
                    self._stride = max(self.stride_per_key(), default=0)
            elif not self._keys:
                self._stride = 0
            elif self._lengths is not None:
                self._stride = self._lengths.shape[0] // len(self._keys)
            else:
                assert self._offsets is not None
                self._stride = (self._offsets.shape[0] - 1) // len(self._keys)
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Batch size of each key."""
        if self._stride_per_key is None:
            if self.variable_stride_per_key():
                self._stride_per_key = [sum(s) for s in self.stride_per_key_per_rank()]
            else:
                self._stride_per_key = [self.stride()] * len(self._keys)
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> Strides:
        """Batch size of each key on each rank; ``[]`` for a fixed batch."""
        if isinstance(self._stride_per_key_per_rank, Tensor):
            self._stride_per_key_per_rank = self._stride_per_key_per_rank.tolist()
        return self._stride_per_key_per_rank or []

    def inverse_indices(self) -> InverseIndices:
        """``(keys, int64[len(keys), full batch])``; InputError without them."""
        if self._inverse_indices is None:
            raise InputError("this KeyedJaggedTensor has no inverse indices; build it with inverse_indices=")
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """``(keys, int64[len(keys), full batch])`` or None."""
        return self._inverse_indices

    # ---- sizes of the keys

    def length_per_key(self) -> list[int]:
        """Number of values of each key; computed once (waits for the device).

        On the meta device the numbers are unknown: the values are split evenly, with the remainder in the first key.
        """
        if self._length_per_key is None:
            self._length_per_key = self._compute_length_per_key()
        return self._length_per_key

    def _compute_length_per_key(self) -> list[int]:
        if self._jt_dict is not None:
            return [self._jt_dict[k].values().shape[0] for k in self._keys]
        if not self._keys:
            return []
        known = self._lengths if self._lengths is not None else self._offsets
        if self._values.is_meta and known is not None and known.is_meta:
            share, rest = divmod(self._values.shape[0], len(self._keys))
            return [share + rest, *[share] * (len(self._keys) - 1)]
        strides = self.stride_per_key()
        if self._lengths is None and self._offsets is not None and self._offsets.numel():
            ends = torch.tensor(prefix_sums(strides), device=self._offsets.device)
            at = self._offsets[ends].tolist()
            return [stop - start for start, stop in pairwise(at)]
        return segment_sums(self.lengths(), strides)

    def length_per_key_or_none(self) -> list[int] | None:
        """The result of :meth:`length_per_key` if computed, else None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Start of each key's values, and the end: ``F + 1`` numbers."""
        if self._offset_per_key is None:
            self._offset_per_key = prefix_sums(self.length_per_key())
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """The result of :meth:`offset_per_key` if computed, else None."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Start of each key's lengths, and the end: ``F + 1`` numbers."""
        if self._lengths_offset_per_key is None:
            self._lengths_offset_per_key = prefix_sums(self.stride_per_key())
        return self._lengths_offset_per_key

    def sync(self) -> Self:
        """Compute the sizes of the keys now; returns self."""
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forget the sizes of the keys (after changing lengths in place); returns self."""
        self._length_per_key = None
        self._offset_per_key = None
        self._jt_dict = None
        return self
