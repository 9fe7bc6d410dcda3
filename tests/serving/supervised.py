"""Supervisors of tests in this process, whose workers are processes: real ones, and fakes that start at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import grpc

from recinfer.serving.server.server import SERVICE_NAME
from recinfer.serving.wire import codec
from recinfer.serving.workers import changes, process
from recinfer.serving.workers.supervisor import Supervisor
from tests.caller_threads import CallerThreads
from tests.serving.conftest import make_request
from tests.warm import starting_warm

__all__ = ["FAKE", "PATIENT", "WAITS", "Load", "supervised", "supervising"]

WAITS = ("--worker-timeout", "600")
"""Options of `recinfer serve --workers`: no worker counts as hung because the machine is busy."""

PATIENT = "from recinfer.serving.workers import changes; changes._ANSWER_S = 600.0\n"
"""Begins the code of such a server: a change of models waits for workers that are slow to answer."""

FAKE = """
import json, os, pathlib, sys, time
from multiprocessing.connection import Connection

folder, peer = pathlib.Path(sys.argv[1]), Connection(0)

def answer(asked, found):
    peer.send_bytes(json.dumps({"to": asked["request"], **found}).encode())

def state(model):
    version = {"model": model, "version": "1", "content": [], "deltas": [], "undone": 0}
    return {"versions": [version], "spreads": {}}

begin = json.loads(peer.recv_bytes())
answer(begin, {"is": None})
kills = folder / "kills"
if left := int(kills.read_text()) if kills.exists() else 0:
    kills.write_text(str(left - 1))
    os.kill(os.getpid(), 9)
(folder / f"began-{os.getpid()}").write_text(json.dumps((begin["with"]["restore"] or state(None))["versions"][0]["model"]))
if (folder / "broken").exists():
    time.sleep(0.3)
    sys.exit(print(json.dumps({"error": {"message": "the store has no '1'"}}), flush=True) or 2)
print(json.dumps({"port": 1}), flush=True)
try:
    while True:
        asked = json.loads(peer.recv_bytes())
        if asked["what"] == "admin":
            (folder / "asked").touch()
            while not (folder / "go").exists():
                time.sleep(0.02)
            if (folder / "refuses").exists():
                answer(asked, {"failed": {"code": "NOT_FOUND", "message": "no version '2'"}})
            else:
                answer(asked, {"is": {"answer": "", "before": {}, "served_before": False, "state": state("after")}})
        elif asked["what"] == "set_spreads":
            time.sleep(0.3)
            (folder / "restored").touch()
            answer(asked, {"is": None})
        elif asked["what"] == "state":
            answer(asked, {"is": state("before")})
        else:
            answer(asked, {"failed": {"code": "INTERNAL", "message": "a fake has no status"}})
except EOFError:
    pass
"""
"""A worker for ``python -c FAKE FOLDER``: it serves nobody, but takes part in changes once the file "go" is there, and fails
to start while there is "broken". It makes no change while there is "refuses", and writes "restored" when it has taken one back, which
takes a while. The number in "kills" says how many of its next starts end by SIGKILL. The model that it began with is in the file
"began-<its pid>"."""


@contextmanager
def supervised(
    *arguments: object, workers: int = 2, program: Sequence[str] = ("-m", "recinfer"), **options: Any
) -> Iterator[tuple[Supervisor, str, list[str]]]:
    """A supervisor in this process, with real workers, forked from a warm interpreter: its target, and the list of its messages.
    Tests of the whole command, `recinfer serve --workers 2`, have workers that are started as everywhere.

    Args:
        program: what the workers run in place of recinfer, as Python's own arguments.
        options: of Supervisor.
    """

    def command(port: int) -> list[str]:
        serve = ["serve", *map(str, arguments), "--worker", "--json", "--port", str(port)]
        return [sys.executable, *program, *serve]

    with starting_warm(process), supervising(command, workers, **options) as found:
        yield found


@contextmanager
def supervising(
    command: Callable[[int], list[str]], workers: int = 2, **options: Any
) -> Iterator[tuple[Supervisor, str, list[str]]]:
    """The same for any command. No worker counts as hung because the machine is busy, unless ``options`` say otherwise.

    Args:
        options: of Supervisor, and ``answer_seconds``: for each worker's answer before a change of models.
    """
    said: list[str] = []
    ready = threading.Event()
    answer_seconds = options.pop("answer_seconds", 3600.0)
    supervisor = Supervisor(command, workers, "127.0.0.1", 0, report=said.append, **{"timeout": 3600.0, **options})
    failed: list[BaseException] = []

    def run() -> None:
        try:
            supervisor.run(lambda answer: ready.set())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(180), failed
        with mock.patch.object(changes, "_ANSWER_S", answer_seconds):
            yield supervisor, f"127.0.0.1:{supervisor.port}", said
    finally:
        supervisor.stop()
        thread.join(90)
        assert not thread.is_alive()
        assert not failed


class Load(CallerThreads):
    """Callers with a connection each, one request after another; counts the answers by code."""

    def __init__(self, target: str, callers: int) -> None:
        super().__init__(callers)
        self.target, self.codes = target, {}

    def _call(self, number: int) -> None:
        dense, kjt = make_request(number, 2)
        data = codec.encode_predict_request(dense, kjt)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
        with grpc.insecure_channel(self.target, options=options) as channel:
            predict = channel.unary_unary(f"/{SERVICE_NAME}/Predict")
            while not self._stop.is_set():
                try:
                    predict(data, timeout=60, wait_for_ready=True)
                    code = "OK"
                except grpc.RpcError as error:
                    code = error.code().name
                self.codes[code] = self.codes.get(code, 0) + 1
