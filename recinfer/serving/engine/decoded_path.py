"""Answers serialized requests with serialized responses; knows no network, so every door (gRPC, TorchServe) uses it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recinfer.errors import InputError
from recinfer.inference.bags import Bags, bags_of
from recinfer.inference.lookups import Steps, run_now
from recinfer.inference.together import Outputs, PredictInputs
from recinfer.serving.engine.byte_path import Direct
from recinfer.serving.engine.registry import ModelRegistry, ServedModel
from recinfer.serving.engine.remote_byte_path import Away
from recinfer.serving.engine.stats import RequestStats
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.raw_rows import read_raw

__all__ = ["Call", "InferenceService", "Message"]

_FLOAT_BYTES = 4


@dataclass(slots=True, eq=False)
class Call:
    """A decoded Lookup or Predict, ready to run.

    Attributes:
        kind: ``"Lookup"`` or ``"Predict"``.
        model: what answers it; held until it is answered, also when the model is unloaded meanwhile.
        features: ids of B samples.
        dense: float32 ``[B, num_dense]`` of a Predict.
        context: ids of one sample that goes with all B, or None.
        bytes: size of the request's message.
    """

    kind: str
    model: ServedModel
    features: Bags
    dense: Tensor | None
    context: Bags | None
    bytes: int

    @property
    def lane(self) -> tuple[str, int]:
        """Calls with equal lanes may share a run."""
        return self.kind, id(self.model.predictor)

    @property
    def samples(self) -> int:
        """B."""
        return self.features.batch


@dataclass(slots=True, eq=False)
class Message:
    """A Lookup or Predict that is decoded when it is run: several one behind another take a third of the time each.

    Attributes:
        kind: ``"Lookup"`` or ``"Predict"``.
        data: the serialized request.
        samples: 1 for a small one, whatever it holds: what it costs is hardly its samples.
    """

    kind: str
    data: bytes
    samples: int = 1

    @property
    def lane(self) -> str | tuple[str, str]:
        """Messages of one kind are run together, and there merged by their models."""
        return self.kind if self.samples == 1 else (self.kind, "large")

    @property
    def bytes(self) -> int:
        """Size of the message."""
        return len(self.data)


class InferenceService:
    """The three calls of the wire over the models of a registry: bytes in, bytes out. Thread-safe.

    Each method raises InputError or NotFoundError for what the caller did wrong; recinfer.serving.wire.status maps errors
    to codes.
    """

    def __init__(
        self, registry: ModelRegistry, limits: Limits | None = None, stats: RequestStats | None = None
    ) -> None:
        self.registry = registry
        self.stats = stats or RequestStats()
        self.limits = limits or Limits()
        self.direct = Direct(registry, self.limits, self.stats)
        self.away = Away(self.direct)

    def lookup(self, data: bytes) -> bytes:
        """LookupRequest -> LookupResponse."""
        call = self.decode_lookup(data)
        return _lookup_response(call, call.model.predictor.lookup(call.features))

    def predict(self, data: bytes) -> bytes:
        """PredictRequest -> PredictResponse."""
        call = self.decode_predict(data)
        return _predict_response(call, run_now(_predict_steps(call)))

    def decode_lookup(self, data: bytes) -> Call:
        """A serialized LookupRequest as a call."""
        return self._timed(self._decode_lookup, data)

    def decode_predict(self, data: bytes) -> Call:
        """A serialized PredictRequest, of ids or of raw rows, as a call."""
        return self._timed(self._decode_predict, data)

    def _timed(self, decode: Callable[[bytes], Call], data: bytes) -> Call:
        start = time.perf_counter()
        call = decode(data)
        self.stats.stages.add("decode", time.perf_counter() - start)
        self.stats.batch.add(call.samples)
        return call

    def _decode_lookup(self, data: bytes) -> Call:
        request = self._parse(pb.LookupRequest, data)
        model = self.registry.get(request.model, request.version)
        features = codec.decode_bags(request.features, self.limits)
        self._check_response_size(model, features)
        return Call("Lookup", model, features, None, None, len(data))

    def _decode_predict(self, data: bytes) -> Call:
        request = self._parse(pb.PredictRequest, data)
        model = self.registry.get(request.model, request.version)
        context = None
        if request.HasField("context"):
            context = codec.decode_bags(request.context, self.limits, field="context")
        if raw := request.raw:
            if request.HasField("features") or request.dense or context is not None:
                raise InputError("raw: got features, dense or context beside it; raw rows hold all the inputs")
            replaced: dict[str, int] = {}
            dense, rows = read_raw(raw, model.predictor.contract, self.limits, replaced)
            if any(replaced.values()):
                model.predictor.intake.count_replaced({name: count for name, count in replaced.items() if count})
            features = bags_of(rows)
        else:
            features = codec.decode_bags(request.features, self.limits)
            dense = codec.decode_dense(request.dense, features.batch, model.predictor.num_dense)
            if context is not None:
                self._check_context_size(model, context, features.batch)
        return Call("Predict", model, features, dense, context, len(data))

    def run(self, works: Sequence[Call | Message], max_batch: int = 1 << 31) -> list[bytes | Exception]:
        """The serialized answers of works of one lane, run together; an error stands in its work's place.

        Args:
            max_batch: messages whose samples are more than this together are run in turn.
        """
        return run_now(self.run_steps(works, max_batch))

    def run_steps(self, works: Sequence[Call | Message], max_batch: int = 1 << 31) -> Steps[list[bytes | Exception]]:
        """:meth:`run` for who waits for lookups in another way (see recinfer.inference.lookups)."""
        answers: list[Any] = self._directly(works, max_batch)
        groups: dict[Any, list[list[tuple[int, Call]]]] = {}
        for at, work in enumerate(works):
            if answers[at] is not None:
                continue
            try:
                call = work if isinstance(work, Call) else self._decoded(work)
            except Exception as error:
                answers[at] = error
                continue
            runs = groups.setdefault(call.lane, [[]])
            if runs[-1] and sum(mine.samples for _, mine in runs[-1]) + call.samples > max_batch:
                runs.append([])
            runs[-1].append((at, call))
        for group in (run for runs in groups.values() for run in runs):
            given = yield from self._run([call for _, call in group])
            for (at, _), answer in zip(group, given, strict=True):
                answers[at] = answer
        return answers

    def _directly(self, works: Sequence[Call | Message], max_batch: int) -> list[Any]:
        """Answers of the messages that need no decoding; None for the others."""
        answers: list[Any] = [None] * len(works)
        messages = [(at, work) for at, work in enumerate(works) if isinstance(work, Message)]
        predicts = [(at, work.data) for at, work in messages if work.kind == "Predict"]
        if predicts:
            given = self.direct.predict_many([data for _, data in predicts], max_batch)
            for (at, _), answer in zip(predicts, given, strict=True):
                answers[at] = answer
        for at, work in messages:
            if work.kind == "Lookup" and (found := self.direct.lookup(work.data)) is not None:
                answers[at] = found[0]
        return answers

    def _decoded(self, message: Message) -> Call:
        return (self.decode_lookup if message.kind == "Lookup" else self.decode_predict)(message.data)

    def _run(self, calls: Sequence[Call]) -> Steps[list[bytes | Exception]]:
        predictor, kind = calls[0].model.predictor, calls[0].kind
        answers: Sequence[Any]
        if len(calls) == 1:
            try:
                call = calls[0]
                steps = predictor.lookup_steps(call.features) if kind == "Lookup" else _predict_steps(call)
                answers = [(yield from steps)]
            except Exception as error:
                return [error]
        elif kind == "Lookup":
            answers = yield from predictor.lookup_many_steps([call.features for call in calls])
        else:
            answers = yield from predictor.predict_many_steps(
                [PredictInputs(c.dense, c.features, c.context) for c in calls]
            )
        encode = _lookup_response if kind == "Lookup" else _predict_response
        start = time.perf_counter()
        encoded: list[bytes | Exception] = []
        for call, answer in zip(calls, answers, strict=True):
            try:
                encoded.append(answer if isinstance(answer, Exception) else encode(call, answer))
            except InputError as error:  # of this call alone
                encoded.append(error)
        self.stats.stages.add("encode", time.perf_counter() - start)
        return encoded

    def get_model(self, data: bytes) -> bytes:
        """GetModelRequest -> ModelInfo."""
        request = self._parse(pb.GetModelRequest, data)
        model = self.registry.get(request.model, request.version)
        predictor = model.predictor
        contract = predictor.manifest.contract
        features = [
            pb.FeatureInfo(name=f.name, table=f.table, rows=f.rows, dim=f.dim, pooled=f.pooled, missing=str(f.missing))
            for f in predictor.features
        ]
        return pb.ModelInfo(
            name=model.name,
            version=model.version,
            features=features,
            num_dense=predictor.num_dense,
            precision=predictor.manifest.precision,
            plan_hash=predictor.manifest.plan_hash,
            feature_contract=json.dumps(contract) if contract is not None else "",
            needs_weights=predictor.intake.needs_weights,
        ).SerializeToString()

    def _parse(self, kind: type[codec.M], data: bytes) -> codec.M:
        if len(data) > self.limits.max_message_bytes:
            raise InputError(f"request: got {len(data)} bytes, expected at most {self.limits.max_message_bytes}")
        return codec.parse(kind, data)

    def _check_context_size(self, model: ServedModel, context: Bags, batch: int) -> None:
        # Unpooled vectors of a context are repeated for every sample: a few bytes of request could fill the memory.
        taken = batch * context.values.size * model.sequence_width * _FLOAT_BYTES
        if taken > self.limits.max_response_bytes:
            raise InputError(
                f"context: its embeddings may take {taken} bytes beside {batch} samples, expected at most "
                f"{self.limits.max_response_bytes}: send fewer samples a request"
            )

    def _check_response_size(self, model: ServedModel, features: Bags) -> None:
        limit = self.limits.max_response_bytes // _FLOAT_BYTES
        ids, batch = features.values.size, features.batch
        if batch * model.pooled_width + ids * model.sequence_width <= limit:
            return
        pooled, sequence = model.widths_of(features.keys)
        most = batch * pooled + ids * sequence
        if most > limit:
            raise InputError(
                f"features.batch_size: got {batch} samples with {ids} ids, whose embeddings may take "
                f"{most * _FLOAT_BYTES} bytes; expected at most {self.limits.max_response_bytes}: "
                "send fewer samples a request"
            )


def _predict_steps(call: Call) -> Steps[Any]:
    return call.model.predictor.predict_steps(call.dense, call.features, call.context)


def _lookup_response(call: Call, result: Any) -> bytes:
    return codec.encode_lookup_response(
        result.pooled, result.sequences, call.samples, call.model.version, result.missing
    )


def _predict_response(call: Call, outputs: Outputs) -> bytes:
    """Raises InputError for a NaN: inputs are finite here, so the model's numbers ran out of range on the way."""
    for name, output in outputs.items():
        places = output.isnan().nonzero()
        if len(places):
            raise InputError(
                f"output {name!r}: sample {int(places[0][0]) if output.ndim else 0} is NaN, though all inputs are finite; they are "
                f"beyond what model {call.model.name!r} {call.model.version} can compute with: check their scale, or the model"
            )
    return codec.encode_predict_response(outputs, call.model.version, outputs.missing)
