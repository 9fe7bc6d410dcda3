"""Answers any request from its decoded message: weights, unpooled vectors, raw rows, and invalid requests."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from recinfer.errors import InputError
from recinfer.inference.bags import Bags, bags_of
from recinfer.inference.lookups import Steps, run_now, run_steps
from recinfer.inference.results import Outputs
from recinfer.inference.together import PredictInputs
from recinfer.serving.engine.registry import ModelRegistry, RequestStats, ServedModel
from recinfer.serving.engine.request import CallName, Request, served_of_task
from recinfer.serving.engine.scheduler import Entry, Scheduler
from recinfer.serving.wire import codec
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb
from recinfer.serving.wire.raw_rows import read_raw
from recinfer.sparse.jagged_tensor import JaggedTensor

__all__ = ["DecodedRequest", "DecodedRuns", "InferenceService"]

_FLOAT_BYTES, _ID_BYTES = 4, 8
_DECODED = 2  # bytes of the parsed message and its arrays per byte of the message
_FEW_BYTES = 64 << 10
_SHARED_BYTES = 64 << 10  # a longer request is decoded by a worker of its own
_MOST_SHARED = 64
_MOST_UNDER_WAY = 64  # runs that wait for shard servers


@dataclass(slots=True, eq=False)
class DecodedRequest:
    """A Lookup or Predict, ready to run.

    Attributes:
        call: the method.
        model: the version that answers; this reference keeps it in memory if it is unloaded meanwhile.
        features: ids of B samples.
        given: all inputs of a Predict; None for a Lookup.
        vector_bytes: upper bound on the bytes of the float vectors that the request looks up.
    """

    call: CallName
    model: ServedModel
    features: Bags
    given: PredictInputs | None
    vector_bytes: int

    @property
    def key(self) -> tuple[str, int]:
        """Requests with equal keys may share a run."""
        return self.call, id(self.model.predictor)

    @property
    def samples(self) -> int:
        """Number of samples, B."""
        return self.features.batch


class InferenceService:
    """Decodes, runs and encodes the three calls of the wire over the models of a registry. Thread-safe.

    A wrong request raises InputError or NotFoundError; recinfer.serving.wire.status maps errors to codes.
    """

    def __init__(self, registry: ModelRegistry, limits: Limits | None = None) -> None:
        self.registry = registry
        self.stats = RequestStats()
        self.limits = limits or Limits()

    def decode(
        self, call: CallName, data: bytes, chosen: Callable[[ServedModel], None] = lambda model: None
    ) -> DecodedRequest:
        """Decode and check a serialized LookupRequest, or a PredictRequest of ids or of raw rows.

        Args:
            chosen: called with the version that answers, before errors that concern the version's inputs.
        """
        start = time.perf_counter()
        decoded = (self._decode_lookup if call == "Lookup" else self._decode_predict)(data, chosen)
        self.stats.stages.add("decode", time.perf_counter() - start)
        self.stats.batch.add(decoded.samples)
        return decoded

    def _decode_lookup(self, data: bytes, chosen: Callable[[ServedModel], None]) -> DecodedRequest:
        request = self._parse(pb.LookupRequest, data)
        model = self.registry.get(request.model, request.version, request.label)
        chosen(model)
        features = codec.decode_bags(request.features, self.limits)
        vector_bytes = self._check_response_size(model, features)
        return DecodedRequest("Lookup", model, features, None, vector_bytes)

    def _decode_predict(self, data: bytes, chosen: Callable[[ServedModel], None]) -> DecodedRequest:
        request = self._parse(pb.PredictRequest, data)
        model = self.registry.get(request.model, request.version, request.label)
        chosen(model)
        context, inputs, once = None, None, None
        if request.HasField("context"):
            context = codec.decode_bags(request.context, self.limits, field="context")
        if raw := request.raw:
            others = request.inputs or request.context_inputs
            if request.HasField("features") or request.dense or context is not None or others:
                raise InputError("raw: got features, dense, context or inputs as well; raw rows hold all the inputs")
            replaced: dict[str, int] = {}
            dense, rows, own = read_raw(raw, model.predictor.contract, self.limits, replaced, request.raw_context)
            if any(replaced.values()):
                model.predictor.intake.count_replaced({name: count for name, count in replaced.items() if count})
            features = bags_of(rows)
            if own is not None:
                context = bags_of(own)
                self._check_context_size(model, context, features.batch)
        elif request.raw_context:
            raise InputError("raw_context: got it without raw; give the context's features in context")
        else:
            predictor = model.predictor
            features = codec.decode_bags(
                request.features, self.limits, may_be_none=not predictor.intake.names or context is not None
            )
            if request.inputs:
                inputs = codec.decode_inputs(request.inputs, features.batch, self.limits)
            dense = None
            if request.context_inputs:
                once = codec.decode_inputs(request.context_inputs, 1, self.limits)
                self._check_repeated(once, features.batch)
            names = predictor.inputs.dense_names
            if request.dense or names.isdisjoint([*(inputs or ()), *(once or ())]):
                dense = codec.decode_dense(request.dense, features.batch, predictor.num_dense)
            if context is not None:
                self._check_context_size(model, context, features.batch)
        ids = features.values.size + (0 if context is None else features.batch * context.values.size)
        vector_bytes = _FLOAT_BYTES * (features.batch * model.pooled_width + ids * model.sequence_width)
        named = model.predictor.inputs
        vector_bytes += named.converted_bytes(inputs) + features.batch * named.converted_bytes(once, always=True)
        given = PredictInputs(dense, features, context, inputs, once)
        return DecodedRequest("Predict", model, features, given, vector_bytes)

    def run(self, requests: Sequence[DecodedRequest]) -> Steps[list[bytes | Exception]]:
        """Run requests of one key together; returns the serialized answer or the error of each."""
        predictor, kind = requests[0].model.predictor, requests[0].call
        answers: Sequence[Any]
        if len(requests) == 1:
            try:
                (one,) = requests
                answers = [
                    (yield from predictor.lookup_steps(one.features))
                    if one.given is None
                    else (yield from predictor.predict_steps(one.given))
                ]
            except Exception as error:
                return [error]
        elif kind == "Lookup":
            answers = yield from predictor.lookup_many_steps([one.features for one in requests])
        else:
            answers = yield from predictor.predict_many_steps([one.given for one in requests if one.given is not None])
        encode = _lookup_response if kind == "Lookup" else _predict_response
        start = time.perf_counter()
        encoded: list[bytes | Exception] = []
        for one, answer in zip(requests, answers, strict=True):
            try:
                encoded.append(answer if isinstance(answer, Exception) else encode(one, answer))
            except InputError as error:  # concerns this request alone
                encoded.append(error)
        self.stats.stages.add("encode", time.perf_counter() - start)
        return encoded

    def get_model(self, data: bytes) -> bytes:
        """The serialized ModelInfo for a serialized GetModelRequest."""
        request = self._parse(pb.GetModelRequest, data)
        model = self.registry.get(request.model, request.version, request.label)
        served_of_task.set(model)
        predictor = model.predictor
        contract = predictor.manifest.contract
        features = [pb.FeatureInfo(**vars(f) | {"missing": str(f.missing)}) for f in predictor.features]
        inputs = [pb.InputInfo(**vars(i) | {"shape": map(str, i.shape)}) for i in predictor.inputs.specs]
        return pb.ModelInfo(
            name=model.name,
            version=model.version,
            features=features,
            num_dense=predictor.num_dense,
            precision=predictor.manifest.precision,
            plan_hash=predictor.manifest.plan_hash,
            feature_contract=json.dumps(contract) if contract is not None else "",
            needs_weights=predictor.intake.needs_weights,
            inputs=inputs,
            string_features=[name for name in predictor.intake.names if name in predictor.manifest.string_features],
        ).SerializeToString()

    def _parse(self, kind: type[codec.M], data: bytes) -> codec.M:
        if len(data) > self.limits.max_message_bytes:
            raise InputError(f"request: got {len(data)} bytes, expected at most {self.limits.max_message_bytes}")
        return codec.parse(kind, data)

    def _check_context_size(self, model: ServedModel, context: Bags, batch: int) -> None:
        # Unpooled vectors of a context are repeated for every sample: a few bytes of request could fill the memory.
        predictor = model.predictor
        each = model.sequence_width * _FLOAT_BYTES + _ID_BYTES * predictor.programs_read_ids
        taken = batch * context.values.size * each
        if taken > self.limits.max_response_bytes:
            raise InputError(
                f"context: its embeddings may take {taken} bytes with {batch} samples, expected at most "
                f"{self.limits.max_response_bytes}: send fewer samples per request"
            )

    def _check_repeated(self, once: Mapping[str, Tensor | JaggedTensor], batch: int) -> None:
        """Raise InputError where the context's inputs, repeated for every sample, take more than the limit."""
        for name, given in once.items():
            values = given.values() if isinstance(given, JaggedTensor) else given
            taken = batch * values.numel() * _ID_BYTES
            if taken > self.limits.max_response_bytes:
                raise InputError(
                    f"context: input {name!r} may take {taken} bytes with {batch} samples, expected at most "
                    f"{self.limits.max_response_bytes}: send fewer samples per request"
                )

    def _check_response_size(self, model: ServedModel, features: Bags) -> int:
        """An upper bound on the bytes of a lookup's vectors; raises InputError where it exceeds the limit."""
        ids, batch = features.values.size, features.batch
        taken = _FLOAT_BYTES * (batch * model.pooled_width + ids * model.sequence_width)
        if taken <= min(_FEW_BYTES, self.limits.max_response_bytes):
            return taken  # counts all features of the model: a small request is not worth the sum over its own
        pooled, sequence = model.widths_of(features.keys)
        taken = _FLOAT_BYTES * (batch * pooled + ids * sequence)
        if taken > self.limits.max_response_bytes:
            raise InputError(
                f"features.batch_size: got {batch} samples with {ids} ids, whose embeddings may take {taken} bytes; "
                f"expected at most {self.limits.max_response_bytes}: send fewer samples per request"
            )
        return taken


