"""Cuts a model into embedding lookups and programs: traces forward on an example batch and splits it at the lookups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.archive.check import Request, golden_requests, input_tensor
from recinfer.archive.dense import Part
from recinfer.archive.leaves import Leaf
from recinfer.archive.made_batch import made_batch
from recinfer.archive.manifest import DenseInput, InputInfo, Signature
from recinfer.archive.samples import Samples, samples_of
from recinfer.archive.split import ModuleLookup, Split, split
from recinfer.archive.subgraph import Program
from recinfer.archive.user_axis import split_user
from recinfer.capture import Captured, CaptureError, Slot, brief, trace
from recinfer.errors import ConfigError

__all__ = ["Cut", "cut_captured", "cut_model"]

_TRIALS = 50


_TITLES = {
    "model": "the dense part",
    "ids": "the program that computes ids",
    "user": "the user program",
    "candidates": "the candidates program",
}
"""Names of programs, as those of their files, and their names in messages."""


@dataclass(frozen=True)
class Cut:
    """A model cut at its lookups.

    Attributes:
        parts: the programs by the names of their files: ``model``, the dense part behind the lookups; ``ids``, which computes features
            before them, where forward does not pass its ids on; ``user`` and ``candidates``, the dense part in two, with ``user``.
        computed: features that the ids program computes -> whether their ids carry weights.
        user: names of the user's inputs, as the caller gave them.
        signature: what forward takes and returns, without programs.
        lookups: the lookups of each module.
        num_dense: columns of the dense input; 0 where requests name their tensors.
        outputs: output names and shapes behind the batch.
        samples: makes requests.
    """

    parts: dict[str, Part]
    computed: dict[str, bool]
    user: tuple[str, ...]
    signature: Signature
    lookups: tuple[ModuleLookup, ...]
    num_dense: int
    outputs: dict[str, tuple[int, ...]]
    samples: Samples

    @property
    def tables(self) -> set[tuple[str, str]]:
        """(module path, table) of the tables that lookups read."""
        return {(lookup.leaf.path, config.name) for lookup in self.lookups for config in lookup.leaf.configs}

    @property
    def dense(self) -> Part:
        """The dense part."""
        return self.parts["model"]


def cut_model(
    model: nn.Module,
    leaves: Sequence[Leaf],
    load: Callable[[nn.Module], object],
    batches: Sequence[Any] = (),
    num_dense: int | None = None,
    user: Sequence[str] = (),
) -> Cut | None:
    """Cut ``model`` at its embedding modules ``leaves``.

    Args:
        model: not changed; its dense parameters may be on meta.
        leaves: the model's embedding modules, whose tables are neither copied nor read.
        load: fills the parameters and buffers of the model without its leaves.
        batches: example batches, see recinfer.capture.capture; none: a made one, for a forward that takes one float matrix
            and passes its sparse inputs on.
        num_dense: columns of the dense input of a made batch, where they are known.
        user: names of the user's inputs, for one user with many candidates.

    Returns:
        the cut, or None if the model is a single embedding module.

    Raises:
        ConfigError: forward cannot be traced or split; the message names the input or the line.
    """
    if len(leaves) == 1 and leaves[0].module is model and not leaves[0].about.plain:
        return None

    def prepare(body: nn.Module) -> None:
        load(body)
        _refuse_meta(body)

    modules = [leaf.module for leaf in leaves]
    abouts = [leaf.about for leaf in leaves]
    try:
        if not batches:
            batches = [made_batch(model, leaves, prepare, num_dense)]
        captured = trace(model, modules, abouts, batches, prepare)
    except CaptureError as error:
        raise ConfigError(str(error)) from error
    return cut_captured(captured, leaves, user)


def cut_captured(captured: Captured, leaves: Sequence[Leaf], user: Sequence[str] = ()) -> Cut:
    """Split a trace of the model of ``leaves``, and describe what requests bring; see :func:`cut_model`."""
    leaves = [leaf.with_tables(about.plain) if about.plain else leaf for leaf, about in zip(leaves, captured.modules)]
    parts = split(captured, leaves)
    used = _used_slots(captured, parts)
    infos = tuple(_infos(used, _weighted(parts)))
    parts, num_dense = _with_plain_dense(parts, infos)
    examples: dict[tuple[str, str], Tensor] = {
        (slot.name, slot.part): tensor for slot, tensor in zip(captured.slots, captured.examples)
    }
    samples = samples_of(parts.lookups, infos, parts.facts, examples, num_dense, parts.computed)
    known = {info.name for info in infos}
    signature = Signature(
        arguments=captured.arguments,
        inputs=infos,
        per_sample={name: count for name, count in parts.facts.per_sample.items() if name in known},
        as_long_as={a: b for a, b in parts.facts.as_long_as.items() if a in known and b in known},
        at_most={axis: n for axis, n in captured.at_most.items() if any(axis in info.shape for info in infos)},
        ids=None,
        returns=captured.structure or {},
        user=None,
        counts={a: b for a, b in parts.facts.counts.items() if a in known and b in known},
    )
    trials = _Trials(parts, samples)
    programs = {"model": parts.dense}
    if parts.ids is not None:
        programs["ids"] = parts.ids
    if user:
        programs["user"], programs["candidates"] = _split_user(parts, infos, user, trials)
        trials.user = programs["user"]
    outputs = _check_outputs(trials.part("model", parts.dense))
    if not trials.finite(parts.dense):  # a mean or a softmax over no ids
        samples = replace(samples, never_empty=True)
    return Cut(
        parts={name: trials.part(name, program) for name, program in programs.items()},
        computed=parts.computed,
        user=tuple(user),
        signature=signature,
        lookups=parts.lookups,
        num_dense=num_dense,
        outputs=outputs,
        samples=samples,
    )


def _split_user(
    parts: Split, infos: Sequence[InputInfo], names: Sequence[str], trials: _Trials
) -> tuple[Program, Program]:
    """The parts of the dense program that read the user's inputs ``names``, and the others."""
    unknown = [name for name in names if name not in {info.name for info in infos}]
    if unknown:
        raise ConfigError(
            f"user: forward has no input {unknown[0]!r}; its inputs are {', '.join(info.name for info in infos)}"
        )
    if parts.computed:
        raise ConfigError(
            f"user: forward computes the ids of {next(iter(parts.computed))!r}, and the user's part runs once only where forward passes "
            f"all ids on; compute them before the request, or leave user out"
        )
    if all(info.name in names for info in infos if info.kind == "ids"):
        raise ConfigError("user: all features are the user's, so that nothing tells candidates apart; name fewer")
    owned = {about.name for about in parts.dense.inputs if trials.read_by(about, infos) <= set(names)}
    pooled = {about.name: trials.columns(about) for about in parts.dense.inputs if about.kind == "pooled"}
    mixed = {name: [feature in names for feature in columns] for name, columns in pooled.items() if name not in owned}
    return split_user(parts.dense, owned, mixed)


