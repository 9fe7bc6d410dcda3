"""A deployment on Ray as plain data: room on nodes, commands, records of servers and their number."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from recinfer.cli.deploy_options import Action, DeployOptions, ManifestOptions, RayOptions, ServerOptions
from recinfer.cli.deploy_ray import cores, spec_of_options
from recinfer.cli.main import app
from recinfer.deploy.ray import client
from recinfer.deploy.ray.application import servers_needed
from recinfer.deploy.ray.spec import Deployment, Kind
from recinfer.errors import ConfigError, NotFoundError, UnavailableError
from recinfer.serving.config import SecurityConfig
from tests.deploy.local import LocalRecords

SHARDS = Kind("shard-0", (0, 1), 3 << 30, 70)
RANKERS = Kind("ranker", (), 2 << 30, 40)


def spec(archive: Path = Path("/models/ctr/7"), **options: Any) -> Deployment:
    return Deployment("ctr", "ctr", archive, (SHARDS, RANKERS), **options)


@pytest.mark.parametrize(
    ("on", "bounds", "most"),
    [(1, (2, None), None), (3, (2, None), 1), (3, (1, 4), 2)],
)
def test_no_node_takes_more_than_its_share_of_a_kind(on: int, bounds: tuple[int, int | None], most: int | None):
    assert replace(SHARDS, least=bounds[0], ceiling=bounds[1]).per_node(on) == most


def test_a_share_grows_and_never_falls():
    """Serve replaces all servers of a kind whose share changes; were it a kind of one server, nobody would serve."""
    made = spec()
    more = made.scaled(4, None)
    less = more.scaled(1, None)
    least = less.scaled(2, None)
    assert [[kind.per_node(3) for kind in each.kinds] for each in (made, more, less, least)] == [
        *([1, 1], [2, 1], [2, 1], [2, 1])
    ]


def test_the_settings_of_the_servers():
    made = spec(security=SecurityConfig("secret-secret-secret"))
    assert (made.name, made.store) == ("ctr", Path("/models"))
    listed = Path("/tmp/shards.json")
    shard = made.config(SHARDS, "10.0.0.1", 5000, listed)
    assert shard.archives == (Path("/models/ctr/7"),) and not shard.models.admin
    assert shard.role.ranks == (0, 1) and shard.address.port == 5000 and shard.tables.preload
    ranker = made.config(RANKERS, "10.0.0.1", 0, listed)
    assert ranker.models.admin and ranker.role.shards == listed and ranker.models.store == Path("/models")
    assert ranker.archives == shard.archives and not ranker.models.follows_store
    assert ranker.security.token == "secret-secret-secret" and "secret" not in repr(made)


def test_a_file_chooses_the_versions():
    made = spec(model_config=Path("/models/models.toml"))
    shard, ranker = (made.config(kind, "h", 0, Path("/tmp/shards.json")) for kind in made.kinds)
    for config in (shard, ranker):
        assert config.archives == () and config.models.model_config == Path("/models/models.toml")
    assert shard.models.poll is None and ranker.models.poll and ranker.models.admin


def test_an_archive_in_no_store_has_one_version():
    made = spec(Path("/data/movies.rqa"))
    assert made.store is None
    config = made.config(RANKERS, "h", 0, Path("/tmp/shards.json"))
    assert config.archives == (Path("/data/movies.rqa"),) and config.models.store is None and not config.models.admin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "Ctr"], "name"),
        (["--name", "a/b"], "name"),
        (["--replicas", "3", "--max-replicas", "2"], "shard-0 servers: got 3, expected 1 to the maximum of 2"),
        (["--rankers", "0"], "rankers"),
        (["--queue-depth", "0"], "queue-depth"),
        (["--queue-depth", "8"], "give --load-percent"),
        (["--busy-percent", "101"], "busy-percent"),
        (["--load-percent", "101"], "load-percent"),
        (["--model-config", "models.toml"], "--model-config: expected an archive at STORE/tiny/VERSION"),
    ],
)
def test_wrong_options_are_named(archive: Path, options: list[str], message: str):
    done = CliRunner().invoke(app, ["deploy", str(archive), "--ray", "127.0.0.1:1", *options, "--json"])
    assert done.exit_code == 2 and message in done.output


def test_cpus_as_kubernetes_writes_them():
    assert [cores(text) for text in ("2", "0.5", "500m")] == [2.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="two"):
        cores("two")


@pytest.mark.parametrize(
    ("count", "bounds", "scaled"),
    [
        (3, (2, None), (3, 3)),
        (3, (2, 4), (3, 4)),
        (1, (2, 4), (1, 4)),
        (1, (4, 4), (1, 4)),
        (None, (2, 4), (2, 4)),
    ],
)
def test_numbers_that_scaling_takes(count: int | None, bounds: tuple[int, int | None], scaled: tuple[int, int]):
    found = replace(SHARDS, least=bounds[0], ceiling=bounds[1]).scaled(count)
    assert (found.least, found.most) == scaled


@pytest.mark.parametrize(
    ("count", "bounds", "message"),
    [(0, (2, None), "0, expected 1 to the maximum of 0"), (5, (1, 4), "5, exp")],
)
def test_numbers_that_scaling_refuses(count: int, bounds: tuple[int, int | None], message: str):
    with pytest.raises(ConfigError, match=f"shard-0 servers: got {message}"):
        replace(SHARDS, least=bounds[0], ceiling=bounds[1]).scaled(count)


@pytest.mark.parametrize(
    ("given", "bounds"),
    [
        ((None, None), (2, 2)),
        ((3, None), (3, 3)),
        ((None, 4), (2, 4)),
        ((None, 1), (1, 1)),
        ((1, 4), (1, 4)),
    ],
)
def test_numbers_of_servers_from_options(archive: Path, given: tuple[int | None, int | None], bounds: tuple[int, int]):
    servers = ServerOptions(replicas=given[0], max_replicas=given[1], rankers=given[0], max_rankers=given[1])
    made = spec_of_options(
        archive, DeployOptions(ray=RayOptions(), action=Action(), k8s=ManifestOptions(), servers=servers)
    )
    assert {(kind.least, kind.most) for kind in made.kinds} == {bounds}
    assert [(kind.name, kind.percent) for kind in made.kinds][-1] == ("ranker", ServerOptions.load_percent)


# ---------------------------------------------------------------- records


def test_a_replica_takes_the_name_of_an_ended_one_and_its_port_on_the_same_host():
    records = LocalRecords()
    records.alive |= {f"actor-{n}" for n in range(6)}
    made = [records.claim("ctr", "shard-0", f"actor-{n}", f"10.0.0.{n}")[0] for n in range(3)]
    assert [each.name for each in made] == ["shard-0-0", "shard-0-1", "shard-0-2"]
    for number, each in enumerate(made):
        each.port, each.state = 4000 + number, "serving"
        records.write("ctr", each)
    records.alive -= {"actor-1", "actor-2"}
    assert [each.name for each in records.servers("ctr")] == ["shard-0-0"]
    assert records.claim("ctr", "ranker", "actor-5", "10.0.0.2")[0].name == "ranker-0", "another kind takes none"
    took, port = records.claim("ctr", "shard-0", "actor-3", "10.0.0.2")
    assert (took.name, took.restarts, port) == ("shard-0-2", 1, 4002)
    took, port = records.claim("ctr", "shard-0", "actor-4", "10.0.0.9")
    assert (took.name, took.restarts, port) == ("shard-0-1", 1, 0)
    records.forget("ctr", "shard-0-0")
    assert Counter(each.state for each in records.servers("ctr")) == {"starting": 3}
    records.forget("ctr")
    assert not records.local.values


def test_a_deployment_is_found_by_its_name_or_alone():
    records = LocalRecords()
    with pytest.raises(NotFoundError, match="got none, expected one of: none exist"):
        records.deployment(None)
    for name in ("a", "b"):
        records.save(replace(spec(), name=name))
    assert records.deployment("b").name == "b" and records.names() == ["a", "b"]
    for name, shown in ((None, "none"), ("c", "'c'")):
        with pytest.raises(NotFoundError, match=f"got {shown}, expected one of: a, b"):
            records.deployment(name)
    records.forget("a")
    assert records.deployment(None).name == "b"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> LocalRecords:
    """The records of one deployment, which the client reads."""
    found = LocalRecords()
    found.save(spec())
    monkeypatch.setattr(client, "Records", lambda: found)
    return found


# ---------------------------------------------------------------- Serve's reasons


class RayError(Exception):
    """Ray's."""