class DecodedRuns:
    """Decodes and runs requests on worker threads; requests of one model and call share runs. Any thread may submit a request.

    A ranker's run continues on the thread where the shard servers' answers arrive. The scheduler calls the methods of
    recinfer.serving.engine.scheduler.Runner.

    Args:
        service: decodes, runs and encodes.
        scheduler: queues the requests.
    """

    def __init__(self, service: InferenceService, scheduler: Scheduler) -> None:
        self._service = service
        self._scheduler = scheduler
        self._under_way = 0
        self._lock = threading.Lock()

    def submit(self, request: Request) -> None:
        """Queue a request for a worker thread."""
        is_small = len(request.data) <= _SHARED_BYTES
        self._scheduler.submit(self, Entry(request, request.call if is_small else object(), 1))

    # -- for the scheduler

    def can_start(self) -> bool:
        """Whether fewer than 64 runs wait for shard servers."""
        return self._under_way < _MOST_UNDER_WAY

    def may_share(self, entry: Entry, samples: int) -> bool:
        """Whether the run has at most 64 requests, as one worker thread decodes them all."""
        return samples <= _MOST_SHARED

    def seconds(self, entry: Entry, samples: int, threads: int) -> float:
        """Infinite: the duration is unknown before the request is decoded, so a worker thread runs it."""
        return math.inf

    def run(self, entries: Sequence[Entry], threads: int) -> None:
        """Decode the requests, run those of one key together, and reply."""
        groups: dict[Any, list[list[tuple[Request, DecodedRequest]]]] = {}
        for request in (entry.request for entry in entries):
            try:
                request.ticket.grow_to_answer(_DECODED * len(request.data))
                decoded = self._service.decode(request.call, request.data, request.chose)
                copies = 2 if request.call == "Lookup" else 1  # the answer to a lookup holds the vectors once more
                request.ticket.grow_to_answer(copies * decoded.vector_bytes)
            except Exception as error:
                request.reply(error)
                continue
            runs = groups.setdefault(decoded.key, [[]])
            samples = decoded.samples + sum(one.samples for _, one in runs[-1])
            if runs[-1] and samples > self._scheduler.config.max_batch:
                runs.append([])
            runs[-1].append((request, decoded))
        for group in (run for runs in groups.values() for run in runs):
            self._run(group)

    def _run(self, group: Sequence[tuple[Request, DecodedRequest]]) -> None:
        start = time.monotonic()
        steps = self._service.run([decoded for _, decoded in group])
        self._scheduler.begin()
        if not group[0][1].model.predictor.lookups.waits:
            self._finish(group, start, _answers_now(steps))
            return
        with self._lock:
            self._under_way += 1

        def done(answers: Sequence[bytes | Exception] | Exception) -> None:
            with self._lock:
                self._under_way -= 1
            self._finish(group, start, answers)
            self._scheduler.run_ready()

        trace = group[0][0].trace()  # a shared run has one trace: its first request's
        run_steps(steps, max(request.deadline for request, _ in group), done, self._scheduler.on_worker, trace)

    def _finish(
        self,
        group: Sequence[tuple[Request, DecodedRequest]],
        start: float,
        answers: Sequence[bytes | Exception] | Exception,
    ) -> None:
        self._scheduler.done(len(group), sum(decoded.samples for _, decoded in group), time.monotonic() - start)
        for at, (request, _) in enumerate(group):
            request.reply(answers if isinstance(answers, Exception) else answers[at])


def _answers_now(steps: Steps[list[bytes | Exception]]) -> Sequence[bytes | Exception] | Exception:
    try:
        return run_now(steps)
    except Exception as error:
        return error


def _lookup_response(call: DecodedRequest, result: Any) -> bytes:
    return codec.encode_lookup_response(
        result.pooled, result.sequences, call.samples, call.model.version, result.missing
    )


def _predict_response(call: DecodedRequest, outputs: Outputs) -> bytes:
    """A serialized PredictResponse; raises InputError for a NaN: the inputs are finite, so the model's numbers overflowed."""
    for name, output in outputs.items():
        places = output.isnan().nonzero()
        if len(places):
            raise InputError(
                f"output {name!r}: sample {int(places[0][0]) if output.ndim else 0} is NaN, though all inputs are finite; they are "
                f"beyond what model {call.model.name!r} {call.model.version} can compute with: check their scale, or the model"
            )
    return codec.encode_predict_response(outputs, call.model.version, outputs.missing)
