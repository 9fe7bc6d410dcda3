"""What to use instead of names and modules of torchrec that are not here; a module's entry holds for all in it."""

from __future__ import annotations

__all__ = ["INSTEAD"]

INSTEAD = {
    "torchrec.datasets.criteo.BinaryCriteoUtils.shuffle": (
        "InMemoryBinaryCriteoIterDataPipe(shuffle_training_set=True), which shuffles while it reads"
    ),
    "torchrec.datasets.utils.ParallelReadConcat": (
        "give the files of all pipes to one criteo_terabyte: the workers of a DataLoader share them"
    ),
}
