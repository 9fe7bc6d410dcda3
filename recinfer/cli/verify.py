"""``recinfer verify``: checks the hashes of an archive and replays its golden requests."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, where_rules_are

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "verify"
EXAMPLE = "Example: recinfer verify movielens.rqa"


def run(
    archive: Annotated[str, typer.Argument(help="Archive folder, or its URL.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Check the hashes of an archive's files and replay its golden requests.

    Golden requests are the requests and outputs that export stored under check/. Exit code 0: everything agrees. 1:
    outputs differ from the stored ones. 2: the archive is damaged.
    """
    from recinfer.inference.verify import verify
    from recinfer.remote.cache import in_cache

    output = Output(as_json)
    with in_cache(archive) as (folder, release):
        report = verify(folder)
    release()
    output.show(report)
    if where := where_rules_are(" ".join(report.problems)):
        output.show(Text(where))
    output.finish({"archive": archive, "ok": report.ok, **asdict(report)})
    if not report.ok:
        raise typer.Exit(EXIT_FAILED_CHECK)
