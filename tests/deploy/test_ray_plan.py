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
from recinfer.deploy.groups import MIB, Footprint, RankGroup
from recinfer.deploy.ray import client
from recinfer.deploy.ray.application import servers_needed
from recinfer.deploy.ray.records import Server, status_of
from recinfer.deploy.ray.rollout import roll
from recinfer.deploy.ray.spec import Bounds, Deployment
from recinfer.errors import ConfigError, InputError, UnavailableError
from recinfer.serving.config import SecurityConfig
from tests.deploy.local import LocalRecords

GIB = 1024 * MIB
FOUND = Footprint("ctr", "7", (RankGroup(0, (0, 1), 3 * GIB), RankGroup(1, (2,), GIB)), 2 * GIB, 3 * GIB)


def spec(archive: Path = Path("/models/ctr/7"), **options: Any) -> Deployment:
    return Deployment("ctr", FOUND, archive, "7", **options)


@pytest.mark.parametrize(
    ("on", "bounds", "most"),
    [(1, Bounds(2), None), (3, Bounds(2), 1), (3, Bounds(1, 4), 2)],
)
def test_no_node_takes_more_than_its_share_of_a_kind(on: int, bounds: Bounds, most: int | None):
    assert spec(nodes=on, shards=bounds).per_node(0) == most


def test_a_share_grows_and_never_falls():
    """Serve replaces all servers of a kind whose share changes; were it a kind of one server, nobody would serve."""
    made = spec(nodes=3)
    more = replace(made, shards=made.shards.scaled(4))
    less = replace(more, shards=more.shards.scaled(1))
    least = replace(less, shards=less.shards.scaled(2))
    assert [(each.per_node(0), each.per_node(None)) for each in (made, more, less, least)] == [
        *((1, 1), (2, 1), (2, 1), (2, 1))
    ]


def test_the_settings_of_the_servers():
    made = spec(security=SecurityConfig("secret-secret-secret"))
    assert (made.name, made.version, made.store) == ("ctr", "7", Path("/models"))
    listed = Path("/tmp/shards.json")
    shard = replace(made, version="8").config(0, "10.0.0.1", 5000, listed)
    assert shard.archives == (Path("/models/ctr/8"),) and not shard.models.admin
    assert shard.role.ranks == (0, 1) and shard.address.port == 5000 and shard.tables.preload
    ranker = made.config(None, "10.0.0.1", 0, listed)
    assert ranker.models.admin and ranker.role.shards == listed and ranker.models.store == Path("/models")
    assert ranker.security.token == "secret-secret-secret" and "secret" not in repr(made)
    assert (made.memory(0), made.memory(None)) == (FOUND.groups[0].memory_bytes, FOUND.ranker_bytes)


def test_an_archive_in_no_store_has_one_version():
    made = spec(Path("/data/movies.rqa"))
    assert made.store is None and made.version == "7"
    config = made.config(None, "h", 0, Path("/tmp/shards.json"))
    assert config.archives == (Path("/data/movies.rqa"),) and config.models.store is None and not config.models.admin


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--name", "Ctr"], "name"),
        (["--name", "a/b"], "name"),
        (["--replicas", "3", "--max-replicas", "2"], "replicas: got 3, expected 1 to the maximum of 2"),
        (["--rankers", "0"], "rankers"),
        (["--queue-depth", "0"], "queue-depth"),
        (["--queue-depth", "8"], "give --load-percent"),
        (["--busy-percent", "101"], "busy-percent"),
        (["--load-percent", "101"], "load-percent"),
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
        (3, Bounds(2), (3, 3)),
        (3, Bounds(2, 4), (3, 4)),
        (1, Bounds(2, 4), (1, 4)),
        (1, Bounds(2, 4).scaled(4), (1, 4)),
        (None, Bounds(2, 4), (2, 4)),
    ],
)
def test_numbers_that_scaling_takes(count: int | None, bounds: Bounds, scaled: tuple[int, int]):
    found = bounds.scaled(count)
    assert (found.least, found.most) == scaled


@pytest.mark.parametrize(
    ("count", "bounds", "message"),
    [(0, Bounds(2), "0, expected 1 to the maximum of 0"), (5, Bounds(1, 4), "5, exp")],
)
def test_numbers_that_scaling_refuses(count: int, bounds: Bounds, message: str):
    with pytest.raises(ConfigError, match=f"replicas: got {message}"):
        replace(spec(), shards=bounds.scaled(count))


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
    assert (made.shards.least, made.shards.most) == (made.rankers.least, made.rankers.most) == bounds


# ---------------------------------------------------------------- records


