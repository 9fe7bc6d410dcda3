"""Runs an archive's programs beside the dense one: that of ids, and the dense one in two parts; and reads whole tables for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.check import Request, input_tensor
from recinfer.archive.delta import Delta
from recinfer.archive.dense import DenseEngine, open_program
from recinfer.archive.manifest import DenseInput, Manifest, UserInfo
from recinfer.archive.reader import Archive
from recinfer.archive.rows import RowReader
from recinfer.errors import InputError, UnavailableError
from recinfer.inference.bags import Bags, bags_of, offsets_of
from recinfer.quant.rows import unpack_rows

__all__ = ["IdsProgram", "TensorOf", "UserPrograms", "read_whole_tables"]


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
        self._weighted = bool(manifest.weighted_features)

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


TensorOf = Callable[[DenseInput], Tensor]
"""The tensor of a program's input."""


class UserPrograms:
    """The two programs of an archive that was exported with the user's inputs named.

    Attributes:
        names: the user's inputs; the parts run where a request gives all of them as its context.
    """

    def __init__(self, archive: Archive, info: UserInfo, outputs: Sequence[str], options: Mapping[str, Any]) -> None:
        self.names = frozenset(info.names)
        self._info = info
        self._user = open_program(archive, "dense/user", info.user, info.between, **options)
        self._candidates = open_program(archive, "dense/candidates", info.candidates, outputs, **options)

    def run(self, user_of: TensorOf, tensor_of: TensorOf, batches: Sequence[int]) -> list[Tensor]:
        """The outputs of all samples.

        Args:
            user_of: a user's input with one row per request.
            tensor_of: another input with one row per sample.
            batches: number of samples of each request.
        """
        rows = self._user([user_of(about) for about in self._info.user.inputs])
        repeats = torch.tensor(batches, device=rows[0].device)
        repeated = iter([row.repeat_interleave(repeats, 0) for row in rows])
        return self._candidates(
            [next(repeated) if about.kind == "user" else tensor_of(about) for about in self._info.candidates.inputs]
        )


def read_whole_tables(archive: Archive, deltas: Sequence[Delta]) -> dict[str, Tensor]:
    """Input of the dense program -> float32 [rows, dim], with ``deltas`` applied; empty for most archives.

    Raises:
        UnavailableError: the archive was opened without its rows, as rankers do.
    """
    dense = archive.manifest.dense
    wanted = [] if dense is None else [about for about in dense.inputs if about.kind == "table"]
    if not wanted:
        return {}
    if len(archive.rank_files) < archive.manifest.world_size:
        raise UnavailableError(
            f"forward reads all rows of table {wanted[0].feature!r}, and this process holds none; serve this model without "
            f"shard servers"
        )
    found = {}
    with RowReader(archive) as reader:
        for about in wanted:
            assert about.module is not None
            assert about.feature is not None
            planned = archive.plan.table(about.module, about.feature)
            packed = reader.read(planned, 0, planned.num_embeddings)
            for delta in deltas:
                packed = delta.patch(about.module, about.feature, 0, packed)
            found[about.name] = unpack_rows(packed, planned.embedding_dim, planned.precision)
    return found
