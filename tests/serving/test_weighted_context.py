"""A user whose ids and other values have weights, once for all candidates or in each row, in each form of JSON as in Python."""

from __future__ import annotations

import csv
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from recinfer.serving.client.bulk import batch_of
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import json_codec
from tests.e2e.commands import run_json
from tests.serving.paths import decoded

CANDIDATES = [[3], [7], [5]]
CLICKS, CLICK_WEIGHTS = [2, 9], [0.5, 3.0]
PRICES, PRICE_WEIGHTS = [0.25, 4.0, 1.5], [2.0, 0.5, 1.0]


class Ranker(nn.Module):
    """Weighted ids of a user, prices with weights, and a candidate."""

    def __init__(self) -> None:
        super().__init__()

        def table(name: str) -> EmbeddingBagConfig:
            return EmbeddingBagConfig(name=name, num_embeddings=12, embedding_dim=4, feature_names=[name])

        self.clicks = EmbeddingBagCollection(tables=[table("clicks")], is_weighted=True)
        self.items = EmbeddingBagCollection(tables=[table("item")])

    def forward(self, clicks: KeyedJaggedTensor, item: KeyedJaggedTensor, prices: JaggedTensor) -> Tensor:
        paid = JaggedTensor(prices.values() * prices.weights(), lengths=prices.lengths()).to_padded_dense(4).sum(1)
        return (self.clicks(clicks).values() * self.items(item).values()).sum(1) + paid


def arguments(samples: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor, JaggedTensor]:
    """The user in every sample, with the candidates."""
    clicks = torch.tensor(CLICKS * samples), torch.tensor(CLICK_WEIGHTS * samples), torch.full((samples,), 2)
    prices = torch.tensor(PRICES * samples), torch.tensor(PRICE_WEIGHTS * samples), torch.full((samples,), 3)
    items = torch.tensor(CANDIDATES).flatten().repeat(2)[:samples]
    return (
        KeyedJaggedTensor(["clicks"], clicks[0], clicks[1], lengths=clicks[2]),
        KeyedJaggedTensor(["item"], items, lengths=torch.ones(samples, dtype=torch.int64)),
        JaggedTensor(prices[0], prices[1], prices[2]),
    )


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """An archive of the model, and its outputs for the candidates."""
    torch.manual_seed(0)
    model = Ranker()
    path = tmp_path_factory.mktemp("weighted") / "m.rqa"
    model.eval()
    recinfer.export(model, arguments(4), path, precision="fp32", user=["clicks", "prices"], progress=False)
    with torch.no_grad():
        return path, model(*arguments(3)).tolist()


