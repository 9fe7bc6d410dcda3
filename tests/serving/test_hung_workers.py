"""Workers that hang, or die of a damaged archive: they are replaced, and changes of models meanwhile fail with an error."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recinfer.errors import ConfigError, NotFoundError, RecinferError, UnavailableError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.workers import changes, supervisor
from recinfer.serving.workers.connection import PeerConnection
from recinfer.serving.workers.process import WorkerProcess
from tests.serving.supervised import FAKE, supervised, supervising
from tests.waiting import stand_still, until

_NEVER_S = 3600.0  # longer than any test
_TIMEOUT_S = 5.0  # long enough for an answer on a busy machine; after it a hung worker counts as hung


def all_answer(target: str) -> bool:
    """Whether twenty new connections are answered, whichever worker each of them meets."""
    with suppress(UnavailableError):
        for number in range(20):
            with InferenceClient(target, timeout=60, retries=0) as client:
                client.lookup({"user": [number]})
        return True
    return False


def runs_two_without(pids: list[int], ended: int) -> bool:
    """Whether two workers run, none of which is the ended one; of one list, since a second read may be another."""
    return len(pids) == 2 and ended not in pids


def test_a_stopped_worker_is_replaced(archive: Path):
    with supervised(archive, timeout=_TIMEOUT_S) as (workers, target, said):
        victim = workers.pids[0]
        stand_still(victim)
        until(lambda: any("worker 0 serves again" in line for line in said))
        assert any(f"worker 0 (process {victim}) hung (no answer for 5 s) and was killed" in line for line in said)
        until(lambda: runs_two_without(workers.pids, victim))
        until(lambda: all_answer(target))  # on a busy machine the other one may count as hung too


_HANGS = """
import os, runpy, threading, time
from contextlib import suppress
from recinfer.serving.server.grpc_core import CoreServer
from recinfer.serving.wire.loop import start_on_loop

def hang_once():
    with suppress(FileNotFoundError):
        os.unlink({file!r})
        time.sleep(3600)

async def hang_loop():
    hang_once()

def hang_loop_when_told():
    while not os.path.exists({file!r}):
        time.sleep(0.05)
    start_on_loop(hang_loop())

def begin(self, options, admit, **others):
    made(self, options, lambda *call: hang_once() or admit(*call), **others)

if {which!r} == "gRPC":
    made, CoreServer.__init__ = CoreServer.__init__, begin
else:
    threading.Thread(target=hang_loop_when_told, daemon=True).start()
runpy.run_module("recinfer", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("which", ["gRPC", "loop"])
def test_a_worker_of_which_one_thread_hangs_is_replaced(archive: Path, tmp_path: Path, which: str):
    told = tmp_path / "hang"
    program = ["-c", _HANGS.format(file=str(told), which=which)]
    with supervised(archive, program=program, timeout=_TIMEOUT_S) as (workers, target, said):
        before = set(workers.pids)
        told.touch()
        if which == "gRPC":
            with InferenceClient(target, timeout=90, retries=0) as client, pytest.raises(UnavailableError):
                client.lookup({"user": [1]})
        until(lambda: any("serves again" in line for line in said))
        assert "hung (no answer for 5 s) and was killed" in said[0]
        assert not before <= set(workers.pids)
        until(lambda: all_answer(target))


def apart(workers: supervisor.Supervisor, admin: AdminClient) -> tuple[WorkerProcess, WorkerProcess]:
    """Of two workers, the one that the client's connection is to, and the other one."""

    def asked(worker: WorkerProcess) -> int:
        requests = worker.connection.request("beat").result(60)["status"]["requests"]
        return sum(found["count"] for found in requests if found["method"] == "ListModels")

    both = workers._ready_workers()
    before = [asked(worker) for worker in both]
    admin.list_models()
    one, other = sorted(both, key=lambda worker: asked(worker) == before[both.index(worker)])
    return one, other


def versions(worker: WorkerProcess) -> list[str]:
    """What the worker serves."""
    models = worker.connection.request("beat").result(60)["status"]["models"]
    return sorted(model["version"] for model in models)


@pytest.fixture
def store(archive: Path, tmp_path: Path) -> Path:
    """A model store with three versions of one model."""
    for version in ("1", "2", "3"):
        shutil.copytree(archive, tmp_path / "tiny" / version)
    return tmp_path


def test_a_change_while_a_worker_hangs_fails_with_its_name_and_changes_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        supervised("--model-store", store, "--admin", answer_seconds=5.0) as (workers, target, said),
        AdminClient(target, timeout=60) as admin,
    ):
        one, other = apart(workers, admin)
        stand_still(other.process.pid)
        try:
            with pytest.raises(UnavailableError, match="does not answer; the change was not made") as found:
                admin.load("tiny", "1")
        finally:
            os.kill(other.process.pid, signal.SIGCONT)
        monkeypatch.setattr(changes, "_ANSWER_S", _NEVER_S)  # it answers now, as soon as it gets a core
        assert f"worker {other.slot} (process {other.process.pid})" in str(found.value)
        assert versions(one) == versions(other) == ["3"]
        admin.load("tiny", "1")
        assert versions(one) == versions(other) == ["1", "3"]
        assert not said


