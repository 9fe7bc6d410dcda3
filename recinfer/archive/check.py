"""Creates, stores, reads and compares the golden requests and answers of ``check/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.manifest import DenseInput, InputInfo, Manifest
from recinfer.archive.reader import Archive
from recinfer.archive.tensors import pack_tensors, unpack_tensors
from recinfer.columns import Strings
from recinfer.errors import ArchiveError, InputError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "ANSWERS",
    "REQUESTS",
    "Answer",
    "Request",
    "compare_answers",
    "golden_requests",
    "input_tensor",
    "odd_rows",
    "pack_answers",
    "pack_requests",
    "read_requests",
]

REQUESTS = "check/requests.safetensors"
ANSWERS = "check/answers.safetensors"
RELATIVE_TOLERANCE = 1e-5
ABSOLUTE_TOLERANCE = 1e-6
_BATCHES = (2, 1, 16)
# Numbers of samples, and of ids of each bag, at which programs fail and which random bags seldom have.
_UNIFORM = ((2, 0), (1, 1))
_STRINGS = ("strings", "string_lengths")


@dataclass(frozen=True)
class Request:
    """One golden request.

    Attributes:
        dense: float32 [B, num_dense], or None.
        features: all features of a request, in the archive's order.
        inputs: tensors and jagged tensors of the other inputs, by name.
        strings: the ids of the features that take strings, in the order of features; ``features`` has their rows. None: requests
            hold the rows.
    """

    dense: Tensor | None
    features: KeyedJaggedTensor
    inputs: Mapping[str, Tensor | JaggedTensor] = field(default_factory=dict)
    strings: Strings | None = None


@dataclass(frozen=True)
class Answer:
    """The answer to a golden request: per pooled module [B, D], per sequence output [ids, dim]; the dense outputs."""

    embeddings: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


class MakesRequests(Protocol):
    """Makes random requests of a model: recinfer.archive.samples.Samples."""

    def request(
        self, batch: int, generator: torch.Generator, *, size: int | None = None, edges: bool = False
    ) -> Request: ...


def golden_requests(samples: MakesRequests, *, seed: int = 0) -> list[Request]:
    """Deterministic requests: the first and last id of every feature, random ids, bags of 0 to 3 ids; then a request
    without ids, and a request of one sample with one id per feature."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [samples.request(batch, generator, edges=not index) for index, batch in enumerate(_BATCHES)]
    return [*drawn, *(samples.request(batch, generator, size=size) for batch, size in _UNIFORM)]


def pack_requests(requests: Sequence[Request]) -> bytes:
    """The bytes of ``check/requests.safetensors``."""
    tensors: dict[str, Tensor] = {}
    for i, request in enumerate(requests):
        tensors[f"{i}/lengths"] = request.features.lengths()
        tensors[f"{i}/values"] = request.features.values()
        if request.features.weights_or_none() is not None:
            tensors[f"{i}/weights"] = request.features.weights()
        if request.dense is not None:
            tensors[f"{i}/dense"] = request.dense
        if request.strings is not None:
            tensors[f"{i}/strings"] = torch.from_numpy(np.frombuffer(bytearray(request.strings.data), np.uint8))
            tensors[f"{i}/string_lengths"] = torch.from_numpy(request.strings.lengths)
        for name, given in request.inputs.items():
            if isinstance(given, JaggedTensor):
                tensors[f"{i}/input/{name}/lengths"] = given.lengths().int()
                if given.weights_or_none() is not None:
                    tensors[f"{i}/input/{name}/weights"] = given.weights()
                given = given.values()
            tensors[f"{i}/input/{name}"] = given
    return pack_tensors(tensors)


def pack_answers(answers: Sequence[Answer]) -> bytes:
    """The bytes of ``check/answers.safetensors``."""
    tensors: dict[str, Tensor] = {}
    for i, answer in enumerate(answers):
        tensors.update({f"{i}/embedding/{j}": t for j, t in enumerate(answer.embeddings)})
        tensors.update({f"{i}/output/{j}": t for j, t in enumerate(answer.outputs)})
    return pack_tensors(tensors)


