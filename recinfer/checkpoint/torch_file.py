"""Finds and reads single tensors in torch.save files without loading the whole file.

torch.save writes a zip of uncompressed records: ``data.pkl`` describes the tensors, ``data/<n>`` hold their storages.
Here ``data.pkl`` is read by an unpickler that knows tensors, plain containers and the ShardedTensor of a sharded model;
an object without meaning takes the place of every object of another class (arguments, configurations, sets), so no code
in a file can run. What it returns are byte ranges that are read row by row with ``pread``.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recinfer.errors import CheckpointError

__all__ = ["ShardedBytes", "TensorBytes", "read_torch_file"]

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_LOCAL_HEADER_BYTES = 30
# Size of the buffer for tensors that are not contiguous in the file.
_BUFFER_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorBytes:
    """The location of one tensor in a file.

    Attributes:
        path: the file.
        offset: byte offset of the tensor's first element in the file.
        available: bytes of its storage from ``offset`` on.
        dtype, shape, strides: those of the torch tensor; strides count elements.
    """

    path: Path
    offset: int
    available: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __setstate__(self, _: Any) -> None:
        raise CheckpointError(f"{self.path}: sets attributes of a tensor; the file is damaged")

    def check(self) -> None:
        """Raises CheckpointError if the shape needs more bytes than the storage has."""
        if min(self.shape, default=0) < 0 or min(self.strides, default=0) < 0 or len(self.shape) != len(self.strides):
            raise CheckpointError(f"{self.path}: a tensor of shape {self.shape}, strides {self.strides}")
        needed = self._span(self.shape) * self.dtype.itemsize
        if needed > self.available:
            raise CheckpointError(
                f"{self.path}: a tensor of shape {self.shape} and {self.dtype} needs {needed} bytes, its storage has "
                f"{self.available}; the file is damaged"
            )

    def read_rows(self, start: int, stop: int, out: Tensor) -> None:
        """Read rows ``start`` to ``stop`` into ``out`` (any strides and dtype). A scalar counts as one row.

        Raises:
            CheckpointError: the file is missing or shorter than it should be.
        """
        shape = self.shape or (1,)
        strides = self.strides or (1,)
        direct = out.is_contiguous() and out.dtype == self.dtype and _is_contiguous(shape, strides)
        row_bytes = max(1, math.prod(shape[1:]) * self.dtype.itemsize)
        step = max(1, stop - start) if direct else max(1, _BUFFER_BYTES // row_bytes)
        out = out.reshape(stop - start, *shape[1:]) if out.dim() == 0 else out
        with _open(self.path) as file:
            for first in range(start, stop, step):
                last = min(first + step, stop)
                target = out[first - start : last - start]
                block = (last - first, *shape[1:])
                at = self.offset + first * strides[0] * self.dtype.itemsize
                if direct:
                    _pread(file, at, target)
                    continue
                # The span from the block's first element to its last, for any strides.
                span = torch.empty(self._span(block), dtype=self.dtype)
                _pread(file, at, span)
                target.copy_(span.as_strided(block, strides))

    def read_blocks(self, start: int, stop: int, block: Tensor) -> Iterator[tuple[int, int]]:
        """Yields (first, last) for rows ``start`` to ``stop`` in blocks; before each yield the first rows of ``block``
        are filled.

        Only for tensors that are :meth:`plain`.
        """
        bytes_of_row = math.prod(self.shape[1:]) * self.dtype.itemsize
        view = block.reshape(-1).view(torch.uint8).numpy().data
        with _open(self.path) as file:
            for first in range(start, stop, len(block)):
                last = min(first + len(block), stop)
                _fill(file, self.offset + first * bytes_of_row, view[: (last - first) * bytes_of_row])
                yield first, last

    def plain(self, dtype: torch.dtype) -> bool:
        """Whether the stored bytes are those of a contiguous tensor of ``dtype`` with rows."""
        return self.dtype == dtype and bool(self.shape) and _is_contiguous(self.shape, self.strides)

    def _span(self, shape: tuple[int, ...]) -> int:
        """Elements from the first to the last one of a block of ``shape``."""
        if 0 in shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(shape, self.strides))


@dataclass(frozen=True)
class ShardedBytes:
    """The part of a torch ShardedTensor that one rank saved.

    Attributes:
        dtype, shape: those of the whole tensor.
        shards: offsets in the whole tensor, and location, of each shard of this rank.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[tuple[tuple[int, ...], TensorBytes], ...]


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """The object that torch.save wrote at ``offset`` of ``path``, with a :class:`TensorBytes` in place of every tensor
    and a :class:`ShardedBytes` in place of every ShardedTensor.

    Reads the descriptions only, and makes no object of the file's classes, so the file need not be trusted. Tensors
    inside of such an object, as in a saved module, are refused.

    Raises:
        CheckpointError: no file, not a whole torch.save zip, or content that is refused; names the path and the cause.
    """
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise CheckpointError(
                f"{path}: has {size} bytes, expected at least {offset + length}; the file is truncated, copy it again"
            )
        view = _FileView(file, offset, length)
        try:
            with zipfile.ZipFile(view) as archive:
                return _read_archive(_Records(path, offset, length, view, archive))
        except CheckpointError:
            raise
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                f"{path}: bytes {offset} to {offset + length} are not a complete torch.save file ({error}); expected "
                f"the zip format of torch 1.6 or later"
            ) from error
        except Exception as error:  # a damaged pickle raises nearly anything
            raise CheckpointError(f"{path}: cannot be read as a torch.save file: {error!r}") from error


