"""Reads a checkpoint in slices: a torch.distributed.checkpoint folder (ours or TorchRec's), or a state dict in a file of
torch.save or safetensors.

Tensors are read from the byte ranges of their files into memory that the caller chooses, so a table never exists twice,
and a slice of rows reads only the shards that overlap it. torchrec is not needed for any sharding. Files need not be
trusted: see :mod:`recinfer.checkpoint.dcp` and :mod:`recinfer.checkpoint.torch_file`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from recinfer.checkpoint.dcp import Chunk, StoredTensor, cover_fault, read_metadata
from recinfer.checkpoint.model_json import build_model, read_model_json
from recinfer.checkpoint.safetensors_file import is_safetensors, read_safetensors
from recinfer.checkpoint.torch_file import ShardedBytes, TensorBytes, read_torch_file
from recinfer.errors import CheckpointError, ConfigError
from recinfer.excerpts import some

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["CheckpointReader"]

_MODEL_GROUPS = ("model", "state_dict", "model_state_dict", "module", "app")


class CheckpointReader:
    """One checkpoint, open for reading. Opening reads the index only. Safe to use from several threads.

    A state dict saved inside another, as in ``dcp.save({"model": ..., "optim": ...})``, is recognized: keys are
    the module's own, without the ``model.`` before them. :meth:`align` finds any other nesting by the module's keys.

    Args:
        path: a folder with ``.metadata``, or a file of torch.save or safetensors.
        prefix: the part of the keys to leave out, with its dot; None finds it. ``""`` shows the keys as stored.

    Raises:
        CheckpointError: the path does not exist, or is not a readable checkpoint.

    Example::

        reader = CheckpointReader("model.ckpt")
        rows = reader.read_rows("sparse_arch.ebc.embedding_bags.item_id.weight", 1000, 2000)
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str | None = None) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise CheckpointError(
                f"{self.path}: does not exist; expected a checkpoint folder, a .pt or a .safetensors file"
            )
        self._tensors = read_metadata(self.path) if self.path.is_dir() else _read_state_dict(self.path)
        self.prefix = _model_prefix(self._tensors) if prefix is None else prefix

    def __repr__(self) -> str:
        return f"CheckpointReader({str(self.path)!r}, prefix={self.prefix!r}, {len(self.keys())} keys)"

    def keys(self) -> list[str]:
        """Keys of the model's tensors, sorted, without the prefix."""
        return sorted(k[len(self.prefix) :] for k in self._tensors if k.startswith(self.prefix))

    def stored_keys(self) -> list[str]:
        """All keys of tensors as they are stored, the optimizer's among them, sorted."""
        return sorted(self._tensors)

    def __contains__(self, key: str) -> bool:
        return self.prefix + key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of the whole tensor ``key``; raises CheckpointError for an unknown key."""
        return self._tensor(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Dtype of ``key``; raises CheckpointError for an unknown key."""
        return self._tensor(key).dtype

    def num_bytes(self) -> int:
        """Bytes of the model's tensors, the optimizer's not counted."""
        return sum(torch.Size(self.shape(k)).numel() * self.dtype(k).itemsize for k in self.keys())

    def tensor(self, key: str) -> StoredTensor:
        """The stored shards of the model's ``key``; raises CheckpointError for an unknown key."""
        return self._tensor(key)

    def stored(self, key: str) -> StoredTensor:
        """The stored shards of ``key``, one of :meth:`stored_keys`; raises CheckpointError for an unknown key."""
        if key not in self._tensors:
            raise CheckpointError(f"{self.path}: has no {key!r}; it has {some(self.stored_keys())}")
        return self._tensors[key]

    def read(self, key: str) -> Tensor:
        """The whole tensor ``key``, contiguous, on the CPU.

        Raises:
            CheckpointError: unknown key, a missing or damaged file.
        """
        tensor = self._tensor(key)
        for chunk in tensor.chunks:
            _check_chunk(key, tensor, chunk)  # checked before memory is allocated for a damaged index
        out = torch.empty(tensor.shape, dtype=tensor.dtype)
        self.read_into(key, out)
        return out

    def read_rows(self, key: str, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` (0 <= start <= stop <= rows) of ``key``, contiguous ``[stop - start, ...]``.

        Only the shards that overlap are opened; memory is that of the result and a buffer of 16 MiB.

        Raises:
            CheckpointError: unknown key, a range outside the tensor, a missing or damaged file.
        """
        tensor = self._tensor(key)
        self._check_rows(key, tensor, start, stop)
        for chunk in tensor.chunks:
            if chunk.offsets and chunk.offsets[0] < stop and start < chunk.offsets[0] + chunk.sizes[0]:
                _check_chunk(key, tensor, chunk)
        out = torch.empty((stop - start, *tensor.shape[1:]) if tensor.shape else (), dtype=tensor.dtype)
        self.read_into(key, out, start, stop)
        return out

    def read_into(self, key: str, out: Tensor, start: int = 0, stop: int | None = None) -> None:
        """Read the rows of :meth:`read_rows` into ``out``, a CPU tensor of the slice's shape; other dtypes are
        converted."""
        tensor = self._tensor(key)
        rows = tensor.shape[0] if tensor.shape else 1
        stop = rows if stop is None else stop
        self._check_rows(key, tensor, start, stop)
        expected = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        if tuple(out.shape) != expected:
            raise CheckpointError(f"{self.path}: {key}: the target has shape {tuple(out.shape)}, expected {expected}")
        for chunk in tensor.chunks:
            if not tensor.shape:
                _check_chunk(key, tensor, chunk)
                chunk.data.read_rows(0, 1, out)
                continue
            first = max(start, chunk.offsets[0])
            last = min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first >= last:
                continue
            _check_chunk(key, tensor, chunk)
            target = out[first - start : last - start]
            for dim, (offset, size) in enumerate(zip(chunk.offsets[1:], chunk.sizes[1:]), start=1):
                target = target.narrow(dim, offset, size)
            chunk.data.read_rows(first - chunk.offsets[0], last - chunk.offsets[0], target)

    def read_blocks(self, key: str, start: int, stop: int, block: Tensor) -> Iterator[tuple[int, int]]:
        """Yields rows ``start`` to ``stop`` of a matrix in blocks: the fastest way to read a large table.

        Args:
            block: contiguous CPU tensor ``[any number of rows, columns]``; its first rows are refilled each time. Other
                dtypes are converted.

        Yields:
            (first, last): ``block[: last - first]`` now holds rows ``first`` to ``last``.

        Raises:
            CheckpointError: as :meth:`read_rows`.
        """
        tensor = self._tensor(key)
        self._check_rows(key, tensor, start, stop)
        for chunk in tensor.chunks:
            low, high = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
            if low <= start and stop <= high and chunk.sizes[1:] == tensor.shape[1:]:
                _check_chunk(key, tensor, chunk)
                if chunk.data.plain(block.dtype):
                    for first, last in chunk.data.read_blocks(start - low, stop - low, block):
                        yield first + low, last + low
                    return
        for first in range(start, stop, len(block)):
            last = min(first + len(block), stop)
            self.read_into(key, block[: last - first], first, last)
            yield first, last

    def _check_rows(self, key: str, tensor: StoredTensor, start: int, stop: int) -> None:
        rows = tensor.shape[0] if tensor.shape else 1
        if not 0 <= start <= stop <= rows or (not tensor.shape and start == stop):
            raise CheckpointError(f"{self.path}: rows {start} to {stop} of {key}, which has {rows} rows")

    def align(self, module_or_keys: nn.Module | Iterable[str]) -> CheckpointReader:
        """Choose the key prefix that matches most of the module's keys; keeps the current one if no other matches
        more."""
        keys = list(module_or_keys.state_dict() if isinstance(module_or_keys, nn.Module) else module_or_keys)
        if all(key in self for key in keys):
            return self
        stored = set(self._tensors)
        ends: Counter[str] = Counter()
        for key in keys[:1] + keys[-1:]:
            ends.update(s[: -len(key)] for s in stored if s == key or s.endswith("." + key))
        best = max([self.prefix, *ends], key=lambda prefix: sum(prefix + key in stored for key in keys))
        self.prefix = best
        return self

    @cached_property
    def model_json(self) -> Mapping[str, Any] | None:
        """The content of ``model.json``; None without one. Raises CheckpointError if it is damaged."""
        return read_model_json(self.path) if self.path.is_dir() else None

    @cached_property
    def contract(self) -> FeatureContract | None:
        """The feature contract of ``model.json``, if it has one."""
        found = (self.model_json or {}).get("contract")
        if found is None:
            return None
        from recinfer.data.contract import FeatureContract

        try:
            return FeatureContract.from_dict(found)
        except ConfigError as error:
            raise CheckpointError(
                f"{self.path}: the feature contract in model.json is inconsistent: {error}"
            ) from error

    def build_model(self, device: str | torch.device = "meta") -> nn.Module:
        """The module that ``model.json`` describes, without its weights (see :func:`recinfer.checkpoint.load_into`).

        Raises:
            CheckpointError: no ``model.json``, or one that describes an unknown module.
        """
        if self.model_json is None:
            raise CheckpointError(
                f"{self.path}: has no model.json to build the module from; give a function that returns the module "
                f"(--model pkg.module:function)"
            )
        return build_model(self.model_json, device, where=str(self.path))

    def _tensor(self, key: str) -> StoredTensor:
        found = self._tensors.get(self.prefix + key)
        if found is None:
            raise CheckpointError(f"{self.path}: has no {key!r}; it has {some(self.keys())}")
        return found


def _check_chunk(key: str, tensor: StoredTensor, chunk: Chunk) -> None:
    """Raises CheckpointError unless the file holds the shard that the index describes."""
    if chunk.data.dtype != tensor.dtype:
        raise CheckpointError(
            f"{chunk.path}: a shard of {key} is {chunk.data.dtype}, expected {tensor.dtype}; the file is damaged"
        )


def _read_state_dict(path: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}

    def walk(value: Any, at: tuple[Any, ...]) -> None:
        if isinstance(value, TensorBytes):
            value.check()
            chunk = Chunk((0,) * len(value.shape), value.shape, path, known=value)
            tensors[".".join(map(str, at))] = StoredTensor(value.shape, value.dtype, at, (chunk,))
        elif isinstance(value, ShardedBytes):
            tensors[".".join(map(str, at))] = _sharded(path, at, value)
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                walk(inner, (*at, name))

    walk(read_safetensors(path) if is_safetensors(path) else read_torch_file(path), ())
    if not tensors:
        raise CheckpointError(f"{path}: does not hold a dict of tensors; expected torch.save(model.state_dict(), path)")
    return tensors


def _sharded(path: Path, at: tuple[Any, ...], value: ShardedBytes) -> StoredTensor:
    """The tensor of a sharded model's state dict, of which a file of torch.save has the shards of one rank."""
    chunks = tuple(Chunk(offsets, data.shape, path, known=data) for offsets, data in value.shards)
    found = StoredTensor(value.shape, value.dtype, at, chunks)
    if cover_fault(found):
        raise CheckpointError(
            f"{path}: holds one rank's shards of {'.'.join(map(str, at))}, not all of its {value.shape[0]} rows; save the "
            f"sharded model from all ranks: torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=folder)"
        )
    return found


def _model_prefix(tensors: Mapping[str, StoredTensor]) -> str:
    """The key prefix of the model's state dict inside nested dicts; ``""`` if it is not nested."""
    prefix: list[str] = []
    inside = [t.path for t in tensors.values()]
    while inside:
        depth = len(prefix)
        groups = {str(p[depth]) for p in inside if len(p) > depth + 1}
        groups = {g for g in groups if not g.lower().startswith("optim")}
        leaves = any(len(p) == depth + 1 for p in inside)
        known = next((g for g in _MODEL_GROUPS if g in groups), None)
        chosen = known if known or leaves or len(groups) != 1 else next(iter(groups))
        if chosen is None:
            break
        prefix.append(chosen)
        inside = [p for p in inside if len(p) > depth + 1 and str(p[depth]) == chosen]
    return "".join(f"{name}." for name in prefix)
