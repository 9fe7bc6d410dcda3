"""Programs and ranks of tests in processes forked from a warm interpreter, which imports slow modules once."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType, SimpleNamespace, TracebackType
from typing import IO, Any
from unittest import mock

from tests.export_caches import cache_exports, keep_programs, programs_of_run
from tests.warm_shell import warm_tools

__all__ = [
    "LONGEST_S",
    "RECINFER",
    "Program",
    "WarmPopen",
    "run_program",
    "starting_warm",
    "warm_context",
    "warm_workers",
]

# Modules that a process has imported when it starts.
_PRELOAD = ["tests.distributed.spawn", __name__, "tests.preloaded"]

LONGEST_S = 200.0
"""Of one such process: less than what pytest waits for a test."""

RECINFER = "import runpy; runpy.run_module('recinfer', run_name='__main__', alter_sys=True)"
"""What ``python -m recinfer`` runs."""


def warm_workers() -> str:
    """What RECINFER is, but the workers that it starts are forked from a warm interpreter as well.

    The process that its supervisor sees of a worker passes signals on to the real one and ends as that ends; SIGSTOP stops the former
    alone. Tests of how workers start have workers that are started as everywhere.
    """
    return f"import sys; sys.executable = {str(warm_tools() / 'python')!r}\n{RECINFER}"


def warm_context() -> Any:
    """multiprocessing's context; its processes have the environment that the first of them was started with."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


class Program:
    """``python -c code *arguments`` with pipes, as subprocess.Popen has it, for programs whose own start is not the matter.

    Attributes:
        pid: of its process.
        stdin, stdout: its pipes, text.
        returncode: negative: the signal that ended it; None: it has not ended, as far as was looked.
    """

    def __init__(self, code: str, *arguments: object) -> None:
        context = warm_context()
        stdin, writes = context.Pipe(duplex=False)
        reads, stdout = context.Pipe(duplex=False)
        self._stderr = tempfile.NamedTemporaryFile("r")  # noqa: SIM115
        program = (code, [str(a) for a in arguments], dict(os.environ), os.getcwd(), programs_of_run())
        self._process = context.Process(target=_main, args=(stdin, stdout, self._stderr.name, *program), daemon=True)
        self._process.start()
        stdin.close()
        stdout.close()
        self.pid: int = self._process.pid
        self.stdin = open(os.dup(writes.fileno()), "w", buffering=1)  # noqa: SIM115
        self.stdout = open(os.dup(reads.fileno()))  # noqa: SIM115
        writes.close()
        reads.close()

    @property
    def returncode(self) -> int | None:
        """See above."""
        code: int | None = self._process.exitcode
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """To the process, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def communicate(self, text: str = "", timeout: float = LONGEST_S) -> tuple[str, str]:
        """What it printed to stdout and stderr until its end, once it has read ``text`` and the end of stdin. One that goes on
        after ``timeout`` seconds is ended, and says in stderr where it was."""
        late = threading.Timer(timeout, self.send_signal, [signal.SIGABRT])
        late.start()
        try:
            with suppress(BrokenPipeError):  # it reads nothing
                self.stdin.write(text)
                self.stdin.close()
            out = self.stdout.read()
            self._process.join()
        finally:
            late.cancel()
        return out, self._stderr.read()

    def wait(self, timeout: float = LONGEST_S) -> int:
        """Its returncode, once it has ended."""
        self._process.join(timeout)
        code = self.returncode
        assert code is not None, "it goes on"
        return code

    def close(self) -> None:
        """End it, however it is."""
        self._process.kill()
        self._process.join()
        for file in (self.stdin, self.stdout, self._stderr):
            file.close()

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def run_program(code: str, *arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``python -c code *arguments``; see :class:`Program`."""
    with Program(code, *arguments) as program:
        out, err = program.communicate()
        assert program.returncode is not None
        return program.returncode, out, err


class WarmPopen:
    """``subprocess.Popen`` with what the tests' servers and a supervisor use of it, for ``python -m recinfer ...`` and ``python -c
    code ...``: a process of its own with a pid that signals reach. May be used from any thread.

    Attributes:
        pid: of the process.
        stdout: its pipe.
        returncode: negative: the signal that ended it; None: it has not ended, as far as was looked.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdout: int,
        stdin: int = 0,
        stderr: IO[Any] | None = None,
        text: bool = False,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        assert stdout == subprocess.PIPE, "its stdout is a pipe"
        match list(command):
            case [sys.executable, "-m", "recinfer", *arguments]:
                code = RECINFER
            case [sys.executable, "-c", code, *arguments]:
                pass
            case _:
                raise AssertionError(f"only Python starts warm, not {command}")
        context = warm_context()
        reads, writes = context.Pipe(duplex=False)
        ends = [Connection(os.dup(stdin)), writes, Connection(os.dup(2 if stderr is None else stderr.fileno()))]
        program = (code, arguments, dict(os.environ if env is None else env), os.getcwd(), programs_of_run())
        self._process = context.Process(target=_as_popen, args=(start_new_session, *ends, *program), daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        self.pid: int = self._process.pid
        self.stdout = open(os.dup(reads.fileno()), "r" if text else "rb")  # noqa: SIM115
        reads.close()
        self._lock = threading.Lock()  # only one thread may read how it ended

    @property
    def returncode(self) -> int | None:
        """See above."""
        with self._lock:
            code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        """Its returncode by now."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its returncode, once it has ended; raises subprocess.TimeoutExpired."""
        wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[Any, None]:
        """What it printed to stdout until its end."""
        with self.stdout:
            out = self.stdout.read()
        self.wait(timeout)
        return out, None

    def send_signal(self, number: signal.Signals) -> None:
        """To the process, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> WarmPopen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stdout.close()
        self.wait()


@contextmanager
def starting_warm(module: ModuleType) -> Iterator[None]:
    """Processes that ``module`` starts by ``subprocess.Popen`` are forked from the warm interpreter."""
    warm = SimpleNamespace(Popen=WarmPopen, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired)
    with mock.patch.object(module, "subprocess", warm):
        yield


def _as_popen(
    start_new_session: bool, stdin: Connection, stdout: Connection, stderr: Connection, *program: Any
) -> None:
    if start_new_session:
        os.setsid()
    _main(stdin, stdout, stderr.fileno(), *program)


def _main(
    stdin: Connection,
    stdout: Connection,
    stderr: str | int,
    code: str,
    arguments: list[str],
    env: dict[str, str],
    at: str,
    programs: Path | None,
) -> None:
    """Be ``python -c code *arguments``."""
    said = os.open(stderr, os.O_WRONLY | os.O_APPEND) if isinstance(stderr, str) else stderr
    for number, from_ in enumerate((stdin.fileno(), stdout.fileno(), said)):
        os.dup2(from_, number)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    os.chdir(at)
    faulthandler.enable(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    keep_programs(programs)
    cache_exports()
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]  # a program may have children
    sys.argv = ["-c", *arguments]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    exec(compile(code, "<string>", "exec"), main.__dict__)
