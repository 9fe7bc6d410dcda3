"""Exported programs of a test run: of two equal parts of models, the second gets the programs of the first.

An export of a small model takes a second and a half, half of it for the dense part's programs, and some hundred tests export a
model that another test has exported. Parts are equal if their code, their tensors and the names and examples of their inputs are.
Most of the rest is the trace of forward, which an equal model with equal weights shares within a process.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from recinfer.archive.dense import ExportedDense, Part
from recinfer.checkpoint import CheckpointReader
from recinfer.inference.prepare import CutModel, table_keys

__all__ = ["kept_in", "traced_once"]

_MOST_BYTES = 4 << 20


def kept_in(folder: Path, export_part: Callable[[Part], ExportedDense]) -> Callable[[Part], ExportedDense]:
    """``export_part``, which looks for the programs of an equal part in ``folder`` first; processes may share the folder.

    Errors are raised anew each time.
    """

    @functools.wraps(export_part)
    def exported(part: Part) -> ExportedDense:
        file = folder / f"{_key(part)}.programs"
        try:
            return pickle.loads(file.read_bytes())
        except FileNotFoundError:
            made = export_part(part)
        beside = folder / f"{file.name}.{os.getpid()}"
        beside.write_bytes(pickle.dumps(made))
        beside.rename(file)
        return made

    return exported


def _key(part: Part) -> str:
    found = hashlib.blake2b(digest_size=16)
    for described in _described(part):
        found.update(described)
        found.update(b"\0")
    return found.hexdigest()


def _described(part: Part) -> Iterator[bytes]:
    """All of a part that its programs and the comparison between them depend on."""
    yield repr((part.title, part.inputs, part.outputs, _shapes(part))).encode()
    for name, module in part.module.named_modules():
        yield f"{name} {type(module)} {module.code if isinstance(module, fx.GraphModule) else module}".encode()
        tensors: dict[str, Any] = {**module._parameters, **module._buffers, **vars(module)}
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                yield key.encode()
                yield from _bytes_of(tensor)
    for tensor in (*part.example(5, 1), *part.without_ids()):
        yield from _bytes_of(tensor)


def _shapes(part: Part) -> list[str]:
    """The shapes of the inputs, in which a free axis has a name."""
    return [str(tuple(node.meta["val"].shape)) for node in part.program.given]


def _bytes_of(tensor: Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode()
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def traced_once(cut_and_export: Callable[..., CutModel]) -> Callable[..., CutModel]:
    """``cut_and_export``, which returns what it has made of an equal model, weights and further arguments.

    Models are equal if they pickle to the same bytes and their weights outside the tables are equal: programs hold no vectors of
    tables. A model that does not pickle, as one of a class within a test, and one with much data are traced each time. Errors are
    raised anew each time.
    """
    made: dict[bytes, CutModel] = {}

    @functools.wraps(cut_and_export)
    def cut(model: Any, leaves: Any, checkpoint: CheckpointReader, *more: Any) -> CutModel:
        key = _key_of_model(model, leaves, checkpoint, more)
        if key is None:
            return cut_and_export(model, leaves, checkpoint, *more)
        if key not in made:
            made[key] = cut_and_export(model, leaves, checkpoint, *more)
        return made[key]

    return cut


class _Described(pickle.Pickler):
    """Pickles equal tensors to equal bytes, which torch does not: it writes their addresses."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return NotImplemented
        about = f"{type(value)} {value.dtype} {tuple(value.shape)} {value.requires_grad} {value.device}".encode()
        return bytes, (b"\0".join((about, *(() if value.is_meta else _bytes_of(value)))),)


def _key_of_model(model: Any, leaves: Any, checkpoint: CheckpointReader, more: tuple[Any, ...]) -> bytes | None:
    if checkpoint.num_bytes() > _MOST_BYTES:
        return None
    pickled = io.BytesIO()
    try:
        _Described(pickled).dump((model, more))
    except (AttributeError, TypeError, pickle.PicklingError):
        return None
    found = hashlib.blake2b(pickled.getbuffer(), digest_size=16)
    tables = set(table_keys(leaves, checkpoint).values())
    for key in checkpoint.keys():  # noqa: SIM118
        found.update(f"\0{key}\0".encode())
        if key in tables:
            continue
        for described in _bytes_of(checkpoint.read(key)):
            found.update(described)
    return found.digest()
