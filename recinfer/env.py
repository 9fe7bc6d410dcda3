"""The environment variables that recinfer reads, all of them: nothing else looks at the process environment.

    RECINFER_DEBUG    1: the command line shows tracebacks of expected errors too
"""

from __future__ import annotations

import os

__all__ = ["child_environment", "debug"]

_OFF = frozenset({"", "0", "false", "no", "off"})


def debug() -> bool:
    """Whether ``RECINFER_DEBUG`` asks for tracebacks."""
    return os.environ.get("RECINFER_DEBUG", "").strip().lower() not in _OFF


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's, with ``changes``."""
    return {**os.environ, **changes}