def serve_is(monkeypatch: pytest.MonkeyPatch, status: Callable[[], Any]) -> None:
    """Serve's status is what ``status`` returns or raises."""
    serve, exceptions = SimpleNamespace(status=status), SimpleNamespace(RayError=RayError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve, exceptions=exceptions))


@pytest.fixture
def serve_says(records: LocalRecords, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    """The status of a deployment without servers, where Serve has this status and message for its rankers."""

    def found(status: str, message: str) -> dict[str, Any]:
        kinds = {"ranker": SimpleNamespace(status=status, message=message)}
        applications = {"ctr": SimpleNamespace(deployments=kinds)}
        serve_is(monkeypatch, lambda: SimpleNamespace(applications=applications))
        return client.status(None)

    return found


def test_a_status_needs_no_serve(records: LocalRecords, monkeypatch: pytest.MonkeyPatch):
    """The client of a process that outlives the deployment's Serve knows the ended one alone."""

    def ended() -> Any:
        raise RayError("the actor died")

    serve_is(monkeypatch, ended)
    found = client.status(None)
    assert (found["ready"], found["why"], found["failed"]) == (False, [], False)


def test_a_deployment_that_is_not_ready_has_serves_reason(serve_says: Callable[[str, str], dict[str, Any]]):
    assert serve_says("UPDATING", "")["why"] == []
    message = "1 replicas have taken more than 30s to initialize.\nThis may be caused by a slow __init__."
    found = serve_says("UPDATING", message)
    assert (found["why"], found["failed"]) == ([f"ranker: {message.splitlines()[0]}"], False)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("ModuleNotFoundError: No module named 'recinfer'", "ModuleNotFoundError: No module named 'recinfer'"),
        ("recinfer.errors.UnavailableError: on 10.0.0.2: cannot read c.pem", "on 10.0.0.2: cannot read c.pem"),
    ],
)
def test_a_kind_of_servers_that_serve_gave_up_is_an_error(
    serve_says: Callable[[str, str], dict[str, Any]], error: str, shown: str
):
    """As on nodes without recinfer: the last line of the message, a traceback, is the error."""
    found = serve_says("DEPLOY_FAILED", f"It failed. Error:\nray::x.y() Traceback (most recent call last):\n{error}\n")
    assert found["failed"]
    with pytest.raises(UnavailableError, match=f"^ranker: {shown}$"):
        client.wait_until_ready("ctr", 1.0, print)


# ---------------------------------------------------------------- load


@pytest.mark.parametrize(
    ("needed", "running", "target", "wanted"),
    [
        ([0.5, 0.5], 2, 2, 1),
        ([1.05, 1.05], 2, 2, 2),  # a tenth more changes nothing
        ([1.2, 1.2], 2, 2, 3),
        ([9.0, 9.0], 2, 2, 4),  # at most twice as many at a time
        ([3.0], 2, 2, 2),  # one has not reported yet
        ([], 0, 2, 2),
    ],
)
def test_the_number_of_servers_follows_the_load(needed: list[float], running: int, target: int, wanted: int):
    metrics = {"needed": dict(enumerate(needed))} if needed else {}
    context = SimpleNamespace(aggregated_metrics=metrics, current_num_replicas=running, target_num_replicas=target)
    assert servers_needed(context) == (wanted, {})  # type: ignore[arg-type]
