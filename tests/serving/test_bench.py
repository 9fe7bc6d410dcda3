"""Load on a real server, through the library and through ``recinfer bench serve``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recinfer.cli.main import app
from recinfer.errors import InputError, UnavailableError
from recinfer.inference.predictor import load
from recinfer.serving.bench import measure_load
from recinfer.serving.client.client import InferenceClient
from recinfer.serving.random_requests import RandomRequests
from recinfer.serving.server.security import Security
from recinfer.serving.server.server import Server
from recinfer.serving.wire.limits import Limits
from recinfer.sizing.arrivals import Trace
from recinfer.sizing.load import Driver, encode_requests
from tests.serving.conftest import NUM_DENSE, ROWS
from tests.serving.named_models import make_archive


@pytest.mark.parametrize("call", ["lookup", "predict"])
def test_load_is_measured(server: Server, call: str):
    before = sum(server.stats.requests().values())
    one, four = measure_load(server.target, call=call, concurrency=[1, 4], duration=0.2, batch=3, ids=2)
    assert (one.concurrency, four.concurrency, one.errors) == (1, 4, {})
    assert 0 < one.percentile(50) <= one.percentile(99) < 60
    assert one.rate == pytest.approx(one.latencies.size / one.seconds)
    assert sum(server.stats.requests().values()) - before >= one.latencies.size + four.latencies.size


def test_every_caller_asks_at_least_once(server: Server):
    """However short the run is, or however long the machine pauses."""
    (found,) = measure_load(server.target, concurrency=[3], duration=1e-9)
    assert found.latencies.size >= 3 and found.errors == {}


def test_requests_fit_the_model(client: InferenceClient):
    made = RandomRequests(client.get_model()).predict(5, {name: np.full(5, 3, np.int32) for name in ROWS})
    assert made.dense is not None and made.dense.shape == (5, NUM_DENSE)
    assert made.features is not None and made.features.values.size == 5 * 3 * len(ROWS)
    assert sorted(made.features.keys) == sorted(ROWS)
    client.predict(**made.arguments())


def test_requests_keep_the_facts_of_named_inputs(tmp_path: Path):
    """Tensors of all types, two ids per sample, and as many prices as items; ids that forward computes."""
    archives = {name: load(make_archive(tmp_path, name)) for name in ("priced", "hashed")}
    with Server(archives) as server:
        for model in archives:
            for batch in (1, 5):
                (found,) = measure_load(
                    server.target, call="predict", model=model, concurrency=[1], duration=0.01, batch=batch, ids=3
                )
                assert found.latencies.size and found.errors == {}, found.reasons
            with InferenceClient(server.target, model=model, timeout=60) as client:
                about = client.get_model()
            trace = Trace(np.arange(9) * 1e-3, np.arange(1, 10), np.arange(9), {})
            with Driver(
                server.target, "predict", encode_requests(about, "predict", trace, name=model), timeout=60
            ) as driver:
                assert driver.run(trace.times).errors == {}
        (found,) = measure_load(server.target, model="priced", concurrency=[1], duration=0.01)
        assert found.errors == {}
        with pytest.raises(InputError, match="hashed computes the ids of all its lookups; ask for predictions"):
            measure_load(server.target, model="hashed", duration=0.01)


def test_a_weighted_model_gets_weights(others: dict[str, Path]):
    with Server({name: load(path) for name, path in others.items()}) as server:
        for model in others:
            (found,) = measure_load(server.target, model=model, concurrency=[1], duration=0.05, batch=2, ids=3)
            assert found.latencies.size and found.errors == {}, model


def test_the_verb(server: Server, tmp_path: Path):
    picture = tmp_path / "curve.png"
    args = ["bench", "serve", "--target", server.target, "--concurrency", "1,2", "--duration", "0.1", "--json"]
    try:
        import matplotlib  # noqa: F401

        args += ["--plot", str(picture)]
    except ImportError:
        picture = Path(__file__)
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [level["concurrency"] for level in found["levels"]] == [1, 2]
    assert all(level["requests"] > 0 and level["p50_ms"] > 0 for level in found["levels"])
    assert picture.stat().st_size > 1000


def test_the_verb_has_a_token(archive: Path, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("sixteen letters and more\n")
    with Server({"tiny": load(archive)}, security=Security(token=token.read_text().strip())) as server:
        args = ["bench", "serve", "--target", server.target, "--duration", "0.05", "--timeout", "60", "--json"]
        for given, env, code in ((["--token-file", str(token)], "", 0), ([], token.read_text(), 0), ([], "", 2)):
            result = CliRunner().invoke(app, [*args, *given], env={"RECINFER_TOKEN": env})
            assert result.exit_code == code, result.output
            assert code == 0 or "token" in result.output


def test_a_server_that_answers_nothing_is_a_failure(archive: Path):
    with Server({"tiny": load(archive)}, limits=Limits(max_ids=1)) as server:
        args = ["bench", "serve", "--target", server.target, "--duration", "0.05", "--timeout", "60", "--ids", "5"]
        for more in ([], ["--json"]):
            result = CliRunner().invoke(app, [*args, *more])
            assert result.exit_code == 1, result.output
            assert "InputError" in result.output and "nan" not in result.output.lower()
            assert "the first InputError: features.lengths: got 20 ids in all, expected at most 1" in " ".join(
                result.output.split()
            )
        (level,) = json.loads(result.stdout.splitlines()[-1])["levels"]
        assert "expected at most 1" in level["reasons"]["InputError"]


def test_a_picture_that_cannot_be_written_is_found_before_the_measurement(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (the plot extra)")
    for picture, words in ((tmp_path / "curve.txt", "cannot write"), (tmp_path / "nowhere" / "curve.png", "no folder")):
        args = ["bench", "serve", "--target", "127.0.0.1:1", "--plot", str(picture), "--duration", "1000"]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 2 and words in result.output, result.output


def test_wrong_arguments():
    with pytest.raises(InputError):
        measure_load("127.0.0.1:1", concurrency=[0])
    with pytest.raises(UnavailableError):
        measure_load("127.0.0.1:1", duration=0.1)
    assert CliRunner().invoke(app, ["bench", "serve", "--target", "x:1", "--concurrency", "many"]).exit_code == 2
