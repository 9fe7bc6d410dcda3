"""``recinfer verify``: checks the hashes of an archive and replays its golden requests."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.text import Text

from recinfer.cli.archives import ArchiveArgument, local_archive
from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, where_rules_are

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "verify"
EXAMPLE = "Example: recinfer verify movielens.rqa"


def run(
    archive: ArchiveArgument,
    as_json: JsonOption = False,
) -> None:
    """Check the hashes of an archive's files and replay its golden requests.

    Golden requests are the requests and outputs that export stored under check/. Exit code 0: everything agrees. 1:
    outputs differ from the stored ones. 2: the archive is damaged.
    """
    from recinfer.inference.verify import verify

    output = Output(as_json)
    report = verify(local_archive(archive, output))
    output.show(report)
    if where := where_rules_are(" ".join(report.problems)):
        output.show(Text(where))
    output.finish({"archive": archive, "ok": report.ok, **asdict(report)})
    if not report.ok:
        raise typer.Exit(EXIT_FAILED_CHECK)
