"""recinfer.serve: a server of a Python program, from its configuration to its end."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.request
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import recinfer
from recinfer.cli.serve_options import (
    AddressOptions,
    BatchOptions,
    LimitOptions,
    ModelOptions,
    RoleOptions,
    SecurityOptions,
    ServeOptions,
    TableOptions,
)
from recinfer.errors import ArchiveError, ConfigError, InputError, RecinferError, UnavailableError
from recinfer.inference.predictor import Predictor
from recinfer.serving.app.running import RunningServer
from recinfer.serving.app.service import ReadyModels, ReadyRanks
from recinfer.serving.app.workers import worker_command
from recinfer.serving.client.admin import AdminClient
from recinfer.serving.config import (
    AddressConfig,
    ModelsConfig,
    RoleConfig,
    SecurityConfig,
    ServeConfig,
    TablesConfig,
)
from recinfer.serving.wire.limits import BatchConfig
from recinfer.serving.wire.loop import run_on_loop
from recinfer.serving.workers import process
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import write_shards
from tests.waiting import until
from tests.warm import starting_warm

TOKEN = "a-token-of-enough-letters"


def is_open(target: str) -> bool:
    host, _, port = target.rpartition(":")
    with socket.socket() as tried:
        return tried.connect_ex((host, int(port))) == 0


def predicts(server: RunningServer, predictor: Predictor) -> bool:
    """Whether a prediction over gRPC is the predictor's."""
    dense, features = make_request(4, 3)
    with server.client(timeout=60) as client:
        found = client.predict(dense, features)["output"]
    return torch.equal(found, predictor.predict(dense, features)["output"])


def model_over_http(server: RunningServer) -> str:
    with urllib.request.urlopen(f"{server.url}/v2/models/tiny", timeout=60) as answer:
        return str(json.load(answer)["name"])


def test_a_server_answers_inside_the_block_and_is_gone_after_it(archive: Path, predictor: Predictor):
    with recinfer.serve(archive, http_port=0, metrics_port=0) as server:
        assert predicts(server, predictor) and model_over_http(server) == "tiny"
        assert isinstance(server.ready, ReadyModels) and server.ready.serving == ("tiny 3",)
        with urllib.request.urlopen(f"{server.metrics_url}/metrics", timeout=60) as answer:
            assert b"recinfer" in answer.read()
        with urllib.request.urlopen(f"{server.metrics_url}/status.json", timeout=60) as answer:
            assert server.status().keys() == json.load(answer).keys() and server.status()["ready"]
        assert is_open(server.target)
        assert (
            repr(server) == f"<server of tiny 3: gRPC {server.target}, REST {server.url}, metrics {server.metrics_url}>"
        )
    assert not is_open(server.target)
    assert repr(server) == "<stopped server of tiny 3>"
    server.stop()  # a second stop has no effect
    with recinfer.serve(str(archive)) as server:
        assert model_over_http(server) == "tiny" and server.metrics_url is None
    with recinfer.serve(str(archive), http_port=None) as server:
        assert server.url is None


def test_a_server_runs_inside_an_event_loop(archive: Path, predictor: Predictor):
    """As in a notebook, whose cells run on a loop."""

    async def cell() -> str:
        with recinfer.serve(archive, http_port=0) as server:
            assert predicts(server, predictor)
            async with recinfer.AsyncInferenceClient(server.target, timeout=60) as client:
                dense, features = make_request(5, 2)
                assert (await client.predict(dense, features))["output"].shape[0] == 2
            assert await asyncio.to_thread(model_over_http, server) == "tiny"
        return server.target

    assert not is_open(asyncio.run(cell()))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_server_of_another_thread_is_gone_after_an_exception(
    archive: Path, predictor: Predictor, error: type[BaseException]
):
    targets: list[str] = []

    def work() -> None:
        with pytest.raises(error), recinfer.serve(archive) as server:
            targets.append(server.target)
            assert predicts(server, predictor)
            raise error

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    assert targets and not is_open(targets[0])


def test_a_server_that_nothing_refers_to_stops(archive: Path, tmp_path: Path):
    unix_socket = tmp_path / "server.sock"
    server = recinfer.serve(ServeConfig((archive,), AddressConfig(unix_socket=unix_socket)))
    target = server.target
    assert unix_socket.exists()
    with pytest.warns(ResourceWarning, match=f"unclosed <server of tiny 3: gRPC {target}>; .* stop"):
        del server
    assert not is_open(target)
    assert not unix_socket.exists()


