"""Commands of recinfer, run in this process, and the server as a process of its own."""

from __future__ import annotations

import functools
import json
from typing import Any

import typer.testing
from typer.testing import CliRunner

from recinfer.cli.main import app

__all__ = ["run", "run_json"]

# Typer derives the options of all commands from their functions in each call, which takes longer than most commands.
typer.testing._get_command = functools.cache(typer.testing._get_command)  # type: ignore[attr-defined]


def run(*args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); an exception that is not an exit is raised."""
    done = CliRunner().invoke(app, [str(a) for a in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def run_json(*args: object, code: int = 0) -> dict[str, Any]:
    """The object that ``--json`` printed as the last line of stdout; fails on another exit code."""
    found, out, err = run(*args, "--json")
    assert found == code, err
    return json.loads(out.splitlines()[-1])
