"""``python -m recinfer``: the command line, for when the script is not on the path."""

from __future__ import annotations

from recinfer.cli.main import main

if __name__ == "__main__":
    main()
