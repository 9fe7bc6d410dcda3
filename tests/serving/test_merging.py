"""Requests answered together get what each gets alone; a bad one among them fails on its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import InputError
from recinfer.inference.bags import bags_of, merge_bags
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.together import PredictInputs
from recinfer.modules.embedding_configs import EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import ROWS, export, make_request


def subset(kjt: KeyedJaggedTensor, keys: list[str]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict({key: kjt[key] for key in keys})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 6)), min_size=1, max_size=6), st.booleans())
def test_merging_is_concatenation_by_feature(sizes: list[tuple[int, int]], weighted: bool):
    requests = []
    for seed, batch in sizes:
        _, kjt = make_request(seed, batch)
        weights = torch.rand(kjt.values().numel())
        requests.append(KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, lengths=kjt.lengths()))
    merged = merge_bags([bags_of(request) for request in requests], tuple(ROWS), weighted=weighted).kjt()
    assert merged.keys() == list(ROWS)
    assert merged.stride() == sum(batch for _, batch in sizes)
    for name in ROWS:
        assert torch.equal(merged[name].values(), torch.cat([r[name].values() for r in requests]))
        assert torch.equal(merged[name].lengths(), torch.cat([r[name].lengths() for r in requests]))
        if weighted:
            assert torch.equal(merged[name].weights(), torch.cat([r[name].weights() for r in requests]))


def test_ids_of_both_widths_merge():
    narrow, wide = make_request(1, 2, dtype=torch.int32)[1], make_request(2, 3)[1]
    narrow, wide = bags_of(narrow), bags_of(wide)
    assert merge_bags([narrow, narrow], tuple(ROWS)).values.dtype == np.int32
    assert merge_bags([narrow, wide], tuple(ROWS)).values.dtype == np.int64


def test_predictions_together_equal_predictions_alone(predictor: Predictor):
    assert predictor.mergeable
    requests = [PredictInputs(*make_request(seed, 1 + seed % 5)) for seed in range(20)]
    for request, answer in zip(requests, predictor.predict_many(requests), strict=True):
        for name, tensor in predictor.predict(request.dense, request.features).items():
            torch.testing.assert_close(answer[name], tensor, rtol=0, atol=1e-6)


def test_lookups_of_different_features_together(predictor: Predictor):
    requests = [make_request(1, 3)[1], make_request(2, 1, keys=["shop"])[1], make_request(3, 2, ["item", "user"])[1]]
    for request, answer in zip(requests, predictor.lookup_many(requests), strict=True):
        expected = predictor.lookup(request)
        assert answer.pooled.keys() == expected.pooled.keys()
        assert torch.equal(answer.pooled.values(), expected.pooled.values())


def test_a_bad_request_fails_alone(predictor: Predictor):
    requests = [PredictInputs(*make_request(seed, 2)) for seed in range(5)]
    bad_id = KeyedJaggedTensor(list(ROWS), torch.tensor([99, 1, 1, 1]), lengths=torch.ones(4, dtype=torch.int32))
    requests[1] = PredictInputs(torch.zeros(1, 3), bad_id)
    requests[2] = PredictInputs(torch.full((2, 3), float("nan")), requests[2].features)
    requests[4] = PredictInputs(
        torch.zeros(1, 3), KeyedJaggedTensor(["colour"], torch.tensor([1]), lengths=torch.tensor([1]))
    )
    answers = predictor.predict_many(requests)
    assert "'user', sample 0: id 99" in str(answers[1])
    assert "sample 0, column 0 is nan" in str(answers[2])
    assert "'colour'" in str(answers[4])
    for at in (0, 3):
        expected = predictor.predict(requests[at].dense, requests[at].features)["output"]
        torch.testing.assert_close(answers[at]["output"], expected, rtol=0, atol=1e-6)
    lookups = predictor.lookup_many([bad_id, requests[0].features])
    assert isinstance(lookups[0], InputError)
    assert torch.equal(lookups[1].pooled.values(), predictor.lookup(requests[0].features).pooled.values())


def repeated(context: KeyedJaggedTensor, batch: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    return {key: (context[key].values().repeat(batch), context[key].lengths().repeat(batch)) for key in context.keys()}  # noqa: SIM118 - not a dict


def written_out(features: KeyedJaggedTensor, context: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The request without a context: its features repeated for every candidate."""
    parts = {key: (features[key].values(), features[key].lengths()) for key in features.keys()}  # noqa: SIM118 - not a dict
    parts |= repeated(context, features.stride())
    values = torch.cat([v for v, _ in parts.values()])
    return KeyedJaggedTensor(list(parts), values, lengths=torch.cat([n for _, n in parts.values()]))


@pytest.mark.parametrize("keys", [["user"], ["history", "user"]])
def test_a_context_beside_no_candidates(predictor: Predictor, keys: list[str]):
    rest = [key for key in ROWS if key not in keys]
    none = KeyedJaggedTensor.from_parts_unchecked(
        rest, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32), stride=0
    )
    found = predictor.predict(torch.zeros(0, 3), none, make_request(1, 1, keys)[1])["output"]
    assert found.shape == (0, 1)


def test_context_is_broadcast(predictor: Predictor):
    requests = []
    for seed in range(6):
        dense, candidates = make_request(seed, 1 + 3 * seed, keys=["item", "shop"])
        _, context = make_request(100 + seed, 1, keys=["history", "user"])
        requests.append(PredictInputs(dense, candidates, context))
    plain = PredictInputs(*make_request(7, 4))
    together = predictor.predict_many([*requests, plain])
    for request, answer in zip(requests, together):
        expected = predictor.predict(request.dense, written_out(request.features, request.context))["output"]
        alone = predictor.predict(request.dense, request.features, request.context)["output"]
        torch.testing.assert_close(alone, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(answer["output"], expected, rtol=0, atol=1e-6)
    expected = predictor.predict(plain.dense, plain.features)["output"]
    torch.testing.assert_close(together[-1]["output"], expected, rtol=0, atol=1e-6)


def test_a_context_that_does_not_fit_is_refused(predictor: Predictor):
    dense, features = make_request(1, 2, keys=["item", "shop"])
    with pytest.raises(InputError, match="context: got 2 samples, expected 1"):
        predictor.predict(dense, features, make_request(2, 2, keys=["user"])[1])
    with pytest.raises(InputError, match="'item' is also in features"):
        predictor.predict(dense, features, make_request(2, 1, keys=["item"])[1])


def test_sequences_together(tmp_path: Path):
    tables = [EmbeddingConfig(num_embeddings=20, embedding_dim=4, name="t_clicks", feature_names=["clicks", "buys"])]
    predictor = load(export(EmbeddingCollection(tables=tables), tmp_path, "sequences", "1"))
    names = [feature.name for feature in predictor.features]
    rows = {feature.name: feature.rows for feature in predictor.features}

    def request(seed: int, batch: int, keys: list[str]) -> KeyedJaggedTensor:
        random = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (len(keys), batch), generator=random, dtype=torch.int32)
        ids = [torch.randint(0, rows[k], (int(n.sum()),), generator=random) for k, n in zip(keys, lengths)]
        return KeyedJaggedTensor(keys, torch.cat(ids), lengths=lengths.reshape(-1))

    lookups = [request(seed, 1 + seed, names[::-1] if seed % 2 else names) for seed in range(4)]
    for one, answer in zip(lookups, predictor.lookup_many(lookups)):
        expected = predictor.lookup(one)
        assert answer.keys() == expected.keys()
        for name, sequence in expected.sequences.items():
            assert torch.equal(answer[name].values(), sequence.values())
            assert torch.equal(answer[name].lengths(), sequence.lengths())
