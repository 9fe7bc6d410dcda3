"""Replicas that die, stop, are slow and come back: real processes on 127.0.0.x, and a ranker that is not restarted."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.errors import UnavailableError
from recinfer.inference.predictor import Predictor, load
from recinfer.serving.client.client import AsyncInferenceClient, InferenceClient
from recinfer.serving.engine.registry import ServedModel
from recinfer.serving.server.server import Server
from recinfer.serving.shards.fan_out import FanOut
from recinfer.serving.shards.lookups import MakeLookups
from tests.caller_threads import CallerThreads
from tests.ports import free_port
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import Process, allowing_default_rows, asking, write_shards
from tests.waiting import until


@dataclass
class Fleet:
    """Two replicas of each of two ranks, and a ranker in this process. ``shards[rank][number]``."""

    folder: Path
    archive: Path
    addresses: dict[int, list[str]]
    shards: dict[int, list[Process]]
    fan_out: FanOut | None = None
    here: Predictor | None = None

    def begin(self, rank: int, number: int) -> Process:
        """Start a replica at its address in shards.json."""
        host, _, port = self.addresses[rank][number].rpartition(":")
        log = self.folder / f"shard-{rank}-{number}.log"
        return Process(self.archive, "--ranks", str(rank), "--host", host, "--port", port, log=log)

    def up(self, rank: int) -> int:
        """The number of replicas of a rank that the ranker considers up."""
        return sum(replica.up for replica in self.fan_out.pool.replicas(rank))


@pytest.fixture(scope="module")
def fleet(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    archive = allowing_default_rows(archive, folder / "allowing.rqa")
    addresses = {
        rank: [f"127.0.0.{1 + 2 * rank + n}:{free_port(f'127.0.0.{1 + 2 * rank + n}')}" for n in range(2)]
        for rank in range(2)
    }
    fleet = Fleet(folder, archive, addresses, {})
    with ExitStack() as stack:
        for rank in range(2):
            fleet.shards[rank] = [fleet.begin(rank, number) for number in range(2)]
        stack.callback(lambda: [process.close() for mine in fleet.shards.values() for process in mine])
        shards = write_shards(folder / "shards.json", addresses)
        fleet.fan_out = stack.enter_context(asking(shards, missing="error"))
        fleet.here = load(archive, lookups=MakeLookups(fleet.fan_out))
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[InferenceClient]:
    """A client, which never tries again, of the ranker."""
    with (
        Server([ServedModel.of("tiny", fleet.here)], shards=fleet.fan_out) as server,
        InferenceClient(server.target, retries=0, timeout=60) as client,
    ):
        yield client


class Load(CallerThreads):
    """Callers that look up all the time, and compare."""

    def __init__(self, client: InferenceClient, expected: Predictor, callers: int = 3) -> None:
        super().__init__(callers)
        self.client, self.expected = client, expected
        self.failed: list[str] = []
        self.num_calls = [0] * callers

    def _call(self, number: int) -> None:
        request = make_request(number, 3)[1]
        wanted = self.expected.lookup(request).pooled.values()
        while not self._stop.is_set():
            try:
                got = self.client.lookup(request)
                if not torch.equal(got.pooled.values(), wanted):
                    self.failed.append("another answer")
            except Exception as error:
                self.failed.append(str(error))
            self.num_calls[number] += 1

    def done(self, count: int) -> None:
        """Wait for so many more answers."""
        goal = sum(self.num_calls) + count
        until(lambda: sum(self.num_calls) >= goal or bool(self.failed))


def test_a_killed_replica_fails_nothing_and_comes_back(fleet: Fleet, client: InferenceClient, predictor: Predictor):
    with Load(client, predictor) as load:
        load.done(100)
        fleet.shards[0][0].kill()
        load.done(200)
        until(lambda: fleet.up(0) == 1)
        fleet.shards[0][0] = fleet.begin(0, 0)
        until(lambda: fleet.up(0) == 2)
        load.done(100)
    assert load.failed == []


def test_no_replica_is_an_error_that_says_which_and_it_recovers(fleet: Fleet, client: InferenceClient, tmp_path: Path):
    request = make_request(5, 4)[1]
    for process in fleet.shards[1]:
        process.kill()
    until(lambda: fleet.up(1) == 0)
    with pytest.raises(UnavailableError, match="rank 1 has no living replica") as caught:
        client.lookup(request)
    assert all(re.search(re.escape(address), str(caught.value)) for address in fleet.addresses[1])
    fleet.fan_out._missing = None  # so as the manifest says
    try:
        got = client.lookup(request)
        assert got.missing_ranks == (1,) and fleet.fan_out.default_rows[1] > 0
        outputs = client.predict(*make_request(5, 4))
        assert outputs.missing == (1,) and torch.isfinite(outputs["output"]).all()
        features = [f"--feature={key}=0" for key in request.keys()]  # noqa: SIM118
        asked = ["lookup", "--target", client.target, "--timeout", "60", *features]
        assert "rank 1 did not respond" in CliRunner().invoke(app, asked).stdout
        assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["missing_ranks"] == [1]
        row = {**dict.fromkeys(request.keys(), 0), "dense": [0.0] * client.get_model().num_dense}
        assert [one.outputs.missing for one in client.predict_many([row, row]) if one.outputs] == [(1,), (1,)]
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        asked = ["predict", "--target", client.target, "--timeout", "60", "--rows", str(tmp_path / "rows.jsonl")]
        assert "rank 1 did not respond" in CliRunner().invoke(app, asked).stdout
    finally:
        fleet.fan_out._missing = "error"
    fleet.shards[1] = [fleet.begin(1, number) for number in range(2)]
    until(lambda: fleet.up(1) > 0)
    assert client.lookup(request).missing_ranks == ()  # the first request already succeeds
    until(lambda: fleet.up(1) == 2)


def test_a_stopped_replica_is_hedged(fleet: Fleet, client: InferenceClient, predictor: Predictor):
    with Load(client, predictor) as load:
        load.done(200)  # so that it knows how long answers take
        won = fleet.fan_out.calls["hedge_won"]
        fleet.shards[0][1].kill(signal.SIGSTOP)
        load.done(300)
        fleet.shards[0][1].kill(signal.SIGCONT)
        load.done(100)
    # Without the other replica's answers each call to the one that is stopped would take until its deadline, and fail, or
    # until its connection is given up: a minute both, which is longer than `done` waits.
    assert load.failed == []
    assert fleet.fan_out.calls["hedge_won"] > won
    until(lambda: fleet.up(0) == 2)


def test_a_stopping_replica_drains(fleet: Fleet, client: InferenceClient, predictor: Predictor):
    with Load(client, predictor) as load:
        load.done(50)
        fleet.shards[1][1].kill(signal.SIGTERM)
        load.done(50)
    assert load.failed == []
    assert fleet.shards[1][1].process.returncode == 0
    fleet.shards[1][1] = fleet.begin(1, 1)
    until(lambda: fleet.up(1) == 2)


def test_shard_errors_are_not_reported_as_the_rankers_own(fleet: Fleet, client: InferenceClient):
    """The ranker itself answered: the error must not suggest starting one, nor say that the client's timeout passed."""
    path, pool = fleet.folder / "shards.json", fleet.fan_out.pool
    lost = "rank (0, )?1"  # on a busy machine rank 0 may be late too
    write_shards(path, fleet.addresses, timeout_seconds=1.0)
    until(lambda: pool.config.settings.timeout_seconds == 1.0)
    for process in fleet.shards[1]:
        process.kill(signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError, match=rf"{client.target}: .*{lost}") as caught:
            client.lookup(make_request(1, 1)[1])
        assert "Start one" not in str(caught.value) and "did not answer within" not in str(caught.value)

        async def ask() -> None:
            async with AsyncInferenceClient(client.target, retries=0, timeout=60) as other:
                await other.lookup(make_request(1, 1)[1])

        with pytest.raises(UnavailableError, match=rf"^{client.target}: .*{lost}"):
            asyncio.run(ask())
    finally:
        for process in fleet.shards[1]:
            process.kill(signal.SIGCONT)
        write_shards(path, fleet.addresses)
    until(lambda: pool.config.settings.timeout_seconds == 60.0 and fleet.up(1) == 2)


