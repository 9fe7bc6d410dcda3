"""Turns the arguments of forward into a request, and outputs into forward's result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from recinfer.archive.manifest import Manifest
from recinfer.capture import CaptureError, read_arguments
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, offsets_of
from recinfer.inference.together import PredictInputs
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["Call"]

Parts = Mapping[str, Tensor]


class Call:
    """Reads the arguments of forward by an archive's signature.

    Args:
        manifest: of the archive; one of an earlier version has no signature and can't be called.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._signature = manifest.signature

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PredictInputs:
        """The request for arguments of forward; inputs of one sample beside features of many are its context.

        Raises:
            InputError: an argument is missing, or an input of forward is not in it.
        """
        signature = self._signature
        if signature is None:
            raise InputError(
                "this archive has no signature (an earlier recinfer wrote it, or it has no dense part); call "
                "predict(dense, features) or lookup(features)"
            )
        try:
            found: dict[str, dict[str, Tensor]] = {}
            for slot, tensor in read_arguments(signature.arguments, args, kwargs):
                found.setdefault(slot.path, {})[slot.part] = tensor
        except CaptureError as error:
            raise InputError(str(error)) from None
        features: dict[str, Parts] = {}
        inputs: dict[str, Any] = {}
        for info in signature.inputs:
            parts = found.get(info.path)
            if parts is None:
                raise InputError(f"{info.path} is missing; forward takes it as {info.name!r} ({info.dtype})")
            if info.kind == "ids":
                features[info.name] = parts
            elif info.kind == "jagged":
                inputs[info.name] = JaggedTensor(parts["values"], parts.get("weights"), parts["lengths"])
            else:
                inputs[info.name] = parts["tensor"]
        sizes = {name: len(parts["lengths"]) for name, parts in features.items()}
        most = max(sizes.values(), default=0)
        own = {name: parts for name, parts in features.items() if sizes[name] == 1 < most}
        rest = {name: parts for name, parts in features.items() if name not in own}
        batched = {i.name for i in signature.inputs if i.kind == "jagged" or i.shape[:1] == ("batch",)}
        once = {
            name: value
            for name, value in inputs.items()
            if most > 1 and name in batched and len(value.lengths() if isinstance(value, JaggedTensor) else value) == 1
        }
        return PredictInputs(
            None,
            _bags(rest) if rest else None,
            _bags(own) if own else None,
            {name: value for name, value in inputs.items() if name not in once},
            once,
        )

    def returned(self, outputs: Mapping[str, Tensor]) -> Any:
        """Forward's result around ``outputs``."""
        assert self._signature is not None
        return _filled(self._signature.returns or None, outputs)


def _bags(features: Mapping[str, Parts]) -> Bags:
    names = tuple(features)
    lengths = [parts["lengths"].numpy() for parts in features.values()]
    if len({len(each) for each in lengths}) > 1:
        sizes = ", ".join(f"{name}: {len(each)}" for name, each in zip(names, lengths))
        raise InputError(
            f"features have different numbers of samples ({sizes}); expected one number, or 1 for a context"
        )
    values = np.concatenate([parts["values"].numpy() for parts in features.values()])
    weights = None
    if any("weights" in parts for parts in features.values()):
        weights = np.concatenate(
            [
                parts["weights"].float().numpy() if "weights" in parts else np.ones(len(parts["values"]), np.float32)
                for parts in features.values()
            ]
        )
    weighted = tuple(name for name, parts in features.items() if "weights" in parts)
    return Bags(names, len(lengths[0]), offsets_of(np.concatenate(lengths), values.dtype), values, weights, weighted)


def _filled(structure: Any, outputs: Mapping[str, Tensor]) -> Any:
    if structure is None:
        return None
    ((kind, inner),) = structure.items()
    if kind == "output":
        return outputs[inner]
    if kind == "dict":
        return {key: _filled(part, outputs) for key, part in inner.items()}
    items = [_filled(part, outputs) for part in inner]
    return items if kind == "list" else tuple(items)