def test_a_worker_that_hangs_as_a_change_comes_is_replaced_by_one_that_has_it(store: Path):
    """The change waits until it is clear that the worker hangs."""
    with (
        supervised("--model-store", store, "--admin", timeout=_TIMEOUT_S) as (workers, target, said),
        AdminClient(target, timeout=120) as admin,
    ):
        one, other = apart(workers, admin)
        stand_still(other.process.pid)
        assert sorted(admin.load("tiny", "1")["tiny"]) == ["1", "3"]
        until(lambda: any("serves again" in line for line in said))
        now = workers._ready_workers()
        assert one in now and other not in now and [versions(worker) for worker in now] == [["1", "3"]] * 2


def test_a_worker_that_begins_during_a_change_begins_with_it(tmp_path: Path):
    command = [sys.executable, "-c", FAKE, str(tmp_path)]
    with supervising(lambda port: command) as (workers, _, said):
        made = workers._on_request("change", {"call": "Load", "data": ""})
        until(lambda: (tmp_path / "asked").exists())
        first, second = workers.pids
        os.kill(second, signal.SIGKILL)
        until(lambda: runs_two_without(workers.pids, second))
        third = workers.pids[1]
        (tmp_path / "go").touch()
        assert made.result(60) == ""
        until(lambda: any("serves again" in line for line in said))
        began = {pid: (tmp_path / f"began-{pid}").read_text() for pid in (first, third)}
        assert began == {first: "null", third: '"after"'}


def test_pauses_before_restarts_leave_one_worker_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "_BACKOFF_S", _NEVER_S)
    monkeypatch.setattr(supervisor, "_MAX_BACKOFF_S", _NEVER_S)
    monkeypatch.setattr(supervisor, "_STEADY_S", _NEVER_S)  # on a slow machine too, no worker has served for long
    command = [sys.executable, "-c", FAKE, str(tmp_path)]
    with supervising(lambda port: command) as (workers, _, said):
        for times in (1, 2, 3):
            for pid in workers.pids:
                os.kill(pid, signal.SIGKILL)
            until(lambda times=times: sum("serves again" in line for line in said) == times)
            assert len(workers.pids) == 1  # the other one waits
        lines = "\n".join(said)  # in any order: each of the two that end together has a thread that reports it
        assert "the others go on, another starts in 3600 s" in lines
        assert "no other one runs, another starts in 0.5 s" in lines


