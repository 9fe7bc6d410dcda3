"""Changes of shards.json: applied as a whole or not at all, and every rank keeps a replica meanwhile."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from recinfer.errors import ConfigError
from recinfer.inference.predictor import load
from recinfer.serving.server.security import Security
from recinfer.serving.shards.config import ShardsConfig, read_shards
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.shards.replica import Replica
from recinfer.serving.shards.replicas import ReplicaPool, _stamp
from tests.ports import free_port
from tests.serving.remote.fleet import asking, shard, write_shards
from tests.serving.remote.test_direct import make_archive, make_request
from tests.waiting import replace_text, until

TOKENS = ("a-token-of-24-characters", "another-one-of-24-letters")


@pytest.mark.parametrize("name", ["a..b", "x" * 64, ".", "a." * 127 + "b"])
def test_names_that_dns_cannot_know_are_refused(tmp_path: Path, name: str):
    for address in (f"dns:///{name}:1", f"{name}:1"):
        with pytest.raises(ConfigError, match="expected host:port or dns:///name:port"):
            ReplicaPool(write_shards(tmp_path / "shards.json", {0: [address]}))


def test_a_name_that_no_resolver_takes_is_one_without_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("recinfer.serving.shards.config._is_host", lambda name: True)
    with asking(write_shards(tmp_path / "shards.json", {0: ["dns:///a..b:1"]})) as fan_out:
        assert fan_out.pool.addresses(0) == "dns:///a..b:1 (no address)"
    assert "cannot resolve dns:///a..b:1" in caplog.text


def test_a_rank_that_is_needed_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    archive, path = make_archive(tmp_path, "row_wise"), tmp_path / "shards.json"
    with shard(archive, (0, 1, 2)) as server:
        whole = {rank: [server.target] for rank in range(3)}
        with asking(write_shards(path, whole)) as fan_out:
            there = load(archive, lookups=MakeLookups(fan_out))
            expected = there.lookup(make_request(4)).pooled.values()
            write_shards(path, {0: whole[0], 2: whole[2]})
            until(lambda: "no address of rank 1; what is served is cut for 3 ranks" in caplog.text)
            assert torch.equal(there.lookup(make_request(4)).pooled.values(), expected)
            assert sorted(fan_out.pool.config.ranks) == [0, 1, 2] == sorted(fan_out.pool._listed)


def test_a_list_that_changes_while_it_is_first_read_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, addresses = tmp_path / "shards.json", [f"127.0.0.1:{free_port()}" for _ in range(2)]

    def read_before_it_changes(path: Path) -> ShardsConfig:
        monkeypatch.undo()
        found = read_shards(path)
        write_shards(path, {0: addresses[1:]})
        return found

    monkeypatch.setattr("recinfer.serving.shards.replicas.read_shards", read_before_it_changes)
    with asking(write_shards(path, {0: addresses[:1]}), ready=False) as fan_out:
        until(lambda: [each.target for each in fan_out.pool.everyone()] == addresses[1:])


def test_invalid_list_is_logged_once_and_a_later_valid_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    archive, path = make_archive(tmp_path, "row_wise"), tmp_path / "shards.json"
    monkeypatch.setattr("recinfer.serving.shards.replicas._LOOK_S", 0.01)
    with (
        shard(archive, (0, 1, 2)) as server,
        shard(archive, (0, 1, 2)) as other,
        asking(write_shards(path, {rank: [server.target] for rank in range(3)})) as fan_out,
    ):
        pool = fan_out.pool
        before, missing = pool.config, tmp_path / "token"
        write_shards(path, {rank: [other.target] for rank in range(3)}, token_file=str(missing))
        until(lambda: "the shards stay as they were" in caplog.text)
        looks: list[Path] = []
        monkeypatch.setattr("recinfer.serving.shards.replicas._stamp", lambda path: looks.append(path) or _stamp(path))
        until(lambda: len(looks) > 10)
        assert pool.config is before and [each.target for each in pool.everyone()] == [server.target]
        assert caplog.text.count("the shards stay as they were") == 1
        replace_text(missing, TOKENS[0])
        until(lambda: [each.target for each in pool.everyone()] == [other.target])
        until(lambda: all(each.up for each in pool.everyone()))
        until(lambda: "was read again" in caplog.text)
        assert [record.levelname for record in caplog.records if "was read again" in record.getMessage()] == ["WARNING"]


def test_changed_settings_reach_existing_replicas(tmp_path: Path):
    """A server that accepts only the new token gets requests with it; until it is reachable, the old connection stays."""
    archive, path, token = make_archive(tmp_path, "row_wise"), tmp_path / "shards.json", tmp_path / "token"
    token.write_text(TOKENS[0])
    with shard(archive, (0, 1, 2), security=Security(token=TOKENS[0])) as server:
        ranks = {rank: [server.target] for rank in range(3)}
        with asking(write_shards(path, ranks, token_file=str(token), prepare_seconds=600)) as fan_out:
            there = load(archive, lookups=MakeLookups(fan_out))
            (first,) = fan_out.pool.everyone()
            write_shards(path, ranks, token_file=str(token), prepare_seconds=5)
            until(lambda: there.lookup(make_request(4)) and fan_out.pool.everyone() != [first])  # each is answered
            (second,) = fan_out.pool.everyone()
            assert second.up and second._credentials.prepare_seconds == 5
            there.lookup(make_request(4))
            (tmp_path / "other").write_text(TOKENS[1])
            write_shards(path, ranks, token_file=str(tmp_path / "other"), timeout_seconds=0.2)
            until(lambda: fan_out.pool.everyone() != [second])  # the file says so, though no server accepts it
            (third,) = fan_out.pool.everyone()
            assert third._metadata == (("authorization", f"Bearer {TOKENS[1]}"),) and not third.up


def test_an_address_that_is_replaced_stays_until_the_new_one_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    archive, path, port = make_archive(tmp_path, "row_wise"), tmp_path / "shards.json", free_port("127.0.0.2")
    monkeypatch.setattr("recinfer.serving.shards.replicas._SWITCH_S", 3600.0)
    with (
        shard(archive, (0, 1, 2)) as server,
        ExitStack() as later,
        asking(write_shards(path, {rank: [server.target] for rank in range(3)})) as fan_out,
    ):
        pool, there = fan_out.pool, load(archive, lookups=MakeLookups(fan_out))
        (first,) = pool.everyone()
        expected = there.lookup(make_request(4)).pooled.values()
        made: list[Replica] = []
        make = pool._new
        monkeypatch.setattr(pool, "_new", lambda *given: made.append(make(*given)) or made[-1])
        write_shards(path, {rank: [f"127.0.0.2:{port}"] for rank in range(3)}, timeout_seconds=3600.0)
        until(lambda: bool(made) and made[0].why != "not connected yet")
        assert pool.everyone() == [first] and first.up
        assert torch.equal(there.lookup(make_request(4)).pooled.values(), expected)
        later.enter_context(shard(archive, (0, 1, 2), "127.0.0.2", port=port))

        def is_replaced() -> bool:
            assert torch.equal(there.lookup(make_request(4)).pooled.values(), expected)
            return pool.everyone() == made

        until(is_replaced)
        assert made[0].up and fan_out.calls["failed"] == 0


def test_new_address_without_an_answer_is_used_after_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    archive, path, nobody = make_archive(tmp_path, "row_wise"), tmp_path / "shards.json", f"127.0.0.2:{free_port()}"
    with (
        shard(archive, (0, 1, 2)) as server,
        asking(write_shards(path, {rank: [server.target] for rank in range(3)})) as fan_out,
    ):
        write_shards(path, {rank: [nobody] for rank in range(3)}, timeout_seconds=0.2)
        until(lambda: [each.target for each in fan_out.pool.everyone()] == [nobody])
        assert caplog.text.count(f"shard {nobody} cannot be called with the present settings") == 1
