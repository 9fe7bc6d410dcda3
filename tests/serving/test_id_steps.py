"""A step that changes ids reaches every path of a request: Python, bytes, decoded, a ranker, with a context and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recinfer.archive.part import Changes
from recinfer.archive.reader import Archive
from recinfer.errors import InputError
from recinfer.inference import id_steps
from recinfer.inference.id_steps import IdCounts
from recinfer.inference.predictor import load
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import NUM_DENSE, RANKER_ROWS, make_archive, make_request
from tests.serving.paths import BytePath, decoded
from tests.serving.remote import test_direct as remote
from tests.serving.test_direct import some_of

FIRST = 10**15


class RawIds:
    """A trial step: id FIRST + r of any feature is row r, other ids from FIRST are unknown, smaller ones stay."""

    decoded_only = False
    drops: frozenset[str] = frozenset()

    def __call__(self, ids: NDArray[Any], keys: tuple[str, ...], edges: NDArray[Any]) -> NDArray[Any]:
        assert len(edges) == len(keys) + 1 and edges[-1] == ids.size
        if ids.size and ids.max() >= FIRST + 10**6:
            raise InputError(f"features: id {ids.max()} is unknown")
        wide = ids.astype(np.int64)
        return np.where(wide >= FIRST, wide - FIRST, wide)


@pytest.fixture(autouse=True)
def raw_ids() -> Iterator[None]:
    """All archives that are loaded in a test have the step."""

    def make(archive: Archive, deltas: Sequence[Changes], counts: IdCounts) -> RawIds:
        return RawIds()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(id_steps, "STEPS", [make, *id_steps.STEPS])
        yield


def raw(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().long() + FIRST, lengths=features.lengths().int())


@pytest.mark.parametrize("narrow", [False, True])
def test_local_paths(tmp_path: Path, narrow: bool) -> None:
    predictor = load(make_archive(tmp_path, out_of_range={"f_cat": "default_row"})[1].root)
    service = InferenceService(ModelRegistry({"ranker": predictor}))
    paths = BytePath(service, threads=2)
    for seed, batch in enumerate((1, 5, 300)):
        rows = make_request(RANKER_ROWS, batch, seed)
        if narrow:
            rows = KeyedJaggedTensor(rows.keys(), rows.values().int(), lengths=rows.lengths().int())
        ids, dense = raw(rows), torch.randn(batch, NUM_DENSE)
        expected = predictor.predict(dense, rows)["output"]
        assert torch.equal(predictor.predict(dense, ids)["output"], expected)
        wanted = codec.encode_lookup_request(rows)
        for data in (wanted, codec.encode_lookup_request(ids)):
            assert paths.lookup(data) == decoded(service, "Lookup", wanted) == decoded(service, "Lookup", data)
        names = list(RANKER_ROWS)
        user = some_of(make_request(RANKER_ROWS, 1, seed + 9), names[:2])
        rest = some_of(rows, names[2:])
        asked = codec.encode_predict_request(dense, rest, "ranker", context=user)
        for data in (
            codec.encode_predict_request(dense, raw(rest), "ranker", context=raw(user)),
            codec.encode_predict_request(dense, rest, "ranker", context=raw(user)),
        ):
            assert paths.predict(data) == paths.predict(asked) == [decoded(service, "Predict", asked)]
            assert decoded(service, "Predict", data) == decoded(service, "Predict", asked)
    unknown = codec.encode_lookup_request(
        KeyedJaggedTensor(["f_user"], torch.tensor([FIRST + 10**7]), lengths=torch.tensor([1]).int())
    )
    assert paths.lookup(unknown) is None  # the decoded path has the error
    with pytest.raises(InputError, match="is unknown"):
        decoded(service, "Lookup", unknown)
    far = KeyedJaggedTensor(["f_cat"], torch.tensor([FIRST + 999_999]), lengths=torch.tensor([1]).int())
    before = predictor.replaced_ids
    predictor.lookup(
        far
    )  # the steps run in their order: an id becomes a row, and a row outside the table the default row
    assert predictor.replaced_ids == before + 1
    paths.close()


def test_a_ranker_runs_it_before_it_splits_ids_by_rank(tmp_path: Path) -> None:
    archive = remote.make_archive(tmp_path, "row_wise")
    with remote.served(archive, tmp_path) as service:
        for rows in remote.requests():
            ids, dense = raw(rows), torch.randn(rows.stride(), remote.NUM_DENSE)
            expected = remote.ordinary(service, "Lookup", codec.encode_lookup_request(rows))
            data = codec.encode_lookup_request(ids)
            assert remote.straight(service, "Lookup", data) == expected
            assert remote.ordinary(service, "Lookup", data) == expected
            if len(rows.keys()) == len(remote.ROWS):
                answer = remote.straight(service, "Predict", codec.encode_predict_request(dense, rows))
                assert remote.straight(service, "Predict", codec.encode_predict_request(dense, ids)) == answer


@pytest.mark.parametrize("lengths", [[2], [-1], [0]])
def test_lengths_that_are_not_those_of_the_ids_are_for_the_decoded_path(tmp_path: Path, lengths: list[int]) -> None:
    service = InferenceService(ModelRegistry({"ranker": load(make_archive(tmp_path)[1].root)}))
    data = codec.encode_lookup_request(
        KeyedJaggedTensor(["f_user"], torch.tensor([FIRST]), lengths=torch.tensor([1]).int())
    )
    wrong = data.replace(np.int32(1).tobytes(), np.int32(lengths[0]).tobytes(), 1)
    assert wrong != data and BytePath(service).lookup(data) is not None and BytePath(service).lookup(wrong) is None