def test_supervisor_that_was_stopped_kills_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its clock went on meanwhile, and the answers that came are not read yet when it looks."""
    ahead, looks = [0.0], 0
    silent_s = WorkerProcess.silent_s

    def before_answers_are_read(worker: WorkerProcess, passed_s: float) -> float:
        nonlocal looks
        looks += 1
        worker._beat = Future()
        return silent_s(worker, passed_s)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0], sleep=time.sleep)
    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "_MAX_INTERVAL_S", 0.05)
    monkeypatch.setattr(WorkerProcess, "silent_s", before_answers_are_read)
    command = [sys.executable, "-c", FAKE, str(tmp_path)]
    with supervising(lambda port: command, timeout=_NEVER_S) as (workers, _, said):
        pids = workers.pids
        for _ in range(2):
            ahead[0] += 2 * _NEVER_S
            before = looks
            until(lambda before=before: looks > before + 4)
        assert workers.pids == pids and not said


def _kill_by_truncation(target: str, folder: Path) -> None:
    """Cut the files of the archive that ``target`` maps to nothing, and ask for rows until a worker has died of it."""
    for file in folder.rglob("*.safetensors"):
        os.truncate(file, 0)
    for number in range(200):
        with InferenceClient(target, timeout=60, retries=0) as client:
            try:
                client.lookup({"user": [number % 50]})
            except UnavailableError:
                return


def test_workers_whose_mapped_file_was_truncated_say_what_is_wrong_and_come_back(archive: Path, tmp_path: Path):
    folder, whole = tmp_path / "tiny", tmp_path / "whole"
    shutil.copytree(archive, folder)
    shutil.copytree(archive, whole)
    with supervised(folder) as (workers, target, said):
        _kill_by_truncation(target, folder)
        until(lambda: said)
        slot = said[0].split()[1]
        assert said[0].startswith(f"worker {slot} (process ")
        assert "was killed by SIGBUS: a file that it maps may have been truncated" in said[0]
        assert "`recinfer verify`" in said[0]
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        until(lambda: said and len(workers.pids) == 2 and "serves again" in said[-1])
        # The other one, which maps what was cut, may have to die first.
        until(lambda: all_answer(target))


def test_a_stop_leaves_no_worker_behind_not_even_a_stopped_one(archive: Path):
    with supervised(archive, grace=1.0) as (workers, _, _):
        pids = workers.pids
        stand_still(pids[0])
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_error_names_a_worker_that_cannot_start(tmp_path: Path):
    with pytest.raises(UnavailableError, match=r"worker 0 could not be started: .*No such file"):
        supervisor.Supervisor(lambda port: [str(tmp_path / "nothing")], 1, "127.0.0.1", 0).run()


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan")])
def test_a_timeout_is_above_0(timeout: float):
    with pytest.raises(ConfigError, match="timeout: got"):
        supervisor.Supervisor(lambda port: [], 1, "127.0.0.1", 0, timeout=timeout)


def test_two_ends_ask_each_other_and_errors_keep_their_meaning():
    later: Future[str] = Future()

    def answer(what: str, arguments: dict[str, Any]) -> Any:
        if what == "fail":
            raise NotFoundError(f"no {arguments['name']}")
        if what == "crash":
            raise KeyError("secret")
        return later if what == "later" else [what, arguments]

    ours, theirs = Pipe()
    one, other = PeerConnection(ours, answer), PeerConnection(theirs, answer)
    waiting = one.request("later")
    assert one.request("a", b=1).result(60) == ["a", {"b": 1}]
    assert other.request("c").result(60) == ["c", {}]
    with pytest.raises(NotFoundError, match="no x"):
        one.request("fail", name="x").result(60)
    with pytest.raises(RecinferError, match="internal error"):
        one.request("crash").result(60)
    assert not waiting.done()
    later.set_result("now")
    assert waiting.result(60) == "now"


def test_requests_do_not_wait_for_a_peer_that_reads_nothing_and_fail_when_it_ends():
    ours, theirs = Pipe()
    gone: Future[None] = Future()
    peer = PeerConnection(ours, lambda what, arguments: None, on_gone=lambda: gone.set_result(None))
    asked = [peer.request("much", data="x" * (1 << 20)) for _ in range(8)]  # more than a socket takes
    theirs.close()
    for future in asked:
        with pytest.raises(UnavailableError, match="has gone"):
            future.result(60)
    assert gone.result(60) is None and peer.closed
    with pytest.raises(UnavailableError, match="has gone"):
        peer.request("more").result(60)
