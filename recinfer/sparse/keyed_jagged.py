"""KeyedJaggedTensor: jagged values of several keys, concatenated key by key.

Shapes: ``F`` keys, ``B`` batch size (the stride), ``N`` values. With a variable batch every key has its own batch
size, split by rank: ``stride_per_key_per_rank[F][ranks]``, and ``inverse_indices`` say which row of the key's batch
belongs to each example of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, fx

from recinfer.sparse import distribution, rearrange
from recinfer.sparse.checks import MissingKeyError, require
from recinfer.sparse.jagged import JaggedTensor, same_tensor
from recinfer.sparse.keyed_parts import InverseIndices, KeyedParts, Strides
from recinfer.sparse.offsets import prefix_sums
from recinfer.sparse.printing import format_keyed_jagged, summary

__all__ = ["KeyedJaggedTensor", "kjt_is_equal"]


class KeyedJaggedTensor(KeyedParts):
    """Ids of several features for a batch of examples.

    Args:
        keys: the ``F`` feature names.
        values: ``[N, ...]``, key after key, and in a key example after example.
        weights: ``[N]`` or None.
        lengths: integers ``[F * B]``, key-major (``[F, B]`` is flattened).
        offsets: integers ``[F * B + 1]``; at least one of lengths and offsets.
        stride: ``B``; read off the lengths if None.
        stride_per_key_per_rank: batch size of each key on each rank, ``[F][ranks]``: a variable batch.
        stride_per_key: batch size of each key; unequal ones make a variable batch of one rank.
        length_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict: precomputed values, when the
            caller has it already; not checked.
        inverse_indices: ``(keys, int64[len(keys), full batch])`` of a variable batch.

    Raises:
        InputError: sizes that do not fit together, or negative lengths.

    >>> kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 0, 1]))
    >>> kjt["b"].to_dense()
    [tensor([], dtype=torch.int64), tensor([3])]
    """

    # ---- constructors

    @staticmethod
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, with the sizes of the keys computed now (waits for the device)."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, with the sizes of the keys computed now (waits for the device)."""
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per JaggedTensor, in the dict's order; different batch sizes give a variable batch.

        Raises:
            InputError: the dict is empty, or only some keys have weights.
        """
        return _from_jt_dict(jt_dict)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys and no values, of the given dtypes."""
        return KeyedJaggedTensor.from_parts_unchecked(
            [],
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=lengths_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            stride=0,
        )

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | None = None) -> KeyedJaggedTensor:
        """No keys and no values, of the dtypes, the device and the batch sizes of ``kjt``.

        Args:
            device: if given, the result has ``kjt``'s keys and sizes on this device, in uninitialised memory for
                :meth:`copy_`.
        """
        if device is not None:

            def uninitialised(tensor: Tensor) -> Tensor:
                return torch.empty_like(tensor, device=device)

            return kjt._map(uninitialised, uninitialised)
        lengths = kjt._lengths if kjt._lengths is not None else kjt.offsets()
        return KeyedJaggedTensor.from_parts_unchecked(
            [],
            kjt._values.new_empty((0, *kjt._values.shape[1:])),
            lengths.new_empty(0),
            weights=None if kjt._weights is None else kjt._weights.new_empty(0),
            stride=kjt.stride(),
            stride_per_key_per_rank=kjt._stride_per_key_per_rank,
        )

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """The keys of all of ``kjt_list``, in order, for the same batch.

        Raises:
            InputError: an empty list; batch sizes that differ; weights, or a variable batch, in some only.
        """
        return rearrange.concat(kjt_list)

    # ---- views and rearrangements

    def __getitem__(self, key: str) -> JaggedTensor:
        """The rows of ``key`` as views; MissingKeyError (a KeyError) if there is no such key."""
        index = self._key_indices().get(key)
        if index is None:
            raise MissingKeyError(f"no key {key!r} in this KeyedJaggedTensor; it has {self._keys}")
        start, stop = self.offset_per_key()[index : index + 2]
        at = self.lengths_offset_per_key()
        return JaggedTensor.from_parts_unchecked(
            self._values[start:stop],
            None if self._weights is None else self._weights[start:stop],
            self.lengths()[at[index] : at[index + 1]],
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Key to JaggedTensor (views); built once.

        Args:
            compute_offsets: also fill the offsets of each, all keys in one operation.
        """
        if self._jt_dict is None:
            self._jt_dict = rearrange.by_key(self, compute_offsets)
        return self._jt_dict

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Split the keys into runs of ``segments`` keys (views; a run may be empty).

        Raises:
            InputError: the segments are not as many keys as there are.
        """
        require(
            sum(segments) == len(self._keys) and min(segments, default=0) >= 0,
            f"KeyedJaggedTensor.split: segments {segments} hold {sum(segments)} keys; expected {len(self._keys)}",
        )
        return [rearrange.cut(self, start, stop) for start, stop in pairwise(prefix_sums(segments))]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at ``indices``, in that order (a copy); keys may be repeated or left out.

        Args:
            indices: places in :meth:`keys`.
            indices_tensor: ``indices`` as an integer tensor, if the caller has it on the device.

        Raises:
            InputError: an index outside of the keys.
        """
        return rearrange.permute(self, indices, indices_tensor)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """A KeyedJaggedTensor with ``lengths`` flattened to one dimension."""
        flat = KeyedJaggedTensor.from_parts_unchecked(
            self._keys,
            self._values,
            self.lengths().reshape(-1),
            weights=self._weights,
            stride=self.stride(),
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            inverse_indices=self._inverse_indices,
        )
        flat._length_per_key = self.length_per_key()
        return flat

    # ---- moving

    def _map(self, function: Callable[[Tensor], Tensor], weights: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        def apply(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else function(tensor)

        inverse = self._inverse_indices
        result = KeyedJaggedTensor.from_parts_unchecked(
            self._keys,
            function(self._values),
            apply(self._lengths),
            offsets=apply(self._offsets),
            weights=None if self._weights is None else weights(self._weights),
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            inverse_indices=None if inverse is None else (inverse[0], function(inverse[1])),
        )
        result._stride_per_key = self._stride_per_key
        result._length_per_key = self._length_per_key
        result._lengths_offset_per_key = self._lengths_offset_per_key
        result._offset_per_key = self._offset_per_key
        result._index_per_key = self._index_per_key
        return result

    def to(
        self, device: torch.device, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """A KeyedJaggedTensor on ``device``; ``dtype`` is for the weights only."""
        return self._map(
            lambda t: t.to(device, non_blocking=non_blocking),
            lambda t: t.to(device, non_blocking=non_blocking, dtype=dtype),
        )

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in page-locked memory (needs an accelerator)."""
        return self._map(lambda t: t.pin_memory(), lambda t: t.pin_memory())

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copy the numbers of ``kjt``, of the same keys and sizes, into the memory of ``self``; returns ``self``."""
        mine_inverse, inverse = self._inverse_indices, kjt._inverse_indices
        pairs = [
            ("values", self._values, kjt._values),
            ("weights", self._weights, kjt._weights),
            ("lengths", self.lengths(), kjt.lengths()),
            (
                "inverse indices",
                None if mine_inverse is None else mine_inverse[1],
                None if inverse is None else inverse[1],
            ),
        ]
        for name, mine, theirs in pairs:
            mine_shape = None if mine is None else tuple(mine.shape)
            their_shape = None if theirs is None else tuple(theirs.shape)
            require(
                mine_shape == their_shape,
                f"KeyedJaggedTensor.copy_: {name} are {mine_shape} here but {their_shape} in the source",
            )
        for _, mine, theirs in pairs:
            if mine is not None and theirs is not None:
                mine.copy_(theirs, non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(kjt.offsets(), non_blocking=non_blocking)
        if mine_inverse is not None and inverse is not None:
            self._inverse_indices = (inverse[0], mine_inverse[1])
        self._stride_per_key_per_rank = kjt._stride_per_key_per_rank
        self._stride_per_key = self._lengths_offset_per_key = None
        return self.unsync()

    # ---- exchange between ranks

    def dist_labels(self) -> list[str]:
        """Names of the tensors that are exchanged between ranks, in order."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """The split sizes of each of :meth:`dist_tensors` by rank, when rank ``r`` gets ``key_splits[r]`` keys."""
        return distribution.splits(self, key_splits)

    def dist_tensors(self) -> list[Tensor]:
        """The tensors that are exchanged between ranks, as :meth:`dist_labels` names them."""
        return distribution.tensors(self)

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """Build from the tensors received from all ranks: see :func:`recinfer.sparse.distribution.received`."""
        parts = distribution.received(
            len(keys), tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger
        )
        kjt = KeyedJaggedTensor.from_parts_unchecked(
            keys,
            parts.values,
            parts.lengths,
            weights=parts.weights,
            stride=parts.stride,
            stride_per_key_per_rank=parts.strides,
        )
        return kjt.sync()

    def __str__(self) -> str:
        return format_keyed_jagged(self._keys, self._values, self._weights, self.lengths(), self.stride_per_key())

    def __repr__(self) -> str:
        return summary(
            "KeyedJaggedTensor",
            self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
        )


@fx.wrap
def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """See :meth:`KeyedJaggedTensor.from_jt_dict`: a separate function, so that torch.fx makes it one node."""
    require(len(jt_dict) > 0, "KeyedJaggedTensor.from_jt_dict: got no keys; use KeyedJaggedTensor.empty")
    parts = list(jt_dict.values())
    weighted = [k for k, jt in jt_dict.items() if jt.weights_or_none() is not None]
    require(
        len(weighted) in (0, len(parts)),
        f"KeyedJaggedTensor.from_jt_dict: weights for {weighted} but not for all of {list(jt_dict)}; "
        "give them for all keys or for none",
    )
    strides = [jt.lengths().numel() for jt in parts]
    uniform = len(set(strides)) == 1
    kjt = KeyedJaggedTensor(
        list(jt_dict),
        torch.cat([jt.values() for jt in parts]),
        torch.cat([jt.weights() for jt in parts]) if weighted else None,
        lengths=torch.cat([jt.lengths() for jt in parts]),
        stride=strides[0] if uniform else None,
        stride_per_key_per_rank=None if uniform else [[s] for s in strides],
    )
    kjt._length_per_key = [jt.values().shape[0] for jt in parts]
    return kjt


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Whether the two have the same keys in the same order, the same batch sizes and equal numbers."""
    if not (isinstance(kjt_1, KeyedJaggedTensor) and isinstance(kjt_2, KeyedJaggedTensor)):
        return False
    return (
        kjt_1.keys() == kjt_2.keys()
        and kjt_1.stride_per_key_per_rank() == kjt_2.stride_per_key_per_rank()
        and kjt_1.stride() == kjt_2.stride()
        and same_tensor(kjt_1.lengths(), kjt_2.lengths())
        and same_tensor(kjt_1._values, kjt_2._values)
        and same_tensor(kjt_1._weights, kjt_2._weights)
    )