def read_requests(archive: Archive) -> list[tuple[Request, Answer]]:
    """The golden requests and answers; raises ArchiveError (C1) unless they have the shapes that the manifest implies."""
    manifest = archive.manifest
    given = unpack_tensors(archive.read(REQUESTS), REQUESTS, "C1")
    stored = unpack_tensors(archive.read(ANSWERS), ANSWERS, "C1")
    weights = ["weights"] if manifest.weighted_features else []
    names = ["lengths", "values", *weights, *(["dense"] if manifest.num_dense else [])]
    for about in manifest.named_inputs:
        names.append(f"input/{about.name}")
        names += [f"input/{about.name}/{part}" for part in ("lengths", "weights")[: 1 + about.weighted]] * (
            about.kind == "jagged"
        )
    count = manifest.check.num_requests
    strings = [i for i in range(count) if f"{i}/strings" in given] if manifest.string_features else []
    expected = {f"{i}/{name}" for i in range(count) for name in names}
    if given.keys() != expected | {f"{i}/{name}" for i in strings for name in _STRINGS}:
        raise ArchiveError(f"{REQUESTS}: expected {names} of {count} requests; got {sorted(given)[:8]}", rule="C1")
    pairs = []
    left = set(stored)
    for i in range(count):
        request = _request(manifest, i, {name: given[f"{i}/{name}"] for name in (*names, *_STRINGS * (i in strings))})
        shapes = _answer_shapes(manifest, request)
        for name, shape in shapes.items():
            tensor = stored.get(f"{i}/{name}")
            if tensor is None or not _has_shape(tensor, shape) or tensor.dtype != torch.float32:
                came = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
                raise ArchiveError(f"{ANSWERS}: {i}/{name} is {came}; expected float32 {shape}", rule="C1")
            left.discard(f"{i}/{name}")
        parts = [
            [stored[f"{i}/{name}"] for name in shapes if name.startswith(kind)] for kind in ("embedding", "output")
        ]
        pairs.append((request, Answer(*parts)))
    if left:
        raise ArchiveError(f"{ANSWERS}: unexpected tensors {sorted(left)[:5]}", rule="C1")
    return pairs


def _has_shape(tensor: Tensor, sizes: Sequence[int | str | None]) -> bool:
    """Whether the tensor has these sizes, of which only numbers are checked."""
    return tensor.dim() == len(sizes) and all(
        size == n or not isinstance(size, int) for size, n in zip(sizes, tensor.shape)
    )


def _request(manifest: Manifest, index: int, tensors: Mapping[str, Tensor]) -> Request:
    dtypes = {"lengths": torch.int32, "values": torch.int64, "weights": torch.float32, "dense": torch.float32}
    dtypes |= {"strings": torch.uint8, "string_lengths": torch.int32}
    features = list(manifest.request_features)
    try:
        for name, tensor in tensors.items():
            if name.startswith("input/"):
                continue
            if tensor.dtype != dtypes[name] or tensor.dim() != (2 if name == "dense" else 1):
                raise InputError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
        stride = None if features else _batch_of_inputs(manifest, tensors)
        kjt = KeyedJaggedTensor(
            features, tensors["values"], tensors.get("weights"), lengths=tensors["lengths"], stride=stride
        )
        dense = tensors.get("dense")
        if dense is not None and (len(dense) != kjt.stride() or dense.shape[1] != manifest.num_dense):
            raise InputError(f"dense is {list(dense.shape)} for a batch of {kjt.stride()}")
        inputs = {about.name: _stored_input(about, tensors, kjt.stride()) for about in manifest.named_inputs}
        strings = _stored_strings(manifest, kjt, *(tensors[name].numpy() for name in _STRINGS if name in tensors))
    except InputError as error:
        raise ArchiveError(f"{REQUESTS}: request {index}: {error}", rule="C1") from None
    return Request(dense, kjt, inputs, strings)


def _stored_strings(manifest: Manifest, features: KeyedJaggedTensor, *given: NDArray[Any]) -> Strings | None:
    """The strings of a golden request from their bytes and lengths, None without; raises InputError unless one is for each row."""
    if not given:
        return None
    data, lengths = given
    each = zip(features.keys(), features.length_per_key())
    counts = {name: count for name, count in each if name in manifest.string_features}
    rows = sum(counts.values())
    if len(lengths) != rows or (lengths < 0).any() or lengths.sum(dtype=np.int64) != len(data):
        raise InputError(
            f"{len(lengths)} strings of {len(data)} bytes for the {rows} rows of features that take strings"
        )
    return Strings(tuple(counts), data.tobytes(), lengths)


def _batch_of_inputs(manifest: Manifest, tensors: Mapping[str, Tensor]) -> int:
    """The number of samples of a golden request without features."""
    if "dense" in tensors:
        return len(tensors["dense"])
    for about in manifest.named_inputs:
        if about.kind == "jagged":
            return len(tensors[f"input/{about.name}/lengths"])
        if about.shape[:1] == ("batch",) and tensors[f"input/{about.name}"].dim():
            return len(tensors[f"input/{about.name}"])
    raise InputError("no input has the batch as its first axis")


