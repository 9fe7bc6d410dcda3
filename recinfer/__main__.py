"""Runs the command line: the ``recinfer`` script, and ``python -m recinfer``."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run it, with handlers of signals that are there before the commands are imported."""
    # A stream that the caller closed is None, and the next file would get its number: a library's text would go into it.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
    try:
        from recinfer.cli.interrupts import redelivering_interrupts, set_first_handlers

        set_first_handlers(sys.argv[1:])
        with redelivering_interrupts():
            from recinfer.cli.main import main

            main()
    except KeyboardInterrupt:  # while the verbs are loaded
        exec("")  # see recinfer.cli.console.verb
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
