"""Writes files and folders so that their target is complete, the content getting its name by one rename; reads text."""

from __future__ import annotations

import ctypes
import errno
import gzip
import io
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from recinfer.errors import ConfigError

__all__ = [
    "NOT_GZIP",
    "create_text",
    "exchange",
    "naming",
    "open_text",
    "packed",
    "put",
    "read_bytes",
    "refuse_url",
    "sync_folder",
    "without_gz",
    "write_file",
]

NOT_GZIP = (EOFError, gzip.BadGzipFile, zlib.error)
"""The errors of reading a ``.gz`` file that is cut off or damaged."""

# A URL that became a Path has one slash after its scheme.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)

_RENAME_NOREPLACE, _RENAME_EXCHANGE = 1, 2
_AT_FDCWD = -100
_LIBC = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def refuse_url(path: Path, what: str) -> None:
    """Raise ConfigError for a URL given as a path, which would name a folder ``s3:`` in the current folder.

    Args:
        what: the name of the argument, for the message.
    """
    if _URL.match(str(path)):
        raise ConfigError(f"{what}: got the URL {path}, expected a path on this machine")


def put(partial: Path, target: Path, *, replace: bool) -> None:
    """Rename ``partial``, a file or folder, to ``target`` in the same file system.

    Args:
        replace: what has the name is removed: a file by a file, a folder by a folder.

    Raises:
        FileExistsError: something has the name, and is not to be replaced. Of several callers at one moment, all but one
            get this.
    """
    try:
        _put_new(partial, target)
    except FileExistsError:
        if not replace:
            raise
        if not partial.is_dir():
            os.replace(partial, target)
        elif exchange(partial, target):
            shutil.rmtree(partial, ignore_errors=True)
        else:
            _replace_folder(partial, target)
    sync_folder(target.parent)


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` as the whole content of a file; an error, for example of a full disk, leaves the file as it was.

    A link, a device or a pipe (``/dev/stdout``) is written in place.

    Raises:
        OSError: it cannot be written; names ``path``.
    """
    path = Path(path)
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_bytes(data)
            return
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(data)
            if path.exists():
                shutil.copymode(path, partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:  # an error of a write names no file
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make errors of the operating system in the block name ``path``: those of a write, such as that of a full disk,
    name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:  # numpy's, which has only a text
            raise OSError(f"{os.fspath(path)}: {error}") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def open_text(path: str | os.PathLike[str], errors: str = "strict") -> IO[str]:
    """``path``, UTF-8 with or without a byte order mark, opened for reading; unpacked if its name ends in ``.gz``.

    Args:
        errors: what becomes of bytes that are no UTF-8, as in :func:`open`.

    Raises:
        OSError: the file cannot be opened. Reading raises one of :data:`NOT_GZIP` for a damaged ``.gz``.
    """
    if _is_gz(path):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", errors=errors, newline="")  # type: ignore[arg-type]
    return open(path, encoding="utf-8-sig", errors=errors, newline="")


def create_text(path: str | os.PathLike[str]) -> IO[str]:
    """``path``, UTF-8, created or emptied for writing; packed if its name ends in ``.gz``."""
    if _is_gz(path):
        return io.TextIOWrapper(gzip.open(path, "wb"), encoding="utf-8", newline="")  # type: ignore[arg-type]
    return open(path, "w", encoding="utf-8", newline="")


def packed(path: str | os.PathLike[str], data: bytes) -> bytes:
    """``data`` as a file of the name ``path`` holds it: packed if the name ends in ``.gz``."""
    return gzip.compress(data) if _is_gz(path) else data


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The content of ``path``, unpacked if its name ends in ``.gz``; raises what :func:`open_text` and reading it do."""
    data = Path(path).read_bytes()
    return gzip.decompress(data) if _is_gz(path) else data


def without_gz(path: str | os.PathLike[str]) -> Path:
    """``path`` without its last suffix if that is ``.gz``: its name says what the file holds."""
    return Path(path).with_suffix("") if _is_gz(path) else Path(path)


def _is_gz(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == ".gz"


def exchange(one: Path, other: Path) -> bool:
    """Swap two names atomically; returns False if the system or file system does not support it."""
    return _renameat2(one, other, _RENAME_EXCHANGE) == 0


def _put_new(partial: Path, target: Path) -> None:
    error = _renameat2(partial, target, _RENAME_NOREPLACE)
    if error == 0:
        return
    if error == errno.EEXIST:
        raise FileExistsError(error, os.strerror(error), str(target))
    # The system or the file system (NFS) has no such call. To make something under a name fails where the name is taken,
    # and to rename over an empty folder or a file that one has just made takes nothing from anybody.
    if partial.is_dir():
        remove = os.rmdir
        os.mkdir(target)
    else:
        remove = os.unlink
        os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.replace(partial, target)
    except BaseException:
        remove(target)
        raise


def _renameat2(source: Path, target: Path, flag: int) -> int:
    """Call Linux's renameat2; returns 0 or the error number."""
    function = getattr(_LIBC, "renameat2", None)
    if function is None:
        return errno.ENOSYS
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return 0
    return ctypes.get_errno()


def _replace_folder(partial: Path, target: Path) -> None:
    """Move the old target to another name, because a folder cannot be renamed over a non-empty one; moves it back on an
    error."""
    moved = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    try:
        os.rename(target, moved / "old")
        try:
            os.rename(partial, target)
        except BaseException:
            os.rename(moved / "old", target)
            raise
    finally:
        shutil.rmtree(moved, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush the directory entries of ``folder`` to the disk, if the system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # a file system without this operation
    finally:
        os.close(descriptor)
