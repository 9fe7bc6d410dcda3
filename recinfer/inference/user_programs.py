"""Runs a dense program in two parts: the user's part once per request, the candidates' part for every sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from recinfer.archive.dense import open_info
from recinfer.archive.manifest import DenseInput, UserInfo
from recinfer.archive.reader import Archive

__all__ = ["TensorOf", "UserPrograms"]

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
        self._user = open_info(archive, "dense/user", info.user, info.between, **options)
        self._candidates = open_info(archive, "dense/candidates", info.candidates, outputs, **options)

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