class _Records:
    """The records of one torch.save zip, by the part of their name after the top folder."""

    def __init__(self, path: Path, offset: int, length: int, view: io.RawIOBase, archive: zipfile.ZipFile) -> None:
        self.path = path
        self.offset = offset
        self.length = length
        self.view = view
        self.archive = archive
        self.infos = {info.filename.partition("/")[2]: info for info in archive.infolist()}

    def read(self, name: str) -> bytes | None:
        info = self.infos.get(name)
        return None if info is None else self.archive.read(info)

    def locate(self, name: str) -> tuple[int, int]:
        """(offset in the file, bytes) of a record's content."""
        info = self.infos.get(name)
        if info is None:
            raise CheckpointError(f"{self.path}: has no record {name!r}; the file is damaged")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(f"{self.path}: record {name!r} is compressed; save again with plain torch.save")
        # The central directory says where the local header is; only the local header says how long it is.
        self.view.seek(info.header_offset)
        header = self.view.read(_LOCAL_HEADER_BYTES) or b""
        if len(header) < _LOCAL_HEADER_BYTES or header[:4] != b"PK\x03\x04":
            raise CheckpointError(f"{self.path}: record {name!r} has no header; the file is damaged")
        name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
        start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
        if start + info.file_size > self.length:
            raise CheckpointError(f"{self.path}: record {name!r} reaches beyond its file; the file is truncated")
        return self.offset + start, info.file_size


def _read_archive(records: _Records) -> Any:
    description = records.read("data.pkl")
    if description is None:
        raise CheckpointError(f"{records.path}: a zip file without data.pkl; expected a file that torch.save wrote")
    order = records.read("byteorder")
    if order not in (None, b"little"):
        raise CheckpointError(f"{records.path}: byte order {order!r}; expected little")
    unpickler = _TensorUnpickler(description, records)
    found = unpickler.load()
    hidden = unpickler.num_tensors - len(_tensors_in(found, set()))
    if hidden and unpickler.others:
        raise CheckpointError(
            f"{records.path}: holds tensors inside of an object of a class ({unpickler.others[0]}); expected dicts of tensors. "
            "Save model.state_dict() on its own: torch.save(model.state_dict(), path)"
        )
    return found


