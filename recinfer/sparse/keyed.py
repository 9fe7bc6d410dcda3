"""KeyedTensor: dense tensors of several keys, concatenated in one tensor, and regrouping them.

The operations are slices and concatenations with sizes known in Python, which torch.export can trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from recinfer.sparse.checks import MissingKeyError, is_plain, require
from recinfer.sparse.offsets import prefix_sums
from recinfer.sparse.printing import format_keyed, summary
from recinfer.sparse.proxyable import Proxyable

__all__ = ["KeyedTensor", "permute_multi_embedding", "regroup_kts"]


class KeyedTensor(metaclass=Proxyable):
    """Pooled embeddings: one dense block of columns per key.

    Args:
        keys: the names, in order.
        length_per_key: width of each key's block along ``key_dim``.
        values: ``[B, sum(length_per_key)]`` (or any shape whose ``key_dim`` is that sum).
        key_dim: the dimension that the keys share.
        offset_per_key, index_per_key: precomputed values, if the caller has them.

    Raises:
        InputError: the number of lengths is not that of keys, or their sum is not the size of ``key_dim``.

    >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))
    >>> kt["b"]
    tensor([[1., 2.],
            [4., 5.]])
    """

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        if is_plain(values):
            self._check()

    def _check(self) -> None:
        require(
            len(self._keys) == len(self._length_per_key),
            f"KeyedTensor: got {len(self._keys)} keys and {len(self._length_per_key)} lengths; expected one length "
            f"per key",
        )
        shape = tuple(self._values.shape)
        require(
            -len(shape) <= self._key_dim < len(shape), f"KeyedTensor: key_dim {self._key_dim} with values of {shape}"
        )
        require(
            sum(self._length_per_key) == shape[self._key_dim],
            f"KeyedTensor: lengths per key sum to {sum(self._length_per_key)} but values have {shape[self._key_dim]} "
            f"entries in dimension {self._key_dim} (shape {shape})",
        )

    @classmethod
    def from_parts_unchecked(
        cls, keys: list[str], length_per_key: list[int], values: Tensor, offset_per_key: list[int] | None = None
    ) -> KeyedTensor:
        """Build without checks, for the hot path, from parts that are known to be consistent."""
        self = cls.__new__(cls)
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = 1
        self._offset_per_key = offset_per_key
        self._index_per_key = None
        return self

    @staticmethod
    def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1) -> KeyedTensor:
        """Concatenate ``tensors`` (one per key) along ``cat_dim``.

        Raises:
            InputError: no tensors, or not one a key.
        """
        require(
            len(keys) == len(tensors) and len(keys) > 0,
            f"KeyedTensor.from_tensor_list: got {len(keys)} keys and {len(tensors)} tensors; expected one tensor per "
            f"key",
        )
        return KeyedTensor(keys, [t.shape[key_dim] for t in tensors], torch.cat(tensors, dim=cat_dim), key_dim)

    def keys(self) -> list[str]:
        """The names, in order."""
        return self._keys

    def values(self) -> Tensor:
        """``[B, sum(length_per_key)]``: all keys concatenated."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the keys are concatenated along."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Width of each key."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Start of each key along ``key_dim``, and the end."""
        if self._offset_per_key is None:
            self._offset_per_key = prefix_sums(self._length_per_key)
        return self._offset_per_key

    def _key_indices(self) -> dict[str, int]:
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def __getitem__(self, key: str) -> Tensor:
        """The block of ``key``, a view; MissingKeyError (a KeyError) if there is no such key."""
        index = self._key_indices().get(key)
        if index is None:
            raise MissingKeyError(f"no key {key!r} in this KeyedTensor; it has {self._keys}")
        return self._values.narrow(self._key_dim, self.offset_per_key()[index], self._length_per_key[index])

    def _blocks(self) -> list[Tensor]:
        return list(self._values.split(self._length_per_key, dim=self._key_dim)) if self._keys else []

    def to_dict(self) -> dict[str, Tensor]:
        """Key to its block (views)."""
        blocks = self._blocks()
        return {key: blocks[i] for key, i in self._key_indices().items()}

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """One tensor per group: the concatenated blocks of the group's keys, from any of ``keyed_tensors``.

        A key may be in several groups. A key that several of ``keyed_tensors`` have is taken from the last one.

        Raises:
            InputError: no keyed tensors.
            MissingKeyError: a key of a group that none of them has.
        """
        return regroup_kts(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """:meth:`regroup`, with a name in ``keys`` for each group."""
        require(
            len(groups) == len(keys),
            f"KeyedTensor.regroup_as_dict: got {len(groups)} groups and {len(keys)} keys; expected one key per group",
        )
        grouped = regroup_kts(keyed_tensors, groups)
        return {key: grouped[i] for i, key in enumerate(keys)}  # by index, because a symbol of torch.fx has no iterator

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        """A KeyedTensor on ``device``."""
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            self._values.to(device, non_blocking=non_blocking),
            self._key_dim,
            self._offset_per_key,
            self._index_per_key,
        )

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the allocator that ``stream`` uses the values."""
        if self._values.device.type != "cpu":
            self._values.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def __str__(self) -> str:
        return format_keyed(self._keys, self._blocks(), self._values)

    def __repr__(self) -> str:
        return summary("KeyedTensor", self._keys, values=self._values)


@fx.wrap  # a single node in graphs of torch.fx, where keyed tensors are symbols with unknown keys
def regroup_kts(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """The implementation of :meth:`KeyedTensor.regroup`: keys that stay adjacent are copied as one slice."""
    require(len(keyed_tensors) > 0, "KeyedTensor.regroup: got no keyed tensors; expected at least one")
    places = {key: (n, i) for n, kt in enumerate(keyed_tensors) for key, i in kt._key_indices().items()}
    dim = keyed_tensors[0].key_dim()
    return [_gather(keyed_tensors, _runs(keyed_tensors, places, group), dim) for group in groups]


def _runs(
    keyed_tensors: Sequence[KeyedTensor], places: dict[str, tuple[int, int]], group: Sequence[str]
) -> list[list[int]]:
    """``[tensor, start, stop]`` slices that make up ``group``, neighbours merged."""
    runs: list[list[int]] = []
    for key in group:
        if key not in places:
            raise MissingKeyError(f"no key {key!r} in the keyed tensors to regroup; they have {sorted(places)}")
        n, i = places[key]
        start, stop = keyed_tensors[n].offset_per_key()[i : i + 2]
        if runs and runs[-1][0] == n and runs[-1][2] == start:
            runs[-1][2] = stop
        else:
            runs.append([n, start, stop])
    return runs


def _gather(keyed_tensors: Sequence[KeyedTensor], runs: list[list[int]], dim: int) -> Tensor:
    if not runs:
        return keyed_tensors[0].values().narrow(dim, 0, 0)
    parts = [keyed_tensors[n].values().narrow(dim, start, stop - start) for n, start, stop in runs]
    return torch.cat(parts, dim=dim)


def permute_multi_embedding(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """TorchRec's other name for :func:`regroup_kts`."""
    return regroup_kts(keyed_tensors, groups)
