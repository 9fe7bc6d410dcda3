"""Rules for every command: help with an example, one JSON object at the end, errors in one line, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recinfer import __version__
from recinfer.cli.main import app
from tests.warm import RECINFER, Program

ROOT = Path(__file__).resolve().parents[2]
VERBS = [
    "migrate",
    "train",
    "plan",
    "export",
    "inspect",
    "verify",
    "reshard",
    "delta",
    "serve",
    "lookup",
    "predict",
    "mar",
    "demo",
    "calibrate",
]


OPTIONS = {
    "migrate": "--write",
    "train": "--data --format --out --epochs --batch-size --embedding-dim --limit --seed",
    "plan": "--checkpoint --model --world-size --device --hbm-gb --ddr-gb --precision --table-precision --batch-size "
    "--hardware --plot --timeout-seconds --out",
    "export": "--checkpoint --model --plan --world-size --precision --table-precision --name --version --inputs --user --program "
    "--eval-data --format --eval-limit --eval-output --max-auc-drop --overwrite --out",
    "inspect": "",
    "verify": "",
    "delta": "--after --model --overwrite --out",
    "reshard": "--world-size --plan --device --overwrite --out",
    "serve": "--host --port --device --preload --lock --delta",
    "lookup": "--target --feature --model --version --timeout --wait --token-file --tls-ca --tls-cert --tls-key --tls-name",
    "predict": "--target --input --format --out --batch-size --model --version --timeout --wait --token-file --tls-ca "
    "--tls-cert --tls-key --tls-name",
    "mar": "--export-path --archive-format --model-name --archive-at --workers --batch-size --max-batch-delay-ms --force",
    "demo": "--data --format --out --world-size --epochs --embedding-dim --limit --seed",
    "calibrate": "--out --device --seconds-per-point",
}


def invoke(*args: object, **env: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command in this process."""
    done = CliRunner().invoke(app, [str(a) for a in args], env=env)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def words(text: str) -> str:
    """``text`` without the frames and line breaks that the terminal's width adds."""
    return " ".join(text.replace("│", " ").split())


def test_help_lists_the_verbs_in_the_order_of_the_pipeline() -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    places = [words(out).index(f" {verb} ") for verb in VERBS]
    assert places == sorted(places)


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_help_with_an_example_and_json(verb: str) -> None:
    code, out, _ = invoke(verb, "--help")
    assert code == 0
    assert f"Example: recinfer {verb}" in words(out)
    assert set(re.findall(r"--[a-z][a-z-]+", out)) - {"--help"} >= {"--json", *OPTIONS[verb].split()}


@pytest.mark.parametrize("verb", [*VERBS, "compare", "size", "bench serve", "bench capacity", "admin list", "deploy"])
def test_no_word_of_the_help_is_cut_at_80_columns(verb: str) -> None:
    _, out, _ = invoke(*verb.split(), "--help", COLUMNS="80")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_version() -> None:
    assert invoke("--version")[:2] == (0, f"recinfer {__version__}\n")


def test_an_error_is_one_line_on_stderr_and_code_2(tmp_path: Path) -> None:
    code, out, err = invoke("inspect", tmp_path / "nothing.rqa")
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "nothing.rqa" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("train", "--data", "text"), "expected none, or the format of its rows: 'criteo' or 'movielens'"),
        (("train", "--plan", "folder", "--world-size", "2"), "Is a directory; expected a JSON file of `recinfer plan`"),
        (("serve", "--model-store", "folder"), "model store folder has no archive that may be served at folder/MODEL"),
        (("bench", "capacity", "gone", "--p99-ms", "10", "--trace", "gone"), "no trace 'gone'"),
    ],
)
def test_a_slip_is_named_with_what_was_expected(
    arguments: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("text").write_text("hello")
    more = ("--out", "out") if arguments[0] == "train" else ()
    code, _, err = invoke(*arguments, *more)
    assert code == 2
    assert says in " ".join(err.split())


def test_an_error_with_json_is_an_object_too(tmp_path: Path) -> None:
    code, out, err = invoke("inspect", tmp_path / "nothing.rqa", "--json")
    assert code == 2
    error = json.loads(out)["error"]
    assert error["type"] == "NotFoundError"
    assert words(error["message"]) in words(err)


@pytest.mark.parametrize(("args", "env"), [(("--debug",), {}), ((), {"RECINFER_DEBUG": "1"})])
def test_debug_shows_the_traceback(tmp_path: Path, args: tuple[str, ...], env: dict[str, str]) -> None:
    command = [sys.executable, "-m", "recinfer", *args, "inspect", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **env})
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "NotFoundError" in done.stderr


