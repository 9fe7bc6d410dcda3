"""Cuts a model into embedding lookups and programs: traces forward on an example batch and splits it at the lookups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from recinfer.archive.check import Request, input_tensor
from recinfer.archive.dense import Part
from recinfer.archive.leaves import Leaf
from recinfer.archive.made_batch import made_batch
from recinfer.archive.manifest import DenseInput, InputInfo, Signature
from recinfer.archive.samples import Samples
from recinfer.archive.split import ComputedFeature, ModuleLookup, Split, split
from recinfer.archive.user_axis import split_user
from recinfer.capture import Captured, CaptureError, Slot, brief, trace
from recinfer.errors import ConfigError

__all__ = ["Cut", "UserParts", "cut_captured", "cut_model"]

_TRIALS = 50


@dataclass(frozen=True)
class Cut:
    """A model cut at its lookups.

    Attributes:
        dense, inputs: the program behind the lookups, and its inputs.
        ids, ids_inputs, computed: the program before them, its inputs and the features that it computes; None, if forward
            passes its ids on.
        signature: what forward takes and returns, without the ids program.
        lookups: the lookups of each module.
        num_dense: columns of the dense input; 0 where requests name their tensors.
        outputs: output names and shapes behind the batch.
        samples: makes requests.
        user: the dense program in two parts, if the caller named the user's inputs.
    """

    dense: Part
    inputs: tuple[DenseInput, ...]
    ids: Part | None
    ids_inputs: tuple[DenseInput, ...]
    computed: tuple[ComputedFeature, ...]
    signature: Signature
    lookups: tuple[ModuleLookup, ...]
    num_dense: int
    outputs: dict[str, tuple[int, ...]]
    samples: Samples
    user: UserParts | None


@dataclass(frozen=True)
class UserParts:
    """The user program and the candidates program, with their inputs."""

    names: tuple[str, ...]
    user: Part
    user_inputs: tuple[DenseInput, ...]
    candidates: Part
    candidate_inputs: tuple[DenseInput, ...]


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
    if len(leaves) == 1 and leaves[0].module is model:
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
    parts = split(captured, leaves)
    used = _used_slots(captured, parts)
    infos = tuple(_infos(used))
    inputs, ids_inputs, num_dense = _with_plain_dense(parts, infos)
    rows: dict[str, int] = {}
    computed = {feature.name for feature in parts.computed}
    longest: dict[str, int] = {}
    for lookup in parts.lookups:
        for config, names in zip(lookup.leaf.configs, lookup.features):
            for name in names:
                if name not in computed:
                    rows[name] = min(config.num_embeddings, rows.get(name, config.num_embeddings))
        for name, (_, positions) in (lookup.leaf.position_weights or {}).items():
            longest[name] = min(positions, longest.get(name, positions))
    given = [info.name for info in infos if info.kind == "ids"]
    samples = Samples(
        {(slot.name, slot.part): tensor for slot, tensor in zip(captured.slots, captured.examples)},
        infos,
        parts.facts,
        tuple(dict.fromkeys([*(name for name in rows if name in given), *given])),
        rows,
        longest,
        any(lookup.leaf.about.weighted for lookup in parts.lookups),
        num_dense,
    )
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
    sizes = _Sizes(parts, ids_inputs, samples)
    free = {_program_name(slot): slot for slot in used}
    dense = Part(
        parts.dense,
        [i.name for i in inputs],
        [_free_axes(i, free) for i in inputs],
        lambda batch, seed: sizes.example(inputs, batch, seed),
        lambda: sizes.without_ids(inputs),
        list(captured.outputs),
    )
    ids = None
    if parts.ids is not None:
        outputs = _output_names(parts.ids)
        ids = Part(
            parts.ids,
            [i.name for i in ids_inputs],
            [_free_axes(i, free) for i in ids_inputs],
            lambda batch, seed: sizes.example(ids_inputs, batch, seed),
            lambda: sizes.without_ids(ids_inputs),
            outputs,
            "the program that computes ids",
        )
    return Cut(
        dense,
        inputs,
        ids,
        ids_inputs,
        parts.computed,
        signature,
        parts.lookups,
        num_dense,
        _check_outputs(dense),
        samples,
        _user_parts(parts, inputs, infos, tuple(user), sizes, captured) if user else None,
    )


def _user_parts(
    parts: Split,
    inputs: tuple[DenseInput, ...],
    infos: Sequence[InputInfo],
    names: tuple[str, ...],
    sizes: _Sizes,
    captured: Captured,
) -> UserParts:
    unknown = [name for name in names if name not in {info.name for info in infos}]
    if unknown:
        raise ConfigError(
            f"user: forward has no input {unknown[0]!r}; its inputs are {', '.join(info.name for info in infos)}"
        )
    if parts.computed:
        raise ConfigError(
            f"user: forward computes the ids of {parts.computed[0].name!r}, and the user's part runs once only where forward passes "
            f"all ids on; compute them before the request, or leave user out"
        )
    if all(info.name in names for info in infos if info.kind == "ids"):
        raise ConfigError("user: all features are the user's, so that nothing tells candidates apart; name fewer")
    owned = {about.name for about in inputs if sizes.features_of(about, infos) <= set(names)}
    found = split_user(parts.dense, inputs, owned)
    between = _output_names(found.user)

    def example(batch: int, seed: int, none: bool = False) -> list[Tensor]:
        tensors = sizes.without_ids(inputs) if none else sizes.example(inputs, batch, seed)
        by_name = dict(zip((about.name for about in inputs), tensors))
        with torch.no_grad():
            by_name.update(found.user(*(by_name[about.name] for about in found.user_inputs)))
        return [by_name[about.name] for about in found.candidate_inputs]

    user = Part(
        found.user,
        [i.name for i in found.user_inputs],
        [_free_axes(i, {}) for i in found.user_inputs],
        lambda batch, seed: sizes.example(found.user_inputs, batch, seed),
        lambda: sizes.without_ids(found.user_inputs),
        between,
        "the user program",
    )
    candidates = Part(
        found.candidates,
        [i.name for i in found.candidate_inputs],
        [_free_axes(i, {}) for i in found.candidate_inputs],
        example,
        lambda: example(2, 0, True),
        list(captured.outputs),
        "the candidates program",
    )
    return UserParts(names, user, found.user_inputs, candidates, found.candidate_inputs)


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


def _program_name(slot: Slot) -> str:
    return slot.name if slot.part == "tensor" else f"{slot.name}/{slot.part}"


def _used_slots(captured: Captured, parts: Split) -> list[Slot]:
    """The tensors that a program or a lookup reads, and the other parts of the same jagged inputs."""
    programs = [i.feature for i in (*parts.inputs, *parts.ids_inputs) if i.kind == "tensor" or "jagged" in i.kind]
    looked_up = [name for lookup in parts.lookups for names in lookup.features for name in names]
    used = {*programs, *looked_up}
    used |= {parts.facts.as_long_as[name] for name in used if name in parts.facts.as_long_as}
    used |= {parts.facts.counts[name] for name in used if name in parts.facts.counts}
    return [slot for slot in captured.slots if slot.name in used]


def _infos(slots: Sequence[Slot]) -> list[InputInfo]:
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
                slot.name in weighted,
            )
    return list(infos.values())


def _with_plain_dense(
    parts: Split, infos: Sequence[InputInfo]
) -> tuple[tuple[DenseInput, ...], tuple[DenseInput, ...], int]:
    """The inputs of both programs, and the width of the dense matrix, where that is the only input beside ids."""
    others = [info for info in infos if info.kind != "ids"]
    if len(others) != 1 or others[0].kind != "tensor" or others[0].dtype != "float32":
        return parts.inputs, parts.ids_inputs, 0
    if all(about.kind != "tensor" for about in parts.inputs):
        return parts.inputs, parts.ids_inputs, 0  # the ids program alone reads it
    shape = others[0].shape
    if len(shape) != 2 or shape[0] != "batch" or not isinstance(shape[1], int) or not shape[1]:
        return parts.inputs, parts.ids_inputs, 0
    dense = DenseInput("dense", "dense", None, None, shape[1])
    renamed = [tuple(dense if i.kind == "tensor" else i for i in inputs) for inputs in (parts.inputs, parts.ids_inputs)]
    return renamed[0], renamed[1], shape[1]


def _free_axes(about: DenseInput, slots: dict[str, Slot]) -> tuple[int, ...]:
    if about.kind == "table":
        return ()
    slot = slots.get(about.name)
    if about.kind != "tensor" or slot is None:
        return (0,)
    return tuple(axis for axis, size in enumerate(slot.shape) if isinstance(size, str))


def _output_names(module: fx.GraphModule) -> list[str]:
    (result,) = (node.args[0] for node in module.graph.nodes if node.op == "output")
    assert isinstance(result, dict)
    return list(result)


# ------------------------------------------------------------------------------------------------- examples of parts


class _Sizes:
    """Makes inputs of programs: of random requests, with random vectors of as many rows as the lookups would give."""

    def __init__(self, parts: Split, ids_inputs: tuple[DenseInput, ...], samples: Samples) -> None:
        self._parts = parts
        self._ids_inputs = ids_inputs
        self._samples = samples
        self._rows = {
            (lookup.leaf.path, config.name): config.num_embeddings
            for lookup in parts.lookups
            for config in lookup.leaf.configs
        }
        self._features = {  # output of a sequence module -> the feature of its ids
            (lookup.leaf.path, output): feature
            for lookup in parts.lookups
            if not lookup.leaf.pooled
            for output, (_, feature) in zip(lookup.leaf.output_names(lookup.features), lookup.columns)
        }

    def features_of(self, about: DenseInput, infos: Sequence[InputInfo]) -> set[str]:
        """The inputs of requests that a program's input depends on."""
        if about.kind == "table":
            return {info.name for info in infos}
        if about.kind == "dense":
            return {info.name for info in infos if info.kind == "tensor"}
        if about.kind == "pooled":
            (lookup,) = (lookup for lookup in self._parts.lookups if lookup.leaf.path == about.module)
            names = {name for _, name in lookup.columns}
        elif about.kind in ("values", "lengths"):
            names = {self._features[about.module or "", about.feature or ""]}
        else:
            names = {about.feature or ""}
        return names

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

    def _tensors(self, inputs: Sequence[DenseInput], request: Request, generator: torch.Generator) -> list[Tensor]:
        computed: dict[str, Tensor] = {}
        if self._parts.ids is not None:
            with torch.no_grad():
                computed = self._parts.ids(*(input_tensor(i, request) for i in self._ids_inputs))
        tensors = []
        for about in inputs:
            if about.kind == "pooled":
                batch = request.features.stride()
                tensors.append(torch.randn(batch, about.dim, generator=generator))
                continue
            if about.kind == "table":
                tensors.append(
                    torch.randn(self._rows[about.module or "", about.feature or ""], about.dim, generator=generator)
                )
                continue
            if about.kind not in ("values", "lengths"):
                tensors.append(input_tensor(about, request))
                continue
            feature = self._features[about.module or "", about.feature or ""]
            lengths = computed.get(f"computed/{feature}/lengths")
            if lengths is None:
                lengths = request.features[feature].lengths().long()
            if about.kind == "lengths":
                tensors.append(lengths)
            else:
                tensors.append(torch.randn(int(lengths.sum()), about.dim, generator=generator))
        return tensors


