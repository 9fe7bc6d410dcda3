"""The cache folder: archives that were downloaded, each under the SHA-256 of its manifest.

A folder of the cache::

    archives/<sha256>/       an archive; a file has its name there once its bytes and its SHA-256 are those of the manifest
    parts/<sha256>/          files whose download is not complete; a later process continues them
    locks/<sha256>.fetch     held by the process that downloads the archive; the others wait
    locks/<sha256>.use       held, shared, by each process that uses the archive
    stores/<sha256 of URL>/  the manifests of a model store, ``<model>/<version>/manifest.json``

Processes may share the folder, and may end at any moment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO

from recinfer import env
from recinfer.archive.manifest import FileInfo
from recinfer.archive.manifest_rules import read_manifest
from recinfer.archive.paths import file_sha256
from recinfer.errors import ArchiveError, ConfigError, NotFoundError, UnavailableError
from recinfer.files import naming, write_file
from recinfer.remote.location import Location, is_url
from recinfer.sizes import size_text
from recinfer.strict_json import MAX_JSON_BYTES

__all__ = ["ArchiveCache", "CachedArchive", "Progress", "in_cache"]

_CHUNK = 16 << 20  # bytes of one request to the storage
_FILES_AT_ONCE = 4
_ATTEMPTS = 4  # attempts of one chunk
_FIRST_PAUSE_S = 0.2  # before the second attempt; doubles
_RESERVE = 64 << 20  # bytes that a download leaves free on the disk

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a download, given its name and its bytes: a context manager whose function takes the number of bytes just done."""


def _no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda count: None)


class CachedArchive:
    """An archive in the cache; the cache keeps it until :meth:`release`, or until the end of the process.

    Attributes:
        path: its folder.
    """

    def __init__(self, path: Path, lock: IO[bytes]) -> None:
        self.path = path
        self._lock = lock

    def release(self) -> None:
        """Let the cache remove the archive when it needs the room; a second call has no effect."""
        self._lock.close()


@contextmanager
def in_cache(path: str | os.PathLike[str]) -> Iterator[tuple[str | os.PathLike[str], Callable[[], None]]]:
    """The folder of an archive that a folder or a URL names, and the function that ends its use; an error in the block ends it.

    Raises:
        NotFoundError, ArchiveError, ConfigError, UnavailableError: see :meth:`ArchiveCache.archive`.
    """
    if not (isinstance(path, str) and is_url(path)):
        yield path, lambda: None
        return
    cached = ArchiveCache().archive(Location(path))
    try:
        yield cached.path, cached.release
    except BaseException:
        cached.release()
        raise


