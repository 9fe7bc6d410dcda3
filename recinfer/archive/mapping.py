"""Maps shard files into memory so that the row-wise shards of a table are contiguous.

The mapped pages belong to the page cache: loading copies only pages that two shards share, and processes that serve the
same archive share the memory.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.paths import open_inside
from recinfer.archive.rank_files import RankFile, StoredRect
from recinfer.errors import ArchiveError, UnavailableError
from recinfer.quant.buffers import SLACK_BYTES, Placed

__all__ = ["MappedShards", "map_shards"]

_MAP_FIXED = 0x10
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
_MAP_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True)
class MappedShards:
    """Packed shards in one buffer.

    Attributes:
        buffer: uint8, 1-D, read-only memory: do not write to it (but in ``edit`` of :func:`map_shards`).
        shards: module path -> its shards; row pieces of one table and column range are neighbours when all are here.
        mapped_bytes: bytes of tables that are file pages.
        copied_bytes: bytes that had to be copied: all of them where pages cannot be mapped.
    """

    buffer: Tensor
    module_shards: dict[str, tuple[Placed, ...]]
    mapped_bytes: int
    copied_bytes: int

    @property
    def shards(self) -> tuple[Placed, ...]:
        """The shards of all modules."""
        return tuple(shard for shards in self.module_shards.values() for shard in shards)


@dataclass(frozen=True)
class _InFile:
    path: str
    piece: StoredRect
    offset: int  # in the buffer


def map_shards(
    root: Path,
    files: Sequence[RankFile],
    *,
    preload: bool = False,
    lock: bool = False,
    copy: bool = False,
    edit: Callable[[MappedShards], None] | None = None,
) -> MappedShards:
    """Map or read the shards of ``files`` into one buffer.

    Args:
        root: the archive's folder.
        files: checked files of the ranks wanted.
        preload: read all pages now instead of at their first use.
        lock: keep all pages in memory (mlock), which also reads them now.
        copy: read into ordinary memory instead of mapping (what happens anyway where mapping is impossible).
        edit: may write to the buffer before anyone else sees it. The pages it touches become private copies of this
            process; the files and other processes never see the change, and all other pages stay shared.

    Raises:
        ArchiveError: a file no longer exists (F3) or is shorter than its header requires (F4).
        UnavailableError: there is no memory for the copy, or the limit on locked memory is too low.
    """
    placed, size = _place(files)
    total = sum(p.piece.bytes for p in placed)
    mapped = None if copy or not _can_map() else _map(root, placed, size, preload, private=edit is not None)
    buffer, copied = (_copy(root, placed, size), total) if mapped is None else mapped
    shards: dict[str, list[Placed]] = {}
    for p in placed:
        table = p.piece.table
        shards.setdefault(table.module, []).append(Placed(p.piece.rect, table.precision, p.offset))
    result = MappedShards(buffer, {path: tuple(s) for path, s in shards.items()}, total - copied, copied)
    if edit is not None:
        edit(result)
        if mapped is not None:
            _protect(buffer)
            if preload:  # MAP_POPULATE would copy every page of a writable private mapping
                int(buffer[:: mmap.PAGESIZE].max())
    if lock:
        _lock(buffer)
    return result


def _place(files: Sequence[RankFile]) -> tuple[list[_InFile], int]:
    """Buffer offsets: each (table, columns) gets a page-aligned region, and each shard its place by row in it.

    Regions follow the order of their first pieces in the files, so that neighbouring file pages stay neighbours and
    the kernel keeps few mappings.
    """
    regions: dict[tuple[str, str, int, int], list[tuple[str, StoredRect]]] = {}
    for file in files:
        for piece in file.rects:
            rect = piece.rect
            key = (piece.table.module, piece.table.table, rect.col_start, rect.col_stop)
            parts = regions.setdefault(key, [])
            # Every rank has a replicated table (data_parallel); this host maps one copy.
            if all(other.rect.row_start != rect.row_start for _, other in parts[-1:]):
                parts.append((file.path, piece))
    placed, at = [], 0
    for parts in regions.values():
        parts.sort(key=lambda part: part[1].rect.row_start)
        end = at
        previous: StoredRect | None = None
        base = 0
        for path, piece in parts:
            in_table = piece.rect.row_start * piece.row_bytes
            if previous is None or piece.rect.row_start != previous.rect.row_stop:
                # The shard does not follow the previous one, because the rank between them is not opened: begin at a
                # new page, at its phase.
                base = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE - in_table // mmap.PAGESIZE * mmap.PAGESIZE
            placed.append(_InFile(path, piece, base + in_table))
            end = base + in_table + piece.bytes
            previous = piece
        at = -(-end // mmap.PAGESIZE) * mmap.PAGESIZE
    return placed, at + SLACK_BYTES


def _can_map() -> bool:
    return os.name == "posix" and hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")


def _read(root: Path, path: str, spans: Sequence[tuple[int, memoryview]]) -> None:
    """Read each view from its offset in the file."""
    with open_inside(root, path) as file:
        for start, view in spans:
            file.seek(start)
            done = 0
            while done < len(view):
                count = file.readinto(view[done : done + (64 << 20)])  # type: ignore[attr-defined]
                if not count:
                    raise ArchiveError(f"{path} ends at byte {start + done}, inside a shard", rule="F4")
                done += count


def _copy(root: Path, placed: Sequence[_InFile], size: int) -> Tensor:
    try:
        buffer = torch.zeros(size, dtype=torch.uint8)
    except RuntimeError as error:
        raise UnavailableError(
            f"cannot allocate {size} bytes for tables: {error}; shard the model over more hosts"
        ) from None
    view = memoryview(buffer.numpy())  # type: ignore[arg-type]
    for path, parts in _by_path(placed).items():
        _read(root, path, [(p.piece.start, view[p.offset : p.offset + p.piece.bytes]) for p in parts])
    return buffer


def _by_path(placed: Sequence[_InFile]) -> dict[str, list[_InFile]]:
    result: dict[str, list[_InFile]] = {}
    for p in placed:
        result.setdefault(p.path, []).append(p)
    return result


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _protect(buffer: Tensor) -> None:
    """Make a mapped buffer read-only."""
    result = _libc().mprotect(buffer.data_ptr(), buffer.numel(), mmap.PROT_READ)
    assert result == 0, os.strerror(ctypes.get_errno())


def _lock(buffer: Tensor) -> None:
    if os.name != "posix":
        raise UnavailableError("locking memory needs a POSIX system; load without lock")
    if _libc().mlock(buffer.data_ptr(), buffer.numel()):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise UnavailableError(
            f"cannot lock {buffer.numel()} bytes of tables in memory: {os.strerror(ctypes.get_errno())}; the limit is "
            f"{soft} bytes (ulimit -l), raise it or load without lock"
        )


def _map(
    root: Path, placed: Sequence[_InFile], size: int, preload: bool, *, private: bool
) -> tuple[Tensor, int] | None:
    """The buffer of mapped pages and the number of copied bytes; None if the system cannot map the pages this way.

    A ``private`` mapping is writable until :func:`_protect`.
    """
    if any((p.offset - p.piece.start) % mmap.PAGESIZE for p in placed):
        return None  # pages of this machine are larger than the format's phase
    try:
        # Reserved without write access, so that it counts against no limit on memory.
        reservation = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    except (OSError, ValueError, OverflowError):
        return None
    holder = (ctypes.c_uint8 * size).from_address(_address(reservation))
    holder.owner = reservation  # type: ignore[attr-defined]  # the mapping lives as long as the tensor does
    base = ctypes.addressof(holder)
    page = mmap.PAGESIZE
    shared: dict[int, list[_InFile]] = {}  # pages with bytes of several shards, which cannot be a page of one file
    libc = _libc()
    if private:  # without a reservation of swap: few pages will be written
        flags, prot = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    else:
        flags, prot = mmap.MAP_SHARED | _MAP_FIXED | (_MAP_POPULATE if preload else 0), mmap.PROT_READ
    for path, parts in _by_path(placed).items():
        with open_inside(root, path) as file:
            length = os.fstat(file.fileno()).st_size
            for p in parts:
                if p.piece.start + p.piece.bytes > length:
                    raise ArchiveError(f"{path} has {length} bytes and ends inside a shard", rule="F4")
            for offset, file_offset, count in _runs(parts, shared, page):
                got = libc.mmap(base + offset, count, prot, flags, file.fileno(), file_offset)
                if got == _MAP_FAILED:
                    _assert_mapping_unsupported(ctypes.get_errno())
                    return None
    copied = 0
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    for offset, owners in shared.items():
        if libc.mmap(base + offset, page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _MAP_FAILED:
            _assert_mapping_unsupported(ctypes.get_errno())
            return None
        target = memoryview(np.frombuffer(holder, dtype=np.uint8))  # type: ignore[call-overload]
        for p in owners:
            first, last = max(p.offset, offset), min(p.offset + p.piece.bytes, offset + page)
            _read(root, p.path, [(p.piece.start + first - p.offset, target[first:last])])
            copied += last - first
        if not private:
            libc.mprotect(base + offset, page, mmap.PROT_READ)
    return torch.frombuffer(holder, dtype=torch.uint8), copied


def _runs(parts: Sequence[_InFile], shared: dict[int, list[_InFile]], page: int) -> list[tuple[int, int, int]]:
    """(buffer offset, file offset, bytes) of page runs to map; pages with bytes of two shards are appended to
    ``shared``.

    A piece owns its first page if the piece begins at the page's start, and its last page if no other piece follows
    there.
    """
    runs: list[tuple[int, int, int]] = []
    for p in parts:
        start, stop = p.offset, p.offset + p.piece.bytes
        first, last = start // page * page, -(-stop // page) * page
        low, high = first, last
        if start % page:
            shared.setdefault(first, []).append(p)
            low = first + page
        if stop % page and high > low and p.piece.rect.row_stop != p.piece.table.num_embeddings:
            shared.setdefault(last - page, []).append(p)
            high = last - page
        if high <= low:
            continue
        file_offset = p.piece.start - (start - low)
        if runs and runs[-1][0] + runs[-1][2] == low and runs[-1][1] + runs[-1][2] == file_offset:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + high - low)
        else:
            runs.append((low, file_offset, high - low))
    return runs


def _assert_mapping_unsupported(code: int) -> None:
    """Assert that mmap failed for too many mappings, or on a file system without mapping; the caller copies then."""
    assert code in (errno.ENOMEM, errno.ENODEV, errno.EACCES, errno.EPERM, errno.EAGAIN), os.strerror(code)


def _address(reservation: mmap.mmap) -> int:
    """The address of a read-only mapping, from numpy, because ctypes only takes writable buffers."""
    return int(np.frombuffer(reservation, dtype=np.uint8).__array_interface__["data"][0])
