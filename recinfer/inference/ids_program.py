"""Runs an archive's ids program, which computes the ids of lookups from a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from recinfer.archive.check import Request, input_tensor
from recinfer.archive.dense import DenseEngine
from recinfer.archive.manifest import DenseInput, Manifest
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, bags_of, offsets_of

__all__ = ["IdsProgram"]


class IdsProgram:
    """Computes the features of lookups that no request brings.

    Args:
        manifest: of an archive with an ids program.
        engine: the opened program.
    """

    def __init__(self, manifest: Manifest, engine: DenseEngine) -> None:
        signature = manifest.signature
        assert signature is not None
        assert signature.ids is not None
        self._info = signature.ids
        self._engine = engine
        self._weighted = any(m.is_weighted and m.position_weights is None for m in manifest.modules)

    def run(self, given: Bags, tensor_of: Callable[[DenseInput], Tensor]) -> Bags:
        """The features that lookups read.

        Args:
            given: the features of requests.
            tensor_of: the tensor of a program's input.

        Raises:
            InputError: the program fails, or gives lengths or ids that do not fit each other.
        """
        try:
            results = self._engine([tensor_of(about) for about in self._info.inputs])
        except InputError:
            raise
        except Exception as error:  # each engine raises its own types for errors of the archive's program
            reason = " ".join(str(error).split())[:300]
            raise InputError(
                f"the archive's ids program fails on this request: {type(error).__name__}: {reason}"
            ) from None
        outputs = dict(zip(self._info.outputs, results))
        passed = [key for key in given.keys if key not in self._info.features]
        kept = given.arranged(tuple(passed)) if passed else None
        lengths = [] if kept is None else [kept.lengths_FB.astype(np.int64)]
        values = [] if kept is None else [kept.values.astype(np.int64, copy=False)]
        weights = [] if kept is None else [_ones(kept.values.size) if kept.weights is None else kept.weights]
        for name in self._info.features:
            ids, counts = outputs[f"computed/{name}/values"].numpy(), outputs[f"computed/{name}/lengths"].numpy()
            _check(name, ids, counts, given.batch)
            lengths.append(counts.astype(np.int64).reshape(1, -1))
            values.append(ids.astype(np.int64, copy=False))
            heavy = outputs.get(f"computed/{name}/weights")
            weights.append(_ones(ids.size) if heavy is None else heavy.numpy().astype(np.float32))
        return Bags(
            (*passed, *self._info.features),
            given.batch,
            offsets_of(np.concatenate(lengths), np.int64),
            np.concatenate(values),
            np.concatenate(weights) if self._weighted else None,
        )

    def looked_up(self, request: Request) -> Request:
        """``request`` with the features that lookups read in place of its own."""
        found = self.run(bags_of(request.features), lambda about: input_tensor(about, request))
        return Request(request.dense, found.kjt(), request.inputs)


def _ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


def _check(name: str, ids: np.ndarray, counts: np.ndarray, batch: int) -> None:
    """Raise InputError unless the program's answer describes the bags of ``batch`` samples."""
    shapes: Sequence[object] = (list(ids.shape), list(counts.shape))
    if ids.ndim != 1 or counts.shape != (batch,) or ids.dtype.kind not in "iu" or counts.dtype.kind not in "iu":
        raise InputError(
            f"the archive's ids program gives feature {name!r} ids of shape {shapes[0]} and lengths of shape {shapes[1]}; "
            f"expected [ids] and [{batch}] integers"
        )
    if (counts < 0).any() or int(counts.sum()) != ids.size:
        raise InputError(
            f"the archive's ids program gives feature {name!r} {ids.size} ids, and lengths that sum to {int(counts.sum())}"
        )