def _check_outputs(dense: Part) -> dict[str, tuple[int, ...]]:
    """Output name -> its shape behind the batch; raises ConfigError for an output that is not a batch."""
    shapes: dict[str, tuple[int, ...]] = {}
    for batch in (3, 6):
        try:
            with torch.no_grad():
                outputs = dense.module(*dense.example(batch, 0))
        except (RuntimeError, IndexError) as error:
            raise ConfigError(
                f"forward fails on a random request ({type(error).__name__}: {brief(error)}); it relies on more than the "
                f"numbers of values and samples, as that one input counts the values of another, which no request can state"
            ) from error
        for name, value in outputs.items():
            if value.dim() < 1 or value.shape[0] != batch:
                raise ConfigError(
                    f"output {name!r} of forward has shape {tuple(value.shape)} for a batch of {batch}; expected the batch as "
                    f"first dimension (remove the loss and other summaries from an inference model; where each sample has "
                    f"one id, .to_padded_dense(1).squeeze(1) of an unpooled feature is [samples, dim])"
                )
            shape = tuple(value.shape[1:])
            if shapes.setdefault(name, shape) != shape:
                raise ConfigError(
                    f"each sample of output {name!r} has shape {shapes[name]} in a batch of 3 and {shape} in a batch of "
                    f"{batch}; it may not depend on the other samples (as each user's score for all items of a batch does): "
                    f"export the towers, or the score of a sample's own item"
                )
    return shapes