def _refuse_meta(body: nn.Module) -> None:
    stuck = [name for name, tensor in [*body.named_parameters(), *body.named_buffers()] if tensor.is_meta]
    for path, module in body.named_modules():
        plain = [name for name, value in vars(module).items() if isinstance(value, Tensor) and value.is_meta]
        stuck += [f"{path}.{name}" if path else name for name in plain]
    if stuck:
        raise ConfigError(
            f"{', '.join(stuck[:5])} of the model are on the meta device and not in the checkpoint; create tensors "
            f"that are neither parameters nor persistent buffers on the CPU (only tables need device='meta')"
        )


# ------------------------------------------------------------------------------------------------- what requests bring


def _used_slots(captured: Captured, parts: Split) -> list[Slot]:
    """The tensors that a program or a lookup reads, and the other parts of the same jagged inputs."""
    programs = [program for program in (parts.dense, parts.ids) if program is not None]
    used = {i.feature for program in programs for i in program.inputs if i.kind == "tensor" or "jagged" in i.kind}
    used |= {name for lookup in parts.lookups for _, name in lookup.columns}
    used |= {parts.facts.as_long_as[name] for name in used if name in parts.facts.as_long_as}
    used |= {parts.facts.counts[name] for name in used if name in parts.facts.counts}
    return [slot for slot in captured.slots if slot.name in used]


