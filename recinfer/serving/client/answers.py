"""What the server's answers are to who asked: embeddings, and what a model takes and is made of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from recinfer.inference.results import FeatureSpec
from recinfer.serving.wire import codec
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["Embeddings", "ModelDescription", "decode_description", "decode_embeddings"]


@dataclass(frozen=True)
class Embeddings:
    """What a lookup gives.

    Attributes:
        pooled: one vector a sample and feature, ``[B, sum(dims)]``, in the model's feature order; None when only unpooled
            features were asked for.
        sequences: one vector an id, for each unpooled feature.
        model_version: the version that answered.
        missing_ranks: ranks of a model on several hosts that did not answer, so that vectors of their rows are zero.
    """

    pooled: KeyedTensor | None
    sequences: dict[str, JaggedTensor]
    model_version: str
    missing_ranks: tuple[int, ...] = ()

    def keys(self) -> list[str]:
        """Names of all embeddings, the pooled ones first."""
        return [*(self.pooled.keys() if self.pooled is not None else ()), *self.sequences]

    def __getitem__(self, key: str) -> Tensor | JaggedTensor:
        """``[B, D]`` of a pooled feature, or the JaggedTensor of an unpooled one."""
        return self.sequences[key] if key in self.sequences or self.pooled is None else self.pooled[key]


@dataclass(frozen=True)
class ModelDescription:
    """What a served model takes and what it is made of.

    ``contract`` makes its inputs of raw rows; None when the archive was exported without one. ``needs_weights``: every
    request brings a weight for each id.
    """

    name: str
    version: str
    features: tuple[FeatureSpec, ...]
    num_dense: int
    precision: str
    plan_hash: str
    contract: FeatureContract | None = None
    needs_weights: bool = False


def decode_embeddings(answer: bytes) -> Embeddings:
    """The message of a LookupResponse."""
    return Embeddings(*codec.decode_lookup_answer(answer))


def decode_description(answer: bytes) -> ModelDescription:
    """The message of a ModelInfo."""
    info = codec.parse(pb.ModelInfo, answer)
    features = tuple(FeatureSpec(f.name, f.table, f.rows, f.dim, f.pooled, _missing(f.missing)) for f in info.features)
    contract = None
    if info.feature_contract:
        from recinfer.data.contract import FeatureContract

        contract = FeatureContract.from_dict(json.loads(info.feature_contract))
    return ModelDescription(
        info.name, info.version, features, info.num_dense, info.precision, info.plan_hash, contract, info.needs_weights
    )


def _missing(text: str) -> str | int:
    """The policy in a FeatureInfo; servers from before there was one give none, and may refuse."""
    return int(text) if text.isdecimal() else text or "reject"
