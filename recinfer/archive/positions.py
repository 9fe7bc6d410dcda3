"""Stores the position weights of an archive and applies them to requests."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from recinfer.archive.reader import Archive
from recinfer.archive.tensors import pack_tensors, unpack_tensors
from recinfer.errors import ArchiveError, InputError
from recinfer.modules.positions import offsets_to_positions
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["PATH", "PositionWeights", "pack_position_weights", "read_position_tensors", "read_position_weights"]

PATH = "dense/position_weights.safetensors"


class PositionWeights:
    """Multiplies each id's weight by the weight of its position in its bag; features without position weights get 1.

    Args:
        weights: feature -> float32 [positions].
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        names = list(weights)
        sizes = [weights[name].numel() for name in names]
        self._names = names
        # The features' weights, concatenated; those of feature i begin at starts[i]. The last entry, 1, is for other
        # features.
        self._flat = torch.cat([*(weights[name].float() for name in names), torch.ones(1)])
        self._starts = dict(zip(names, torch.tensor([0, *sizes]).cumsum(0).tolist()))
        self._sizes = dict(zip(names, sizes))

    def apply(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """``features`` with their weights; raises InputError for a bag that is longer than its weights."""
        keys, values = features.keys(), features.values()
        counts = torch.tensor(features.length_per_key())
        positions = offsets_to_positions(features.offsets(), values.numel())
        start_F = torch.tensor([self._starts.get(key, len(self._flat) - 1) for key in keys])
        limit_F = torch.tensor([self._sizes.get(key, 0) for key in keys])
        key_N = torch.repeat_interleave(torch.arange(len(keys)), counts, output_size=values.numel())
        limit_N = limit_F[key_N]
        if bool(((positions >= limit_N) & (limit_N > 0)).any()):
            self._refuse(features, positions, key_N, limit_N)
        places = start_F[key_N] + torch.where(limit_N > 0, positions, 0)
        return KeyedJaggedTensor.from_parts_unchecked(
            keys,
            values,
            features.lengths_or_none(),
            offsets=features.offsets(),
            weights=self._flat[places],
            stride=features.stride(),
        )

    @staticmethod
    def _refuse(features: KeyedJaggedTensor, positions: Tensor, key_N: Tensor, limit_N: Tensor) -> None:
        first = int(((positions >= limit_N) & (limit_N > 0)).nonzero()[0])
        name, limit = features.keys()[int(key_N[first])], int(limit_N[first])
        bag = int(torch.searchsorted(features.offsets(), first, right=True)) - 1
        got = f"feature {name!r}, sample {bag % features.stride()}: got {int(features.lengths()[bag])} ids"
        raise InputError(f"{got}, expected at most {limit}, its number of position weights")


def pack_position_weights(weights: Mapping[str, Mapping[str, Tensor]]) -> bytes:
    """The file's bytes, from module path -> feature -> weights."""
    return pack_tensors(
        {f"{path}/{feature}": w.float().contiguous() for path, mine in weights.items() for feature, w in mine.items()}
    )


def read_position_weights(archive: Archive) -> dict[str, PositionWeights]:
    """Module path -> its weights, ready to apply; raises ArchiveError (D4)."""
    return {path: PositionWeights(weights) for path, weights in read_position_tensors(archive).items()}


def read_position_tensors(archive: Archive) -> dict[str, dict[str, Tensor]]:
    """Module path -> feature -> weights [positions]; raises ArchiveError (D4) unless they are the manifest's."""
    modules = [module for module in archive.manifest.modules if module.position_weights is not None]
    if not modules:
        return {}
    tensors = unpack_tensors(archive.read(PATH), PATH, "D4")
    expected = {
        f"{module.path}/{feature}": (size,)
        for module in modules
        for feature, size in (module.position_weights or {}).items()
    }
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    good = found == expected and all(t.dtype == torch.float32 and bool(t.isfinite().all()) for t in tensors.values())
    if not good:
        odd = sorted(found.items() ^ expected.items())[:4]
        raise ArchiveError(
            f"{PATH}: {odd or 'numbers that are not finite float32'}; expected the manifest's", rule="D4"
        )
    return {
        module.path: {f: tensors[f"{module.path}/{f}"] for f in module.position_weights or {}} for module in modules
    }
