"""``recinfer migrate``: rewrites a TorchRec program to import recinfer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recinfer.cli.console import EXIT_FAILED_CHECK, JsonOption, Output, styled

if TYPE_CHECKING:
    from recinfer.migrate import FileChange

__all__ = ["EXAMPLE", "NAME", "run"]

NAME = "migrate"
EXAMPLE = "Example: recinfer migrate my_program/ (shows the diff), then: recinfer migrate my_program/ --write"

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def run(
    path: Annotated[Path, typer.Argument(help="A Python file, or a folder whose .py files are all rewritten.")],
    write: Annotated[bool, typer.Option("--write", help="Change the files instead of showing a diff.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Rewrite a program's uses of torchrec to recinfer, and list the names that recinfer lacks.

    Shows a diff; --write changes the files. Strings, comments and formatting are left alone.
    Exit code: 0 if recinfer has every name that the program uses, 1 if not.
    """
    from recinfer.errors import InputError
    from recinfer.migrate import migrate_file, python_files

    output = Output(as_json)
    changes: list[FileChange] = []
    unread: list[str] = []
    for file in python_files(path):
        try:
            changes.append(migrate_file(file))
        except InputError as error:
            unread.append(str(error))
    for change in changes:
        if change.changed and write:
            change.write()
        elif change.changed:
            _show_diff(output, change)
    _show_names(output, changes, unread)
    changed, missing = [c for c in changes if c.changed], [name for c in changes for name in c.missing]
    done = f"changed {len(changed)} of {len(changes)} files"
    if not write:
        done = f"{len(changed)} of {len(changes)} files would change (--write does it)"
    absent = len({m.name for m in missing})
    here = f"names that are not in recinfer: {absent}" if absent else "recinfer has every name"
    if unread:
        here += f"; files that could not be read: {len(unread)}"
    output.show(styled("red" if missing or unread else "green", f"{done}; {here}"))
    output.finish(
        {
            "written": write,
            "changed": [str(change.path) for change in changed],
            "missing": [
                {"file": str(m.path), "line": m.line, "name": m.name, "instead": m.instead or None} for m in missing
            ],
            "by_hand": [{"file": str(c.path), "line": line, "what": what} for c in changes for line, what in c.by_hand],
            "unread": unread,
        }
    )
    if missing or unread:
        raise typer.Exit(EXIT_FAILED_CHECK)


def _show_diff(output: Output, change: FileChange) -> None:
    for line in change.diff().splitlines():
        output.result.print(line, style=_STYLES.get(line[:1]), highlight=False, soft_wrap=True)


def _show_names(output: Output, changes: list[FileChange], unread: list[str]) -> None:
    def say(line: str) -> None:
        output.result.print(line, highlight=False, soft_wrap=True)

    for change in changes:
        for m in change.missing:
            say(f"{m.path}:{m.line}: {m.name} is not in recinfer; " + (m.instead or "no replacement is known"))
        for line, what in change.by_hand:
            say(f"{change.path}:{line}: not changed: {what}")
    for message in unread:
        say(message)
