"""A ranker's shard servers as people see them: on the status page, in `recinfer admin list`, and the last ten minutes."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recinfer.cli import admin as admin_command
from recinfer.cli import main
from recinfer.inference.predictor import load
from recinfer.serving.client import InferenceClient
from recinfer.serving.client.admin import AdminClient, ShardReplica
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.store import ModelStore, StoreManager
from recinfer.serving.server.server import Server
from recinfer.serving.server.telemetry import metrics_http
from recinfer.serving.shards.lookups import MakeLookups
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, write_shards
from tests.serving.remote.test_direct import make_archive, make_request
from tests.serving.test_page import Page, browser
from tests.waiting import until


class Ranker:
    """A ranker with admin and metrics over two shard servers, the second of which holds ranks 1 and 2."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        archive = allowing_default_rows(make_archive(folder, "row_wise"), folder / "store/pooled/1")
        self.one, self.other = (stack.enter_context(shard(archive, ranks)) for ranks in ((0,), (1, 2)))
        ranks = {0: [self.one.target], 1: [self.other.target], 2: [self.other.target]}
        self.fan_out = stack.enter_context(asking(write_shards(folder / "shards.json", ranks)))
        predictor = load(archive, lookups=MakeLookups(self.fan_out))
        registry = ModelRegistry([ServedModel.of("pooled", predictor, "1")])
        admin = StoreManager(registry, ModelStore(folder / "store"))
        server = Server(registry, shards=self.fan_out, admin=admin, metrics_port=0)
        self.server = stack.enter_context(server)

    def lose(self) -> None:
        """Stop the second shard server."""
        self.other.stop(0.0)
        until(lambda: not any(replica.up for replica in self.fan_out.pool.listed(1)))


@pytest.fixture
def ranker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(metrics_http, "_SPACING_S", 0.05)
    with ExitStack() as stack:
        yield Ranker(stack, tmp_path)


def test_page_turns_red_when_a_rank_is_gone(ranker: Ranker, tmp_path: Path) -> None:
    with browser(f"http://127.0.0.1:{ranker.server.metrics_port}/", tmp_path / "profile") as address:
        page = Page(address)
        page.until("document.getElementById('state')?.textContent === 'live'")
        shown = page.evaluate("document.body.innerText")
        assert "Shard servers" in shown and ranker.one.target in shown
        assert not page.evaluate("document.body.classList.contains('gone')")
        ranker.lose()
        page.until("document.body.classList.contains('gone')")
        assert page.text("alarm") == "No shard server answers for ranks 1, 2"
        with InferenceClient(ranker.server.target, timeout=60) as client:
            client.lookup(make_request(3, 1, longest=1))
        page.until("document.body.innerText.includes('answers with default rows')")
        page.until("[...document.querySelectorAll('#shards td.n')].some(cell => cell.textContent === '1')")


def test_admin_lists_shard_servers(ranker: Ranker) -> None:
    with AdminClient(ranker.server.target) as admin:
        ranks = [(replica.rank, replica.address, replica.up) for replica in admin.list_shards()]
        assert ranks == [(0, ranker.one.target, True), (1, ranker.other.target, True), (2, ranker.other.target, True)]
        assert all(len(replica.versions) == 1 for replica in admin.list_shards())
    run = CliRunner().invoke(main.app, ["admin", "list", "--target", ranker.server.target, "--json"])
    assert run.exit_code == 0, run.output
    assert [replica["rank"] for replica in json.loads(run.stdout.splitlines()[-1])["shards"]] == [0, 1, 2]
    ranker.lose()
    run = CliRunner().invoke(main.app, ["admin", "list", "--target", ranker.server.target])
    assert "no shard server answers for rank 1, 2" in run.output and "down" in run.output


def test_a_version_and_the_same_with_a_delta_differ() -> None:
    """In a terminal too, as on the page: the keys of both begin alike."""
    key = "9bf5e7f34c925307a1b2c3d4e5f60718"
    replica = ShardReplica(0, "a:1", True, "", (key, f"{key}+2:{key}"), 0, 0)
    (table,) = admin_command._shard_tables([replica])
    assert list(table.columns[-1].cells) == ["9bf5e7f3 9bf5e7f3+2"]


def test_watch_and_json_do_not_go_together(ranker: Ranker) -> None:
    run = CliRunner().invoke(main.app, ["admin", "list", "--target", ranker.server.target, "--watch", "1", "--json"])
    assert run.exit_code == 2 and "--watch and --json" in run.output


def test_history_has_the_minutes_before_the_page_was_opened(ranker: Ranker) -> None:
    with InferenceClient(ranker.server.target, timeout=60) as client:
        for _ in range(3):
            client.lookup(make_request(3, 1, longest=1))

    def points() -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{ranker.server.metrics_port}/history.json"
        with urllib.request.urlopen(url, timeout=60) as answer:
            return list(json.loads(answer.read()))

    until(lambda: points() and sum(item["count"] for item in points()[-1]["requests"]) >= 3)
    uptimes = [point["uptime"] for point in points()]
    assert uptimes == sorted(uptimes) and len(points()[0]) == 3
    until(lambda: len(points()) == metrics_http._POINTS)  # older points go
