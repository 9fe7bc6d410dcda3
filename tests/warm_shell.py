"""`recinfer` and `python` for scripts of the documentation, forked from one interpreter that has imported what takes seconds.

A page runs some three commands, and each would import torch anew. Here a server, itself forked from the interpreter of tests.warm,
forks a process for each command, with the command's own arguments, folder, environment, standard streams and signals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing import process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.export_caches import cache_exports, keep_programs, programs_of_run

__all__ = ["warm_tools"]

ROOT = Path(__file__).resolve().parent.parent
# A command: it hands its streams to the server, passes signals on, and ends as the process there ends.
_CLIENT = """#!{python} -ISE
import json, os, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
said = json.dumps({{"tool": {tool!r}, "arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
socket.send_fds(server, [len(said).to_bytes(8, "little")], [0, 1, 2])
server.sendall(said)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: server.sendall(bytes([number])))
sys.exit((server.recv(1) or b"\\xff")[0])
"""


_kept: list[Connection] = []  # a server ends when its connection closes, however this process ends


@functools.cache
def warm_tools() -> Path:
    """A folder with the programs `recinfer` and `python`; their server runs until this process ends."""
    from tests.warm import warm_context

    folder = Path(tempfile.mkdtemp(prefix="recinfer-warm-"))
    path = folder / "socket"
    context = warm_context()
    starts, ready = context.Pipe(duplex=False)
    lives, ends = context.Pipe(duplex=False)
    _kept.append(ends)
    server = context.Process(target=_serve, args=(str(path), ready, lives, programs_of_run()), daemon=True)
    server.start()
    ready.close()
    lives.close()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    assert starts.recv() == "ready"
    tools = folder / "bin"
    tools.mkdir()
    for tool in ("recinfer", "python"):
        (tools / tool).write_text(_CLIENT.format(python=sys.executable, path=str(path), tool=tool))
        (tools / tool).chmod(0o755)
    return tools


def _next_command(path: str, ready: Connection, lives: Connection) -> dict[str, Any]:
    """Serves commands for ever; returns in the process that has been forked for one."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes below
        ready.send("ready")
        ready.close()
        while True:
            found, _, _ = select.select([listener, lives], [], [])
            if lives in found:  # the test run has ended, however it did
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork():
                connection.close()
                continue
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            command = _received(connection)
            child = os.fork()
            if child:
                _watch(connection, child)
            connection.close()
            lives.close()
            return command


def _received(connection: socket.socket) -> dict[str, Any]:
    """What a client said; its streams become this process's."""
    length, streams, _, _ = socket.recv_fds(connection, 8, 3)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    size = int.from_bytes(length, "little")
    return json.loads(connection.recv(size, socket.MSG_WAITALL))


def _watch(connection: socket.socket, child: int) -> None:
    """Passes signals on and reports the end; a client that was killed takes its process with it. Does not return."""
    ended = os.pidfd_open(child)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            connection.sendall(bytes([code if code >= 0 else 128 - code]))
            os._exit(0)
        number = connection.recv(1)
        os.kill(child, number[0] if number else signal.SIGKILL)
        if not number:
            os._exit(0)


def _serve(path: str, ready: Connection, lives: Connection, programs: Path | None) -> None:
    """The server, and each process that it has forked for a command. Does not return."""
    import torch

    torch.set_num_threads(1)
    keep_programs(programs)
    cache_exports()
    command = _next_command(path, ready, lives)
    # A program of its own, which may have children, and not a daemon of the test process.
    process.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    process._parent_process = None  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    code = 1  # of an exception
    try:
        _run(command)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, KeyboardInterrupt):  # Python ends by the signal
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    # As an interpreter ends, but what was imported is not freed, which takes longer than most commands run.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a reader that is gone; a stream that the command closed
            stream.flush()
    os._exit(code)


def _run(command: dict[str, Any]) -> None:
    """Be the command."""
    os.chdir(command["folder"])
    os.environ.clear()
    os.environ.update(command["environment"])
    arguments = command["arguments"]
    sys.path.insert(0, "")
    main = type(sys)("__main__")
    if command["tool"] == "recinfer":
        arguments = ["-m", "recinfer", *arguments]
    match arguments:
        case ["-m", name, *rest]:
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = main
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case [] | ["-", *_]:
            sys.argv = ["-"]
            sys.modules["__main__"] = main
            exec(compile(sys.stdin.read(), "<stdin>", "exec"), main.__dict__)
        case [file, *rest]:
            sys.argv = [file, *rest]
            sys.path[0] = str(Path(file).resolve().parent)
            runpy.run_path(file, run_name="__main__")
