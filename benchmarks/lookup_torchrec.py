"""TorchRec's quantized collections for ``benchmarks.lookup``: eager and scripted, unsharded and on 2 ranks of one CPU host."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["contenders", "features"]

_RANKS = 2
_KINDS = ("table_wise", "row_wise", "column_wise")
_LEAVES = ["IntNBitTableBatchedEmbeddingBagsCodegen", "ComputeJTDictToKJT"]


def contenders(rows: list[int], dim: int, precision: str) -> dict[str, Callable[[Any], object]]:
    """Name -> module that takes a KeyedJaggedTensor of TorchRec's; empty when TorchRec is not installed."""
    try:
        from torchrec.distributed.global_settings import set_propogate_device
    except ImportError:
        return {}
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    set_propogate_device(True)
    found: dict[str, Callable[[Any], object]] = {}
    for kind in (None, *_KINDS):
        name = "torchrec" if kind is None else f"torchrec {kind.replace('_', '-')}"
        module = _collection(rows, dim, precision)
        if kind is not None:
            module = _sharded(module, kind, dim)
        _fill(module)
        found[f"{name} eager"] = module
        found[f"{name} scripted"] = _scripted(module, len(rows))
    return found


def features(keys: list[str], values: torch.Tensor, lengths: torch.Tensor) -> Any:
    """TorchRec's KeyedJaggedTensor."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)


def _collection(rows: list[int], dim: int, precision: str) -> Any:
    from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
    from torchrec.quant.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(
            num_embeddings=n, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"], data_type=DataType(precision)
        )
        for i, n in enumerate(rows)
    ]
    return EmbeddingBagCollection(
        tables=tables,
        is_weighted=False,
        device=torch.device("cpu"),
        row_alignment=16,
        quant_state_dict_split_scale_bias=True,  # its row- and column-wise sharding asks for these two
        register_tbes=True,
    )


def _sharded(module: Any, kind: str, dim: int) -> Any:
    from torchrec.distributed.fused_params import (
        FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
        FUSED_PARAM_REGISTER_TBE_BOOL,
    )
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
    from torchrec.inference.modules import shard_quant_model

    class Sharder(QuantEmbeddingBagCollectionSharder):  # type: ignore[misc]
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [kind]

    needed = {FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS: True, FUSED_PARAM_REGISTER_TBE_BOOL: True}
    limits = {
        config.name: ParameterConstraints(sharding_types=[kind], min_partition=dim // _RANKS)
        for config in module.embedding_bag_configs()
    }
    model, _ = shard_quant_model(
        torch.nn.ModuleDict({"ebc": module}),
        world_size=_RANKS,
        compute_device="cpu",
        sharding_device="cpu",
        sharders=[Sharder(fused_params=needed)],
        constraints=limits,
    )
    return model["ebc"]


def _fill(module: Any) -> None:
    """Fill rows with codes and normal scales: uninitialized memory may hold denormal numbers, which are slow to add."""
    scale_bias = torch.tensor([0.01, -1.0], dtype=torch.float16).view(torch.uint8)
    for tbe in module.modules():
        if type(tbe).__name__ == _LEAVES[0]:
            for weights, scales, _ in tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=1):
                weights.random_(0, 256)
                if scales is not None:
                    scales.copy_(scale_bias.expand(scales.shape))


def _scripted(module: Any, num: int) -> Callable[[Any], object]:
    from torchrec.fx.tracer import symbolic_trace
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, given: KeyedJaggedTensor) -> Any:
            return self.module(given)

    Whole.forward.__annotations__ = {"given": KeyedJaggedTensor}  # TorchScript reads types, not their names
    whole = Whole()
    one = features([f"f{i}" for i in range(num)], torch.zeros(num, dtype=torch.int64), torch.ones(num, dtype=torch.int32))  # fmt: skip
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        whole(one)  # makes its input distribution, which cannot be traced
        return torch.jit.script(symbolic_trace(whole, leaf_modules=_LEAVES))
