"""``python -m recinfer.deploy.ray.guard``: runs a command that ends with its starter, and removes its folder
afterwards.

The guard's stdin is a pipe that its starter holds and never writes to. When the pipe ends, because the starter closed
it or ended, the guard sends SIGTERM to the command, then SIGKILL after the grace period, and removes the folder. If the
guard is killed, the kernel sends the command SIGKILL. The first line on stdout is ``{"pid": N}``; the rest is the
command's.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command; its exit code, or 128 and the number of the signal that ended it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grace", type=float, default=15.0, help="seconds from SIGTERM to SIGKILL")
    parser.add_argument("--folder", help="removed at the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    # A signal to the guard means the same as the end of its stdin.
    signals, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(options.command, stdin=subprocess.DEVNULL, preexec_fn=partial(_die_with, os.getpid()))
        print(json.dumps({"pid": child.pid}), flush=True)
        code = _wait(child, signals, options.grace)
    finally:
        if options.folder:
            shutil.rmtree(options.folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _wait(child: subprocess.Popen[bytes], signals: int, grace: float) -> int:
    ended = os.pidfd_open(child.pid)
    poll = select.poll()
    for descriptor in (ended, signals, sys.stdin.fileno()):
        poll.register(descriptor, select.POLLIN)
    found = {descriptor for descriptor, _ in poll.poll()}
    if ended not in found:
        child.terminate()
        last = select.poll()
        last.register(ended, select.POLLIN)
        end = time.monotonic() + grace
        while (left := end - time.monotonic()) > 0 and not last.poll(left * 1000):
            pass
        child.kill()
    os.close(ended)
    return child.wait()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its starter ``parent`` ends; exits at once if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # before the kernel was asked
        os._exit(128 + signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main())
