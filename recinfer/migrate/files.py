"""Reads and writes a program's files, preserving encoding and line ends."""

from __future__ import annotations

import difflib
import io
import os
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recinfer.errors import InputError
from recinfer.files import write_file

__all__ = ["FileChange", "MissingName", "python_files", "read_text"]

_NOT_OF_THE_PROGRAM = {"__pycache__", "node_modules", "site-packages"}


@dataclass(frozen=True)
class MissingName:
    """A name of torchrec that the installed recinfer does not have.

    Attributes:
        path: the file that uses it.
        line: the line, from 1.
        name: dotted, as in ``torchrec.metrics.recall``.
        instead: the replacement; "" if none is known.
    """

    path: Path
    line: int
    name: str
    instead: str


@dataclass(frozen=True)
class FileChange:
    """The migration of one file.

    Attributes:
        path: the file.
        before, after: text of the file.
        encoding: encoding of the text on disk.
        missing: the names that recinfer lacks.
        by_hand: (line, description) of places that are not rewritten, such as a string.
    """

    path: Path
    before: str
    after: str
    encoding: str
    missing: tuple[MissingName, ...] = ()
    by_hand: tuple[tuple[int, str], ...] = ()

    @property
    def changed(self) -> bool:
        """Whether ``after`` differs from ``before``."""
        return self.before != self.after

    def diff(self) -> str:
        """A unified diff that ``patch -p0`` applies; "" without a change."""
        before, after = (io.StringIO(text, newline="").readlines() for text in (self.before, self.after))
        lines = difflib.unified_diff(before, after, str(self.path), str(self.path))
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def write(self) -> None:
        """Write ``after`` to the file in its encoding; an error leaves the file as it was."""
        write_file(self.path, self.after.encode(self.encoding))


def python_files(path: str | os.PathLike[str]) -> list[Path]:
    """The file itself, or the ``.py`` files below a folder, hidden folders and virtual environments left out.

    Raises:
        InputError: there is no such file or folder, or no Python file in the folder.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: does not exist; expected a Python file or a folder with Python files")
    found = sorted(_below(path)) if path.is_dir() else [path]
    if not found:
        raise InputError(f"{path}: has no .py file; expected a Python file or a folder with Python files")
    return found


def _below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _NOT_OF_THE_PROGRAM
            and not Path(root, name, "pyvenv.cfg").exists()
        ]
        yield from (Path(root, name) for name in files if name.endswith(".py"))


def read_text(path: Path) -> tuple[str, str]:
    """The text of a Python file with its original line ends, and its encoding.

    Raises:
        InputError: the bytes are not text of the encoding that the file has.
    """
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(encoding), encoding
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise InputError(f"{path}: cannot be read as Python text: {error}") from error