def _weighted(parts: Split) -> set[str]:
    """The features whose weights a lookup or a program reads."""
    programs = [program for program in (parts.dense, parts.ids) if program is not None]
    read = {i.feature or "" for program in programs for i in program.inputs if i.kind == "jagged_weights"}
    lookups = [lookup for lookup in parts.lookups if lookup.leaf.about.weighted]
    return read | {name for lookup in lookups for _, name in lookup.columns if name not in parts.computed}


def _infos(slots: Sequence[Slot], weighted_ids: Collection[str]) -> list[InputInfo]:
    infos: dict[str, InputInfo] = {}
    weighted = {slot.name for slot in slots if slot.part == "weights"}
    for slot in slots:
        if slot.part == "tensor":
            infos[slot.name] = InputInfo(slot.name, slot.path, "tensor", slot.dtype, slot.shape, False)
        elif slot.part == "values":
            is_ids = slot.dtype == "int64" and len(slot.shape) == 1
            infos[slot.name] = InputInfo(
                slot.name,
                slot.path,
                "ids" if is_ids else "jagged",
                slot.dtype,
                (f"values of {slot.name}"[:256], *slot.shape[1:]),
                slot.name in weighted and (slot.name in weighted_ids or not is_ids),
            )
    return list(infos.values())


def _with_plain_dense(parts: Split, infos: Sequence[InputInfo]) -> tuple[Split, int]:
    """The parts and the width of the dense matrix, where that is the only input beside ids; it is ``dense`` then."""
    others = [info for info in infos if info.kind != "ids"]
    if len(infos) == 1:  # the features of a request tell its number of samples, as those of ``dense`` do not
        return parts, 0
    if len(others) != 1 or others[0].kind != "tensor" or others[0].dtype != "float32":
        return parts, 0
    if all(about.kind != "tensor" for about in parts.dense.inputs):
        return parts, 0  # the ids program alone reads it
    shape = others[0].shape
    if len(shape) != 2 or shape[0] != "batch" or not isinstance(shape[1], int) or not shape[1]:
        return parts, 0
    dense = DenseInput("dense", "dense", None, None, shape[1])

    def renamed(program: Program) -> Program:
        return replace(program, inputs=tuple(dense if i.kind == "tensor" else i for i in program.inputs))

    ids = None if parts.ids is None else renamed(parts.ids)
    return replace(parts, dense=renamed(parts.dense), ids=ids), shape[1]


# ------------------------------------------------------------------------------------------------- examples of parts