def test_a_replica_takes_the_name_of_an_ended_one_and_its_port_on_the_same_host():
    records = LocalRecords()
    records.alive |= {f"actor-{n}" for n in range(6)}
    made = [records.claim("ctr", 0, f"actor-{n}", f"10.0.0.{n}")[0] for n in range(3)]
    assert [each.name for each in made] == ["shard-0-0", "shard-0-1", "shard-0-2"]
    for number, each in enumerate(made):
        each.port, each.address, each.state = 4000 + number, f"10.0.0.{number}:{4000 + number}", "serving"
        records.write("ctr", each)
    records.alive -= {"actor-1", "actor-2"}
    assert [each.state for each in records.servers("ctr")] == ["serving", "pending", "pending"]
    took, port = records.claim("ctr", 0, "actor-3", "10.0.0.2")
    assert (took.name, took.restarts, port) == ("shard-0-2", 1, 4002)
    took, port = records.claim("ctr", 0, "actor-4", "10.0.0.9")
    assert (took.name, took.restarts, port) == ("shard-0-1", 1, 0)
    assert records.claim("ctr", None, "actor-5", "10.0.0.9")[0].name == "ranker-0"
    records.forget("ctr", "shard-0-0")
    assert Counter(each.state for each in records.servers("ctr")) == {"starting": 3}
    records.forget("ctr")
    assert not records.local.values


def test_a_version_is_served_once_all_rankers_have_it_and_not_if_one_refuses_it():
    records, made = LocalRecords(), spec()
    records.save(made)
    with pytest.raises(UnavailableError, match="no ranker is serving"):
        roll(records, made, "8")
    records.alive |= {"a", "b"}
    rankers = [Server(f"ranker-{n}", None, actor, "h", "serving") for n, actor in enumerate("ab")]
    rankers[0].loaded, rankers[0].version = ["7", "8"], "8"
    rankers[1].refused = {"8": "it is not sound"}
    for each in rankers:
        records.write("ctr", each)
    with pytest.raises(InputError, match="ranker-1 on h: it is not sound"):
        roll(records, made, "8")
    assert records.deployment("ctr") == made, "nothing changed, and no ranker loads the version any more"
    rankers[1].loaded, rankers[1].version, rankers[1].refused = ["7", "8"], "8", {}
    records.write("ctr", rankers[1])
    assert roll(records, made, "8") == "8"
    after = records.deployment("ctr")
    assert after is not None and (after.version, after.previous, after.candidate) == ("8", "7", None)


@pytest.mark.parametrize("archive", ["/models/other/8", "/elsewhere/ctr/8"])
def test_an_archive_of_another_store_or_model_is_refused(archive: str, monkeypatch: pytest.MonkeyPatch):
    """Servers would load the version of that name from their own store."""
    monkeypatch.setattr(client, "_deployment", lambda name: spec())
    monkeypatch.setattr(client, "Records", LocalRecords)
    with pytest.raises(ConfigError, match=f"^{archive}: expected an archive at /models/ctr/VERSION"):
        client.roll(None, Path(archive))


def test_a_later_rollout_takes_over():
    class Later(LocalRecords):
        def servers(self, deployment: str) -> list[Server]:
            found = self.deployment(deployment)
            assert found is not None
            self.save(replace(found, candidate="9"))
            return [Server("ranker-0", None, state="serving")]

    records, made = Later(), spec()
    with pytest.raises(UnavailableError, match="took over"):
        roll(records, made, "8")
    assert records.deployment("ctr") == replace(made, candidate="9"), "the later one goes on"


# ---------------------------------------------------------------- Serve's reasons


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    """The status of a ranker that has not started, where Serve has this status and message."""

    def found(status: str, message: str) -> dict[str, Any]:
        kinds = {"ranker": SimpleNamespace(status=status, message=message)}
        serve = SimpleNamespace(
            status=lambda: SimpleNamespace(applications={"ctr": SimpleNamespace(deployments=kinds)})
        )
        monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(serve=serve))
        one = replace(spec(), servers=replace(FOUND, groups=()), rankers=Bounds(1))
        return client._with_reasons(status_of(one, []))

    return found


def test_a_server_that_has_not_started_has_serves_reason(absent: Callable[[str, str], dict[str, Any]]):
    assert [each["why"] for each in absent("UPDATING", "")["servers"]] == ["its replica has not started"]
    message = "1 replicas have taken more than 30s to be scheduled. Resources required: 9 CPUs"
    assert absent("UPDATING", message)["servers"][0]["why"] == message


def test_a_kind_of_servers_that_serve_gave_up_is_an_error(absent: Callable[[str, str], dict[str, Any]]):
    """As on nodes without recinfer: the last line of the message, a traceback, is the error."""
    with pytest.raises(UnavailableError, match=r"^ranker: ModuleNotFoundError: No module named 'recinfer'$"):
        absent(
            "DEPLOY_FAILED",
            "Traceback (most recent call last):\n  ...\nModuleNotFoundError: No module named 'recinfer'\n",
        )


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
