"""REST of a ranker without a usable replica of a rank: 503 and a sentence, or an answer that lists the missing rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from recinfer.inference.predictor import load
from recinfer.serving.server.server import Server
from recinfer.serving.shards.lookups import MakeLookups
from tests.serving.conftest import make_request
from tests.serving.remote.fleet import allowing_default_rows, asking, shard, write_shards
from tests.serving.v1 import ask, columns_of, get, post, rows_of
from tests.waiting import until

pytest.importorskip("aiohttp", reason="aiohttp is not installed (the serve extra)")


@pytest.mark.parametrize("allowed", [False, True])
def test_a_rank_that_is_missing(archive: Path, tmp_path: Path, allowed: bool):
    archive = allowing_default_rows(archive, tmp_path / "allowing.rqa")
    with ExitStack() as stack:
        targets = [stack.enter_context(shard(archive, [0], "127.0.0.1")).target]
        lost = stack.enter_context(shard(archive, [1], "127.0.0.2"))
        shards = write_shards(tmp_path / "shards.json", {0: targets, 1: [lost.target]})
        fan_out = stack.enter_context(asking(shards, missing=None if allowed else "error"))
        predictor = load(archive, lookups=MakeLookups(fan_out))
        server = stack.enter_context(Server({"tiny": predictor}, shards=fan_out, http_port=0))
        dense, features = make_request(0, 3)
        bodies: dict[str, Any] = {
            "rows": {"instances": rows_of(features, dense)},
            "columns": {"inputs": columns_of(features, dense)},
        }
        for body in bodies.values():
            assert ask(server, "tiny:predict", body)[0] == 200
        lost.stop()
        until(lambda: not fan_out.pool.replicas(1)[0].up)

        for call in ("predict", "lookup"):
            for form, body in bodies.items():
                code, _, found = ask(server, f"tiny:{call}", body)
                if not allowed:
                    assert code == 503 and found.keys() == {"error"}, found
                    assert "rank 1 has no living replica" in found["error"] and lost.target in found["error"]
                    continue
                assert (code, found["missing_ranks"]) == (200, [1])
                rows = found["predictions" if form == "rows" else "outputs"]
                assert len(rows if call == "predict" or form == "rows" else rows["user"]) == 3
        assert get(server, "/v1/models/tiny")[2]["ready"] is allowed

        ids = [{"name": "user", "datatype": "INT64", "shape": [1], "data": [3]}]
        code, _, found = post(server, "/v2/models/tiny/infer", {"inputs": ids, "parameters": {"method": "lookup"}})
        assert (code, "rank 1" in str(found)) == ((200, False) if allowed else (503, True)), found
