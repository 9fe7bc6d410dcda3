"""Writes an archive into a temporary folder, hashes its files and renames it to the target."""

from __future__ import annotations

import ctypes
import glob
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from recinfer.archive.manifest import FileInfo
from recinfer.archive.paths import check_path, file_sha256
from recinfer.archive.rank_files import StoredRect, rank_file, rects_by_rank
from recinfer.distributed.planner.plan import Plan, TablePlan
from recinfer.errors import ArchiveError, UnavailableError
from recinfer.files import put, refuse_url
from recinfer.quant.rows import slice_packed_columns

__all__ = ["ArchiveFolder", "ShardWriter", "archive_folder", "exists", "partial_folder", "put_at", "remove_stale"]

_PARTIAL = re.compile(r"\.[a-z0-9_]{8}\.partial")  # the suffix that partial_folder appends to the target's name
_YOUNG_SECONDS = 10.0

_SYNC_FILE_RANGE_WRITE = 2
_LIBC = ctypes.CDLL(None) if os.name == "posix" else None


def _start_writeback(descriptor: int, offset: int, count: int) -> None:
    """Ask the kernel (Linux) to start writing these bytes to the disk, so that the later fsync takes less time."""
    function = getattr(_LIBC, "sync_file_range", None)
    if function is not None:
        function(descriptor, ctypes.c_int64(offset), ctypes.c_int64(count), _SYNC_FILE_RANGE_WRITE)


class _HashedFile:
    """A file that is written in any order. Bytes written in order are hashed at once, the rest when the file is closed.

    Writes bypass Python's buffers, because close would retry a buffer that could not be written.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._digest = hashlib.sha256()
        self._hashed = 0
        self._in_order = True

    def write_at(self, offset: int, data: bytes | memoryview) -> None:
        if offset != self._hashed:
            if self._in_order and 0 < offset - self._hashed <= 8192:  # padding: zeros that are never written
                self._digest.update(bytes(offset - self._hashed))
                self._hashed = offset
            else:
                self._in_order = False
        view = memoryview(data)
        done = 0
        while done < len(view):  # one call writes at most 2 GiB on Linux
            done += os.pwrite(self._descriptor, view[done:], offset + done)
        _start_writeback(self._descriptor, offset, len(view))
        if self._in_order:
            self._digest.update(view)
            self._hashed += len(view)

    def close(self) -> str:
        """Extend the file to its size, flush it to the disk and return its SHA-256."""
        try:
            os.ftruncate(self._descriptor, self.size)
            os.fsync(self._descriptor)
        finally:
            self.abandon()
        if self._in_order and self._hashed == self.size:
            return self._digest.hexdigest()
        with self.path.open("rb") as file:
            return file_sha256(file)

    def abandon(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class ArchiveFolder:
    """An archive that is being written. The target appears only when all files are complete.

    Attributes:
        root: the temporary folder.
        files: the added files, in order.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[FileInfo] = []

    def path(self, name: str) -> Path:
        """The path to write the file ``name`` to; creates its folder."""
        check_path(name)
        full = self.root / name
        full.parent.mkdir(parents=True, exist_ok=True)
        return full

    def add(self, name: str, data: bytes | None = None) -> None:
        """Register the file ``name``: write ``data`` if given, flush it to the disk and hash it."""
        full = self.path(name)
        if data is not None:
            full.write_bytes(data)
        with full.open("rb") as file:
            os.fsync(file.fileno())
            self.files.append(FileInfo(name, full.stat().st_size, file_sha256(file)))

    def write_manifest(self, text: str) -> None:
        """Write ``manifest.json``, which lists all other files."""
        full = self.root / "manifest.json"
        full.write_text(text, encoding="utf-8")
        with full.open("rb") as file:
            os.fsync(file.fileno())


