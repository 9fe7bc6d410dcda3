"""Runs the command line: the ``recinfer`` script, and ``python -m recinfer``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run it, with handlers of signals that are there before the commands are imported."""
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