def test_a_server_of_a_reference_cycle_stops_on_any_thread(archive: Path):
    server = recinfer.serve(archive)
    target, cycle = server.target, [server]
    cycle.append(cycle)  # type: ignore[arg-type]
    del server, cycle

    async def collect() -> None:
        gc.collect()

    with pytest.warns(ResourceWarning, match="unclosed <server of tiny 3"):
        run_on_loop(collect())  # the thread that the end of a server needs
    until(lambda: not is_open(target))


def test_servers_stop_with_the_program(archive: Path, tmp_path: Path):
    unix_socket = tmp_path / "server.sock"
    program = f"""
        from pathlib import Path
        import recinfer
        from recinfer.serving.config import AddressConfig, RoleConfig, ServeConfig

        address = AddressConfig(http_port=0, metrics_port=0, unix_socket=Path({str(unix_socket)!r}))
        server = recinfer.serve(ServeConfig(({str(archive)!r},), address))
        shard = recinfer.serve(ServeConfig(({str(archive)!r},), role=RoleConfig(ranks=(0,))))
        print("serves")
    """
    ran = subprocess.run(
        [sys.executable, "-W", "default", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout) == (0, "serves\n")
    assert ran.stderr.count("ResourceWarning: unclosed <server of tiny 3") == 2
    assert "Traceback" not in ran.stderr
    assert not unix_socket.exists()


def test_a_server_that_cannot_open_all_ports_opens_none(archive: Path):
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UnavailableError, match="cannot listen on"):
        recinfer.serve(archive, port=port, http_port=taken.getsockname()[1])
    assert not is_open(f"127.0.0.1:{port}")


def test_a_model_store_is_polled(archive: Path, tmp_path: Path, predictor: Predictor):
    store = tmp_path / "store"
    shutil.copytree(archive, store / "tiny" / "1")
    with recinfer.serve(model_store=store, poll=0.05, admin=True) as server:
        assert isinstance(server.ready, ReadyModels) and server.ready.serving == ("tiny 1",)
        shutil.copytree(archive, tmp_path / "new")
        (tmp_path / "new").rename(store / "tiny" / "2")
        with AdminClient(server.target, timeout=60) as admin, server.client(timeout=60) as client:
            until(lambda: client.get_model().version == "2")
            admin.set_weights("tiny", {"1": 1})
            assert client.get_model().version == "1"
        assert predicts(server, predictor)
    assert not [thread.name for thread in threading.enumerate() if thread.name == "recinfer-poll"]


def test_a_client_has_the_servers_token(archive: Path, tmp_path: Path, predictor: Predictor):
    (tmp_path / "token").write_text(TOKEN)
    for security in (SecurityConfig(token=TOKEN), SecurityConfig(token_file=tmp_path / "token")):
        with recinfer.serve(ServeConfig((archive,), security=security)) as server:
            assert predicts(server, predictor)
            with pytest.raises(RecinferError, match="needs a token"), server.client(token="") as client:
                client.get_model()
    assert TOKEN not in repr(SecurityConfig(token=TOKEN)) + ServeConfig(security=SecurityConfig(token=TOKEN)).to_json()


def test_a_shard_server_and_a_ranker_run_in_one_process(archive: Path, tmp_path: Path, predictor: Predictor):
    said: list[str] = []
    with RunningServer(ServeConfig((archive,), role=RoleConfig(ranks=(0, 1)))) as shards:
        assert isinstance(shards.ready, ReadyRanks) and shards.ready.held == ("tiny 3",)
        with pytest.raises(InputError, match="shard server"):
            shards.client()
        listed = write_shards(tmp_path / "shards.json", {0: [shards.target], 1: [shards.target]})
        with RunningServer(ServeConfig((archive,), role=RoleConfig(shards=listed)), said.append) as ranker:
            until(lambda: "all shards are there: serving" in said)
            assert predicts(ranker, predictor)
            assert ranker.status()["shards"]["replicas"] and shards.status()["held"]["ranks"] == [0, 1]
    assert not is_open(ranker.target) and not is_open(shards.target)


def test_workers_of_a_python_program(archive: Path, predictor: Predictor):
    with recinfer.serve(archive, workers=2, http_port=0, metrics_port=0) as server:
        assert predicts(server, predictor) and model_over_http(server) == "tiny"
        assert server.metrics_url is not None and server.status()["workers"] == 2
    assert not is_open(server.target)


