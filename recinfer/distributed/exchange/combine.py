"""Combines received pieces to outputs: adds row pieces and concatenates column pieces, in the module's feature order.

The combination uses one split, sums and one concatenation, so its backward is one concatenation too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate

import torch
from torch import Tensor

__all__ = ["ColumnPlan", "JoinShardings", "Sum", "combine_sums"]


@dataclass(frozen=True)
class Sum:
    """A column piece of an output, as the sum of received pieces.

    Attributes:
        sources: indices of the received pieces.
        divisor: index of the factor (1 / bag length) for the sum; None: no factor.
    """

    sources: tuple[int, ...]
    divisor: int | None = None


class ColumnPlan:
    """Maps the columns of one received tensor to output columns.

    Args:
        widths: columns of each received piece, side by side.
        sums: the output's column pieces from left to right; every received piece is in exactly one.
    """

    def __init__(self, widths: Sequence[int], sums: Sequence[Sum]) -> None:
        starts = [0, *accumulate(widths)]
        runs: list[list[list[int]]] = []  # for each run of sums, [start, stop] of every summand
        self._divisors: list[int | None] = []
        for each in sums:
            spans = [[starts[i], starts[i + 1]] for i in each.sources]
            if (
                runs
                and self._divisors[-1] == each.divisor
                and len(runs[-1]) == len(spans)
                and all(last[1] == span[0] for last, span in zip(runs[-1], spans))
            ):
                for last, span in zip(runs[-1], spans):
                    last[1] = span[1]
            else:
                runs.append(spans)
                self._divisors.append(each.divisor)
        ordered = sorted(tuple(span) for run in runs for span in run)
        place = {span: i for i, span in enumerate(ordered)}
        self._sizes = [stop - start for start, stop in ordered]
        self._runs = [[place[tuple(span)] for span in run] for run in runs]

    def __call__(self, received_BD: Tensor, divisors: Sequence[Tensor] = ()) -> Tensor:
        """Combine.

        Args:
            received_BD: ``[B, sum(widths)]``.
            divisors: ``[B]`` each.
        """
        parts = received_BD.split(self._sizes, dim=1)
        out = []
        for run, divisor in zip(self._runs, self._divisors):
            total = reduce(torch.add, [parts[i] for i in run])
            out.append(total if divisor is None else total * divisors[divisor].unsqueeze(1))
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)


class JoinShardings:
    """Maps the outputs of several shardings to the module's outputs.

    Args:
        widths: for each sharding the columns of its outputs.
        order: (sharding, output) of each output of the module.
    """

    def __init__(self, widths: Sequence[Sequence[int]], order: Sequence[tuple[int, int]]) -> None:
        starts = [[0, *accumulate(each)] for each in widths]
        self._runs: list[list[int]] = []  # sharding, start, stop
        for sharding, i in order:
            start, stop = starts[sharding][i : i + 2]
            if self._runs and self._runs[-1][0] == sharding and self._runs[-1][2] == start:
                self._runs[-1][2] = stop
            else:
                self._runs.append([sharding, start, stop])

    def __call__(self, outputs_BD: Sequence[Tensor]) -> Tensor:
        """``[B, sum of dims]`` of the module, from the ``[B, columns]`` of each sharding."""
        if len(self._runs) == 1 and len(outputs_BD) == 1:
            return outputs_BD[0]
        return torch.cat([outputs_BD[sharding][:, start:stop] for sharding, start, stop in self._runs], dim=1)


def combine_sums(
    pieces: Sequence[Tensor], outputs: Sequence[Sequence[Sum]], divisors: Sequence[Tensor]
) -> list[Tensor]:
    """Combine pieces of different batch sizes: one tensor ``[B of the feature, D]`` per output."""
    result = []
    for sums in outputs:
        columns = []
        for each in sums:
            total = reduce(torch.add, [pieces[i] for i in each.sources])
            columns.append(total if each.divisor is None else total * divisors[each.divisor].unsqueeze(1))
        result.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
    return result
