"""Processes that share a port: a worker killed under load fails only its own requests and is replaced; SIGTERM drains all."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import grpc
import pytest

from recinfer import env
from recinfer.errors import ConfigError, NotFoundError, UnavailableError
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.workers import process as worker_process
from recinfer.serving.workers.supervisor import Supervisor
from tests.ports import free_port
from tests.serving.conftest import replace_archive
from tests.serving.supervised import FAKE, WAITS, Load, supervised, supervising
from tests.waiting import stand_still, until
from tests.warm import RECINFER, Program, WarmPopen, run_program, starting_warm, warm_workers

pytestmark = pytest.mark.skipif(not hasattr(__import__("socket"), "SO_REUSEPORT"), reason="needs SO_REUSEPORT")


def test_a_killed_worker_fails_its_own_requests_and_comes_back(archive: Path):
    with supervised(archive) as (supervisor, target, said):
        with Load(target, 6) as load:
            until(lambda: load.codes.get("OK", 0) > 50)
            victim = supervisor.pids[0]
            os.kill(victim, signal.SIGKILL)
            before = load.codes["OK"]
            until(lambda: load.codes["OK"] > before + 50)  # the other one serves on
            until(lambda: any("serves again" in line for line in said))
        assert set(load.codes) <= {"OK", "UNAVAILABLE"}, load.codes
        # Running requests, and connections that the kernel had assigned to the dying process.
        assert load.codes.get("UNAVAILABLE", 0) <= 2 * 6
        assert f"process {victim}) was killed by SIGKILL" in said[0]
        assert len(supervisor.pids) == 2
        assert victim not in supervisor.pids


def test_a_worker_that_comes_back_serves_no_other_content_under_a_name(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    for version in ("1", "2"):
        shutil.copytree(archive, tmp_path / "tiny" / version)
    with supervised("--model-store", tmp_path, "--admin") as (supervisor, target, said):
        with AdminClient(target) as admin:
            admin.load("tiny", "1")
        replace_archive(tmp_path / "tiny" / "1")
        os.kill(supervisor.pids[0], signal.SIGKILL)
        until(lambda: any("serves again" in line for line in said))
        answers = Counter()
        for number in range(60):
            for version in ("", "1", "2"):
                with InferenceClient(target, version=version, timeout=60, retries=0) as client:
                    try:
                        answers[version, client.lookup({"user": [number % 50]}).model_version] += 1
                    except NotFoundError:
                        answers[version, "none"] += 1
        assert set(answers) == {("", "2"), ("2", "2"), ("1", "1"), ("1", "none")}, answers
    assert "tiny 1 is not served by this process: [X5] the archive on disk is not the one" in capfd.readouterr().err


def test_a_change_that_one_worker_cannot_make_changes_nothing_nor_what_to_go_back_to(archive: Path, tmp_path: Path):
    for version in ("1", "2", "3"):
        shutil.copytree(archive, tmp_path / "tiny" / version)
    with supervised("--model-store", tmp_path, "--admin") as (supervisor, target, said):

        def shown() -> set[str]:
            found = set()
            for number in range(24):
                with InferenceClient(target, timeout=60, retries=0) as client:
                    found.add(client.lookup({"user": [number]}).model_version)
            return found

        with AdminClient(target) as admin:
            admin.load("tiny", "1")
            admin.load("tiny", "2")
            admin.set_weights("tiny", {"2": 50, "1": 50})
            admin.set_default("tiny", "1")
        shutil.rmtree(tmp_path / "tiny" / "2")
        os.kill(supervisor.pids[0], signal.SIGKILL)  # the new worker has no version 2
        until(lambda: any("serves again" in line for line in said))
        assert shown() == {"1"}
        with AdminClient(target) as admin:
            admin.set_weights("tiny", {"1": 50, "3": 50})
            for wanted in ({"1": 50, "3": 50}, {"2": 1}, {"1": 50, "2": 50}):
                if "2" in wanted:
                    with pytest.raises(NotFoundError, match="'2'"):
                        admin.set_weights("tiny", wanted)
                else:
                    admin.set_weights("tiny", wanted)  # a caller that lost the answer calls again
                assert shown() == {"1", "3"}
            shutil.copytree(archive, tmp_path / "tiny" / "2")
            admin.load("tiny", "2", activate=True)  # one of them serves it already
            assert shown() == {"2"}
            admin.rollback("tiny")
            assert shown() == {"1", "3"}


def test_a_refused_change_is_taken_back_before_the_caller_gets_the_refusal(tmp_path: Path):
    folders = [tmp_path / "makes", tmp_path / "refuses"]
    for folder in folders:
        folder.mkdir()
        (folder / "go").touch()
    (folders[1] / "refuses").touch()
    left = iter(folders)
    with supervising(lambda port: [sys.executable, "-c", FAKE, str(next(left))]) as (supervisor, _, said):
        with pytest.raises(NotFoundError, match="no version '2'"):
            supervisor.changes.submit("SetWeights", "").result(60)
        assert (folders[0] / "restored").exists() and not (folders[1] / "restored").exists()
        assert not said, "no worker had to begin anew"


def test_a_worker_that_comes_back_serves_no_other_archive_than_those_that_are_there(
    archive: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    folder, aside = tmp_path / "tiny", tmp_path / "aside"
    shutil.copytree(archive, folder)
    shutil.copytree(archive, aside)
    with supervised(folder) as (supervisor, _, said):
        before = supervisor.pids
        replace_archive(folder)
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(said) > 1)
        assert "tiny 3 is not served by this process: [X5] the archive on disk is not the one" in capfd.readouterr().err
        assert "'tiny' is not on disk any more as the other workers serve it" in said[1]
        assert supervisor.pids.count(before[1]) == 1
        shutil.rmtree(folder)
        aside.rename(folder)
        until(lambda: "serves again" in said[-1])
        assert len(supervisor.pids) == 2


def test_a_worker_that_cannot_start_ends_the_supervisor_with_its_reason(tmp_path: Path):
    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "recinfer", "serve", str(tmp_path), "--worker", "--json", "--port", str(port)]

    with (
        starting_warm(worker_process),
        pytest.raises(UnavailableError, match=r"exit code 2 before it was ready: .*manifest"),
    ):
        Supervisor(command, 2, "127.0.0.1", 0).run()


def test_a_worker_that_is_killed_before_it_is_ready_is_started_again(tmp_path: Path):
    (tmp_path / "kills").write_text("2")
    with supervising(lambda port: [sys.executable, "-c", FAKE, str(tmp_path)], one_first=True) as (supervisor, _, said):
        assert len(supervisor.pids) == 2
    starts = [
        re.fullmatch(r"worker 0 \(process \d+\) was killed by SIGKILL before it was ready; (.*)", line) for line in said
    ]
    assert [start and start[1] for start in starts] == [
        "no other one runs, another starts in 0.1 s",
        "no other one runs, another starts in 0.2 s",
    ]


def test_a_worker_that_ends_while_the_others_start_says_that_none_serves(tmp_path: Path):
    """Two of three start for ever."""
    (tmp_path / "kills").write_text("1")
    commands = iter([[sys.executable, "-c", "import time; time.sleep(600)"]] * 2)
    fake = [sys.executable, "-c", FAKE, str(tmp_path)]
    said: list[str] = []
    supervisor = Supervisor(lambda port: next(commands, fake), 3, "127.0.0.1", 0, grace=0.0, report=said.append)
    thread = threading.Thread(target=supervisor.run)
    thread.start()
    until(lambda: said)
    supervisor.stop()
    thread.join()
    assert said[0].endswith("before it was ready; no other one serves yet, another starts in 0.1 s")


def test_a_worker_that_is_always_killed_before_it_is_ready_ends_the_supervisor(tmp_path: Path):
    (tmp_path / "kills").write_text("100")
    supervisor = Supervisor(lambda port: [sys.executable, "-c", FAKE, str(tmp_path)], 1, "127.0.0.1", 0)
    with pytest.raises(UnavailableError, match=r"was killed by SIGKILL before it was ready, as were the 2 before it"):
        supervisor.run()
    assert (tmp_path / "kills").read_text() == "97"


def test_a_worker_that_fails_after_a_long_load_is_not_started_at_once_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("recinfer.serving.workers.supervisor._STEADY_S", 0.2)  # less than it takes to fail
    folders = [tmp_path / "fails", tmp_path / "serves"]
    for folder in folders:
        folder.mkdir()
    commands = iter(folders)  # the first two starts; all others are of the one that fails
    command = [sys.executable, "-c", FAKE]
    with supervising(lambda port: [*command, str(next(commands, folders[0]))], one_first=True) as (
        supervisor,
        _,
        said,
    ):
        time.sleep(0.3)
        (folders[0] / "broken").touch()
        os.kill(supervisor.pids[0], signal.SIGKILL)
        until(lambda: len(said) > 3)
    assert [line.rpartition("starts in ")[2] for line in said[:4]] == ["0 s", "0.1 s", "0.2 s", "0.4 s"]
    assert "killed by SIGKILL" in said[0] and "exit code 2 after " in said[1] and "the store has no '1'" in said[1]


def test_workers_have_the_supervisors_token_in_their_environment():
    token = "a-token-of-enough-letters"
    tell = (
        "import json, os; print(json.dumps({'error': {'message': os.environ['RECINFER_TOKEN']}})); raise SystemExit(2)"
    )
    command, environment = [sys.executable, "-c", tell], env.child_environment(RECINFER_TOKEN=token)
    with pytest.raises(UnavailableError, match=token):
        Supervisor(lambda port: command, 1, "127.0.0.1", 0, environment=environment).run()


def test_the_command_drains_all_workers_on_sigterm(archive: Path):
    """Workers start no workers, wherever the arguments end; an option given twice is what it says last."""
    options = ["--port", "1", "--json", "--workers", "2", *WAITS, "--port", "0", "--"]
    command = [sys.executable, "-m", "recinfer", "--debug", "serve", *options, str(archive)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: select.select([process.stdout], [], [], 0.05)[0] or len(_below(process.pid)) > 2)
        assert len(_below(process.pid)) == 2, "workers start workers"
        ready = json.loads(process.stdout.readline())
        assert ready["workers"] == len(_below(process.pid)) == 2
        with Load(f"127.0.0.1:{ready['port']}", 4) as load:
            until(lambda: load.codes.get("OK", 0) > 20)
            # Callers stop first, so running requests are answered and no caller finds a closed port.
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            _end_all(process.pid)
    assert process.returncode == 0, err
    assert set(load.codes) == {"OK"}
    assert "Traceback" not in err


def _below(pid: int) -> list[int]:
    """The processes that ``pid`` started, and those that they did."""
    found = []
    with suppress(OSError):  # it has ended
        for listed in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, listed.read_text().split()):
                found += [child, *_below(child)]
    return found


def _end_all(pid: int) -> None:
    """Kill ``pid`` and all below it; stopped first, so that none starts another meanwhile."""
    stopped: set[int] = set()
    while new := {pid, *_below(pid)} - stopped:
        for each in new:
            with suppress(ProcessLookupError):
                stand_still(each)
        stopped |= new
    for each in stopped:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@contextmanager
def served(*arguments: object) -> Iterator[dict[str, Any]]:
    """The line that ``recinfer serve --json *arguments`` prints once it serves, or has failed."""
    with Program(warm_workers(), "serve", "--json", *arguments) as process:
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()


def test_a_compressed_call_is_refused_without_a_line_on_stderr(archive: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    with Program(RECINFER, "serve", "--port", 0, "--json", archive) as process:
        port = json.loads(process.stdout.readline())["port"]
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            check(bytes(1000), timeout=60, compression=grpc.Compression.Gzip)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate()
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "ompression" not in err


def test_the_http_port_of_workers_is_held_for_them_alone(archive: Path):
    with served("--workers", 2, "--port", 0, "--http-port", 0, archive) as first:
        with served("--workers", 2, "--port", 0, "--http-port", first["http_port"], archive) as second:
            assert f"cannot listen on 127.0.0.1:{first['http_port']}" in second["error"]["message"]
        with urllib.request.urlopen(f"http://127.0.0.1:{first['http_port']}/v2/models/tiny", timeout=60) as answer:
            assert json.load(answer)["name"] == "tiny"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("doors", [("--port", "--http-port"), ("--http-port", "--metrics-port")])
def test_two_protocols_on_one_port_are_refused(archive: Path, workers: int, doors: tuple[str, str]):
    port = free_port()
    arguments = [part for door in doors for part in (door, port)]
    with served("--port", 0, "--workers", workers, *arguments, archive) as said:
        assert f"got {doors[0]} {port} and {doors[1]} {port}" in said["error"]["message"]


def test_child_of_a_supervisor_is_not_a_supervisor(monkeypatch: pytest.MonkeyPatch):
    tell = "import json, os; print(json.dumps({'error': {'message': os.environ['RECINFER_SUPERVISED']}}))"
    with pytest.raises(UnavailableError, match="before it was ready: 1"):
        Supervisor(lambda port: [sys.executable, "-c", tell], 1, "127.0.0.1", 0).run()
    monkeypatch.setenv("RECINFER_SUPERVISED", "1")
    with pytest.raises(ConfigError, match="this process is a worker"):
        Supervisor(lambda port: [sys.executable, "-c", tell], 1, "127.0.0.1", 0)


def test_the_log_of_a_supervisor_is_json_too_and_says_once_that_it_serves(archive: Path, tmp_path: Path):
    command = [sys.executable, "-c", warm_workers(), "serve", str(archive), "--workers", "2", "--port", "0", *WAITS]
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        WarmPopen([*command, "--log-json", "--json"], stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert json.loads(process.stdout.readline())["serving"] == ["tiny 3"]
            os.kill(_below(process.pid)[0], signal.SIGKILL)
            until(lambda: "serves again" in log.read_text())
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            _end_all(process.pid)
    said = [json.loads(line)["message"] for line in log.read_text().splitlines()]
    assert [message for message in said if message.startswith("serving")] == [said[0]]
    assert said[1] == "the dense part of tiny 3 runs on onnxruntime"
    assert "was killed by SIGKILL" in said[2] and "serves again" in said[3] and said.count("stopped") == 1


@pytest.mark.parametrize("arguments", [["--token-file", "nowhere"], ["--workers", "2", "--admin"], ["gone"]])
def test_error_at_the_start_is_a_line_of_the_json_log(archive: Path, arguments: list[str]):
    code, out, err = run_program(RECINFER, "serve", archive, "--port", "0", "--json", "--log-json", *arguments)
    said = [json.loads(line) for line in err.splitlines()]
    message = json.loads(out)["error"]["message"]
    assert (code, [(line["level"], line["message"]) for line in said]) == (2, [("error", message)])


def test_workers_end_with_their_supervisor(archive: Path):
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "recinfer", "serve", str(archive), "--worker", "--json", "--port", "0"]
    with WarmPopen(command, stdin=theirs.fileno(), stdout=subprocess.PIPE, text=True) as process:
        theirs.close()
        ours.send_bytes(json.dumps({"request": 7, "what": "begin", "with": {"restore": None}}).encode())
        assert json.loads(ours.recv_bytes()) == {"to": 7, "is": None}
        assert "port" in json.loads(process.stdout.readline())
        ours.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize("stdin", ["/dev/null", "a pipe"])
def test_a_worker_without_a_supervisor_says_so(archive: Path, stdin: str):
    command = [sys.executable, "-m", "recinfer", "serve", str(archive), "--worker", "--json", "--port", "0"]
    with ExitStack() as stack:
        if stdin == "/dev/null":
            at = stack.enter_context(open(stdin)).fileno()
        else:
            at, writes = os.pipe()
            stack.callback(os.close, at)
            stack.callback(os.close, writes)
        process = stack.enter_context(WarmPopen(command, stdin=at, stdout=subprocess.PIPE, text=True))
        assert (
            "--worker is for `recinfer serve --workers N`" in json.loads(process.stdout.readline())["error"]["message"]
        )
        assert process.wait(60) == 2
