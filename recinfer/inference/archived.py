"""A model loaded from an archive, for programs and notebooks: called like forward, by the archive's signature."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from recinfer.archive.manifest import InputInfo, Manifest
from recinfer.capture import CaptureError, read_arguments
from recinfer.errors import InputError
from recinfer.inference.bags import Bags, Features, bags_of, offsets_of
from recinfer.inference.results import FeatureSpec, LookupResult, Outputs, input_specs
from recinfer.inference.together import PredictInputs
from recinfer.printed import Printed
from recinfer.sizes import size_text
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

if TYPE_CHECKING:
    from recinfer.distributed.planner.plan import Plan
    from recinfer.inference.predictor import Predictor
    from recinfer.inference.report import ExportReport

__all__ = ["ArchivedModel", "Call", "load"]


class ArchivedModel(Printed):
    """A model loaded from an archive. All methods are thread-safe.

    Called like the trained model, it takes what forward takes and returns what forward returns, with float32 tensors::

        model = recinfer.load("model.rqa")
        scores = model(batch)

    Attributes:
        predictor: the engine's side of the model, which servers use.
        report: the report of the export that returned this model; None for a model that was loaded.
    """

    def __init__(self, predictor: Predictor, report: ExportReport | None = None) -> None:
        self.predictor = predictor
        self.report = report
        self._call = Call(predictor.manifest)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what forward returns for the same arguments.

        Objects of any class are taken, as long as their tensors are where the example batch had them. An argument that is a
        KeyedJaggedTensor may be a dict of feature to lists (:func:`recinfer.columns.as_features`), which may hold strings. A
        dict comes back as a dict, as do a KeyedTensor, a named tuple and a dataclass; a tuple as a tuple. An archive of a
        collection alone returns its vectors by name, as :meth:`lookup` has them.

        Raises:
            InputError: an input is missing, or has another shape or dtype; names the input and the sample.
        """
        args = tuple(self._without_lists(value) for value in args)
        kwargs = {name: self._without_lists(value) for name, value in kwargs.items()}
        if self._call.is_collection:
            found = self.predictor.lookup(self._call.features(args, kwargs))
            return {name: found[name] for name in found.keys()}  # noqa: SIM118 - not a dict
        (outputs,) = self.predictor.predict_many([self._call.inputs(args, kwargs)])
        if isinstance(outputs, Exception):
            raise outputs
        return self._call.returned(outputs)

    def _without_lists(self, value: Any) -> Any:
        """A KeyedJaggedTensor for a dict of lists or arrays; any other argument as it is."""
        is_dict = type(value) is dict and value
        if not is_dict or not all(isinstance(column, list | tuple | np.ndarray) for column in value.values()):
            return value
        return self.predictor.intake.with_rows(bags_of(value)).kjt()

    def predict(
        self,
        dense: Any = None,
        features: Features | None = None,
        context: Features | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> Outputs:
        """Compute the outputs, by name; see :meth:`recinfer.inference.predictor.Predictor.predict`."""
        return self.predictor.predict(dense, features, context, inputs)

    def predict_many(self, requests: Sequence[PredictInputs]) -> list[Outputs | Exception]:
        """Run :meth:`predict` for several requests together; a failed request has its error as the result."""
        return self.predictor.predict_many(requests)

    def lookup(self, features: Features) -> LookupResult:
        """Look up embeddings; see :meth:`recinfer.inference.predictor.Predictor.lookup`."""
        return self.predictor.lookup(features)

    def lookup_many(self, requests: Sequence[Features]) -> list[LookupResult | Exception]:
        """Run :meth:`lookup` for several requests together; a failed request has its error as the result."""
        return self.predictor.lookup_many(requests)

    def apply_delta(self, path: str | os.PathLike[str]) -> None:
        """Update the model to a later checkpoint; see :meth:`recinfer.inference.model.States.apply_delta`."""
        self.predictor.apply_delta(path)

    def undo_delta(self) -> None:
        """Return to the state before the last delta; raises InputError if no delta is applied."""
        self.predictor.undo_delta()

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model

    @property
    def version(self) -> str:
        """The model's version."""
        return self.manifest.version

    @property
    def features(self) -> tuple[FeatureSpec, ...]:
        """The outputs of :meth:`lookup`, in the model's order."""
        return self.predictor.features

    @property
    def inputs(self) -> tuple[InputInfo, ...]:
        """The inputs of forward, as requests name them; empty for archives of earlier versions."""
        signature = self.manifest.signature
        return () if signature is None else signature.inputs

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return self.predictor.output_names

    @property
    def manifest(self) -> Manifest:
        """The content of ``manifest.json``, with all deltas applied."""
        return self.predictor.manifest

    @property
    def plan(self) -> Plan:
        """The plan: the rank of each rectangle of each table."""
        return self.predictor.plan

    def __repr__(self) -> str:
        manifest = self.manifest
        dense = "lookups only" if manifest.dense is None else f"dense part on {manifest.dense.runs_on}"
        number = len(manifest.tables)
        return (
            f"<{self.name} {self.version}: {number} table{'s' if number != 1 else ''}, {manifest.precision}, "
            f"{size_text(manifest.bytes_total)}, {dense}>"
        )

    def __str__(self) -> str:
        lines = [repr(self)[1:-1]]
        for spec in input_specs(self.manifest):
            described = spec.described(strings=spec.name in self.manifest.string_features)
            lines.append(f"  in   {spec.name}: {described}")
        for output in self.manifest.dense.outputs if self.manifest.dense is not None else ():
            lines.append(f"  out  {output.name}: float32 [batch{''.join(f', {size}' for size in output.shape)}]")
        return "\n".join(lines)


def load(
    path: str | os.PathLike[str],
    *,
    device: str = "cpu",
    preload: bool = False,
    lock: bool = False,
    check_hashes: bool = False,
    dense_threads: int = 1,
    dense_engine: Literal["onnx", "torch"] | None = None,
    reuse_outputs: bool = False,
) -> ArchivedModel:
    """Open an archive as a model that is called like the trained one.

    See :func:`recinfer.inference.predictor.load` for the arguments and errors. ``path`` may be a URL too (``s3://...``): the
    archive is downloaded into the cache folder, see :class:`recinfer.remote.cache.ArchiveCache` for the errors.
    """
    from recinfer.inference.predictor import load as load_predictor
    from recinfer.remote.cache import in_cache

    with in_cache(path) as (folder, release):
        predictor = load_predictor(
            folder,
            device=device,
            preload=preload,
            lock=lock,
            check_hashes=check_hashes,
            dense_threads=dense_threads,
            dense_engine=dense_engine,
            reuse_outputs=reuse_outputs,
        )
    weakref.finalize(predictor, release)
    return ArchivedModel(predictor)


Parts = dict[str, Tensor]


class Call:
    """Reads the arguments of forward by an archive's signature.

    Args:
        manifest: of the archive; one of an earlier version has no signature and can't be called.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._signature = manifest.signature
        inputs = () if self._signature is None else self._signature.inputs
        self._features = {info.path: info.name for info in inputs if info.kind == "ids"}

    @property
    def is_collection(self) -> bool:
        """Whether the exported model is an embedding collection with nothing around it."""
        return self._manifest.dense is None and [module.path for module in self._manifest.modules] == [""]

    def features(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bags:
        """The only argument of a collection, a KeyedJaggedTensor."""
        given = (*args, *kwargs.values())
        by_feature = given[0].to_dict() if len(given) == 1 and hasattr(given[0], "to_dict") else None
        if by_feature is None:
            kinds = ", ".join(type(value).__name__ for value in given) or "nothing"
            raise InputError(f"got {kinds}; this archive holds a collection alone, which takes one KeyedJaggedTensor")
        parts: dict[str, Parts] = {}
        for name in self._manifest.feature_tables.keys() & by_feature.keys():
            jagged = by_feature[name]
            parts[name] = {"values": jagged.values(), "lengths": jagged.lengths()}
            if name in self._manifest.weighted_features:
                parts[name]["weights"] = jagged.weights()
        return _bags(parts)

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> PredictInputs:
        """The request for arguments of forward; inputs of one sample beside features of many are its context.

        Raises:
            InputError: an argument is missing, or an input of forward is not in it.
        """
        signature = self._signature
        if signature is None:
            raise InputError(
                "this archive has no signature (an earlier recinfer wrote it, or it has no dense part); call "
                "predict(dense, features) or lookup(features)"
            )
        whole: Bags | None = None

        def takes(kjt: Any, path: str) -> bool:
            nonlocal whole
            bags = self._all_features(kjt, path)
            whole = bags or whole
            return bags is not None

        try:
            found: dict[str, dict[str, Tensor]] = {}
            for slot, tensor in read_arguments(signature.arguments, args, kwargs, takes):
                found.setdefault(slot.path, {})[slot.part] = tensor
        except CaptureError as error:
            raise InputError(str(error)) from None
        features: dict[str, Parts] = {}
        inputs: dict[str, Any] = {}
        for info in signature.inputs:
            if info.kind == "ids" and whole is not None:
                continue
            parts = found.get(info.path)
            if parts is None:
                raise InputError(f"{info.path} is missing; forward takes it as {info.name!r} ({info.dtype})")
            if info.kind == "ids":
                if "tensor" in parts:
                    parts = _matrix(info.name, parts["tensor"])
                if info.name not in self._manifest.weighted_features:
                    parts.pop("weights", None)  # a KeyedJaggedTensor has weights of all its features, or of none
                features[info.name] = parts
            elif info.kind == "jagged":
                inputs[info.name] = JaggedTensor(parts["values"], parts.get("weights"), parts["lengths"])
            else:
                inputs[info.name] = parts["tensor"]
        sizes = {name: len(parts["lengths"]) for name, parts in features.items()}
        most = max(sizes.values(), default=0 if whole is None else whole.batch)
        own = {name: parts for name, parts in features.items() if sizes[name] == 1 < most}
        rest = {name: parts for name, parts in features.items() if name not in own}
        batched = {i.name for i in signature.inputs if i.kind == "jagged" or i.shape[:1] == ("batch",)}
        once = {
            name: value
            for name, value in inputs.items()
            if most > 1 and name in batched and len(value.lengths() if isinstance(value, JaggedTensor) else value) == 1
        }
        return PredictInputs(
            None,
            _bags(rest) if rest else whole,
            _bags(own) if own else None,
            {name: value for name, value in inputs.items() if name not in once},
            once,
        )

    def _all_features(self, kjt: Any, path: str) -> Bags | None:
        """The bags of a KeyedJaggedTensor that holds all features of the archive and nothing else; None for another one, which is read
        feature by feature. That costs several times what a small lookup does."""
        names, keys = self._features, list(kjt.keys())
        features = tuple(names[at] for key in keys if (at := f"{path}[{key!r}]") in names)
        if not features or not len(keys) == len(set(features)) == len(names) or not isinstance(kjt, KeyedJaggedTensor):
            return None
        values = kjt.values()
        plain = not (kjt.variable_stride_per_key() or values.is_floating_point())
        if not plain or kjt.weights_or_none() is not None or values.device.type != "cpu":
            return None
        ids = values.long().contiguous().numpy()
        offsets = offsets_of(kjt.lengths().numpy(), ids.dtype)
        if offsets[-1] != len(ids):
            return None
        return Bags(features, kjt.stride(), offsets, ids)

    def returned(self, outputs: Mapping[str, Tensor]) -> Any:
        """Forward's result around ``outputs``."""
        assert self._signature is not None
        return _filled(self._signature.returns or None, outputs)


def _matrix(name: str, ids: Tensor) -> Parts:
    """The bags of a matrix of ids, of which each sample has as many; raises InputError for numbers that are not whole."""
    if ids.is_floating_point():
        odd = ids[ids != ids.trunc()]
        if len(odd):
            raise InputError(
                f"feature {name!r}: got the id {float(odd[0])}; expected whole numbers, as in the example batch"
            )
        ids = ids.long()
    ids = ids.reshape(1) if not ids.dim() else ids
    return {"values": ids.reshape(-1), "lengths": torch.full((len(ids),), ids[:1].numel())}


def _bags(features: Mapping[str, Parts]) -> Bags:
    names = tuple(features)
    lengths = [parts["lengths"].numpy() for parts in features.values()]
    if len({len(each) for each in lengths}) > 1:
        sizes = ", ".join(f"{name}: {len(each)}" for name, each in zip(names, lengths))
        raise InputError(
            f"features have different numbers of samples ({sizes}); expected one number, or 1 for a context"
        )
    values = np.concatenate([parts["values"].numpy() for parts in features.values()])
    weights = None
    if any("weights" in parts for parts in features.values()):
        weights = np.concatenate(
            [
                parts["weights"].float().numpy() if "weights" in parts else np.ones(len(parts["values"]), np.float32)
                for parts in features.values()
            ]
        )
    weighted = tuple(name for name, parts in features.items() if "weights" in parts)
    return Bags(names, len(lengths[0]), offsets_of(np.concatenate(lengths), values.dtype), values, weights, weighted)


def _filled(structure: Any, outputs: Mapping[str, Tensor]) -> Any:
    if structure is None:
        return None
    ((kind, inner),) = structure.items()
    if kind == "output":
        return outputs[inner]
    if kind == "dict":
        return {key: _filled(part, outputs) for key, part in inner.items()}
    items = [_filled(part, outputs) for part in inner]
    return items if kind == "list" else tuple(items)