class ArchiveCache:
    """Downloads archives into a folder and keeps them there. Any thread and any process may call it.

    Args:
        folder: the cache folder; None: ``RECINFER_CACHE``, or recinfer's folder in the user's cache folder.
        most_bytes: bytes of all archives in the folder; archives that no process uses are removed, the longest unused
            first. None: no bound but the disk's.
        progress: shows the progress of a download.
        report: takes lines of text, about another process's download.
    """

    def __init__(
        self,
        folder: Path | None = None,
        most_bytes: int | None = None,
        *,
        progress: Progress = _no_progress,
        report: Callable[[str], object] = lambda _: None,
    ) -> None:
        self.folder = env.cache_folder() if folder is None else folder
        self._most = most_bytes
        self._progress = progress
        self._report = report

    def archive(
        self,
        location: Location,
        prefix: str = "",
        *,
        manifest: bytes | None = None,
        wanted: Callable[[str], bool] = lambda _: True,
    ) -> CachedArchive:
        """The archive at a URL, downloaded unless the cache has it. Half an archive is never returned.

        Args:
            prefix: the archive's folder in ``location``; empty: ``location`` itself.
            manifest: the text of manifest.json, known before; then an archive that the cache has needs no storage.
            wanted: whether a file of the manifest is needed; other files stay away.

        Raises:
            NotFoundError: there is no archive.
            ArchiveError: the manifest breaks a rule, or a file has other bytes (F4) or another SHA-256 (F5).
            ConfigError: no rights, or no room on the disk or below ``most_bytes``.
            UnavailableError: the storage does not answer, or the cache cannot be written. A later call goes on where the
                download stopped.
        """
        where = f"{location.url}/{prefix}".rstrip("/")
        begin = f"{prefix}/" if prefix else ""
        try:
            text = manifest or location.read(f"{begin}manifest.json", MAX_JSON_BYTES + 1)
        except NotFoundError:
            raise NotFoundError(f"{where} has no manifest.json; expected the folder of an archive") from None
        files = [file for file in read_manifest(text).files if wanted(file.path)]
        digest = hashlib.sha256(text).hexdigest()
        with _storing(self.folder):
            use = self._opened(digest, "use")
            try:
                fcntl.flock(use, fcntl.LOCK_SH)  # waits only for a process that is removing the archive
                with self._alone(digest, where):
                    root = self.folder / "archives" / digest
                    missing = [file for file in files if not _is_whole(root / file.path, file)]
                    if missing or not (root / "manifest.json").is_file():
                        self._make_room(digest, sum(file.bytes for file in missing), where)
                        self._download(location, begin, digest, missing, where)
                        root.mkdir(parents=True, exist_ok=True)
                        write_file(root / "manifest.json", text)
                        shutil.rmtree(self.folder / "parts" / digest, ignore_errors=True)
                os.utime(use.name)
            except BaseException:
                use.close()
                raise
        return CachedArchive(root, use)

    def _opened(self, digest: str, kind: str) -> IO[bytes]:
        folder = self.folder / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{digest}.{kind}").open("ab")

    @contextmanager
    def _alone(self, digest: str, where: str) -> Iterator[None]:
        """Download an archive in one process at a time."""
        with self._opened(digest, "fetch") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._report(f"another process downloads {where}; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, digest: str, needed: int, where: str) -> None:
        """Remove unused archives until ``needed`` more bytes fit; raises ConfigError if they never do."""
        archives = self.folder / "archives"
        archives.mkdir(parents=True, exist_ok=True)
        if self._most is not None:
            sizes = {path.name: _size(path) for path in archives.iterdir() if path.name != digest}
            room = self._most - _size(archives / digest) - sum(sizes.values())
            for name in sorted(sizes, key=self._last_use):
                if room < needed and self._remove(name):
                    room += sizes[name]
            if room < needed:
                raise ConfigError(
                    f"{where} needs {size_text(needed)}, and the cache {self.folder} has room for {size_text(max(room, 0))} "
                    f"beside the archives in use; its bound is {size_text(self._most)}, set by --cache-bytes"
                )
        free = shutil.disk_usage(self.folder).free - _RESERVE
        started = _size(self.folder / "parts" / digest)
        if free < needed - started:
            raise ConfigError(
                f"{where} needs {size_text(needed - started)}, and the disk of {self.folder} has {size_text(max(free, 0))}; "
                "free some, or name a folder on another disk with --cache-dir"
            )

    def _last_use(self, digest: str) -> float:
        try:
            return (self.folder / "locks" / f"{digest}.use").stat().st_mtime
        except OSError:
            return 0.0

    def _remove(self, digest: str) -> bool:
        """Remove an archive and its parts unless a process uses it."""
        with self._opened(digest, "use") as use:
            try:
                fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            for folder in ("archives", "parts"):
                shutil.rmtree(self.folder / folder / digest, ignore_errors=True)
        return True

    def _download(self, location: Location, begin: str, digest: str, files: list[FileInfo], where: str) -> None:
        parts, root = self.folder / "parts" / digest, self.folder / "archives" / digest
        parts.mkdir(parents=True, exist_ok=True)
        stopped = threading.Event()
        with (
            self._progress(f"downloading {where}", sum(file.bytes for file in files)) as count,
            ThreadPoolExecutor(_FILES_AT_ONCE, "recinfer-download") as pool,
        ):
            # A part's name comes from the hash of the file's path: a path may have folders.
            tasks = [
                pool.submit(_fetch, location, begin, file, parts / _part_name(file), root / file.path, count, stopped)
                for file in files
            ]
            try:
                for task in tasks:
                    task.result()
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _fetch(
    location: Location,
    begin: str,
    file: FileInfo,
    part: Path,
    target: Path,
    count: Callable[[int], None],
    stopped: threading.Event,
) -> None:
    """Download the rest of a file to ``part``, check its SHA-256, and give it its name."""
    with part.open("ab") as out:
        have = os.fstat(out.fileno()).st_size
        if have > file.bytes:
            out.truncate(0)
            have = 0
        count(have)
        while have < file.bytes and not stopped.is_set():
            chunk = _chunk(location, begin + file.path, have, min(have + _CHUNK, file.bytes), file.bytes, stopped)
            if len(chunk) == file.bytes:  # the storage has no ranges
                out.truncate(0)
                have = 0
            out.write(chunk)
            have += len(chunk)
            count(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    if stopped.is_set():
        return
    with part.open("rb") as whole:
        digest = file_sha256(whole)
    if digest != file.sha256:
        part.unlink()
        raise ArchiveError(
            f"{location.url}/{begin}{file.path} has SHA-256 {digest[:16]}...; expected {file.sha256[:16]}...; "
            "upload the archive again",
            rule="F5",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(part, target)


def _chunk(location: Location, path: str, start: int, end: int, size: int, stopped: threading.Event) -> bytes:
    """Bytes ``start`` to ``end`` of a file, or all ``size`` bytes; tries again while the storage does not answer."""
    pause = _FIRST_PAUSE_S
    for attempt in range(_ATTEMPTS):
        try:
            data = location.read_range(path, start, end)
        except UnavailableError:
            if attempt + 1 == _ATTEMPTS or stopped.wait(pause):
                raise
            pause *= 2
            continue
        if len(data) in (end - start, size):
            return data
        break
    raise ArchiveError(
        f"{location.url}/{path}: got {len(data)} bytes from byte {start}, expected {end - start}; the file is truncated: "
        "upload the archive again",
        rule="F4",
    )


@contextmanager
def _storing(folder: Path) -> Iterator[None]:
    """Turn errors of the operating system into UnavailableErrors, which name the file or ``folder``."""
    try:
        with naming(folder):
            yield
    except OSError as error:
        raise UnavailableError(f"the cache cannot be written: {error.filename}: {error.strerror}") from None


def _part_name(file: FileInfo) -> str:
    return hashlib.sha256(f"{file.path} {file.sha256}".encode()).hexdigest()


def _is_whole(path: Path, file: FileInfo) -> bool:
    try:
        return path.stat().st_size == file.bytes
    except OSError:
        return False


def _size(folder: Path) -> int:
    """Bytes of all files below ``folder``; 0 if it does not exist."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # removed by another process
                total += os.stat(os.path.join(parent, name)).st_size
    return total
