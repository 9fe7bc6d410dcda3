"""Runs the command line with ``python -m recinfer``."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    try:
        from recinfer.cli.interrupts import never_lost

        with never_lost():
            from recinfer.cli.main import main

            main()
    except KeyboardInterrupt:  # while the verbs are loaded
        exec("")  # see recinfer.cli.console.verb
        print("interrupted", file=sys.stderr)
        sys.exit(130)
