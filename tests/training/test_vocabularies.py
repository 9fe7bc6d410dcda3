"""Three vocabularies of the same data, side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from recinfer.data.dataset import load_dataset
from recinfer.errors import ConfigError
from recinfer.modules.mc_modules import MCHManagedCollisionModule
from recinfer.training.loop import TrainSettings, fit
from recinfer.training.model import ManagedRows
from recinfer.training.sources import MemorySource
from recinfer.training.vocabularies import compare_vocabularies


def test_three_vocabularies_of_a_tenth_of_the_rows() -> None:
    dataset = load_dataset(None, "synthetic", limit=3000)
    full, hashed, managed = compare_vocabularies(dataset, embedding_dim=4, batch_size=100, progress=False)
    assert [full.name, hashed.name, managed.name] == ["full", "hashed", "managed"]
    assert hashed.rows == managed.rows < full.rows / 4
    assert all(0.5 < result.auc < 1 for result in (full, hashed, managed))
    assert managed.ids_admitted > managed.ids_evicted > 0
    assert (full.ids_admitted, hashed.ids_admitted) == (0, 0)


def test_frequent_ids_get_rows_of_their_own() -> None:
    dataset = load_dataset(None, "synthetic", limit=1000)
    feature = max(dataset.contract.sparse, key=lambda f: f.num_embeddings)
    source = MemorySource(replace(dataset), 50)
    settings = TrainSettings(4, managed={feature.name: ManagedRows(20, 3)})
    model = fit(source, settings, progress=False).model
    (module,) = [m for m in model.modules() if isinstance(m, MCHManagedCollisionModule)]
    held = module._mch_sorted_raw_ids[module._mch_sorted_raw_ids < torch.iinfo(torch.int64).max]
    ids = dataset.contract.apply(dataset.take(dataset.train))[1][feature.name].values()
    counts = {id_: count for id_, count in zip(*[x.tolist() for x in ids.unique(return_counts=True)])}
    assert len(held) == 19
    assert max(counts, key=counts.__getitem__) in held.tolist()


@pytest.mark.parametrize("share", [0, 1, -0.5])
def test_a_share_outside_0_to_1_is_refused(share: float) -> None:
    with pytest.raises(ConfigError, match="share is"):
        next(iter(compare_vocabularies(load_dataset(None, "synthetic", limit=100), share=share)))