def test_rows_carry_weights_of_other_inputs(ranker: tuple[Path, list[float]], tmp_path: Path) -> None:
    path, outputs = ranker
    expected = pytest.approx(outputs, abs=1e-6)
    user = {"clicks": (CLICKS, CLICK_WEIGHTS), "prices": (PRICES, PRICE_WEIGHTS)}
    rows = [{"item": item, **user} for item in CANDIDATES]
    user_json = {
        "clicks": {"ids": CLICKS, "weights": CLICK_WEIGHTS},
        "prices": {"values": PRICES, "weights": PRICE_WEIGHTS},
    }
    files = {name: tmp_path / f"rows.{name}" for name in ("jsonl", "csv", "parquet")}
    files["jsonl"].write_text("\n".join(json.dumps({"item": item, **user_json}) for item in CANDIDATES))
    cells = {name: " ".join(f"{value}:{weight}" for value, weight in zip(*pair)) for name, pair in user.items()}
    lines = [f"{item[0]},{cells['clicks']},{cells['prices']}" for item in CANDIDATES]
    files["csv"].write_text("\n".join(["item,clicks,prices", *lines]))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        del files["parquet"]
    else:
        columns = {
            f"{name}{suffix}": [part] * 3 for name, pair in user.items() for suffix, part in zip(("", ".weights"), pair)
        }
        pyarrow.parquet.write_table(pyarrow.table({"item": CANDIDATES, **columns}), files["parquet"])
    alone, context = tmp_path / "items.jsonl", tmp_path / "user.json"
    alone.write_text("\n".join(json.dumps({"item": item}) for item in CANDIDATES))
    context.write_text(json.dumps(user_json))

    with recinfer.serve(path) as server, server.client(timeout=60) as client:

        def scored(rows: list[dict[str, Any]]) -> list[Any]:
            found = list(client.predict_many(rows, inputs=["prices"]))
            return [row.error if row.outputs is None else row.outputs["output"].item() for row in found]

        assert scored(rows) == expected
        arrays = {name: tuple(map(np.array, pair)) for name, pair in user.items()}
        assert scored([{"item": item, **arrays} for item in CANDIDATES]) == expected
        for plain in ([1.0, 2.0], (1.0, 2.0)):  # a tuple of two numbers is no pair
            (_, _, named) = batch_of([{"prices": plain}], inputs=["prices"])
            assert named["prices"].values.tolist() == [[1.0, 2.0]]
        ones = [1.0] * len(PRICES)
        some = [rows[0] | {"prices": (PRICES, ones)}, rows[1] | {"prices": PRICES}, rows[2]]
        assert scored(some) == scored([*some[:1], rows[1] | {"prices": (PRICES, ones)}, rows[2]])
        (wrong, *others) = scored([rows[0] | {"prices": (PRICES, [1.0])}, *rows[1:]])
        assert str(wrong) == "input 'prices': got 1 weights for 3 values, expected one for each"
        assert others == pytest.approx(outputs[1:], abs=1e-6)
        out = tmp_path / "out.csv"
        for more in (*([file] for file in files.values()), [alone, "--context", context]):
            run_json("predict", "--target", server.target, "--rows", *more, "--out", out)
            with out.open() as file:
                assert [float(row["output"]) for row in csv.DictReader(file)] == expected


def test_a_weighted_context_over_json(ranker: tuple[Path, list[float]]) -> None:
    path, outputs = ranker
    expected = pytest.approx(outputs, abs=1e-6)
    weights = {"clicks": [CLICK_WEIGHTS], "prices": [PRICE_WEIGHTS]}
    once = {"features": {"item": CANDIDATES}, "context": {"clicks": [CLICKS], "prices": [PRICES]}, "weights": weights}
    each = {
        "features": {"item": CANDIDATES, "clicks": [CLICKS] * 3},
        "inputs": {"prices": [PRICES] * 3},
        "weights": {name: given * 3 for name, given in weights.items()},
    }
    service = InferenceService(ModelRegistry({"m": recinfer.load(path).predictor}))
    for body in (once, each):
        answer = json_codec.predict_response(decoded(service, "Predict", json_codec.predict_request(body)))
        assert answer["outputs"]["output"] == expected

    user = {
        "clicks": {"ids": CLICKS, "weights": CLICK_WEIGHTS},
        "prices": {"values": PRICES, "weights": PRICE_WEIGHTS},
    }
    columns = {
        "item": CANDIDATES,
        "clicks": {"ids": [CLICKS] * 3, "weights": [CLICK_WEIGHTS] * 3},
        "prices": {"values": [PRICES] * 3, "weights": [PRICE_WEIGHTS] * 3},
    }
    bodies = [
        {"instances": [{"item": item} for item in CANDIDATES], "context": user},
        {"instances": [{"item": item} | user for item in CANDIDATES]},
        {"inputs": {"item": CANDIDATES}, "context": user},
        {"inputs": columns},
    ]
    with recinfer.serve(path) as server:
        for body in bodies:
            request = urllib.request.Request(f"{server.url}/v1/models/m:predict", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=60) as answer:
                found = json.loads(answer.read())
            assert found.get("predictions", found.get("outputs")) == expected
