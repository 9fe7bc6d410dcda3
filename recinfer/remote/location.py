"""A folder behind a URL (``s3://``, ``gs://``, ``https://`` ...), read through fsspec."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError, NotFoundError, RecinferError, UnavailableError
from recinfer.excerpts import excerpt

__all__ = ["Location", "is_url", "mirror_folder"]

_URL = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_EXTRA = "pip install 'recinfer[remote]'"
_SHOWN = 300  # characters of a storage's own error
# Names of the errors by which storages refuse a caller; their classes belong to packages that are imported on demand.
_REFUSED = frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})
_STAMPS = ("ETag", "etag", "LastModified", "mtime", "updated", "last_modified", "created")


def is_url(path: object) -> bool:
    """Whether ``path`` is text that begins with a URL's scheme, such as ``s3://``.

    >>> is_url("s3://models/ranker"), is_url("models/ranker"), is_url("C://x")
    (True, False, False)
    """
    return isinstance(path, str) and _URL.match(path) is not None


class Location:
    """A folder behind a URL. Any thread may call it.

    Args:
        url: the folder's URL; fsspec and the storage's package read credentials and options from their usual places.

    Attributes:
        url: without a slash at its end and without a password or query.

    Raises:
        ConfigError: a scheme without an installed package, or a bad URL.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = shown_url(url)
        try:
            self._filesystem, root = url_to_fs(url)
        except ImportError as error:
            raise ConfigError(
                f"{self.url}: the package for this storage is not installed; {_EXTRA} ({error})"
            ) from None
        except ValueError as error:  # an unknown scheme, or a URL that the package refuses
            raise ConfigError(f"{self.url}: {excerpt(str(error), _SHOWN)}") from None
        self._root = root.rstrip("/")

    def read(self, path: str, limit: int) -> bytes:
        """The first ``limit`` bytes of a file.

        Raises:
            NotFoundError, ConfigError, UnavailableError: no such file; no rights; the storage does not answer.
        """
        return self.read_range(path, 0, limit)[:limit]

    def read_range(self, path: str, start: int, end: int | None) -> bytes:
        """Bytes ``start`` to ``end`` (None: the last) of a file; all bytes where the storage has no ranges.

        Raises:
            NotFoundError, ConfigError, UnavailableError: as :meth:`read`.
        """
        with self._errors(path):
            return bytes(self._filesystem.cat_file(f"{self._root}/{path}", start=start, end=end))

    def archives(self) -> dict[tuple[str, str], str]:
        """The folders ``<model>/<version>`` with a manifest.json -> text that changes when the manifest changes.

        The text is empty where the storage gives neither a hash nor a time.

        Raises:
            NotFoundError, ConfigError, UnavailableError: as :meth:`read`.
        """
        found = {}
        with self._errors(""):
            self._filesystem.invalidate_cache()
            listed = self._filesystem.glob(f"{_literal(self._root)}/*/*/manifest.json", detail=True)
            if not listed and not self._filesystem.exists(self._root):
                raise FileNotFoundError(self._root)
        for path, info in listed.items():
            model, version, _ = str(path).split("/")[-3:]
            if model[0] != "." and version[0] != ".":
                found[model, version] = _stamp(info)
        return found

    def names(self, path: str, suffix: str) -> list[str]:
        """Sorted names in a folder that end in ``suffix``; raises as :meth:`read`."""
        with self._errors(path):
            self._filesystem.invalidate_cache()
            listed = self._filesystem.ls(f"{self._root}/{path}", detail=False)
        return sorted(name for entry in listed if (name := str(entry).rstrip("/").rpartition("/")[2]).endswith(suffix))

    def stamp(self, path: str) -> str:
        """Text that changes when a file in a folder changes; raises as :meth:`read`.

        The text is empty where the storage gives neither a hash nor a time of each file, as web servers.
        """
        with self._errors(path):
            self._filesystem.invalidate_cache()
            found = self._filesystem.find(f"{self._root}/{path}", detail=True)
        stamps = {name: _stamp(info) for name, info in found.items()}
        return hashlib.sha256(repr(sorted(stamps.items())).encode()).hexdigest() if all(stamps.values()) else ""

    @contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        where = f"{self.url}/{path}".rstrip("/")
        try:
            yield
        except RecinferError:
            raise
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error.__cause__, OSError):  # fsspec's HTTP: no connection
                raise UnavailableError(f"{where} cannot be read: {_why(error.__cause__)}") from None
            raise NotFoundError(f"{where} does not exist") from None
        except PermissionError as error:
            raise ConfigError(f"{where} may not be read with the credentials of this process: {_why(error)}") from None
        except TimeoutError:
            raise UnavailableError(f"{where}: the storage did not answer in time") from None
        except ImportError as error:
            raise ConfigError(f"{where}: a package for this storage is not installed; {_EXTRA} ({error})") from None
        except Exception as error:  # each storage has errors of its own
            if type(error).__name__ in _REFUSED or _status(error) in (401, 403):
                raise ConfigError(
                    f"{where} may not be read with the credentials of this process: {_why(error)}"
                ) from None
            if _status(error) in (404, 410):
                raise NotFoundError(f"{where} does not exist") from None
            raise UnavailableError(f"{where} cannot be read: {_why(error)}") from None


def mirror_folder(url: str, cache: Path) -> Path:
    """The folder of a store's mirror in a cache folder."""
    return cache / "stores" / hashlib.sha256(url.encode()).hexdigest()[:32]


def shown_url(url: str) -> str:
    """``url`` as messages show it: without user, password, query, or a slash at its end.

    >>> shown_url("https://me:secret@host/models/?key=1")
    'https://host/models'
    """
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


def _literal(root: str) -> str:
    """``root`` for a glob pattern: its special characters stand for themselves."""
    return re.sub(r"([*?[])", r"[\1]", root)


def _stamp(info: Mapping[str, Any]) -> str:
    """Text of a file's size and of its hash or time; empty without hash and time."""
    known = [str(info[name]) for name in _STAMPS if info.get(name)]
    return f"{info.get('size')} {known[0]}" if known else ""


def _status(error: Exception) -> int | None:
    """The HTTP status that an error of a storage's package carries."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None


def _why(error: Exception) -> str:
    return excerpt(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, _SHOWN)
