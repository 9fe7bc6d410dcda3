"""``recinfer inspect``: what an archive or a plan holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recinfer.cli.console import JsonOption, Output
from recinfer.errors import NotFoundError

if TYPE_CHECKING:
    from recinfer.archive.manifest import Manifest
    from recinfer.distributed.planner.plan import Plan

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "inspect"
EXAMPLE = "Example: recinfer inspect movielens.rqa --json | tail -1"


def run(
    path: Annotated[Path, typer.Argument(help="Archive folder or plan.json.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Show what an archive or a plan holds: tables, where each piece is, precisions, sizes, hashes."""
    from recinfer.distributed.planner.stats import format_plan

    output = Output(as_json)
    if not path.exists():
        raise NotFoundError(f"nothing at {path}; expected an archive folder or a plan.json")
    if path.is_dir():
        from recinfer.archive.reader import open_archive

        archive = open_archive(path)
        output.show(_summary(archive.manifest), format_plan(archive.plan))
        output.finish(describe_archive(archive.manifest, archive.plan))
    else:
        from recinfer.distributed.planner.plan import Plan

        plan = Plan.load(path)
        output.show(format_plan(plan))
        output.finish(describe_plan(plan))