class ShardWriter:
    """Fills the shard files of all ranks, table by table, rows in ascending chunks.

    Use as a context manager; on success the files are registered in the folder.
    """

    def __init__(self, folder: ArchiveFolder, plan: Plan) -> None:
        self._folder = folder
        plan_hash = plan.hash
        rank_files = [rank_file(rects, rank, plan_hash) for rank, rects in enumerate(rects_by_rank(plan))]
        _check_space(folder.root, sum(each.bytes for each in rank_files))
        self._files: dict[str, _HashedFile] = {}
        self._pieces: dict[tuple[str, str], list[tuple[_HashedFile, StoredRect]]] = {}
        for each in rank_files:
            file = _HashedFile(folder.path(each.path), each.bytes)
            self._files[each.path] = file
            file.write_at(0, each.header)
            for piece in each.rects:
                self._pieces.setdefault((piece.table.module, piece.table.table), []).append((file, piece))

    def write_rows(self, table: TablePlan, first_row: int, packed_RP: Tensor) -> None:
        """Write packed whole rows ``first_row ...`` (uint8 [R, row bytes], row alignment 1) into their shards."""
        stop_row = first_row + packed_RP.shape[0]
        for file, piece in self._pieces[table.module, table.table]:
            rect = piece.rect
            low, high = max(first_row, rect.row_start), min(stop_row, rect.row_stop)
            if low >= high:
                continue
            rows = packed_RP[low - first_row : high - first_row]
            rows = slice_packed_columns(
                rows, table.embedding_dim, table.precision, rect.col_start, rect.col_stop
            ).contiguous()
            offset = piece.start + (low - rect.row_start) * piece.row_bytes
            file.write_at(offset, memoryview(rows.numpy()).cast("B"))  # type: ignore[arg-type]

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                for name, file in self._files.items():
                    self._folder.files.append(FileInfo(name, file.size, file.close()))
        finally:
            for file in self._files.values():
                file.abandon()


@contextmanager
def archive_folder(target: Path, *, overwrite: bool = False) -> Iterator[ArchiveFolder]:
    """Yields a temporary folder next to ``target``; renames it to ``target`` at the end of the block, removes it on an
    error.

    Args:
        target: path of the archive; must not exist, or with ``overwrite`` must be an archive (or empty).

    Raises:
        ConfigError: the target is a URL.
        ArchiveError: the target exists, or is not an archive.
        UnavailableError: the disk is full, or the folder cannot be written.
    """
    refuse_url(target, "out")
    target = Path(os.path.abspath(target))
    _check_target(target, overwrite)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(target)
    except OSError as error:
        raise UnavailableError(f"cannot write next to {str(target)!r}: {error.strerror}") from None
    try:
        with partial_folder(target) as root:
            root.chmod(0o755)
            yield ArchiveFolder(root)
            for folder in [*(p for p in root.rglob("*") if p.is_dir()), root]:
                sync_folder(folder)
            _check_target(target, overwrite)
            put_at(root, target, overwrite)
    except OSError as error:
        raise UnavailableError(f"cannot write the archive {str(target)!r}: {error.strerror or error}") from error


@contextmanager
def partial_folder(target: Path) -> Iterator[Path]:
    """A new, locked, hidden folder next to ``target``, removed at the end of the block and on any error.

    The kernel releases the lock when the process ends in any way, so that :func:`remove_stale` can tell the folder of a
    killed writer from that of a running one, on any host that shares the disk and its locks. Without lock support no
    folder is removed.
    """
    root = target.parent / f".{target.name}.{secrets.token_hex(4)}.partial"
    lock: int | None = None
    mine = True
    try:  # set before the folder exists, because Ctrl-C may arrive while it is created
        try:
            root.mkdir(mode=0o700)
        except FileExistsError:
            mine = False
            raise
        lock = _lock(root)
        yield root
    finally:
        if mine:
            _remove(root)
        if lock is not None:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Remove a folder and its content, even if Ctrl-C interrupts the removal."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove_stale(target: Path) -> None:
    """Remove partial folders next to ``target`` that killed writers left: those without a held lock.

    New folders are kept: a writer creates its folder before it locks it.
    """
    for folder in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        if not _PARTIAL.fullmatch(folder.name[len(target.name) + 1 :]) or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
        except OSError:  # removed meanwhile
            continue
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A descriptor with the folder's exclusive lock; None if another process holds it, or without such locks."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _check_target(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not overwrite:
        raise exists(target)
    is_archive = target.is_dir() and not target.is_symlink()
    if not is_archive or (any(target.iterdir()) and not (target / "manifest.json").is_file()):
        raise ArchiveError(f"{str(target)!r} exists and is not an archive; choose another path, or remove it first")


def exists(target: Path) -> ArchiveError:
    """The error for an archive or delta whose target path exists."""
    return ArchiveError(f"{str(target)!r} exists; choose another path, or pass overwrite=True (--overwrite)")


def put_at(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename a written archive or delta to its target; raises ArchiveError if that exists, unless ``overwrite``."""
    try:
        put(partial, target, replace=overwrite)
    except FileExistsError:
        raise exists(target) from None


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_space(root: Path, need: int) -> None:
    free = shutil.disk_usage(root).free
    if need > free:
        raise UnavailableError(f"the shards need {need} bytes, but only {free} are free at {str(root.parent)!r}")
