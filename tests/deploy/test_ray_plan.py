"""A deployment on Ray as plain data: placement, commands, listed servers and their number."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recinfer.deploy.groups import MIB, Footprint, RankGroup
from recinfer.deploy.ray.load import LoadFollower
from recinfer.deploy.ray.members import Member, Phase, addresses_by_group, backoff, shards_text, to_remove
from recinfer.deploy.ray.place import Node, choose_node, taken
from recinfer.deploy.ray.spec import Bounds, Deployment, Need, cores, deployment_of
from recinfer.errors import ConfigError, UnavailableError
from recinfer.serving.shards.config import read_shards

GIB = 1024 * MIB
FOUND = Footprint("ctr", "7", (RankGroup(0, (0, 1), 3 * GIB), RankGroup(1, (2,), GIB)), 2 * GIB, 3 * GIB)


def spec(archive: Path = Path("/models/ctr/7"), **options: Any) -> Deployment:
    return deployment_of(FOUND, archive, None, "ab12", **options)


def nodes(*memory: float) -> list[Node]:
    return [Node(f"n{i}", f"10.0.0.{i}", size * GIB, 4.0) for i, size in enumerate(memory)]


def place(found: list[Node], needs: list[tuple[str, Need]]) -> list[tuple[str, str]]:
    """Placed one after another, as the controller does it."""
    placed: list[tuple[str, str]] = []
    for kind, need in needs:
        node = choose_node(kind, need, found, [where for other, where in placed if other == kind])
        found = taken(found, node, need)
        placed.append((kind, node.id))
    return placed


def test_replicas_of_a_shard_do_not_share_a_node_where_there_are_others():
    kinds = [*itertools.chain(*([f"shard-{n}"] * 2 for n in range(3))), "ranker", "ranker"]
    placed = place(nodes(20, 20, 20), [(kind, Need(GIB, 0.5)) for kind in kinds])
    assert len(set(placed)) == len(placed)
    counts = [sum(where == f"n{i}" for _, where in placed) for i in range(3)]
    assert max(counts) - min(counts) <= 1, "and the nodes have about as many each"


def test_with_fewer_nodes_than_replicas_they_share():
    placed = place(nodes(20, 4), [("shard-0", Need(3 * GIB, 1))] * 4)
    assert sorted(where for _, where in placed) == ["n0", "n0", "n0", "n1"]


def test_a_server_that_fits_nowhere_is_refused_with_what_there_is():
    found = [*nodes(2.5, 8), Node("n9", "10.0.0.9", 64 * GIB, 0.5)]
    with pytest.raises(UnavailableError) as refused:
        choose_node("shard-0-1 (ranks 0, 1)", Need(9 * GIB, 1), found, [])
    for text in ("shard-0-1 (ranks 0, 1)", "9.0 GiB", "10.0.0.0 2.5 GiB", "10.0.0.1 8.0 GiB", "0.5 CPUs"):
        assert text in str(refused.value)
    with pytest.raises(UnavailableError, match="no nodes"):
        choose_node("ranker-0", Need(1, 1), [], [])


def test_the_commands_of_the_servers():
    made = spec(token="secret-secret-secret", name=None)
    assert (made.name, made.version, made.store) == ("ctr", "7", "/models")
    shard = made.arguments(0, "8", "10.0.0.1", 5000)
    assert shard[:1] == ["/models/ctr/8"] and "--admin" not in shard
    assert shard[shard.index("--ranks") + 1] == "0,1" and shard[shard.index("--port") + 1] == "5000"
    ranker = made.arguments(None, "7", "10.0.0.1")
    assert "--admin" in ranker and "--ranks" not in ranker and ranker[ranker.index("--model-store") + 1] == "/models"
    assert not any("secret" in argument for argument in (*shard, *ranker)), "arguments can be read by every user"
    assert made.environment()["RECINFER_TOKEN"] == "secret-secret-secret" and "secret" not in repr(made)
    assert "--insecure" in spec(insecure=True).arguments(0, "7", "10.0.0.1") and "--insecure" not in shard
    assert made.need(0).memory == FOUND.groups[0].memory_bytes and made.need(None).memory == FOUND.ranker_bytes


def test_an_archive_in_no_store_has_one_version():
    made = spec(Path("/data/movies.rqa"))
    assert made.store is None and made.version == "7" and made.archive_of("8") == "/data/movies.rqa"
    assert "--model-store" not in made.arguments(None, "7", "h") and "--admin" not in made.arguments(None, "7", "h")
    with pytest.raises(ConfigError, match="model store"):
        deployment_of(FOUND, Path("/data/movies.rqa"), Path("/models"), "ab12")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "Ctr"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"shards": Bounds(2, 3, 4)}, "replicas"),
        ({"rankers": Bounds(0, 0, 4)}, "rankers"),
        ({"queue_depth": 0}, "queue depth"),
        ({"busy_percent": 101}, "busy percent"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        spec(**options)


def test_cpus_as_kubernetes_writes_them():
    assert [cores(text) for text in ("2", "0.5", "500m")] == [2.0, 0.5, 0.5]
    with pytest.raises(ConfigError, match="two"):
        cores("two")


# ---------------------------------------------------------------- members


def member(name: str, group: int | None, phase: Phase = Phase.serving, node: str = "n0", port: int = 1) -> Member:
    return Member(name, group, phase=phase, node=node, host="10.0.0.1", port=port)


def test_listed_are_those_that_serve(tmp_path: Path):
    groups = ((0, 1), (2,))
    here = [member("a", 0, port=5), member("b", 0, port=4), member("c", 0, Phase.draining, port=6)]
    here += [member("d", 1, Phase.starting, port=7), member("r", None, port=8)]
    first = addresses_by_group(2, here, {})
    assert first == {0: ("10.0.0.1:4", "10.0.0.1:5")}
    assert shards_text(groups, first) is None, "rankers refuse a file without rank 2"
    here[3].phase = Phase.serving
    second = addresses_by_group(2, here, first)
    text = shards_text(groups, second)
    assert text is not None
    (tmp_path / "shards.json").write_text(text)
    listed = read_shards(tmp_path / "shards.json").ranks
    assert listed == {0: second[0], 1: second[0], 2: ("10.0.0.1:7",)}
    assert addresses_by_group(2, here[:3], second)[1] == ("10.0.0.1:7",), "the last one stays, to be named as missing"


def test_which_servers_are_removed_first():
    here = [member("s-0", 0, node="n0"), member("s-1", 0, node="n1"), member("s-2", 0, node="n1")]
    assert [m.name for m in to_remove(here, 1)] == ["s-2"], "the younger of those that share a node"
    here[0].phase = Phase.starting
    assert [m.name for m in to_remove(here, 2)] == ["s-0", "s-2"]
    here[2].phase = Phase.draining
    assert [m.name for m in to_remove(here, 1)] == ["s-0"], "one that goes already is not chosen again"


def test_a_server_that_keeps_ending_is_started_less_often():
    pauses = list(itertools.accumulate(range(8), lambda last, _: backoff(last, 0.5), initial=0.0))
    assert pauses[:4] == [0.0, 1.0, 2.0, 4.0] and max(pauses) == pauses[-1] == 30.0
    assert backoff(30.0, 60.0) == 0.0


def test_another_controller_knows_the_members_again():
    here = replace(member("s-0", 0, Phase.draining), place=3, life=4, pid=5, stopped=True, version="7", restarts=2)
    again = Member.from_state(json.loads(json.dumps(here.to_state())), now=9.0)
    assert again == replace(here, since=9.0)


# ---------------------------------------------------------------- load

BOUNDS = Bounds(2, 1, 6)


def follow(loads: list[float], count: int = 2, cool_down: float = 30.0) -> list[int]:
    """How many there are after each second of a load, of which a server bears eight, the servers being there at once."""
    follower, counts = LoadFollower(cool_down), []
    for second, load in enumerate(loads):
        count = follower.wanted(float(second), load / 8.0, count, BOUNDS)
        counts.append(count)
    return counts


def test_more_load_more_servers_within_bounds():
    assert follow([16.0] * 60)[-1] == 2, "eight each, as it should be"
    assert follow([40.0] * 60)[-1] == 5
    assert follow([4000.0] * 120)[-1] == 6
    assert max(follow([4000.0] * 15)) == 4, "at most twice as many at a time"


def test_a_short_peak_changes_nothing():
    assert set(follow([16.0] * 20 + [100.0] + [16.0] * 20)) <= {2, 3}
    assert follow([17.0] * 60)[-1] == 2, "nor does a tenth more"


def test_servers_go_when_load_was_low_for_long_enough():
    counts = follow([40.0] * 40 + [1.0] * 80)
    high = counts.index(5)
    assert set(counts[high : 40 + 25]) == {5} and counts[-1] == 1
    dips = follow([40.0] * 40 + ([1.0] * 10 + [40.0] * 15) * 4)
    assert min(dips[40:]) == 5, "load that comes back within that time finds them there"