def _stored_input(about: InputInfo, tensors: Mapping[str, Tensor], batch: int) -> Tensor | JaggedTensor:
    """One input of a golden request; raises InputError for another dtype or shape than the signature's."""
    given = tensors[f"input/{about.name}"]
    sizes = [batch if size == "batch" else size for size in about.shape]
    if about.kind == "jagged":
        lengths = tensors[f"input/{about.name}/lengths"]
        sizes[0] = int(lengths.sum())
    if str(given.dtype) != f"torch.{about.dtype}" or not _has_shape(given, sizes):
        raise InputError(f"{about.name} is {given.dtype} {list(given.shape)}; expected {about.dtype} {sizes}")
    if about.kind == "tensor":
        return given
    return JaggedTensor(given, tensors.get(f"input/{about.name}/weights"), lengths)


def input_tensor(about: DenseInput, request: Request) -> Tensor:
    """The tensor of a request that the program input ``about`` carries; not for vectors of lookups."""
    if about.kind == "dense":
        assert request.dense is not None
        return request.dense
    assert about.feature is not None
    if about.kind == "tensor":
        found = request.inputs[about.feature]
        assert isinstance(found, Tensor)
        return found
    jagged = request.inputs.get(about.feature)
    bag = jagged if isinstance(jagged, JaggedTensor) else request.features[about.feature]
    if about.kind == "jagged_values":
        return bag.values()
    if about.kind == "jagged_weights":
        return bag.weights()
    return bag.lengths().long()


def _answer_shapes(manifest: Manifest, request: Request) -> dict[str, tuple[int | None, ...]]:
    """The shape of each tensor of the answer; None for a number of ids that the ids program decides."""
    batch = request.features.stride()
    counts = dict(zip(request.features.keys(), request.features.length_per_key()))
    embeddings: list[tuple[int | None, ...]] = []
    for module in manifest.modules:
        tables = manifest.module_tables(module.path)
        if module.kind == "pooled":
            embeddings.append((batch, sum(t.dim * len(t.features) for t in tables)))
        else:
            embeddings += [
                (None if f in manifest.computed_features else counts[f], t.dim) for t in tables for f in t.features
            ]
    outputs = [] if manifest.dense is None else [(batch, *output.shape) for output in manifest.dense.outputs]
    return {
        **{f"embedding/{j}": shape for j, shape in enumerate(embeddings)},
        **{f"output/{j}": shape for j, shape in enumerate(outputs)},
    }


def odd_rows(output: Tensor) -> str:
    """Describes the NaN or infinite rows of an output [B, ...], for messages; empty if all values are finite."""
    odd = ~torch.isfinite(output)
    if not bool(odd.any()):
        return ""
    kind = "NaN" if bool(output.isnan().any()) else "infinite"
    rows = odd.reshape(len(output), -1).any(1).nonzero().flatten().tolist()
    shown = ", ".join(map(str, rows[:8])) + (" ..." if len(rows) > 8 else "")
    return f"{kind} in {len(rows)} of {len(output)} rows ({shown})"


def compare_answers(index: int, given: Answer, stored: Answer) -> float:
    """The largest difference; raises ArchiveError (C2) when it is over the tolerance of FORMAT.md."""
    worst = 0.0
    for kind, mine, theirs in (
        ("embedding", given.embeddings, stored.embeddings),
        ("output", given.outputs, stored.outputs),
    ):
        for j, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a.shape != b.shape:
                raise ArchiveError(f"request {index}: {kind} {j} is {list(a.shape)}; stored {list(b.shape)}", rule="C2")
            if odd := odd_rows(a):
                stored_too = odd_rows(b)
                also = f"the stored answer is {stored_too}" if stored_too else "the stored answer is finite"
                what = "tables" if kind == "embedding" else "dense part"
                raise ArchiveError(
                    f"request {index}: {kind} {j} is {odd}; {also}. Run `recinfer verify`: if the {what} is damaged, "
                    f"other rules fail too; if none does, the cause is this machine (CPU, library versions)",
                    rule="C2",
                )
            if not b.numel():
                continue
            difference = float((a - b).abs().max())
            allowed = RELATIVE_TOLERANCE * float(b.abs().max()) + ABSOLUTE_TOLERANCE
            if not difference <= allowed:
                raise ArchiveError(
                    f"request {index}: {kind} {j} differs from the stored answer by {difference:.3g}, over {allowed:.3g}; "
                    "the tables or the dense program are not what was exported",
                    rule="C2",
                )
            worst = max(worst, difference)
    return worst
