"""Answers of the V1 protocol as JSON: the same text whether it is written at once or piece by piece."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from recinfer.errors import InputError
from recinfer.serving.server.v1 import answers
from recinfer.serving.server.v1.answers import to_json
from recinfer.serving.wire import json_codec
from recinfer.serving.wire.proto import inference_pb2 as pb

SAMPLES = 5000


def predicted(**outputs: np.ndarray) -> bytes:
    items = [pb.NamedTensor(name=n, shape=a.shape, values=a.astype("<f4").tobytes()) for n, a in outputs.items()]
    return pb.PredictResponse(outputs=items, missing_ranks=[1, 3]).SerializeToString()


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of values in each call of json."""
    found: list[int] = []
    real = answers.json_text

    def counted(value: Any) -> str:
        text = real(value)
        found.append(text.count(",") + 1)
        return text

    monkeypatch.setattr(answers, "json_text", counted)
    return found


def test_predictions(sizes: list[int]):
    random = np.random.default_rng(0)
    wide, one = random.standard_normal((SAMPLES, 40)).astype(np.float32), random.random(SAMPLES).astype(np.float32)
    wide[4321, 7] = np.nan
    expected = wide.tolist()
    expected[4321][7] = None
    both = predicted(wide=wide, one=one)
    rows = json.loads(to_json("Predict", both, in_rows=True))
    assert rows == {
        "predictions": [{"wide": w, "one": o} for w, o in zip(expected, one.tolist())],
        "missing_ranks": [1, 3],
    }
    columns = json.loads(to_json("Predict", both, in_rows=False))
    assert columns == {"outputs": {"wide": expected, "one": one.tolist()}, "missing_ranks": [1, 3]}
    alone = predicted(wide=wide)
    assert json.loads(to_json("Predict", alone, in_rows=True))["predictions"] == expected
    assert json.loads(to_json("Predict", alone, in_rows=False))["outputs"] == expected
    assert len(sizes) > 30 and max(sizes) < 2 * json_codec._PIECE


def test_vectors(sizes: list[int]):
    random = np.random.default_rng(0)
    values, lengths = random.standard_normal((SAMPLES, 12)), random.integers(0, 4, SAMPLES)
    vectors = random.standard_normal((int(lengths.sum()), 8)).astype(np.float32)
    sequence = pb.SequenceOutput(
        key="clicks", dim=8, lengths=lengths.astype("<i4").tobytes(), values=vectors.astype("<f4").tobytes()
    )
    answer = pb.LookupResponse(
        keys=["user", "item"],
        dims=[4, 8],
        batch_size=SAMPLES,
        values=values.astype("<f4").tobytes(),
        sequences=[sequence],
    ).SerializeToString()
    pooled = values.astype(np.float32)
    ends = np.cumsum(lengths)
    clicks = [vectors[end - n : end].tolist() for n, end in zip(lengths, ends)]
    expected = {"user": pooled[:, :4].tolist(), "item": pooled[:, 4:].tolist(), "clicks": clicks}
    assert json.loads(to_json("Lookup", answer, in_rows=False)) == {"outputs": expected}
    rows = json.loads(to_json("Lookup", answer, in_rows=True))["predictions"]
    assert rows == [dict(zip(expected, row)) for row in zip(*expected.values())]
    assert max(sizes) < 2 * json_codec._PIECE


def test_outputs_without_a_row_a_sample():
    total, short = predicted(loss=np.float32(2.5)), predicted(a=np.zeros(3), b=np.zeros(2))
    assert json.loads(to_json("Predict", total, in_rows=False))["outputs"] == 2.5
    with pytest.raises(InputError, match="'loss' of this model is one number"):
        to_json("Predict", total, in_rows=True)
    with pytest.raises(InputError, match="no row for each sample"):
        to_json("Predict", short, in_rows=True)
