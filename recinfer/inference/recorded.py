"""Reads recorded references: inputs and float outputs of a training program, from ``.npz`` or ``.pt`` files without
pickle.

The file holds ``F.values`` (int64 [ids]) and ``F.lengths`` (int32 [B]) for each feature F, ``F.weights`` (float32 [ids]) for
features of weighted tables, ``dense`` (float32 [B, num_dense]; ``dense_`` if an output has that name), other inputs under their
names (a jagged one as ``NAME.values`` and ``NAME.lengths``), and each output under its name (``output`` if there is only one),
float32 [B, ...].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.check import Request
from recinfer.archive.manifest import InputInfo, Manifest
from recinfer.columns import dense_name
from recinfer.errors import ConfigError, InputError
from recinfer.excerpts import some
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["RecordedBatch", "RecordedReference"]

_BATCH = 1024
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float64)


@dataclass(frozen=True)
class RecordedBatch:
    """Recorded rows from ``first_row`` on as a request, with their recorded outputs in the manifest's order."""

    first_row: int
    request: Request
    outputs: list[Tensor]


@dataclass(frozen=True)
class RecordedReference:
    """The tensors of a reference file, by name."""

    path: str
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> RecordedReference:
        """Read an ``.npz`` (numpy.savez) or ``.pt`` (torch.save of a dict of tensors) file; no code in it is run.

        Raises:
            InputError: another kind of file, or one that holds something else than numbers.
            OSError: it cannot be opened.
        """
        file = Path(path)
        if file.suffix not in (".npz", ".pt"):
            raise InputError(f"reference {file.name}: expected a file named *.npz (numpy.savez) or *.pt (torch.save)")
        with file.open("rb"):  # raises an OSError that names the file if it cannot be opened
            pass
        try:
            found = (
                _read_npz(file) if file.suffix == ".npz" else torch.load(file, map_location="cpu", weights_only=True)
            )
        except Exception as error:  # the exceptions of both libraries' parsers
            kind = "an .npz of plain arrays" if file.suffix == ".npz" else "a .pt of tensors (weights_only)"
            raise InputError(
                f"reference {file.name} cannot be read as {kind}: {type(error).__name__}: {str(error)[:300]}"
            ) from None
        if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
            raise InputError(f"reference {file.name}: expected a dict of tensors, name -> tensor")
        return cls(file.name, {str(name): value.detach() for name, value in found.items()})

    def batches(self, manifest: Manifest) -> list[RecordedBatch]:
        """The recorded rows as requests of at most 1024 rows each.

        Raises:
            ConfigError: the model has no dense part, so no outputs.
            InputError: a tensor is missing, unknown, or has another dtype or shape than the model's; an id is out of range;
                a recorded number is not finite.
        """
        if manifest.dense is None:
            raise ConfigError("reference: this model has no dense part and so no outputs to compare")
        weighted = manifest.weighted_features
        names = list(manifest.request_features)
        jagged = [info for info in manifest.named_inputs if info.kind == "jagged"]
        tensors = [info for info in manifest.named_inputs if info.kind == "tensor"]
        expected = [f"{name}.{part}" for name in names for part in ("values", "lengths")]
        expected += [f"{name}.weights" for name in names if name in weighted]
        given = dense_name(output.name for output in manifest.dense.outputs)
        expected += [given] if manifest.dense.num_dense else []
        expected += [info.name for info in tensors]
        expected += [f"{info.name}.{part}" for info in jagged for part in ("values", "lengths")]
        expected += [output.name for output in manifest.dense.outputs]
        missing = [name for name in expected if name not in self.tensors]
        unknown = sorted(set(self.tensors) - set(expected))
        if missing or unknown:
            raise self._error(
                f"expected {some(expected)}; "
                f"missing {some(missing, none='nothing')}, unknown {some(unknown, none='nothing')}"
            )
        rows = len(self._integers(f"{names[0]}.lengths"))
        if not rows:
            raise self._error("got no rows; record at least one batch")
        lengths = {name: self._lengths(name, rows) for name in names}
        offsets = {name: torch.cat([torch.zeros(1, dtype=torch.int64), n.cumsum(0)]) for name, n in lengths.items()}
        rows_of = {
            name: min(t.rows for t in tables)
            for name, tables in manifest.feature_tables.items()
            if name not in manifest.raw_features | manifest.computed_features
        }
        values = {name: self._ids(name, int(offsets[name][-1]), rows_of.get(name)) for name in names}
        weights = {
            n: self._floats(f"{n}.weights", ids.shape) if n in weighted else torch.ones(len(ids))
            for n, ids in values.items()
        }
        dense = self._floats(given, (rows, manifest.dense.num_dense)) if manifest.dense.num_dense else None
        outputs = [self._floats(o.name, (rows, *o.shape)) for o in manifest.dense.outputs]
        batches = []
        for start in range(0, rows, _BATCH):
            stop = min(start + _BATCH, rows)
            spans = {name: slice(int(offsets[name][start]), int(offsets[name][stop])) for name in names}
            features = KeyedJaggedTensor(
                names,
                torch.cat([values[name][spans[name]] for name in names]),
                torch.cat([weights[name][spans[name]] for name in names]) if weighted else None,
                lengths=torch.cat([lengths[name][start:stop] for name in names]).int(),
            )
            inputs: dict[str, Tensor | JaggedTensor] = {i.name: self._tensor(i, rows)[start:stop] for i in tensors}
            inputs |= {i.name: self._jagged(i, rows, start, stop) for i in jagged}
            request = Request(None if dense is None else dense[start:stop], features, inputs)
            batches.append(RecordedBatch(start, request, [output[start:stop] for output in outputs]))
        return batches

    def _error(self, text: str) -> InputError:
        return InputError(f"reference {self.path}: {text}")

    def _tensor(self, info: InputInfo, rows: int) -> Tensor:
        tensor = self.tensors[info.name]
        if str(tensor.dtype) != f"torch.{info.dtype}" or len(tensor) != rows or tensor.dim() != len(info.shape):
            raise self._error(f"{info.name} is {_shape(tensor)}; expected {info.dtype} {[rows, *info.shape[1:]]}")
        return tensor

    def _jagged(self, info: InputInfo, rows: int, start: int, stop: int) -> JaggedTensor:
        lengths, values = self._lengths(info.name, rows), self.tensors[f"{info.name}.values"]
        if str(values.dtype) != f"torch.{info.dtype}" or len(values) != int(lengths.sum()):
            raise self._error(
                f"{info.name}.values is {_shape(values)}; expected {info.dtype} and "
                f"{int(lengths.sum())} values, the sum of {info.name}.lengths"
            )
        first = int(lengths[:start].sum())
        return JaggedTensor(values[first : first + int(lengths[start:stop].sum())], lengths=lengths[start:stop])

    def _integers(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if tensor.dtype not in _INTEGERS or tensor.dim() != 1:
            raise self._error(f"{name} is {_shape(tensor)}; expected integers with one dimension")
        return tensor.long()

    def _lengths(self, name: str, rows: int) -> Tensor:
        lengths = self._integers(f"{name}.lengths")
        if len(lengths) != rows:
            raise self._error(f"{name}.lengths has {len(lengths)} rows, another feature's lengths {rows}")
        if bool((lengths < 0).any()):
            raise self._error(f"{name}.lengths has negative numbers")
        return lengths

    def _ids(self, name: str, count: int, rows: int | None) -> Tensor:
        values = self._integers(f"{name}.values")
        if len(values) != count:
            raise self._error(f"{name}.values has {len(values)} ids, {name}.lengths sum to {count}")
        if rows is None:  # an ids program or an id step makes rows of them
            return values
        bad = ((values < 0) | (values >= rows)).nonzero()
        if len(bad):
            at = int(bad[0])
            raise self._error(
                f"{name}.values[{at}] is {int(values[at])}; expected ids below {rows}, the rows of its table"
            )
        return values

    def _floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.tensors[name]
        same = [n for n in tensor.shape if n != 1] == [n for n in shape if n != 1]  # [B] equals [B, 1]
        if tensor.dtype not in _FLOATS or not same:
            raise self._error(
                f"{name} is {_shape(tensor)}; expected float32 {list(shape)}, as the model computes it without autocast"
            )
        bad = (~torch.isfinite(tensor)).nonzero()
        if len(bad):
            at = bad[0].tolist()
            raise self._error(f"{name}{at} is {float(tensor[tuple(at)])}; expected finite numbers")
        return tensor.float().reshape(shape)


def _read_npz(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
