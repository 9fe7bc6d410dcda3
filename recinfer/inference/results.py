"""Results of requests: the embeddings of their features, in the model's order."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recinfer.errors import NotFoundError
from recinfer.inference.specs import FeatureSpec, InputSpec, Outputs
from recinfer.quant.transfers import to_host
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedTensor

if TYPE_CHECKING:  # clients import this module for their results, and load no kernels
    from recinfer.archive.manifest import Manifest
    from recinfer.inference.lookups import Part

__all__ = [
    "FeatureSpec",
    "InputSpec",
    "LookupResult",
    "Outputs",
    "feature_specs",
    "input_specs",
    "on_host",
    "selected",
    "tensors_of",
]


@dataclass(frozen=True)
class LookupResult:
    """Embeddings of a request's features, in the model's order.

    Attributes:
        pooled: float32 [B, sum of dims], or None if no pooled feature was requested.
        sequences: name -> values float32 [ids, dim] with their lengths.
        missing: ranks whose hosts did not respond; the vectors of their rows are zero.
    """

    pooled: KeyedTensor | None
    sequences: dict[str, JaggedTensor]
    missing: tuple[int, ...] = ()

    def keys(self) -> list[str]:
        """All names, pooled outputs first."""
        return [*(self.pooled.keys() if self.pooled is not None else ()), *self.sequences]

    def __getitem__(self, name: str) -> Tensor | JaggedTensor:
        """The vectors of one name: [B, dim] when pooled; raises NotFoundError."""
        if name in self.sequences:
            return self.sequences[name]
        if self.pooled is not None and name in self.pooled.keys():  # noqa: SIM118 - not a dict
            return self.pooled[name]
        raise NotFoundError(f"no embedding {name!r} in this result; it has {', '.join(self.keys())}")


def feature_specs(manifest: Manifest, names: dict[str, list[str]]) -> list[FeatureSpec]:
    """The outputs of lookup, in the model's order; ``names`` are the output names of each module by its path."""
    missing = {feature.name: feature.missing for feature in manifest.features}
    specs = []
    for module in manifest.modules:
        looked_up = [(table, name) for table in manifest.module_tables(module.path) for name in table.features]
        for name, (table, feature) in zip(names[module.path], looked_up):
            pooled = module.kind == "pooled"
            flags = missing[feature], feature in manifest.weighted_features, feature in manifest.computed_features
            specs.append(FeatureSpec(name, table.name, table.rows, table.dim, pooled, *flags))
    return specs


def input_specs(manifest: Manifest) -> tuple[InputSpec, ...]:
    """The inputs of forward; none for an archive without a signature."""
    signature = manifest.signature
    if signature is None:
        return ()
    return tuple(
        InputSpec(
            **vars(info),
            per_sample=signature.per_sample.get(info.name, 0),
            as_long_as=signature.as_long_as.get(info.name, ""),
            counts=signature.counts.get(info.name, ""),
            user=signature.user is not None and info.name in signature.user.names,
        )
        for info in signature.inputs
    )


def selected(
    parts: Sequence[Part], found: Sequence[Any], present: Set[str] | None, missing: tuple[int, ...] = ()
) -> LookupResult:
    """The embeddings of the features ``present`` (None: all), from the result of each module on the CPU (None: not looked up)."""
    pooled: list[KeyedTensor] = []
    sequences: dict[str, JaggedTensor] = {}
    for part, given in zip(parts, found):
        wanted = None if present is None else [f in present for f in part.info.features]
        if given is None or (wanted is not None and not any(wanted)):
            continue
        if part.info.kind == "pooled":
            pooled.append(_pooled(part, given, wanted))
        else:
            chosen = zip(part.names, given, wanted or [True] * len(part.names))
            sequences.update({name: sequence for name, sequence, keep in chosen if keep})
    return LookupResult(_joined(pooled), sequences, missing)


def tensors_of(found: Tensor | list[JaggedTensor], *, dense_input: bool = False) -> list[Tensor]:
    """The vectors of one module; for the dense part also the lengths of each sequence."""
    if isinstance(found, Tensor):
        return [found]
    if not dense_input:
        return [sequence.values() for sequence in found]
    return [tensor for sequence in found for tensor in (sequence.values(), sequence.lengths().long())]


def _pooled(part: Part, values: Tensor, wanted: Sequence[bool] | None) -> KeyedTensor:
    if wanted is None or all(wanted):
        return KeyedTensor.from_parts_unchecked(part.names, part.dims, values)
    chosen = [i for i, keep in enumerate(wanted) if keep]
    columns = values.split(part.dims, dim=1)
    return KeyedTensor(
        [part.names[i] for i in chosen],
        [part.dims[i] for i in chosen],
        torch.cat([columns[i] for i in chosen], dim=1),
    )


def _joined(pooled: Sequence[KeyedTensor]) -> KeyedTensor | None:
    if len(pooled) <= 1:
        return pooled[0] if pooled else None
    return KeyedTensor(
        [key for part in pooled for key in part.keys()],  # noqa: SIM118 - not a dict
        [dim for part in pooled for dim in part.length_per_key()],
        torch.cat([part.values() for part in pooled], dim=1),
    )


def on_host(found: Sequence[Any]) -> list[Any]:
    """The results of modules, copied from a GPU together."""
    tensors: list[Tensor] = []
    for given in found:
        if isinstance(given, Tensor):
            tensors.append(given)
        elif given is not None:
            tensors += [tensor for sequence in given for tensor in (sequence.values(), sequence.lengths())]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(found)
    copies = iter(to_host(tensors))

    def copied(given: Any) -> Any:
        if given is None or isinstance(given, Tensor):
            return None if given is None else next(copies)
        return [JaggedTensor.from_parts_unchecked(next(copies), None, next(copies)) for _ in given]

    return [copied(given) for given in found]