def _tensors_in(value: Any, seen: set[int]) -> set[int]:
    """The ids of the tensors that plain containers hold."""
    if isinstance(value, TensorBytes):
        return {id(value)}
    inner: Iterable[Any] = ()
    if isinstance(value, ShardedBytes):
        inner = (data for _, data in value.shards)
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    if not inner or id(value) in seen:
        return set()
    seen.add(id(value))
    return {found for one in inner for found in _tensors_in(one, seen)}


@dataclass(frozen=True)
class _Storage:
    offset: int
    num_bytes: int
    dtype: torch.dtype | None


class _Other:
    """Takes the place of an object of another class: it accepts whatever a pickle does to it, and does nothing."""

    fields: Mapping[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> Any:  # a pickle may leave out __init__
        self = object.__new__(cls)
        self.fields = {}
        return self

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):  # (fields, fields in slots) or fields
            if isinstance(part, Mapping):
                self.fields = {**self.fields, **part}

    def append(self, _: Any) -> None: ...

    def extend(self, _: Any) -> None: ...

    def add(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...


class _TensorUnpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors, containers and numbers, and an :class:`_Other` for every other object."""

    def __init__(self, data: bytes, records: _Records) -> None:
        super().__init__(io.BytesIO(data))
        self.records = records
        self.num_tensors = 0
        self.others: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module == "torch._utils" and name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
            return lambda data, *_: data
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return self._subclass
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch", "Size"):
            return tuple
        if module in ("torch", "torch.storage") and (name in _STORAGE_DTYPES or name == "UntypedStorage"):
            return _STORAGE_DTYPES.get(name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("__builtin__", "getattr"):  # how a pickle names a class inside of a class
            return lambda _, inner: type(inner, (_Other,), {})
        self.others.append(f"{module}.{name}")
        return type(name, (_Other,), {})

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        offset, num_bytes = self.records.locate(f"data/{key}")
        return _Storage(offset, num_bytes, dtype)

    def _tensor(self, storage: _Storage, first: int, shape: Any, strides: Any, *rest: Any) -> TensorBytes:
        # v3 (dtypes that have no storage class of their own) has the dtype behind requires_grad and hooks.
        dtype = storage.dtype if storage.dtype is not None else rest[2]
        skipped = first * dtype.itemsize
        found = TensorBytes(
            self.records.path,
            storage.offset + skipped,
            storage.num_bytes - skipped,
            dtype,
            tuple(int(s) for s in shape),
            tuple(int(s) for s in strides),
        )
        found.check()
        self.num_tensors += 1
        return found

    def _subclass(self, rebuild: Any, kind: Any, args: Any, state: Any) -> Any:
        """A tensor with attributes, or of a subclass: a ShardedTensor is read, others are not."""
        if rebuild == self._tensor:
            return self._tensor(*args)
        if kind.__name__ != "ShardedTensor":
            return kind()
        shards = tuple(
            (tuple(int(at) for at in shard.fields["metadata"].fields["shard_offsets"]), shard.fields["tensor"])
            for shard in state[0]
        )
        return ShardedBytes(args[1], tuple(int(size) for size in args[2]), shards)


class _FileView(io.RawIOBase):
    """Bytes ``offset`` to ``offset + length`` of an open file as a file of their own."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
        super().__init__()
        self.file = file
        self.offset = offset
        self.length = length
        self.at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise OSError(f"seek to {base + offset}")  # zipfile expects the error of a real file
        self.at = base + offset
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self.length - self.at))
        data = os.pread(self.file.fileno(), count, self.offset + self.at)
        view[: len(data)] = data
        self.at += len(data)
        return len(data)


def _open(path: Path) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror}); is the checkpoint complete?") from error


def _pread(file: io.FileIO, offset: int, out: Tensor) -> None:
    """Fill the contiguous ``out`` with the bytes at ``offset``."""
    if out.numel():
        _fill(file, offset, out.reshape(-1).view(torch.uint8).numpy().data)


def _fill(file: io.FileIO, offset: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        # One call reads at most 2 GiB on Linux.
        count = os.preadv(file.fileno(), [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(
                f"{file.name}: ends at byte {offset + done}, expected {offset + len(view)}; the file is truncated"
            )
        done += count


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
