"""Reads the index of a torch.distributed.checkpoint folder: the file and byte offset of every shard of every tensor.

The files are not trusted. ``.metadata`` is a pickle, and torch reads it with the full unpickler, which can run code
from the file. Here it is read by an unpickler that allows only torch's few metadata classes, so a folder of unknown
origin can be opened. The index's content is then checked: shards lie inside their tensor, cover it once, and name files
of the folder.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.serialization import _get_layout

from recinfer.checkpoint.torch_file import TensorBytes, read_torch_file
from recinfer.errors import CheckpointError

__all__ = ["METADATA_FILE", "Chunk", "StoredTensor", "cover_fault", "read_metadata"]

METADATA_FILE = ".metadata"

_METADATA_CLASSES: dict[str, Any] = {
    name: getattr(torch_metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
}


@dataclass
class Chunk:
    """A rectangle of a tensor and where it is stored.

    Attributes:
        offsets, sizes: the rectangle, one number a dimension.
        path, start, length: the bytes of the torch.save file that holds it.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int = 0
    length: int | None = None
    known: TensorBytes | None = None

    @cached_property
    def data(self) -> TensorBytes:
        """The chunk's tensor in its file; its description is read on first use.

        Raises:
            CheckpointError: the file does not hold the tensor that the index lists.
        """
        if self.known is not None:
            return self.known
        found = read_torch_file(self.path, self.start, self.length)
        if not isinstance(found, TensorBytes) or found.shape != self.sizes:
            what = found.shape if isinstance(found, TensorBytes) else type(found).__name__
            raise CheckpointError(
                f"{self.path}: found {what} at byte {self.start}, expected a tensor of shape {self.sizes}; the file is "
                "damaged or belongs to another checkpoint"
            )
        return found


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint: its shape, dtype, its place in the nested state dict, and its chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    path: tuple[Any, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of the torch.distributed.checkpoint in ``folder`` by their full key; reads no tensor data.

    Raises:
        CheckpointError: no ``.metadata``, one that is damaged or holds foreign classes, or shards that do not cover
            their tensor; names the key.
    """
    metadata = _load(folder / METADATA_FILE)
    try:
        return _tensors(folder, metadata)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or forged index can hold values of any type
        raise CheckpointError(f"{folder / METADATA_FILE}: is not an index of tensors: {error!r}") from error


def _tensors(folder: Path, metadata: torch_metadata.Metadata) -> dict[str, StoredTensor]:
    storage = metadata.storage_data if isinstance(metadata.storage_data, dict) else {}
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    tensors = {}
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, torch_metadata.TensorStorageMetadata):
            continue  # torch pickles numbers and strings of optimizers, which recinfer does not read
        found = {}
        for chunk in entry.chunks:
            index = torch_metadata.MetadataIndex(key, chunk.offsets)
            found[tuple(chunk.offsets), tuple(chunk.sizes)] = _chunk(folder, key, chunk, storage.get(index))
        chunks = tuple(sorted(found.values(), key=lambda c: c.offsets))
        tensor = StoredTensor(tuple(entry.size), entry.properties.dtype, tuple(paths.get(key, (key,))), chunks)
        _check_cover(folder, key, tensor)
        tensors[key] = tensor
    return tensors


def _chunk(folder: Path, key: str, chunk: torch_metadata.ChunkStorageMetadata, info: Any) -> Chunk:
    if not isinstance(info, _StorageInfo):
        raise CheckpointError(
            f"{folder}: the shard of {key} at {tuple(chunk.offsets)} is in no file; the checkpoint is damaged"
        )
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(
            f"{folder}: {key} was saved through {info.transform_descriptors}; expected plain "
            "torch.distributed.checkpoint files, save without extensions"
        )
    path = folder / info.relative_path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"{folder}: the file of {key} is outside the folder: {info.relative_path!r}; expected a path inside it"
        )
    return Chunk(tuple(chunk.offsets), tuple(chunk.sizes), path, info.offset, info.length)


def _check_cover(folder: Path, key: str, tensor: StoredTensor) -> None:
    """Raises CheckpointError unless the chunks cover every element of the tensor exactly once."""
    wrong = cover_fault(tensor)
    if wrong:
        rectangles = [(c.offsets, c.sizes) for c in tensor.chunks[:4]]
        raise CheckpointError(
            f"{folder}: the shards of {key} {wrong}: shape {tensor.shape}, {len(tensor.chunks)} shards (offsets, "
            f"sizes) {rectangles}; was every rank's file copied?"
        )


def cover_fault(tensor: StoredTensor) -> str:
    """The fault of chunks that do not cover every element of their tensor exactly once; empty if they do."""
    dims, count = len(tensor.shape), len(tensor.chunks)
    if any(len(c.offsets) != dims or len(c.sizes) != dims for c in tensor.chunks):
        return "have other dimensions than the tensor"
    sizes = np.array([c.sizes for c in tensor.chunks], dtype=np.int64).reshape(count, dims)
    offsets = np.array([c.offsets for c in tensor.chunks], dtype=np.int64).reshape(count, dims)
    if np.any(offsets < 0) or np.any(sizes < 0) or np.any(offsets + sizes > np.array(tensor.shape, dtype=np.int64)):
        return "reach beyond it"
    if sum(math.prod(c.sizes) for c in tensor.chunks) != math.prod(tensor.shape):
        return "do not cover it once"
    if count > 1:
        ends = offsets + sizes
        apart = np.any((ends[:, None] <= offsets) | (ends <= offsets[:, None]), axis=2)
        if not np.all(apart | np.eye(count, dtype=bool)):
            return "overlap"
    return ""


def _load(path: Path) -> torch_metadata.Metadata:
    try:
        metadata = _MetadataUnpickler(path).load()
    except CheckpointError:
        raise
    except FileNotFoundError:
        if (path.parent / "manifest.json").exists():
            raise CheckpointError(
                f"{path.parent} is an archive; give the checkpoint that it was exported from, or a later one"
            ) from None
        raise CheckpointError(
            f"{path.parent}: no {METADATA_FILE} in it; expected a folder of torch.distributed.checkpoint, a .pt or a .safetensors file"
        ) from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: cannot be read: {error!r}; the checkpoint is damaged") from error
    if not isinstance(metadata, torch_metadata.Metadata):
        raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, expected the index of a checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, path: Path) -> None:
        self.path = path
        super().__init__(io.BytesIO(path.read_bytes()))

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _METADATA_CLASSES:
            return _METADATA_CLASSES[name]
        if (module, name) == ("torch.distributed.checkpoint.filesystem", "_StorageInfo"):
            return _StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _get_layout
        if module in ("pathlib", "pathlib._local") and name.endswith("Path"):
            return pathlib.PurePosixPath  # the folder of the save, which recinfer does not use
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        raise CheckpointError(
            f"{self.path}: contains {module}.{name}, which a checkpoint index does not need and which could run code "
            f"when loaded. Save the checkpoint again with torch.distributed.checkpoint"
        )
