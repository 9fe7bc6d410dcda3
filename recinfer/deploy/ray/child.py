"""``python -m recinfer.deploy.ray.child PARENT COMMAND...``: becomes a command that gets SIGTERM when its parent ends.

Ray ends an actor with SIGKILL, so an actor cannot stop its server. Linux sends the signal instead. It sends it when the
thread of the parent that started the command ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Execute ``command``; returns only if the parent has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == parent:  # the parent has not ended before the call above
        os.execv(command[0], command)
    return 128 + signal.SIGTERM


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
