"""Creates, stores, reads and compares the golden requests and answers of ``check/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recinfer.archive.manifest import Manifest
from recinfer.archive.reader import Archive
from recinfer.archive.tensors import pack_tensors, unpack_tensors
from recinfer.errors import ArchiveError, InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "ANSWERS",
    "REQUESTS",
    "Answer",
    "Request",
    "compare_answers",
    "golden_requests",
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


@dataclass(frozen=True)
class Request:
    """One golden request: all features of the archive, in its order."""

    dense: Tensor | None
    features: KeyedJaggedTensor


@dataclass(frozen=True)
class Answer:
    """The answer to a golden request: [B, D] per pooled module and [ids, dim] per sequence output, then the dense
    outputs."""

    embeddings: list[Tensor]
    outputs: list[Tensor] = field(default_factory=list)


def golden_requests(
    features: Sequence[str],
    rows: Mapping[str, int],
    num_dense: int,
    *,
    weighted: bool,
    longest: Mapping[str, int],
    seed: int = 0,
) -> list[Request]:
    """Deterministic requests: the first and last id of every feature, random ids, bags of 0 to 3 ids; then a request
    without ids, and a request of one sample with one id per feature.

    Args:
        rows: ids of each feature are below this.
        longest: longest bag of features that have a limit.
    """
    generator = torch.Generator().manual_seed(seed)
    requests = []
    for index, (batch, size) in enumerate([*((batch, None) for batch in _BATCHES), *_UNIFORM]):
        if size is None:
            lengths = torch.randint(0, 4, (len(features), batch), generator=generator)
        else:
            lengths = torch.full((len(features), batch), size)
        if index == 0:
            lengths[:, 0] = 2
        limits = torch.tensor([longest.get(name, 3) for name in features]).unsqueeze(1)
        lengths = torch.minimum(lengths, limits)
        counts = lengths.sum(1).tolist()
        ids = [torch.randint(0, rows[name], (n,), generator=generator) for name, n in zip(features, counts)]
        if index == 0:
            for name, feature_ids in zip(features, ids):
                edges = torch.tensor([0, rows[name] - 1])
                feature_ids[: len(edges)] = edges[: len(feature_ids)]
        values = torch.cat(ids)
        kjt = KeyedJaggedTensor(
            list(features),
            values,
            lengths=lengths.flatten().int(),
            weights=torch.rand(len(values), generator=generator) + 0.5 if weighted else None,
        )
        requests.append(Request(torch.randn(batch, num_dense, generator=generator) if num_dense else None, kjt))
    return requests


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
    weighted = any(m.is_weighted and m.position_weights is None for m in manifest.modules)
    num_dense = 0 if manifest.dense is None else manifest.dense.num_dense
    names = ["lengths", "values", *(["weights"] if weighted else []), *(["dense"] if num_dense else [])]
    count = manifest.check.num_requests
    if given.keys() != {f"{i}/{name}" for i in range(count) for name in names}:
        raise ArchiveError(f"{REQUESTS}: expected {names} of {count} requests; got {sorted(given)[:8]}", rule="C1")
    pairs = []
    left = set(stored)
    for i in range(count):
        request = _request(manifest, i, {name: given[f"{i}/{name}"] for name in names})
        shapes = _answer_shapes(manifest, request)
        for name, shape in shapes.items():
            tensor = stored.get(f"{i}/{name}")
            if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
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


def _request(manifest: Manifest, index: int, tensors: Mapping[str, Tensor]) -> Request:
    dtypes = {"lengths": torch.int32, "values": torch.int64, "weights": torch.float32, "dense": torch.float32}
    features = [feature.name for feature in manifest.features]
    try:
        for name, tensor in tensors.items():
            if tensor.dtype != dtypes[name] or tensor.dim() != (2 if name == "dense" else 1):
                raise InputError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
        kjt = KeyedJaggedTensor(features, tensors["values"], tensors.get("weights"), lengths=tensors["lengths"])
        dense = tensors.get("dense")
        if dense is not None and (len(dense) != kjt.stride() or dense.shape[1] != _num_dense(manifest)):
            raise InputError(f"dense is {list(dense.shape)} for a batch of {kjt.stride()}")
    except InputError as error:
        raise ArchiveError(f"{REQUESTS}: request {index}: {error}", rule="C1") from None
    return Request(dense, kjt)


def _num_dense(manifest: Manifest) -> int:
    return 0 if manifest.dense is None else manifest.dense.num_dense


def _answer_shapes(manifest: Manifest, request: Request) -> dict[str, tuple[int, ...]]:
    batch = request.features.stride()
    counts = dict(zip(request.features.keys(), request.features.length_per_key()))
    embeddings: list[tuple[int, ...]] = []
    for module in manifest.modules:
        tables = manifest.module_tables(module.path)
        if module.kind == "pooled":
            embeddings.append((batch, sum(t.dim * len(t.features) for t in tables)))
        else:
            embeddings += [(counts[feature], t.dim) for t in tables for feature in t.features]
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
