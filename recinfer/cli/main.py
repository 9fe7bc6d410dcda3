"""The ``recinfer`` command line: its subcommands in the order of the pipeline, and its entry point."""

from __future__ import annotations

import gc
import io
import sys
from typing import Annotated

import typer

from recinfer.cli import (
    admin,
    bench,
    calibrate,
    compare,
    delta,
    demo,
    deploy,
    export,
    inspect,
    lookup,
    mar,
    migrate,
    plan,
    predict,
    reshard,
    serve,
    size,
    train,
    verify,
)
from recinfer.cli.console import EXIT_INTERRUPTED, set_debug, verb
from recinfer.cli.interrupts import redelivering_interrupts, set_first_handlers
from recinfer.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="recinfer",
    help="Take a recommendation model from a training checkpoint to a quantized, sharded, running service.",
    epilog="Start with: recinfer demo",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

# In the order of the pipeline, which is the order `recinfer --help` lists them in.
for _module in (
    migrate,
    train,
    plan,
    export,
    inspect,
    verify,
    compare,
    reshard,
    delta,
    serve,
    deploy,
    lookup,
    predict,
    mar,
    demo,
    calibrate,
    size,
):
    app.command(name=_module.NAME, epilog=_module.EXAMPLE)(verb(_module.run, handles_signals=_module is serve))
app.add_typer(admin.app, name=admin.NAME, epilog=admin.EXAMPLE)
app.add_typer(bench.app, name=bench.NAME, epilog=bench.EXAMPLE)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"recinfer {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks (also: RECINFER_DEBUG=1).")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    set_debug(debug)


def main() -> None:
    """Run the command line; ``recinfer.__main__`` does it for the ``recinfer`` script."""
    set_first_handlers(sys.argv[1:])
    # The modules that a command imports, torch above all, live until the process ends. Full collections over them took
    # a seventh of the import time.
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    # A name that the locale cannot print must not end a command. Python already sets this for stderr.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with redelivering_interrupts():
            app()
    except KeyboardInterrupt:  # between a command and the end of the process; inside one, `verb` has it
        sys.stderr.write("interrupted\n")
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
