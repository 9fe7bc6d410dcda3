"""Packs and unpacks the small safetensors files of an archive: golden requests and position weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from recinfer.errors import ArchiveError

__all__ = ["pack_tensors", "unpack_tensors"]


def pack_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of a safetensors file; names sorted, so that equal tensors give equal bytes.

    The file has a copy of each: safetensors refuses tensors that share memory, as an output and a column of it do.
    """
    return save({name: tensors[name].clone(memory_format=torch.contiguous_format) for name in sorted(tensors)})


def unpack_tensors(data: bytes, what: str, rule: str) -> dict[str, Tensor]:
    """The tensors in ``data``; raises ArchiveError with ``rule`` if it is not a safetensors file."""
    try:
        return load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError, OverflowError) as error:
        raise ArchiveError(f"{what} is not a safetensors file: {error}", rule=rule) from None
