"""A user whose ids and other values have weights, once for all candidates, in each form of JSON as in Python."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import json_codec
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


def test_a_weighted_context_over_json(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ranker()
    path = tmp_path / "m.rqa"
    model.eval()
    recinfer.export(model, arguments(4), path, precision="fp32", user=["clicks", "prices"], progress=False)
    with torch.no_grad():
        expected = pytest.approx(model(*arguments(3)).tolist(), abs=1e-6)

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
