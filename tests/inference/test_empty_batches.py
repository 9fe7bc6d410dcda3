"""Batches without samples, batches without ids, and dense parts that cannot run on them."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.check import read_requests
from recinfer.archive.reader import open_archive
from recinfer.errors import ConfigError
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.together import PredictInputs
from recinfer.inference.verify import verify
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.serving.server.server import Server
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import make_archive
from tests.serving.remote.fleet import remote

KEYS = ["user", "word"]


class Recurrent(nn.Module):
    """A GRU or LSTM over padded rows, whose ONNX form ends the process on a batch of no samples; two outputs."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(9, 4, "users", feature_names=["user"])])
        self.words = EmbeddingCollection(tables=[EmbeddingConfig(9, 4, "words", feature_names=["word"])])
        self.layer = kind(4, 4, batch_first=True)

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> dict[str, Tensor]:
        states, _ = self.layer(self.words(kjt)["word"].to_padded_dense(3))
        both = torch.cat([states[:, -1], self.ebc(kjt).values(), dense], dim=1)
        return {"score": both.sum(1), "states": both.reshape(-1, 2, 5)}


class Padded(nn.Module):
    """Rows padded to the longest of the batch, which is 0 where no sample has ids."""

    def __init__(self, pool: str) -> None:
        super().__init__()
        self.words = EmbeddingCollection(tables=[EmbeddingConfig(9, 4, "words", feature_names=["word"])])
        self.pool = pool

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        padded = self.words(kjt)["word"].to_padded_dense()
        return (padded.amax(1) if self.pool == "max" else padded.sum(1)).sum(1)


def bags(keys: list[str], lengths: list[list[int]]) -> KeyedJaggedTensor:
    flat = torch.tensor(lengths, dtype=torch.int32).flatten()
    return KeyedJaggedTensor(keys, torch.arange(int(flat.sum())) % 9, lengths=flat)


EXAMPLE = torch.randn(3, 2), bags(KEYS, [[1, 2, 0], [0, 3, 1]])


@pytest.mark.parametrize("engine", ["onnx", "torch"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_no_samples_through_a_recurrent_layer(tmp_path: Path, kind: type[nn.RNNBase], engine: str) -> None:
    _, archive = make_archive(tmp_path, model=Recurrent(kind), inputs=[EXAMPLE], ranks=2)
    predictor = load(archive.root, dense_engine=engine)  # type: ignore[arg-type]
    none, some = bags(KEYS, [[], []]), bags(KEYS, [[1, 2], [0, 3]])
    dense = torch.randn(2, 2)
    expected = predictor.predict(dense, some)
    answers = [predictor.predict(torch.zeros(0, 2), none)]
    requests = [
        PredictInputs(torch.zeros(0, 2), none),
        PredictInputs(dense, some),
        PredictInputs(torch.zeros(0, 2), none),
    ]
    first, middle, last = predictor.predict_many(requests)
    only = predictor.predict_many([requests[0], requests[2]])
    context = bags(["user"], [[2]])
    answers += [first, last, *only, predictor.predict(torch.zeros(0, 2), bags(["word"], [[]]), context)]
    for answer in answers:
        assert not isinstance(answer, Exception), answer
        assert {name: tuple(t.shape) for name, t in answer.items()} == {"score": (0,), "states": (0, 2, 5)}
        assert {t.dtype for t in answer.values()} == {torch.float32}
    for name in expected:
        torch.testing.assert_close(middle[name], expected[name])  # type: ignore[index]
    arrays = [np.zeros((0, 2), np.float32), *[np.zeros((0, 4), np.float32)] * 2, np.zeros(0, np.int64)]
    assert [(a.shape, a.dtype) for a in predictor.run_engine_arrays(arrays)] == [((0,), "f4"), ((0, 2, 5), "f4")]
    assert predictor.lookup(none)["user"].shape == (0, 4)  # type: ignore[union-attr]


def test_no_samples_through_a_ranker(tmp_path: Path) -> None:
    """Its shards are asked for no rows; over the wire a server refuses such a request by name, as without shards."""
    _, archive = make_archive(tmp_path, model=Recurrent(nn.GRU), inputs=[EXAMPLE], ranks=2)
    with remote(archive.root, [[0], [1]], tmp_path) as predictor:
        found = predictor.predict(torch.zeros(0, 2), bags(KEYS, [[], []]))
        assert {name: tuple(t.shape) for name, t in found.items()} == {"score": (0,), "states": (0, 2, 5)}
        with Server({"small": predictor}) as server:
            none = pb.PredictRequest(model="small", features=pb.JaggedFeatures(keys=KEYS, batch_size=0))
            with grpc.insecure_channel(server.target) as channel, pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary("/recinfer.v1.Inference/Predict")(none.SerializeToString(), timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]
            assert "batch_size: got 0" in caught.value.details()  # type: ignore[attr-defined]


def test_padding_to_the_longest_of_no_samples(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, model=Padded("sum"))
    for engine in ("onnx", "torch"):
        predictor = load(archive.root, dense_engine=engine)  # type: ignore[arg-type]
        assert predictor.predict(None, bags(["word"], [[]]))["output"].shape == (0,)
        assert predictor.predict(None, bags(["word"], [[0, 0]]))["output"].tolist() == [0.0, 0.0]


def test_golden_requests_have_a_batch_without_ids_and_one_of_one_id(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path, model=Recurrent(nn.GRU), inputs=[EXAMPLE])
    lengths = [request.features.lengths().tolist() for request, _ in read_requests(archive)]
    assert lengths[3:] == [[0, 0, 0, 0], [1, 1]]
    assert [request.features.stride() for request, _ in read_requests(archive)] == [2, 1, 16, 2, 1]
    assert verify(archive.root).ok


def test_a_model_that_needs_an_id_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Its archive would fail, or answer -inf, where no sample of a request has ids."""
    with pytest.raises(
        ConfigError, match=r"cannot run on sequence_0_0_values \[0, 4\].*A request may have no ids"
    ) as caught:
        make_archive(tmp_path, model=Padded("max"))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]


def test_an_engine_that_fails_names_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Golden requests, held-out rows and recorded rows all pass here."""
    _, archive = make_archive(tmp_path, model=Padded("sum"))
    predictor = Predictor(open_archive(archive.root), dense_engine="torch")
    (request, _) = read_requests(archive)[3]

    class Fails:
        name = "torch"

        def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
            raise IndexError("no place\n  to read")

    monkeypatch.setattr(predictor.state, "_engine", Fails())
    message = r"cannot run on a batch of 2 samples, 0 ids of word: IndexError: no place to read\. A request may"
    with pytest.raises(ConfigError, match=message):
        predictor.replay(request)
    with pytest.raises(ConfigError, match=message):
        predictor.run_dense_on(request, [torch.zeros(0, 4)], [torch.zeros(2, dtype=torch.int64)])