def test_workers_that_do_not_start(tmp_path: Path):
    with starting_warm(process), pytest.raises(UnavailableError, match="gone"):
        recinfer.serve(tmp_path / "gone", workers=2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "nothing to serve"),
        ({"config": ServeConfig(), "http_port": 0}, "expected them in the ServeConfig"),
        ({"config": ServeConfig(), "port": 5}, "expected them in the ServeConfig"),
        ({"config": "a.rqa", "poll": 1.0}, "give --model-store DIR"),
        ({"config": "a.rqa", "host": "0.0.0.0"}, "there is no token"),
        ({"config": "a.rqa", "device": "tpu"}, "expected 'cpu' or 'cuda'"),
        ({"config": "a.rqa", "port": 7, "http_port": 7}, "got --port 7 and --http-port 7"),
        ({"config": "a.rqa", "workers": 0}, "--workers: got 0, expected a whole number from 1 to 256"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RECINFER_TOKEN", raising=False)
    with pytest.raises(ConfigError, match=says):
        recinfer.serve(**arguments)  # type: ignore[arg-type]


def test_an_archive_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ArchiveError, match=r"none\.rqa"):
        recinfer.serve(tmp_path / "none.rqa")


# ------------------------------------------------------------------------------------------------------ configuration


def default_options() -> ServeOptions:
    return ServeOptions(
        AddressOptions(),
        TableOptions(),
        ModelOptions(),
        BatchOptions(),
        LimitOptions(),
        SecurityOptions(),
        RoleOptions(),
    )


@pytest.mark.parametrize(
    ("options", "config", "renamed"),
    [
        (AddressOptions, AddressConfig, {"cors_origin"}),
        (TableOptions, TablesConfig, set()),
        (ModelOptions, ModelsConfig, {"delta"}),
        (BatchOptions, BatchConfig, set()),
        (SecurityOptions, SecurityConfig, set()),
        (RoleOptions, RoleConfig, set()),
    ],
)
def test_an_option_has_the_name_of_its_setting(options: type, config: type, renamed: set[str]):
    """An option of another name would have no effect."""
    names = {option.name for option in fields(options)}
    assert renamed <= names and names - renamed <= {setting.name for setting in fields(config)}


def test_options_have_the_defaults_of_the_configuration():
    assert default_options().config() == ServeConfig(address=AddressConfig(port=8500))


def test_a_configuration_survives_json():
    config = ServeConfig(
        archives=(Path("a.rqa"), Path(os.fsdecode(b"\xff.rqa"))),
        address=AddressConfig(
            "::1", 1, 2, 3, True, cors_origins=("https://a.example",), drain_seconds=3.0, idle_seconds=9.5
        ),
        tables=TablesConfig("cpu", True, True, True),
        models=ModelsConfig((Path("1.rqd"),), Path("store"), 0.5, Path("models.toml"), True, 3, 4.0),
        security=SecurityConfig(None, Path("token"), Path("cert"), Path("key"), Path("ca"), True),
        role=RoleConfig(shards=Path("shards.json"), missing_shards="default_rows"),
    )
    assert ServeConfig.from_json(config.to_json()) == config
    shards = ServeConfig(role=RoleConfig(ranks=(1, 0), socket_port=9))
    assert ServeConfig.from_json(shards.to_json()) == shards and shards.role.ranks == (0, 1)
    with pytest.raises(ArchiveError, match="unknown"):
        ServeConfig.from_json(json.dumps({**json.loads(config.to_json()), "more": 1}))


def test_a_worker_has_the_ports_of_its_supervisor_and_no_metrics_port():
    config = ServeConfig(address=AddressConfig(metrics_port=0, http_port=0, log_json=True)).of_worker(1, 2)
    assert config.address == AddressConfig(port=1, http_port=2, log_json=True)
    command = worker_command(config, debug=True)
    assert command[1:8] == ["-m", "recinfer", "--debug", "serve", "--worker", "--json", "--log-json"]
    assert ServeConfig.from_json(command[-1]) == config


@pytest.mark.parametrize(
    ("config", "reloads"),
    [
        (ServeConfig(), False),
        (ServeConfig(models=ModelsConfig(model_store=Path("store"))), False),
        (ServeConfig(models=ModelsConfig(model_store=Path("store"), poll=1.0)), True),
        (ServeConfig(role=RoleConfig(shards=Path("shards.json"))), True),
    ],
)
def test_servers_that_follow_files_reload(config: ServeConfig, reloads: bool):
    assert config.reloads is reloads