def test_closed_streams_are_the_null_device(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import torchrec\n")
    command = f'"{sys.executable}" -m recinfer migrate model.py <&- >&- 2>&-'
    assert (
        subprocess.run(["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}).returncode
        == 0
    )


def test_an_unknown_option_is_a_usage_error() -> None:
    code, _, err = invoke("inspect", "--no-such-option")
    assert code == 2
    assert "No such option" in words(err)


@pytest.mark.parametrize("option", ["--metrics", "--plot"])
def test_train_does_not_write_over_its_rows(tmp_path: Path, option: str) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("label,I1,C1\n")
    code, _, err = invoke("train", "--data", rows, "--format", "criteo", "--out", tmp_path / "c.ckpt", option, rows)
    assert (code, rows.read_text()) == (2, "label,I1,C1\n")
    assert "give another file" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("plan", "--checkpoint", "none.ckpt", "--world-size", 2, "--out", "/nonexistent/p.json"), "--out"),
        (
            ("plan", "--checkpoint", "none.ckpt", "--world-size", 2, "--out", "p.json", "--plot", "p.xyz"),
            "--plot p.xyz",
        ),
        (("calibrate", "--out", "/nonexistent/hardware.json"), "--out"),
        (("train", "--limit", 2000, "--out", "t.ckpt", "--plot", "curve.xyz"), "--plot curve.xyz"),
        (("train", "--limit", 2000, "--out", "t.ckpt", "--plot", "/nonexistent/curve.png"), "--plot"),
        (("bench", "serve", "--target", "127.0.0.1:1", "--plot", "/nonexistent/curve.png"), "--plot"),
        (("predict", "--target", "127.0.0.1:1", "--input", "rows.csv", "--out", "/nonexistent/scores.csv"), "--out"),
    ],
)
def test_an_output_that_cannot_be_written_ends_a_command_before_its_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], says: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, _, err = invoke(*arguments)
    assert (code, list(tmp_path.iterdir())) == (2, [])
    assert err.startswith(f"error: {says}")


def test_a_dimension_beside_that_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    arguments = "--start-from", tmp_path / "sunday.ckpt", "--embedding-dim", 8
    code, _, err = invoke("train", "--limit", 2000, "--out", tmp_path / "out.ckpt", *arguments)
    assert code == 2 and "got --embedding-dim and --start-from" in err


def test_ctrl_c_ends_with_130(tmp_path: Path) -> None:
    curve, out = tmp_path / "curve.csv", tmp_path / "ckpt"
    options = ["--limit", "5000", "--epochs", "100000", "--metrics", str(curve), "--out", str(out)]
    with Program(RECINFER, "train", *options) as process:
        end = time.monotonic() + 120
        while not (curve.exists() and len(curve.read_text().splitlines()) > 1):  # it trains
            assert process.returncode is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_a_signal_ends_leaves_no_folder_and_no_server(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "token")
    with Program(HOLDING, tmp_path) as process:
        server = int(process.stdout.readline())
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(number)
        _, err = process.communicate()
    assert process.returncode == -number, err
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


def test_missing_server_is_an_error_of_one_line() -> None:
    code, _, err = invoke("lookup", "--target", "127.0.0.1:1", "--feature", "C1=1", "--timeout", "5")
    assert code == 2
    assert "127.0.0.1:1" in err
    assert "Traceback" not in err


PROGRAM = """
import typer
from recinfer.cli.console import verb

def run() -> None:
    exec("raise KeyboardInterrupt")

app = typer.Typer()
app.command()(verb(run))
app()
"""

# A command with a temporary folder, and a server that starts for ever, because nobody writes its token.
HOLDING = """
import tempfile
from pathlib import Path

import typer
from recinfer.cli.console import verb
from recinfer.serving.server_process import ServerProcess

class Server(ServerProcess):
    def wait_until_serving(self, seconds=None):
        print(self.pid, flush=True)
        super().wait_until_serving(seconds)

def run(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder), Server("model.rqa", "--token-file", folder / "token", "--port", "0"):
        pass

app = typer.Typer()
app.command()(verb(run))
app()
"""

# Places from which no exception propagates, so that Python drops it: a destructor, a callback of a weak reference.
LOST = """
import signal, time, weakref

class Ended:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

class Watched:
    pass

def wait():
    for _ in range(600):
        time.sleep(0.1)

def in_destructor():
    Ended()
    wait()

def in_callback():
    watched = Watched()
    watch = weakref.ref(watched, lambda _: signal.raise_signal(signal.SIGINT))
    del watched
    wait()
"""
VERB = """
import sys
from lost import in_callback
from recinfer.cli.console import verb
from recinfer.cli.main import app, main

app.command(name="lose")(verb(in_callback))
sys.argv[1:] = ["lose"]
main()
"""


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("interrupted", {"interrupted.py": PROGRAM}),  # in code made from text, as dataclasses are while torch loads
        ("recinfer", {"typer.py": "raise KeyboardInterrupt"}),  # while the verbs load
        ("recinfer", {"typer.py": "import lost\nlost.in_destructor()", "lost.py": LOST}),
        ("verb", {"verb.py": VERB, "lost.py": LOST}),
    ],
)
def test_ctrl_c_ends_with_130_wherever_it_comes(module: str, files: dict[str, str], tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", module],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
