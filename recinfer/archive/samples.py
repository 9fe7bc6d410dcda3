"""Makes requests for a traced model, which keep the facts that its forward relies on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recinfer.archive.check import Request
from recinfer.archive.manifest import InputInfo
from recinfer.archive.split import Facts, ModuleLookup
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = ["Samples", "samples_of"]

_MOST = 3  # ids of a random bag


@dataclass(frozen=True)
class Samples:
    """Makes requests out of an example batch.

    Attributes:
        examples: (input, part) -> its tensor in an example batch, as recinfer.capture.Slot names parts.
        infos: the inputs that forward uses.
        facts: facts about them.
        features: features of a request, in order.
        rows: rows of the smallest table of each feature that a lookup reads as it is.
        longest: longest bag of features that have a limit.
        weighted: whether requests carry weights.
        num_dense: columns of ``dense``; 0 where requests name their tensors.
        never_empty: whether bags that the example batch never has empty get an id at least.
    """

    examples: Mapping[tuple[str, str], Tensor]
    infos: Sequence[InputInfo]
    facts: Facts
    features: Sequence[str]
    rows: Mapping[str, int]
    longest: Mapping[str, int]
    weighted: bool
    num_dense: int
    never_empty: bool = False

    def request(
        self, batch: int, generator: torch.Generator, *, size: int | None = None, edges: bool = False
    ) -> Request:
        """A random request.

        Args:
            batch: number of samples.
            size: number of ids of each bag that is free; None draws 0 to 3.
            edges: give each first bag two ids, the first and the last of its table.
        """
        lengths: dict[str, Tensor] = {}
        jagged = [info for info in self.infos if info.kind != "tensor"]
        for info in jagged:
            lengths[info.name] = self._lengths(info.name, batch, generator, size, edges)
        as_long_as, values = self.facts.as_long_as, {}
        for name, counted in self.facts.counts.items():
            if name in lengths:
                lengths[name] = lengths[as_long_as.get(name, name)]
                values[name], lengths[counted] = self._count(name, lengths[name], generator, size, edges)
        for name, other in as_long_as.items():
            if name in lengths:
                lengths[name] = lengths[other]
        for info in jagged:
            if info.name not in values:
                values[info.name] = self._values(info.name, int(lengths[info.name].sum()), generator)
        if edges:
            for name in self.features:
                ids, rows = values[name], self.rows.get(name)
                if rows is not None and len(ids) > 1:
                    ids[:2] = torch.tensor([0, rows - 1])
        none = torch.zeros(0, dtype=torch.int64)
        ids = torch.cat([none, *(values[name].long() for name in self.features)])
        features = KeyedJaggedTensor(
            list(self.features),
            ids,
            lengths=torch.cat([none, *(lengths[name] for name in self.features)]).int(),
            weights=torch.rand(len(ids), generator=generator) + 0.5 if self.weighted else None,
            stride=batch,
        )
        inputs: dict[str, Tensor | JaggedTensor] = {}
        dense = None
        for info in self.infos:
            if info.kind == "tensor":
                tensor = self._tensor(info, batch, generator)
                if self.num_dense:
                    dense = tensor
                else:
                    inputs[info.name] = tensor
            elif info.kind == "jagged":
                weights = torch.rand(len(values[info.name]), generator=generator) + 0.5 if info.weighted else None
                inputs[info.name] = JaggedTensor(values[info.name], weights, lengths[info.name])
        return Request(dense, features, inputs)

    def _lengths(self, name: str, batch: int, generator: torch.Generator, size: int | None, edges: bool) -> Tensor:
        fixed = self.facts.per_sample.get(name)
        if fixed is not None:
            return torch.full((batch,), fixed)
        if size is not None:
            drawn = torch.full((batch,), size)
        else:
            drawn = torch.randint(0, _MOST + 1, (batch,), generator=generator)
        if edges:
            drawn[0] = 2
        return drawn.clamp(min=self._fewest(name), max=self.longest.get(name, _MOST))

    def _fewest(self, name: str) -> int:
        example = self.examples.get((name, "lengths"))
        return int(self.never_empty and example is not None and bool((example > 0).all()))

    def _count(
        self, name: str, lengths: Tensor, generator: torch.Generator, size: int | None, edges: bool
    ) -> tuple[Tensor, Tensor]:
        """Numbers of values that the input ``name`` of ``lengths`` [B] counts, and their sum of each sample."""
        counts = self._lengths(name, int(lengths.sum()), generator, size, edges and bool(lengths.sum()))
        total = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        ends = lengths.cumsum(0)
        return counts, total[ends] - total[ends - lengths]

    def _values(self, name: str, count: int, generator: torch.Generator) -> Tensor:
        """Ids below the table's rows, or values of the example batch."""
        rows = self.rows.get(name)
        if rows is not None:
            return torch.randint(0, rows, (count,), generator=generator)
        pool = self.examples[name, "values"]
        if not len(pool):
            return pool.new_zeros((count, *pool.shape[1:]))
        return pool[torch.randint(0, len(pool), (count,), generator=generator)]

    def _tensor(self, info: InputInfo, batch: int, generator: torch.Generator) -> Tensor:
        example = self.examples[info.name, "tensor"]
        if info.shape[:1] != ("batch",):
            return example.clone()
        return example[torch.randint(0, len(example), (batch,), generator=generator)]


def samples_of(
    lookups: Sequence[ModuleLookup],
    infos: Sequence[InputInfo],
    facts: Facts,
    examples: Mapping[tuple[str, str], Tensor],
    num_dense: int,
    computed: Collection[str] = (),
) -> Samples:
    """Requests for a model with these lookups and inputs, see :class:`Samples`.

    Args:
        computed: features of lookups whose ids forward computes; a request's feature may have the same name.
    """
    given = [info.name for info in infos if info.kind == "ids"]
    rows: dict[str, int] = {}
    longest: dict[str, int] = {}
    for lookup in lookups:
        for table, name in lookup.columns:
            if name in given and name not in computed:
                size = lookup.leaf.configs[table].num_embeddings
                rows[name] = min(size, rows.get(name, size))
        for name, (_, positions) in (lookup.position_weights or {}).items():
            longest[name] = min(positions, longest.get(name, positions))
    features = tuple(dict.fromkeys([*rows, *given]))
    weighted = any(lookup.leaf.about.weighted for lookup in lookups)
    weighted = weighted or any(info.weighted for info in infos if info.kind == "ids")
    return Samples(examples, infos, facts, features, rows, longest, weighted, num_dense)
