"""Slots of ids in tables of managed collisions: the segment of an id, its hash, and the read-only search for its slot.

FBGEMM's operators block_bucketize_sparse_features and zero_collision_hash define the rules; this module needs only torch.
Shapes: ``N`` ids, ``S`` segments, ``R`` slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["murmur_hash3", "segments_of", "unsigned_remainder", "zero_collision_hash"]

_MAX = (1 << 63) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value > _MAX else value


_C1 = _signed(0x87C37B91114253D5)
_C2 = _signed(0x4CF5AD432745937F)
_F1 = _signed(0xFF51AFD7ED558CCD)
_F2 = _signed(0xC4CEB9FE1A85EC53)


def _shifted_right(x: Tensor, bits: int) -> Tensor:
    """``x >> bits`` of 64 unsigned bits."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _rotated_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shifted_right(x, 64 - bits)


def _mixed(h: Tensor) -> Tensor:
    h = (h ^ _shifted_right(h, 33)) * _F1
    h = (h ^ _shifted_right(h, 33)) * _F2
    return h ^ _shifted_right(h, 33)


def murmur_hash3(ids_N: Tensor) -> Tensor:
    """64 hash bits of each id, int64 ``[N]``: both halves of MurmurHash3 x64 of the blocks (id, 0) with seed 0, combined
    by xor."""
    k1 = _rotated_left(ids_N.long() * _C1, 31) * _C2
    h1 = _rotated_left(k1, 27) * 5 + 0x52DCE729
    h2 = h1 * 5 + 0x38495AB5  # the second block is 0
    h1, h2 = h1 ^ 16, h2 ^ 16
    h1 = h1 + h2
    h2 = h2 + h1
    h1, h2 = _mixed(h1), _mixed(h2)
    h1 = h1 + h2
    h2 = h2 + h1
    return h1 ^ h2


def unsigned_remainder(x: Tensor, divisor: Tensor | int) -> Tensor:
    """``x % divisor`` where the int64 elements of ``x`` are 64 unsigned bits; the divisor is in 1 to 2**62."""
    half = _shifted_right(x, 1) % divisor
    return torch.where(x >= 0, x % divisor, (2 * half + (x & 1)) % divisor)


def segments_of(ids_N: Tensor, input_hash_size: int, num_segments: int) -> Tensor:
    """The segment of each id, int64 ``[N]``: the training rank or bucket that looks the id up.

    Ids from 0 to ``input_hash_size`` are cut into equal blocks. All other ids, negative ones included, are spread by the
    remainder of their 64 unsigned bits. An ``input_hash_size`` of 0 spreads all ids by the remainder of signed numbers, which
    is never negative, as TorchRec's buckets do.
    """
    ids_N = ids_N.long()
    block = -(-input_hash_size // num_segments)
    if not block:
        return ids_N % num_segments
    stop = block * num_segments
    inside = (ids_N >= 0) & (ids_N <= min(stop - 1, _MAX))
    segments = torch.where(inside, ids_N // block, unsigned_remainder(ids_N, num_segments))
    if stop - 1 > _MAX:  # the last block ends in ids that are negative as signed numbers
        segments = torch.where(ids_N < stop - (1 << 64), num_segments - 1, segments)
    return segments


def zero_collision_hash(
    ids_N: Tensor,
    identities_R: Tensor,
    sizes_N: Tensor,
    offsets_N: Tensor,
    max_probe: int,
    num_reserved: int = 0,
    fallback: bool = True,
) -> Tensor:
    """The slot of each id, int64 ``[N]``.

    The search starts at the hash of the id within its segment, visits at most ``max_probe`` slots, and starts over at the
    end of the segment. It does not stop at empty slots, and the id -1 finds the first of them, as in FBGEMM.

    Args:
        identities_R: the id in each slot, -1 in empty ones.
        sizes_N, offsets_N: number of slots of the id's segment, and its first slot.
        max_probe: slots to visit.
        num_reserved: slots at the end of each segment that only missing ids share.
        fallback: give a missing id the slot of its hash (a reserved slot, if there are any); otherwise -1.
    """
    ids_N = ids_N.long()
    hashes = murmur_hash3(ids_N)
    sizes = sizes_N - num_reserved
    first = unsigned_remainder(hashes, sizes)
    if not fallback:
        slots = torch.full_like(ids_N, -1)
    elif num_reserved:
        slots = offsets_N + sizes + unsigned_remainder(hashes, num_reserved)
    else:
        slots = offsets_N + first
    ends = offsets_N + sizes
    visited = offsets_N + first
    waiting = torch.arange(ids_N.shape[0], device=ids_N.device)
    for _ in range(min(max_probe, int(sizes.max()) if ids_N.numel() else 0)):
        found = identities_R[visited] == ids_N
        if bool(found.any()):
            slots[waiting[found]] = visited[found]
            ids_N, waiting, visited, offsets_N, ends = (x[~found] for x in (ids_N, waiting, visited, offsets_N, ends))
        visited = visited + 1
        visited = torch.where(visited == ends, offsets_N, visited)
    return slots
