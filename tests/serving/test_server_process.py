"""``recinfer serve`` as a child process: it ends with its parent."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.waiting import until
from tests.warm import Program
from tests.warm_shell import warm_tools

_PARENT = """
import sys, time
sys.executable = sys.argv[2]
from recinfer.serving.server_process import ServerProcess
server = ServerProcess(sys.argv[1], "--port", "0")
server.wait_until_serving(180.0)
print(server.output["port"], flush=True)
time.sleep(600.0)
"""


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_ends_when_its_parent_is_killed(archive: Path) -> None:
    with Program(_PARENT, archive, warm_tools() / "python") as parent:  # the block ends with SIGKILL
        port = int(parent.stdout.readline())
        assert _listens(port)
    until(lambda: not _listens(port), 60.0)
