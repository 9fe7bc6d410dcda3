"""The positions of bags of ids in the bytes of a message."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["BagPlaces"]


class BagPlaces(NamedTuple):
    """Bags in a message's bytes, in the form of the compiled loops (``Bags`` in ``_bags.h``).

    Attributes:
        lengths_at: offset of the lengths, int32 ``[keys, batch]``, or of another width that is passed to the loop.
        ids_at: offset of the ids, int64 ``[ids]``, or int32 unless ``wide``.
        ids: how many.
        wide: whether ids are 64 bits wide.
        keys, batch: number of features and of samples.
    """

    lengths_at: int
    ids_at: int
    ids: int
    wide: bool
    keys: int
    batch: int
