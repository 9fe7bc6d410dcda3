"""The results of a client's calls: embeddings, and the description of a model."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from recinfer.inference.specs import FeatureSpec, InputSpec, Outputs
from recinfer.printed import Printed
from recinfer.serving.wire.arrays import decode_lookup, decode_predict, parse
from recinfer.serving.wire.proto import inference_pb2 as pb

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = [
    "Embeddings",
    "ModelDescription",
    "decode_description",
    "decode_embeddings",
    "decode_outputs",
    "torch_is_installed",
]


@functools.cache
def torch_is_installed() -> bool:
    """Whether torch can be imported, without importing it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


@dataclass(frozen=True)
class Embeddings:
    """The result of a lookup: tensors, or numpy arrays from a client with ``tensors=False``.

    Attributes:
        pooled: one vector per sample and feature: a KeyedTensor ``[B, sum(dims)]``, or a dict of float32 arrays ``[B, D]``, in
            the model's feature order; None when only unpooled features were requested.
        sequences: one vector per id, for each unpooled feature: a JaggedTensor, or a list of one array ``[n, D]`` per sample.
        model_version: the version that answered.
        missing_ranks: ranks of a model on several hosts that did not answer, so that vectors of their rows are zero.
    """

    pooled: Any
    sequences: dict[str, Any]
    model_version: str
    missing_ranks: tuple[int, ...] = ()

    def keys(self) -> list[str]:
        """Names of all embeddings, the pooled ones first."""
        return [*(self.pooled.keys() if self.pooled is not None else ()), *self.sequences]

    def __getitem__(self, key: str) -> Any:
        """``[B, D]`` of a pooled feature, or the entry of ``sequences`` of an unpooled one."""
        return self.sequences[key] if key in self.sequences or self.pooled is None else self.pooled[key]


@dataclass(frozen=True)
class ModelDescription(Printed):
    """The inputs and the structure of a served model, which print as a line each.

    ``contract`` turns raw rows into the model's inputs; None when the archive was exported without a contract.
    ``needs_weights``: some features are ``weighted``: their ids may have weights. ``inputs``: the inputs of forward, none
    for an archive from before recinfer recorded them. ``string_features``: the features whose ids may be strings.
    """

    name: str
    version: str
    features: tuple[FeatureSpec, ...]
    num_dense: int
    precision: str
    plan_hash: str
    contract: FeatureContract | None = None
    needs_weights: bool = False
    inputs: tuple[InputSpec, ...] = ()
    string_features: tuple[str, ...] = ()

    @property
    def named_inputs(self) -> tuple[InputSpec, ...]:
        """The inputs that ``predict`` takes as ``inputs``: those that are neither features nor ``dense``."""
        return tuple(
            one for one in self.inputs if one.kind == "jagged" or (one.kind == "tensor" and not self.num_dense)
        )

    def __repr__(self) -> str:
        contract = ", takes raw rows" if self.contract is not None else ""
        return f"<{self.name} {self.version}: {len(self.features)} features, {self.precision}{contract}>"

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        for spec in self.inputs:
            lines.append(f"  in   {spec.name}: {spec.described(strings=spec.name in self.string_features)}")
        for one in self.features:
            vectors = f"a vector of {one.dim} per {'sample' if one.pooled else 'id'}"
            lines.append(f"  emb  {one.name}: {vectors}, from the {one.rows:,} rows of {one.table}")
        return "\n".join(lines)


def decode_embeddings(answer: bytes, tensors: bool) -> Embeddings:
    """The embeddings in a serialized LookupResponse, as tensors or as numpy arrays."""
    if tensors:
        from recinfer.serving.wire import codec

        return Embeddings(*codec.decode_lookup_response(answer))
    found = decode_lookup(answer)
    return Embeddings(found.pooled() or None, found.bags(), found.version, found.missing)


def decode_outputs(answer: bytes, tensors: bool) -> Outputs:
    """The outputs in a serialized PredictResponse, as tensors or as numpy arrays."""
    if tensors:
        from recinfer.serving.wire import codec

        return codec.decode_predict_response(answer)[0]
    arrays, _, missing = decode_predict(answer)
    return Outputs(arrays, missing=missing)


def decode_description(answer: bytes) -> ModelDescription:
    """The description in a serialized ModelInfo."""
    info = parse(pb.ModelInfo, answer)
    features = tuple(
        FeatureSpec(f.name, f.table, f.rows, f.dim, f.pooled, _missing(f.missing), f.weighted, f.computed)
        for f in info.features
    )
    inputs = tuple(
        InputSpec(
            *(i.name, i.path, i.kind, i.dtype, _shape(i.shape), i.weighted, i.per_sample),
            *(i.as_long_as, i.counts, i.user),
        )
        for i in info.inputs
    )
    contract = None
    if info.feature_contract:
        from recinfer.data.contract import FeatureContract

        contract = FeatureContract.from_dict(json.loads(info.feature_contract))
    return ModelDescription(
        info.name,
        info.version,
        features,
        info.num_dense,
        info.precision,
        info.plan_hash,
        contract,
        info.needs_weights,
        inputs,
        tuple(info.string_features),
    )


def _shape(sizes: Iterable[str]) -> tuple[int | str, ...]:
    return tuple(int(size) if size.isdecimal() else size for size in sizes)


def _missing(text: str) -> str | int:
    """The missing-feature policy in a FeatureInfo; "reject" for a server older than these policies, which sends none."""
    return int(text) if text.isdecimal() else text or "reject"
