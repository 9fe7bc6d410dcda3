"""Exported programs of a test run: of two equal parts of models, the second gets the programs of the first.

An export of a small model takes a second and a half, half of it for the dense part's programs, and some hundred tests export a
model that another test has exported. Parts are equal if their code, their tensors and the names and examples of their inputs are.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from recinfer.archive.dense import ExportedDense, Part

__all__ = ["kept_in"]


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
    yield repr((part.title, part.inputs, part.free, part.outputs)).encode()
    for name, module in part.module.named_modules():
        yield f"{name} {type(module)} {module.code if isinstance(module, fx.GraphModule) else module}".encode()
        tensors: dict[str, Any] = {**module._parameters, **module._buffers, **vars(module)}
        for key, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                yield key.encode()
                yield from _bytes_of(tensor)
    for tensor in (*part.example(5, 1), *part.without_ids()):
        yield from _bytes_of(tensor)


def _bytes_of(tensor: Tensor) -> Iterator[bytes]:
    yield f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}".encode()
    yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
