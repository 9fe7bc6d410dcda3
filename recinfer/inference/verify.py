"""Verifies an archive: every rule of its format, all hashes, and all golden requests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recinfer.archive.reader import open_archive
from recinfer.errors import ArchiveError
from recinfer.inference.predictor import Predictor
from recinfer.printed import Printed, rich_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["VerifyReport", "verify"]


@dataclass(frozen=True)
class VerifyReport(Printed):
    """The result of :func:`verify`, which prints as a table.

    Attributes:
        model, version: name and version of the archive's model.
        num_files, num_bytes: files whose sizes and hashes were checked.
        num_requests: golden requests replayed.
        engines: dense engines they were replayed on.
        problems: the broken rules: rule C2 (answers differ) or F6 (files that the manifest does not list); empty if
            there are none.
        seconds: duration of the checks.
    """

    model: str
    version: str
    num_files: int
    num_bytes: int
    num_requests: int
    engines: tuple[str, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return not self.problems

    def __str__(self) -> str:
        return rich_text(self)

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=f"{self.model} {self.version}", title_justify="left", show_header=False)
        table.add_row("files", f"{self.num_files}, {self.num_bytes:,} bytes, sizes and SHA-256 as listed")
        on = f" on {', '.join(self.engines)}" if self.engines else ""
        table.add_row("golden requests", f"{self.num_requests} replayed{on}")
        for problem in self.problems:
            table.add_row(Text("problem", "red"), problem)
        table.add_row("result", Text("ok", "green") if self.ok else Text("failed", "red"))
        return table


def verify(path: str | os.PathLike[str]) -> VerifyReport:
    """Check an archive completely.

    Raises:
        ArchiveError: the archive is damaged (any rule that an ordinary load would refuse, or a hash). Answers that
            differ, and files that are not listed, are problems of the report instead.
    """
    started = time.perf_counter()
    archive = open_archive(path, check_hashes=True)
    manifest = archive.manifest
    problems = [f"[F6] {name!r} is not listed in the manifest" for name in archive.unlisted_files()]
    engines = () if manifest.dense is None else ("torch", *(["onnx"] if manifest.dense.onnx else []))
    for engine in engines or (None,):
        predictor = Predictor(archive, dense_engine=engine)  # type: ignore[arg-type]
        problems += _replay(predictor, f" on {engine}" if engine else "")
    return VerifyReport(
        manifest.model,
        manifest.version,
        len(manifest.files),
        manifest.bytes_total,
        manifest.check.num_requests,
        engines,
        tuple(problems),
        time.perf_counter() - started,
    )


def _replay(predictor: Predictor, where: str) -> Iterator[str]:
    for index in range(predictor.manifest.check.num_requests):
        try:
            predictor.check_request(index)
        except ArchiveError as error:
            if error.rule != "C2":
                raise
            yield f"{error}{where}"
    try:
        predictor.check_user()
    except ArchiveError as error:
        yield f"{error}{where}"