def test_replicas_are_added_without_a_restart(fleet: Fleet, client: InferenceClient, caplog: pytest.LogCaptureFixture):
    path = fleet.folder / "shards.json"
    fewer = {0: fleet.addresses[0][:1], 1: fleet.addresses[1]}
    write_shards(path, fewer)
    until(lambda: len(fleet.fan_out.pool.replicas(0)) == 1)
    client.lookup(make_request(1, 1)[1])
    path.write_text("no JSON")  # the last valid list stays
    fleet.fan_out.pool.reload()
    until(lambda: "the shards stay as they were" in caplog.text)
    client.lookup(make_request(1, 1)[1])
    write_shards(path, fleet.addresses)
    until(lambda: fleet.up(0) == 2)


def test_each_shard_maps_only_its_ranks(fleet: Fleet):
    for rank, processes in fleet.shards.items():
        maps = Path(f"/proc/{processes[0].process.pid}/maps").read_text()
        mapped = set(re.findall(r"rank-0*(\d+)\.safetensors", maps))
        assert mapped <= {str(rank)}
    assert any("safetensors" in Path(f"/proc/{p[0].process.pid}/maps").read_text() for p in fleet.shards.values())


def test_replicas_share_the_requests(fleet: Fleet, client: InferenceClient, predictor: Predictor):
    with Load(client, predictor, callers=8) as load:
        load.done(400)
    for rank in range(2):
        counts = [replica.answers for replica in fleet.fan_out.pool.replicas(rank)]
        assert min(counts) > 0
    assert load.failed == []