class _Trials:
    """Makes inputs of programs: of random requests, with random vectors of as many rows as the lookups would give.

    Attributes:
        user: the user program, whose outputs the candidates program takes; None without one.
    """

    user: Program | None = None

    def __init__(self, parts: Split, samples: Samples) -> None:
        self._ids = parts.ids
        self._samples = samples
        self._lookups = {lookup.leaf.path: lookup for lookup in parts.lookups}
        self._features = {  # output of a sequence module -> the feature of its ids
            (lookup.leaf.path, output): feature
            for lookup in parts.lookups
            if not lookup.leaf.about.pooled
            for output, (_, feature) in zip(lookup.leaf.output_names(lookup.features), lookup.columns)
        }

    def part(self, name: str, program: Program) -> Part:
        """The part ``program`` with its trials."""
        return Part(
            _TITLES[name],
            program,
            lambda batch, seed: self.example(program.inputs, batch, seed),
            lambda: self.without_ids(program.inputs),
        )

    def read_by(self, about: DenseInput, infos: Sequence[InputInfo]) -> set[str]:
        """The inputs of requests that a program's input depends on."""
        if about.kind == "table":
            return {info.name for info in infos}
        if about.kind == "dense":
            return {info.name for info in infos if info.kind == "tensor"}
        if about.kind == "pooled":
            return set(self.columns(about))
        return {self._features.get((about.module or "", about.feature or ""), about.feature or "")}

    def columns(self, about: DenseInput) -> list[str]:
        """The feature of each column of a pooled input."""
        lookup = self._lookups[about.module or ""]
        return [name for table, name in lookup.columns for _ in range(lookup.leaf.configs[table].embedding_dim)]

    def example(self, inputs: Sequence[DenseInput], batch: int, seed: int) -> list[Tensor]:
        """Inputs for ``batch`` samples; no free size is below 2 unless the batch is."""
        tensors: list[Tensor] = []
        for trial in range(_TRIALS):
            generator = torch.Generator().manual_seed(seed + 1000 * trial)
            tensors = self._tensors(inputs, self._samples.request(batch, generator, edges=True), generator)
            if batch < 2 or all(tensor.shape[0] >= 2 for tensor in tensors if tensor.dim()):
                break
        return tensors

    def without_ids(self, inputs: Sequence[DenseInput]) -> list[Tensor]:
        """Inputs of two samples without ids, but for features that need some."""
        generator = torch.Generator().manual_seed(0)
        return self._tensors(inputs, self._samples.request(2, generator, size=0), generator)

    def finite(self, program: Program) -> bool:
        """Whether the program gives finite outputs for the golden requests, with random vectors; also True if it fails."""
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                return all(
                    bool(torch.isfinite(output).all())
                    for request in golden_requests(self._samples)
                    for output in program.module(*self._tensors(program.inputs, request, generator)).values()
                )
        except (RuntimeError, IndexError):  # the trials of both engines say what to do
            return True

    def _tensors(self, inputs: Sequence[DenseInput], request: Request, generator: torch.Generator) -> list[Tensor]:
        computed: dict[str, Tensor] = {}
        with torch.no_grad():
            if self._ids is not None:
                computed |= self._ids.module(*(input_tensor(about, request) for about in self._ids.inputs))
            if self.user is not None and any(about.kind == "user" for about in inputs):
                computed |= self.user.module(*self._tensors(self.user.inputs, request, generator))
        return [self._tensor(about, request, generator, computed) for about in inputs]

    def _tensor(
        self, about: DenseInput, request: Request, generator: torch.Generator, computed: Mapping[str, Tensor]
    ) -> Tensor:
        if about.kind == "user":
            return computed[about.name]
        if about.kind == "pooled":
            return torch.randn(request.features.stride(), about.dim, generator=generator)
        if about.kind == "table":
            configs = self._lookups[about.module or ""].leaf.configs
            rows = next(config.num_embeddings for config in configs if config.name == about.feature)
            return torch.randn(rows, about.dim, generator=generator)
        if about.kind not in ("values", "lengths"):
            return input_tensor(about, request)
        feature = self._features[about.module or "", about.feature or ""]
        lengths = computed.get(f"computed/{feature}/lengths")
        if lengths is None:
            lengths = request.features[feature].lengths().long()
        return lengths if about.kind == "lengths" else torch.randn(int(lengths.sum()), about.dim, generator=generator)


def _check_outputs(dense: Part) -> dict[str, tuple[int, ...]]:
    """Output name -> its shape behind the batch; raises ConfigError for an output that is not a batch."""
    shapes: dict[str, tuple[int, ...]] = {}
    for batch in (3, 6):
        try:
            with torch.no_grad():
                outputs = dense.module(*dense.example(batch, 0))
        except (RuntimeError, IndexError) as error:
            if low := {str(p.dtype) for p in dense.module.parameters() if p.dtype in (torch.bfloat16, torch.float16)}:
                raise ConfigError(
                    f"forward has parameters of {min(low)}, but a served model gets float32 vectors and numbers; export "
                    "model.float() with float32 examples (precision= sets the type of the stored rows)"
                ) from error
            raise ConfigError(
                f"forward fails on a random request ({type(error).__name__}: {brief(error)}); it relies on more than the "
                f"numbers of values and samples, as that one input counts the values of another, which no request can state"
            ) from error
        for name, value in outputs.items():
            if value.dim() < 1 or value.shape[0] != batch:
                raise ConfigError(
                    f"output {name!r} of forward has shape {tuple(value.shape)} for a batch of {batch}; expected the batch as "
                    f"first dimension (remove the loss and other summaries from an inference model; where each sample has "
                    f"one id, .to_padded_dense(1).squeeze(1) of an unpooled feature is [samples, dim]; where each has several scores, "
                    f"torch.ops.fbgemm.jagged_to_padded_dense makes them [samples, most scores])"
                )
            shape = tuple(value.shape[1:])
            if shapes.setdefault(name, shape) != shape:
                raise ConfigError(
                    f"each sample of output {name!r} has shape {shapes[name]} in a batch of 3 and {shape} in a batch of "
                    f"{batch}; it may not depend on the other samples (as each user's score for all items of a batch does): "
                    f"export the towers, or the score of a sample's own item"
                )
    return shapes
