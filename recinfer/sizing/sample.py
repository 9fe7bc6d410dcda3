"""The model and the requests that serving costs are measured with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving import codec
from recinfer.serving.bench import random_features

__all__ = ["LOOKUP", "lookup_requests", "write_sample_archive"]

LOOKUP = "/recinfer.v1.Inference/Lookup"
"""The method that is called."""
_FEATURES, _DIM, _ROWS, _DENSE = 26, 16, 20_000, 13


def lookup_requests(predictor: Predictor, batch: int, ids: int = 1, count: int = 64, seed: int = 0) -> list[bytes]:
    """Serialized LookupRequests of all features, ``ids`` uniform ids a feature and sample."""
    random = torch.Generator().manual_seed(seed)
    weighted = predictor.intake.needs_weights
    made = (random_features(predictor.features, batch, ids, random, weighted=weighted) for _ in range(count))
    return [codec.encode_lookup_request(features) for features in made]


def write_sample_archive(
    folder: Path,
    *,
    tables: Sequence[tuple[int, int]] = ((_ROWS, _DIM),) * _FEATURES,
    world_size: int = 1,
    over: Sequence[int] = (64, 1),
    name: str = "sample",
) -> Path:
    """An archive of a DLRM with random weights, INT8 tables of (rows, dim) with a feature each; returns its folder."""
    dim = tables[0][1]

    def model(device: str) -> DLRM:
        configs = [
            EmbeddingBagConfig(num_embeddings=rows, embedding_dim=width, name=f"t{i}", feature_names=[f"f{i}"])
            for i, (rows, width) in enumerate(tables)
        ]
        collection = EmbeddingBagCollection(tables=configs, device=torch.device(device))
        return DLRM(collection, _DENSE, [16, dim], list(over), dense_device=torch.device(device))

    checkpoint = save_checkpoint(folder / "checkpoint", model("cpu"), model_name=name, model_version="1")
    plan = plan_inference(model("meta"), world_size=world_size, precision=DataType.INT8)
    out = folder / f"{name}.rqa"
    reader = CheckpointReader(checkpoint)
    export_archive(model("meta"), reader, plan, out, name=name, version="1", num_dense=_DENSE, progress=False)
    return out
