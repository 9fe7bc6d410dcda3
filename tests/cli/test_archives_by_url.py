"""Commands that read an archive at a URL, and URLs in the place of paths on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recinfer.sizing import capacity
from tests.cli.conftest import Exported
from tests.e2e.commands import run, run_json
from tests.serving.conftest import build_model, make_request
from tests.sizing.simulated import QueueDriver
from tests.sizing.test_capacity import measured


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("RECINFER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def shards_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("archives/*/shards/*"))


def recorded(path: Path) -> Path:
    dense, features = make_request(5, 20)
    arrays = {"dense": dense.numpy(), "output": build_model().eval()(dense, features).detach().numpy()}
    for key in features.keys():  # noqa: SIM118 - not a dict
        arrays[f"{key}.values"] = features[key].values().numpy()
        arrays[f"{key}.lengths"] = features[key].lengths().numpy()
    np.savez(path, **arrays)
    return path


def measurement(path: Path) -> Path:
    replace(measured(QueueDriver(1e-3, 1e-3), 20e-3), model="tiny").save(path)
    return path


Command = Callable[[object, Path, Path], tuple[object, ...]]
COMMANDS: dict[str, Command] = {
    "verify": lambda at, files, out: ("verify", at),
    "compare": lambda at, files, out: ("compare", at, "--reference", recorded(files / "right.npz")),
    "reshard": lambda at, files, out: ("reshard", at, "--world-size", 3, "--out", out),
    "delta": lambda at, files, out: ("delta", at, files / "tiny.ckpt", "--out", out),
}


@pytest.mark.parametrize("make", COMMANDS.values(), ids=COMMANDS)
def test_an_archive_at_a_url_gives_what_its_folder_gives(make: Command, exported: Exported, tmp_path: Path) -> None:
    url, files = exported.archive.as_uri(), exported.archive.parent
    changing = {"archive", "seconds", "delta", "sha256"}
    found = [run_json(*make(at, files, tmp_path / f"out{n}")) for n, at in enumerate((url, exported.archive))]
    by_url, by_path = ({key: value for key, value in each.items() if key not in changing} for each in found)
    assert by_url == by_path
    if make is COMMANDS["verify"]:
        assert found[0]["archive"] == url


def test_commands_that_read_no_rows_download_none(exported: Exported, cache: Path, tmp_path: Path) -> None:
    url = exported.archive.as_uri()
    assert run_json("inspect", url) == run_json("inspect", exported.archive)
    sized = ("--qps", 100, "--capacity", measurement(tmp_path / "c.json"))
    assert run_json("size", "--archive", url, *sized) == run_json("size", "--archive", exported.archive, *sized)
    assert shards_in(cache) == []
    assert run_json("verify", url)["ok"]
    assert len(shards_in(cache)) == 2


def test_a_server_is_started_for_an_archive_at_a_url(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_FEWEST", 1)
    short = ("--seconds", 0.2, "--max-qps", 25, "--p99-ms", 20_000)
    assert run_json("bench", "capacity", exported.archive.as_uri(), *short)["model"] == "tiny"


def test_no_archive_at_a_url_is_one_sentence(tmp_path: Path) -> None:
    code, _, err = run("inspect", (tmp_path / "none").as_uri())
    assert (code, err.count("\n")) == (2, 1)
    assert "none has no manifest.json; expected the folder of an archive" in err


@pytest.mark.parametrize(
    "command",
    [
        ("reshard", "a.rqa", "--world-size", 2, "--out", "s3://models/ranker"),
        ("export", "--checkpoint", "a.ckpt", "--out", "s3://models/ranker"),
        ("export", "--checkpoint", "s3://models/a.ckpt", "--out", "a.rqa"),
        ("train", "--format", "synthetic", "--out", "s3://models/a.ckpt"),
        ("delta", "a.rqa", "a.ckpt", "--out", "d.rqd", "--after", "s3://models/monday.rqd"),
        ("mar", "s3://models/ranker", "--export-path", "store"),
        ("deploy", "s3://models/ranker", "--k8s", "--out", "k8s"),
        ("serve", "a.rqa", "--delta", "s3://models/monday.rqd"),
    ],
    ids=lambda command: " ".join(map(str, command)),
)
def test_a_url_in_the_place_of_a_path(
    command: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*command)
    assert (code, err.count("\n")) == (2, 1)
    assert "got the URL s3:/models/" in err
    assert "expected a path on this machine" in err
    assert not any(tmp_path.iterdir())


def test_export_from_python_to_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import recinfer
    from recinfer.errors import ConfigError

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="out: got the URL s3:/models/ranker, expected a path on this machine"):
        recinfer.export(build_model(), make_request(5, 20), "s3://models/ranker")
    assert not any(tmp_path.iterdir())
