"""Option choices and parsers that several commands share."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Literal

from recinfer.errors import ConfigError

__all__ = [
    "DataFormat",
    "Device",
    "MissingShards",
    "RequestKind",
    "check_other_file",
    "check_picture",
    "check_place",
    "parse_pair",
]


class DataFormat(StrEnum):
    """Formats of raw rows that recinfer.data reads."""

    criteo = "criteo"
    movielens = "movielens"
    synthetic = "synthetic"


class Device(StrEnum):
    """Device that holds the tables and runs the lookups."""

    cpu = "cpu"
    cuda = "cuda"


class MissingShards(StrEnum):
    """A ranker's behaviour when a rank is unavailable."""

    error = "error"
    default_rows = "default-rows"

    @property
    def setting(self) -> Literal["error", "default_rows"]:
        """The value of recinfer.serving.config.RoleConfig."""
        return "default_rows" if self is MissingShards.default_rows else "error"

    @property
    def in_manifest(self) -> Literal["reject", "default_rows"]:
        """The value of the archive's manifest that allows this."""
        return "default_rows" if self is MissingShards.default_rows else "reject"


class RequestKind(StrEnum):
    """Kinds of requests: a lookup or a prediction."""

    lookup = "lookup"
    predict = "predict"


def check_other_file(option: str, out: Path | None, rows: Path | None) -> None:
    """Raises ConfigError if ``out``, the value of ``option``, is the file that rows are read from, which it would replace."""
    if out is not None and rows is not None and out.exists() and rows.exists() and out.samefile(rows):
        raise ConfigError(f"{option} {out} is the file of the rows; give another file")


def check_picture(path: Path) -> None:
    """Raise ConfigError if ``--plot`` names a file that matplotlib cannot write. Commands call it before work that takes long."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    known = sorted(FigureCanvasAgg.get_supported_filetypes())
    if path.suffix[1:].lower() not in known:
        raise ConfigError(f"--plot {path}: cannot write {path.suffix!r}; expected one of {', '.join(known)}")
    check_place("--plot", path)


def check_place(option: str, path: Path) -> None:
    """Raise ConfigError if ``option`` names a file that cannot be written. Commands call it before work that takes long."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; create it first")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; choose a file in a writable folder")


def parse_pair(
    text: str, option: str, expected: str, *, allow_empty: bool = False, at_first: bool = False
) -> tuple[str, str]:
    """``NAME=VALUE`` as a pair; raises ConfigError naming the option.

    Args:
        allow_empty: whether VALUE may be empty.
        at_first: split at the first ``=``: VALUE may have more of them. Otherwise NAME may.
    """
    name, equals, value = text.partition("=") if at_first else text.rpartition("=")
    if not (name and equals and (value or allow_empty)):
        raise ConfigError(f"{option} {text!r}: expected {expected}")
    return name, value
