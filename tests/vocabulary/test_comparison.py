"""Three vocabularies of the same data, side by side."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import recinfer
from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.data.dataset import Dataset, load_dataset
from recinfer.data.metrics import auc
from recinfer.distributed.planner.inference import plan_inference
from recinfer.errors import ConfigError
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import DataType
from recinfer.modules.mc_modules import MCHManagedCollisionModule
from recinfer.training.batches import Examples
from recinfer.training.loop import TrainSettings, fit
from recinfer.training.model import predict_logits
from recinfer.training.sources import MemorySource
from recinfer.vocabulary.comparison import compare_vocabularies, managed_dlrm


def test_three_vocabularies_of_a_tenth_of_the_rows_and_the_archive_of_raw_ids(tmp_path: Path) -> None:
    dataset = load_dataset(None, "synthetic", limit=3000)
    full, hashed, managed = compare_vocabularies(
        dataset, embedding_dim=4, batch_size=100, out=tmp_path / "model.ckpt", progress=False
    )
    assert [full.name, hashed.name, managed.name] == ["full", "hashed", "managed"]
    assert hashed.rows <= managed.rows < full.rows / 4
    assert all(0.5 < result.auc < 1 for result in (full, hashed, managed))
    assert managed.ids_admitted > managed.ids_evicted > 0
    assert (full.ids_admitted, hashed.ids_admitted) == (0, 0)
    check_archive(dataset, tmp_path, managed.auc)


def check_archive(dataset: Dataset, folder: Path, expected_auc: float) -> None:
    """The checkpoint's archive answers the raw ids of rows as the trained model does."""
    reader = CheckpointReader(folder / "model.ckpt")
    assert reader.contract is not None
    held_out = Examples.from_columns(reader.contract, dataset.take(dataset.test))
    live = reader.build_model(device="cpu").eval()
    load_into(reader, live)
    logits = predict_logits(live, held_out)
    assert auc(held_out.labels.numpy(), logits) == pytest.approx(expected_auc, abs=1e-5)
    model = reader.build_model()
    plan = plan_inference(model, world_size=2, precision=DataType.FP32)
    export_archive(
        model, reader, plan, folder / "m.rqa", name="m", version="1", contract=reader.contract, progress=False
    )
    served = recinfer.load(folder / "m.rqa")
    batch = held_out.batch(torch.arange(len(held_out)))
    assert batch.sparse_features.values().max() > 2**60
    answers = served(batch.dense_features, batch.sparse_features)
    torch.testing.assert_close(answers.reshape(-1), torch.from_numpy(logits), rtol=1e-5, atol=1e-5)


def test_frequent_ids_get_rows_of_their_own() -> None:
    dataset = load_dataset(None, "synthetic", limit=1000)
    feature = max(dataset.contract.sparse, key=lambda f: f.num_embeddings)
    source = MemorySource(replace(dataset), 50)
    made = managed_dlrm(dataset.contract, {feature.name: 20}, 3, embedding_dim=4)
    model = fit(source, TrainSettings(4), model=made, progress=False).model
    modules = {m._name: m for m in model.modules() if isinstance(m, MCHManagedCollisionModule)}
    for other in dataset.contract.sparse:
        if other is not feature:  # each id has a row, and unknown ids have another one
            assert modules[f"t_{other.name}"].output_size() == other.num_embeddings + 1
            assert modules[f"t_{other.name}"].num_evicted == 0
    module = modules[f"t_{feature.name}"]
    held = module._mch_sorted_raw_ids[module._mch_sorted_raw_ids < torch.iinfo(torch.int64).max]
    ids = dataset.contract.apply(dataset.take(dataset.train))[1][feature.name].values()
    counts = {id_: count for id_, count in zip(*[x.tolist() for x in ids.unique(return_counts=True)])}
    assert len(held) == 19
    assert max(counts, key=counts.__getitem__) in held.tolist()


@pytest.mark.parametrize("share", [0, 1, -0.5])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share is"):
        next(iter(compare_vocabularies(load_dataset(None, "synthetic", limit=100), share=share)))
