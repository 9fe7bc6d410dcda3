"""Remote shards give the answers of one process: every sharding type, pooling, precision and shape of request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from recinfer.errors import InputError, UnavailableError
from recinfer.inference.predictor import LookupResult, Predictor, load
from recinfer.modules.embedding_configs import DataType
from recinfer.serving.server.security import Security
from recinfer.serving.shards.lookups import MakeLookups
from recinfer.serving.wire.limits import Limits
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import EVERYTHING_ROWS, Everything
from tests.archive.models import make_archive as make_everything
from tests.archive.models import make_request as make_other
from tests.ports import free_port
from tests.serving.remote.fleet import asking, remote, shard, write_shards
from tests.serving.remote.models import KINDS, make_archive, make_request
from tests.waiting import until

EXACT = ("table_wise", "column_wise", "table_column_wise", "data_parallel")
GROUPS = ((0,), (1, 2))


def same(got: LookupResult, expected: LookupResult, *, exact: bool) -> None:
    assert got.keys() == expected.keys()
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    if expected.pooled is not None:
        torch.testing.assert_close(got.pooled.values(), expected.pooled.values(), **tolerance)
    for name, sequence in expected.sequences.items():  # one row is on one rank: exact, however it is cut
        assert torch.equal(got.sequences[name].values(), sequence.values()), name
        assert torch.equal(got.sequences[name].lengths().long(), sequence.lengths().long()), name


def compare(here: Predictor, there: Predictor, is_weighted: bool, *, exact: bool) -> None:
    requests = [
        make_request(1, 1, is_weighted=is_weighted),
        make_request(7, 2, is_weighted=is_weighted, dtype=torch.int32),
        make_request(64, 3, is_weighted=is_weighted, longest=1),
        make_request(33, 4, is_weighted=is_weighted, longest=9),
        make_request(3, 5, is_weighted=is_weighted, keys=("d", "b")),
        make_request(2, 6, is_weighted=is_weighted, longest=300),
    ]
    for request in requests:
        same(there.lookup(request), here.lookup(request), exact=exact)
    for got, alone in zip(there.lookup_many(requests), requests, strict=True):
        same(got, here.lookup(alone), exact=exact)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_type(tmp_path: Path, kind: str, is_weighted: bool):
    archive = make_archive(tmp_path, kind, is_weighted=is_weighted)
    with remote(archive, GROUPS, tmp_path) as there:
        assert there.mapped_bytes == 0
        compare(load(archive), there, is_weighted, exact=kind in EXACT)


@pytest.mark.parametrize("precision", [DataType.INT4, DataType.INT2, DataType.FP16, DataType.BF16, DataType.FP32])
def test_every_precision(tmp_path: Path, precision: DataType):
    archive = make_archive(tmp_path, "grid_shard", precision=precision)
    with remote(archive, GROUPS, tmp_path) as there:
        compare(load(archive), there, False, exact=False)


def test_no_ids_at_all(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    nothing = KeyedJaggedTensor(
        ["a", "f"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int32)
    )
    with remote(archive, GROUPS, tmp_path) as there:
        before = there.lookups._fan_out.calls["sent"]
        same(there.lookup(nothing), load(archive).lookup(nothing), exact=True)
        assert there.lookups._fan_out.calls["sent"] == before  # no rank gets a request


def test_a_replica_of_several_ranks_gets_one_request(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    with remote(archive, [(0, 1, 2)], tmp_path) as there:
        calls = there.lookups._fan_out.calls
        before = calls["sent"]
        there.lookup(make_request(16))
        assert calls["sent"] == before + 1


def test_shards_ask_for_a_token(tmp_path: Path):
    archive, token = make_archive(tmp_path, "table_wise"), "a-token-of-the-shards"
    (tmp_path / "token").write_text(token)
    with shard(archive, (0, 1, 2), security=Security(token=token)) as server:
        path = write_shards(tmp_path / "s.json", {key: [server.target] for key in range(3)}, timeout_seconds=0.1)
        with asking(path, ready=False) as stranger:
            until(lambda: "UNAUTHENTICATED" in stranger.pool.addresses(0))
            with pytest.raises(UnavailableError, match="UNAUTHENTICATED"):
                load(archive, lookups=MakeLookups(stranger))
        write_shards(path, {key: [server.target] for key in range(3)}, token_file=str(tmp_path / "token"))
        with asking(path) as known:
            request = make_request(4)
            same(load(archive, lookups=MakeLookups(known)).lookup(request), load(archive).lookup(request), exact=True)


def test_why_there_is_no_connection_is_said(tmp_path: Path):
    """No server, an unknown name, TLS at one end only: the error names the cause."""
    with asking(write_shards(tmp_path / "s.json", {0: [f"127.0.0.1:{free_port()}"]}), ready=False) as fan_out:
        until(lambda: "refused" in fan_out.pool.addresses(0))


def test_a_name_is_all_its_addresses(tmp_path: Path):
    archive = make_archive(tmp_path, "table_wise")
    with shard(archive, (0, 1, 2)) as server:
        name = f"dns:///localhost:{server.port}"
        path = write_shards(tmp_path / "s.json", {key: [name] for key in range(3)})
        with asking(path, ready=False) as fan_out:  # at some of its addresses no server listens
            until(lambda: any(replica.up for replica in fan_out.pool.replicas(0)))
            request = make_request(4)
            same(
                load(archive, lookups=MakeLookups(fan_out)).lookup(request),
                load(archive).lookup(request),
                exact=True,
            )
            assert server.target in {replica.target for replica in fan_out.pool.replicas(0)}


def test_server_without_a_rank_gets_no_requests_for_it(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """shards.json lists a server under a rank that it does not hold: a mistake in the file."""
    archive, path, request = make_archive(tmp_path, "row_wise"), tmp_path / "s.json", make_request(6)
    expected = load(archive).lookup(request)
    with shard(archive, (0, 1, 2)) as whole, shard(archive, (1, 2), "127.0.0.2") as part:
        with asking(write_shards(path, {rank: [whole.target, part.target] for rank in range(3)})) as fan_out:
            there = load(archive, lookups=MakeLookups(fan_out))
            for _ in range(20):
                same(there.lookup(request), expected, exact=False)
            replicas = {(r["rank"], r["address"]): r for r in fan_out.status()["replicas"]}
            assert [replicas[rank, part.target]["up"] for rank in range(3)] == [False, True, True]
            assert f"shard {part.target} is listed for rank 0, but its server has ranks 1, 2, not 0" in caplog.text
            assert replicas[0, part.target]["why"] == "its server has ranks 1, 2, not 0"
        ranks = {0: [part.target], 1: [whole.target], 2: [whole.target]}
        lists = write_shards(path, ranks, timeout_seconds=0.1)
        says = rf"rank 0: {part.target} \(its server has ranks 1, 2, not 0\)"
        with asking(lists) as fan_out, pytest.raises(UnavailableError, match=says):
            load(archive, lookups=MakeLookups(fan_out))


def test_equal_replicas_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.0)  # no figure is young enough to prefer one
    for wait in ("_FIRST_HEDGE_S", "_LEAST_HEDGE_S"):  # and the other one is not asked because a machine stands still
        monkeypatch.setattr(f"recinfer.serving.shards.fan_out_request.{wait}", 600.0)
    archive = make_archive(tmp_path, "table_wise")
    with shard(archive, (0, 1, 2)) as one, shard(archive, (0, 1, 2), "127.0.0.2") as two:
        targets = [one.target, two.target]
        with asking(write_shards(tmp_path / "s.json", {key: targets for key in range(3)})) as fan_out:
            predictor = load(archive, lookups=MakeLookups(fan_out))
            for _ in range(60):
                predictor.lookup(make_request(2))
            answers = {replica.target: replica.answers for replica in fan_out.pool.replicas(0)}
    assert set(answers) == set(targets)
    assert min(answers.values()) >= 25, answers  # the first that is listed had them all


def test_a_replica_that_was_slow_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("recinfer.serving.shards.replica._STALE_S", 0.05)
    archive = make_archive(tmp_path, "table_wise")
    with shard(archive, (0, 1, 2)) as one, shard(archive, (0, 1, 2), "127.0.0.2") as two:
        targets = [one.target, two.target]
        with asking(write_shards(tmp_path / "s.json", {key: targets for key in range(3)})) as fan_out:
            predictor = load(archive, lookups=MakeLookups(fan_out))
            slow = fan_out.pool.replicas(0)[0]
            slow.answered(100.0)
            before = slow.answers

            def is_tried() -> bool:
                predictor.lookup(make_request(2))
                return slow.answers > before

            until(is_tried)


def test_a_replica_that_is_taken_from_the_list_still_answers_what_it_was_asked(tmp_path: Path):
    archive, path = make_archive(tmp_path, "table_wise"), tmp_path / "s.json"
    asked, go_on = threading.Event(), threading.Event()
    with shard(archive, (0, 1, 2)) as one, shard(archive, (0, 1, 2), "127.0.0.2") as two:
        find = one.tables.find

        def slow_find(data: bytes, limits: Limits) -> bytes:
            asked.set()
            assert go_on.wait(60)
            return find(data, limits)

        patient = {"hedge": False, "timeout_seconds": 60.0}
        with asking(write_shards(path, {key: [one.target] for key in range(3)}, **patient)) as fan_out:
            predictor = load(archive, lookups=MakeLookups(fan_out))
            request = make_request(5000)  # so long that a worker thread answers it
            expected = predictor.lookup(request)
            one.tables.find = slow_find  # type: ignore[method-assign]
            for rank in range(3):
                fan_out.times(
                    rank, 5000
                ).p95 = 60.0  # so the other replica gets no hedged request because this one is slow
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(predictor.lookup, request)
                assert asked.wait(60)
                write_shards(path, {key: [two.target] for key in range(3)}, **patient)
                until(lambda: [replica.target for replica in fan_out.pool.replicas(0) if replica.up] == [two.target])
                go_on.set()
                same(answer.result(60), expected, exact=True)
            assert fan_out.calls["hedge_won"] == 0, "the one that was asked had to answer"
            same(predictor.lookup(request), expected, exact=True)


def test_bad_ids_are_named_as_ever(tmp_path: Path):
    archive = make_archive(tmp_path, "row_wise")
    here = load(archive)
    bad = make_request(3, keys=("a", "b"), longest=1)
    bad.values()[4] = 301
    with remote(archive, GROUPS, tmp_path) as there:
        for predictor in (here, there):
            with pytest.raises(InputError, match="feature 'b', sample 1: id 301 is out of range"):
                predictor.lookup(bad)
        good = make_request(2)
        got = there.lookup_many([bad, good])
        assert isinstance(got[0], InputError)
        same(got[1], here.lookup(good), exact=False)


def test_dense_part_and_position_weights(tmp_path: Path):
    torch.manual_seed(3)
    make_everything(tmp_path, model=Everything(), ranks=2, precision=DataType.INT8, kinds=("row_wise", "column_wise"))
    archive = tmp_path / "small.rqa"
    here = load(archive)
    with remote(archive, [(0,), (1,)], tmp_path) as there:
        for batch in (1, 5):
            features, dense = make_other(EVERYTHING_ROWS, batch, longest=4), torch.randn(batch, 2)
            for name, expected in here.predict(dense, features).items():
                torch.testing.assert_close(there.predict(dense, features)[name], expected, rtol=1e-5, atol=1e-6)


def test_shard_hosts_need_only_their_files(tmp_path: Path):
    archive = make_archive(tmp_path, "grid_shard")
    here = load(archive)
    request = make_request(9)
    expected = here.lookup(request)
    for rank in (1, 2):
        (archive / "shards" / f"rank-0000{rank}.safetensors").rename(tmp_path / f"rank-{rank}")
    with shard(archive, (0,)) as first:
        for rank in (1, 2):
            (tmp_path / f"rank-{rank}").rename(archive / "shards" / f"rank-0000{rank}.safetensors")
        (archive / "shards" / "rank-00000.safetensors").unlink()
        with (
            shard(archive, (1, 2)) as second,
            asking(
                write_shards(tmp_path / "s.json", {0: [first.target], 1: [second.target], 2: [second.target]})
            ) as ask,
        ):
            same(load(archive, lookups=MakeLookups(ask)).lookup(request), expected, exact=False)
