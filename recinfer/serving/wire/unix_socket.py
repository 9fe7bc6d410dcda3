"""The file of a Unix socket on which a server listens: its rights, a file that an ended server left, its removal."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from recinfer.errors import ConfigError, UnavailableError

__all__ = ["SocketFile", "check_socket_path"]

_MOST_BYTES = 107  # longest path that an address of a Unix socket has on Linux
_RIGHTS = 0o660
_ANSWER_S = 1.0  # for another server to accept a connection


def check_socket_path(path: Path) -> None:
    """Raise ConfigError for a path that is too long for a Unix socket."""
    longest = _MOST_BYTES - len(_beside(path)) + len(os.fsencode(path))
    if len(os.fsencode(path)) > longest:
        raise ConfigError(f"--unix-socket: got a path of {len(os.fsencode(path))} bytes, expected at most {longest}")


class SocketFile:
    """The file of one listening socket.

    Args:
        path: of the file. Its folder exists; the rights of the folder, and 0660 of the file, say which users may connect.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._made: tuple[int, int] | None = None

    def listen(self, bind: Callable[[str], int]) -> None:
        """Have ``bind`` listen, given an address of gRPC; replaces the socket of a server that has ended.

        Raises:
            UnavailableError: another server listens, the file is no socket, or the folder cannot be written.
        """
        self._check_free()
        # No caller can connect before the file has its rights: the socket gets its name last. This also replaces an old file
        # at once.
        temporary = Path(os.fsdecode(_beside(self._path)))
        try:
            bind(f"unix:{temporary}")
            temporary.chmod(_RIGHTS)
            made = temporary.stat()
            temporary.rename(self._path)
        except (OSError, RuntimeError) as error:
            why = (
                error.strerror if isinstance(error, OSError) else None
            ) or "its folder is missing or cannot be written"
            raise UnavailableError(f"cannot listen on unix:{self._path}: {why}") from None
        self._made = made.st_dev, made.st_ino

    def remove(self) -> None:
        """Remove the file, unless another server has replaced it."""
        made, self._made = self._made, None
        with suppress(OSError):
            found = self._path.stat()
            if (found.st_dev, found.st_ino) == made:
                self._path.unlink()

    def _check_free(self) -> None:
        try:
            if not stat.S_ISSOCK(self._path.stat().st_mode):
                raise UnavailableError(f"cannot listen on unix:{self._path}: the file is no socket; remove it")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(f"cannot listen on unix:{self._path}: {error.strerror}") from None
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_ANSWER_S)
            try:
                probe.connect(os.fspath(self._path))
            except ConnectionRefusedError:
                return
            except OSError as error:  # full, or of another user
                why = error.strerror or str(error)
                raise UnavailableError(f"cannot listen on unix:{self._path}: a server may use it ({why})") from None
        raise UnavailableError(f"cannot listen on unix:{self._path}: another server listens there; choose another path")


def _beside(path: Path) -> bytes:
    return os.fsencode(path) + f".{os.getpid()}".encode()
